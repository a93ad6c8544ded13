"""Scores against one unpadded forward pass at a time and float64 numpy."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from byte_language import log_softmax
from flax import nnx

from pw_jax.errors import UserError
from pw_jax.evaluation import forward as forwards
from pw_jax.evaluation.encoding import Encoded, Encoder
from pw_jax.evaluation.scoring import BatchShapes, score
from pw_jax.evaluation.tasks import Pair
from pw_jax.models.memory import SequenceMemory

SHAPES = BatchShapes(tokens=64, lengths=(16, 32))


def sequences(count: int) -> list[Encoded]:
    generator = np.random.default_rng(0)
    return [
        Encoded(generator.integers(0, 256, n).astype(np.int32), int(generator.integers(1, n)))
        for n in np.resize((9, 33, 17, 18), count)
    ]


@partial(jax.jit, static_argnums=0)
def logits_of(model, tokens: jax.Array) -> jax.Array:
    positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    memory = SequenceMemory(jnp.ones(tokens.shape, bool))
    return model.logits(model(tokens, positions, memory).hidden)[0]


def expected(model, one: Encoded) -> tuple[float, bool]:
    scores = log_softmax(np.asarray(logits_of(model, jnp.asarray(one.tokens)[None])))
    places = np.arange(len(one.tokens) - one.scored, len(one.tokens))
    picked = scores[places - 1, one.tokens[places]]
    return picked.sum(), bool((scores[places - 1].argmax(axis=1) == one.tokens[places]).all())


def test_batches_of_padded_sequences_score_as_each_alone(model, forward):
    asked = sequences(8)
    jitted: Any = forwards._hidden
    compiled = jitted._cache_size()
    scores = score(forward, asked, SHAPES)
    assert jitted._cache_size() - compiled == len(SHAPES.lengths)
    for one, found in zip(asked, scores, strict=True):
        total, greedy = expected(model, one)
        assert found.log_likelihood == pytest.approx(total, abs=2e-4)
        assert found.greedy == greedy
        assert found.tokens == one.scored


def test_weights_that_are_bound_to_a_device_compile_nothing_anew(model, forward):
    graph, state = nnx.split(model)
    bound = nnx.merge(graph, jax.device_put(state, jax.devices()[0]))
    jitted: Any = forwards._hidden
    score(forward, sequences(4), SHAPES)
    compiled = jitted._cache_size()
    score(forwards.Forward(bound), sequences(4), SHAPES)
    assert jitted._cache_size() == compiled


def test_greedy_is_the_likeliest_token(model, forward):
    start = np.array([5, 6, 7], np.int32)
    best = int(np.asarray(logits_of(model, jnp.asarray(start)[None]))[-1].argmax())
    ends = [best, (best + 1) % 256]
    found = score(forward, [Encoded(np.append(start, e).astype(np.int32), 1) for e in ends], SHAPES)
    assert [one.greedy for one in found] == [True, False]
    assert found[0].log_likelihood > found[1].log_likelihood


def test_a_sequence_beyond_the_longest_batch_is_refused():
    with pytest.raises(ValueError, match="33 tokens is longer than 32"):
        SHAPES.length(33)


def test_a_pair_is_encoded_whole(tokenizer):
    encoder = Encoder(tokenizer, 64)
    spaced = encoder.pair(Pair("ab  ", "cd"))  # the spaces go over to the continuation
    assert bytes(spaced.tokens.tolist()) == b"ab  cd"
    assert spaced.scored == 4
    joined = encoder.pair(Pair("at", "he"))  # "th" is one token, and belongs to neither
    assert joined.tokens.tolist() == [ord("a"), tokenizer.joined, ord("e")]
    assert joined.scored == 1
    alone = encoder.pair(Pair("", "cd"))
    assert alone.tokens.tolist() == [0, ord("c"), ord("d")]
    assert alone.scored == 2


def test_a_begin_token_is_set_where_the_tokenizer_sets_one(tokenizer):
    tokenizer.bos_token_id = 2
    assert Encoder(tokenizer, 64).pair(Pair("a", "b")).tokens.tolist() == [2, ord("a"), ord("b")]


def test_long_pairs_lose_their_beginning(tokenizer):
    encoder = Encoder(tokenizer, 8)
    cut = encoder.pair(Pair("0123456789", "abc"))
    assert bytes(cut.tokens.tolist()) == b"456789abc"  # eight are run, and the last is predicted
    assert cut.scored == 3
    with pytest.raises(UserError, match="has 9 tokens, and the model takes 8"):
        encoder.pair(Pair("x", "123456789"))
    with pytest.raises(UserError, match="no tokens of its own"):
        encoder.pair(Pair("x", ""))


@pytest.mark.parametrize("first", [0, None])
@pytest.mark.parametrize("length", [1, 7, 8, 9, 16, 17, 30])
def test_rolling_windows_score_every_token_once(tokenizer, length, first):
    tokenizer.eos_token_id = first
    text = "".join(chr(ord("A") + n) for n in range(length))
    windows = Encoder(tokenizer, 8).rolling(text)
    scored = [token for window in windows for token in window.tokens[-window.scored :]]
    assert bytes(scored).decode() == (text if first == 0 else text[1:])
    assert all(len(window.tokens) <= 9 for window in windows)
    if length > 8:
        assert len(windows[-1].tokens) == 9  # the last one reaches back
