"""Perplexity and divergence against float64 numpy; long contexts are what they say."""

import jax.numpy as jnp
import numpy as np
import pytest
from byte_language import CONFIG, log_softmax

from pw_jax.errors import UserError
from pw_jax.evaluation.forward import Forward
from pw_jax.evaluation.long_context import Filler, passages, passkey
from pw_jax.evaluation.scoring import BatchShapes
from pw_jax.evaluation.text import Reference, measure_text
from pw_jax.models import registry
from pw_jax.models.memory import SequenceMemory

SHAPES = BatchShapes(tokens=64)
TOKENS = np.random.default_rng(3).integers(0, 256, (5, 24)).astype(np.int32)


def log_probabilities(model) -> np.ndarray:
    positions = jnp.broadcast_to(jnp.arange(24, dtype=jnp.int32), TOKENS.shape)
    memory = SequenceMemory(jnp.ones(TOKENS.shape, bool))
    hidden = model(jnp.asarray(TOKENS), positions, memory).hidden
    return log_softmax(np.asarray(model.logits(hidden)))[:, :-1]


def test_loss_and_divergence(model, forward):
    other = registry.random_model(registry.read_config(CONFIG), seed=1)
    found = measure_text(Forward(other), TOKENS, Reference(forward, TOKENS, SHAPES), SHAPES)
    theirs, ours = log_probabilities(model), log_probabilities(other)
    loss = -np.take_along_axis(ours, TOKENS[:, 1:, None], axis=2)[..., 0].mean(axis=1)
    np.testing.assert_allclose(found.loss, loss, rtol=1e-5)
    assert found.perplexity == pytest.approx(np.exp(loss.mean()), rel=1e-5)
    assert found.kl is not None
    assert found.same_best is not None
    kl = (np.exp(theirs) * (theirs - ours)).sum(axis=2).mean(axis=1)
    np.testing.assert_allclose(found.kl, kl, rtol=1e-4)
    same = (theirs.argmax(axis=2) == ours.argmax(axis=2)).mean(axis=1)
    np.testing.assert_allclose(found.same_best, same, atol=1e-6)


def test_the_reference_itself_does_not_diverge(forward):
    found = measure_text(forward, TOKENS, Reference(forward, TOKENS, SHAPES), SHAPES)
    assert found.kl is not None
    assert found.same_best is not None
    assert np.abs(found.kl).max() < 1e-6
    assert (found.same_best == 1).all()
    assert measure_text(forward, TOKENS, shapes=SHAPES).kl is None
    with pytest.raises(ValueError, match="another text"):
        measure_text(forward, TOKENS + 1, Reference(forward, TOKENS, SHAPES), SHAPES)


@pytest.fixture
def filler(tokenizer):
    text = "".join(f"Sentence number {n} says little. " for n in range(2000))
    return Filler(
        tokenizer(text)["input_ids"], tokenizer.decode, lambda t: tokenizer(t)["input_ids"]
    )


@pytest.mark.parametrize("length", [512, 2048])
def test_pass_keys_stand_at_every_depth(filler, length):
    task = passkey(filler, length, count=5)
    depths = []
    for question in task.questions:
        (pair,) = question.pairs
        assert abs(len(filler.encode(pair.context + pair.continuation)) - length) <= 4
        sentence = f"The pass key is{pair.continuation}."
        assert pair.context.count(sentence) == 1
        depths.append(pair.context.index(sentence) / len(pair.context))
    assert depths == sorted(depths)
    assert depths[0] < 0.2
    assert depths[-1] > 0.75
    assert len({question.pairs[0].continuation for question in task.questions}) == 5
    assert passkey(filler, length, count=5) == task


@pytest.mark.parametrize("length", [512, 2048])
def test_the_quoted_passage_is_the_gold_one(filler, length):
    task = passages(filler, length, count=4)
    numbers = set()
    for question in task.questions:
        ((context, answer),) = question.pairs
        assert abs(len(filler.encode(context)) / length - 1) < 0.15
        quoted = context.rsplit('"', 2)[1]
        numbers.add(int(answer.strip(" .")))
        assert f"Passage {answer.strip(' .')}: {quoted}" in context
    assert len(numbers) > 1


def test_too_little_text_or_room_is_told(filler):
    with pytest.raises(UserError, match="fewer than"):
        passkey(filler, 10**6, count=1)
    with pytest.raises(UserError, match="too few"):
        passkey(filler, 50, count=1)
