"""The engine against dense weights, against itself one by one, and against bad input."""

import dataclasses

import jax
import numpy as np
import pytest
from engine_doubles import MemoryExperts, no_compilation

from pw_jax.engine.config import EngineConfig
from pw_jax.engine.engine import Engine
from pw_jax.engine.sampling import Sampling
from pw_jax.engine.sequence import Request
from pw_jax.errors import UserError
from pw_jax.models.memory import SequenceMemory

CONFIG = EngineConfig(
    memory_budget_bytes=2 << 20,
    slots=3,
    max_sequence_tokens=128,
    prefill_chunk=16,
    kv_dtype="float32",
)


def some_prompts(*lengths: int) -> list[list[int]]:
    generator = np.random.default_rng(7)
    return [generator.integers(0, 95, length).tolist() for length in lengths]


@pytest.fixture(scope="module")
def engine(experts: MemoryExperts) -> Engine:
    return Engine(experts.paged(), CONFIG, experts)


def test_parent_bits_equal_the_same_weights_multiplied_densely(engine, experts):
    prompts = some_prompts(5, 20, 33, 7, 17)
    paged = engine.generate(prompts, 24, stop_token_ids=())
    dense = Engine(experts.dequantized(8), CONFIG).generate(prompts, 24, stop_token_ids=())
    assert [g.tokens for g in paged] == [g.tokens for g in dense]
    assert engine.idle
    engine.check_pages()


def test_greedy_tokens_equal_repeated_whole_forward_passes(engine, experts):
    """An independent oracle: no cache, no pages, no batching."""
    model = experts.dequantized(8)
    forward = jax.jit(lambda tokens: _last_logits(model, tokens))
    (prompt,) = some_prompts(9)
    tokens = list(prompt)
    for _ in range(12):
        padded = np.zeros((1, 32), np.int32)
        padded[0, : len(tokens)] = tokens
        logits = np.asarray(forward(padded))[0, len(tokens) - 1]
        tokens.append(int(logits.argmax()))
    (generated,) = engine.generate([prompt], 12, stop_token_ids=())
    assert list(generated.tokens) == tokens[len(prompt) :]


def _last_logits(model, tokens):
    mask = jax.numpy.ones(tokens.shape, bool)  # causal: the padding behind changes nothing before
    positions = jax.lax.broadcasted_iota(jax.numpy.int32, tokens.shape, 1)
    return model.logits(model(tokens, positions, SequenceMemory(mask)).hidden)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.9, top_k=20, top_p=0.95)])
def test_a_batch_equals_its_prompts_one_by_one(engine, sampling):
    prompts = some_prompts(3, 40, 16, 25)
    requests = [Request(tuple(p), 15, sampling, seed) for seed, p in enumerate(prompts)]
    together = [engine.submit(request) for request in requests]
    list(engine.run())
    for request, sequence in zip(requests, together, strict=True):
        alone = engine.submit(request)
        list(engine.run())
        assert alone.generated == sequence.generated


def test_draws_depend_on_the_seed_only(engine):
    prompts = some_prompts(6)
    hot = Sampling(1.5)
    first = engine.generate(prompts, 20, hot, seed=1)[0].tokens
    assert engine.generate(prompts, 20, hot, seed=1)[0].tokens == first
    assert engine.generate(prompts, 20, hot, seed=2)[0].tokens != first


def test_a_stop_token_ends_a_text_and_frees_its_slot(engine):
    prompts = some_prompts(5, 8, 11, 14)
    free = engine.generate(prompts, 20, stop_token_ids=())
    stop = free[0].tokens[7]
    stopped = engine.generate(prompts, 20, stop_token_ids=(stop,))
    for whole, cut in zip(free, stopped, strict=True):
        if stop in whole.tokens:
            assert cut.tokens == whole.tokens[: whole.tokens.index(stop) + 1]
            assert cut.stopped
        else:
            assert cut.tokens == whole.tokens
    engine.check_pages()


def test_tokens_stream_in_order_and_a_step_late(engine):
    sequences = [engine.submit(Request(tuple(p), 6)) for p in some_prompts(4, 30)]
    seen: dict[int, list[int]] = {0: [], 1: []}
    for event in engine.run():
        seen[sequences.index(event.sequence)].append(event.token)
    assert [seen[0], seen[1]] == [s.generated for s in sequences]


def test_nothing_compiles_after_warm_up(engine):
    engine.generate(some_prompts(5), 3)
    with no_compilation():
        engine.generate(some_prompts(3, 50, 21, 8), 12, Sampling(0.7), stop_token_ids=())


@pytest.mark.parametrize(
    ("prompt", "new", "words"),
    [
        ((), 4, "empty"),
        ((1, 2), 0, "max_new_tokens"),
        ((1, 96), 4, "vocabulary"),
        ((1,) * 100, 29, "maximum of 128"),
    ],
)
def test_bad_requests_are_refused_in_one_line(engine, prompt, new, words):
    with pytest.raises(UserError, match=words):
        engine.submit(Request(prompt, new))
    assert engine.idle


def test_a_text_prompt_needs_a_tokenizer(engine):
    with pytest.raises(UserError, match="tokenizer"):
        engine.generate(["hello"], 4)


def test_budgets_that_cannot_hold_the_model_are_refused(experts):
    model = experts.paged()
    small = dataclasses.replace(CONFIG, memory_budget_bytes=100 << 10)
    with pytest.raises(UserError, match="too small"):
        Engine(model, small, experts)
    floors = dataclasses.replace(CONFIG, memory_budget_bytes=395 << 10)
    with pytest.raises(UserError, match="lowest allowed bits"):
        Engine(model, floors, experts)


def test_unsuitable_sizes_are_refused():
    with pytest.raises(ValueError, match="512"):
        dataclasses.replace(CONFIG, page_bytes=1000)
    with pytest.raises(ValueError, match="slots"):
        dataclasses.replace(CONFIG, slots=0)
