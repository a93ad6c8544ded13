"""Texts that begin alike share pages, and none of them reads differently for it."""

import dataclasses

import numpy as np
import pytest
from engine_doubles import TINY_DENSE, no_compilation
from test_latent_cache import CONFIG as LATENT
from test_latent_cache import random_model

from pw_jax.engine.engine import Engine
from pw_jax.engine.sampling import Sampling
from pw_jax.engine.sequence import Request, Sequence
from pw_jax.models import registry
from pw_jax.paging.allocator import Owner
from pw_jax.planner.config import PlannerConfig

CONFIG = dataclasses.replace(LATENT, page_bytes=2048, kv_cache="full")
POISON = np.uint32(0x7FC07FC0)  # NaN in both dtypes
NEW_TOKENS = 12
HOT = Sampling(0.9)


@pytest.fixture(
    scope="module", params=[pytest.param("full", marks=pytest.mark.slow), "latent", "paged"]
)
def engine(request, experts) -> Engine:
    if request.param == "paged":
        held = PlannerConfig(bucket_floors=(8, 8, 8))  # widths change texts as well
        config = dataclasses.replace(CONFIG, planner=held)
        return Engine(experts.paged(), config, experts)
    if request.param == "latent":
        return Engine(random_model("llama"), dataclasses.replace(CONFIG, kv_cache="latent"))
    model = registry.random_model(registry.read_config(TINY_DENSE))
    return Engine(model, CONFIG)


def requests() -> list[Request]:
    """Three samples of one prompt, two that begin like it, one that is its beginning."""
    draw = np.random.default_rng(3)
    first, other = draw.integers(0, 95, (2, 60)).tolist()
    prompts = [first] * 3 + [first[:39] + other[:9], first[:52] + other[:4], first[:32], other]
    return [
        Request(tuple(prompt), NEW_TOKENS, Sampling() if number > 2 else HOT, seed=number)
        for number, prompt in enumerate(prompts)
    ]


def forget(engine: Engine) -> None:
    """Nothing is known after this."""
    kept = engine.allocator.owned(Owner.KEPT)
    if kept:
        assert engine.allocator.evict is not None
        engine.allocator.evict(kept)
    assert engine.allocator.owned(Owner.KEPT) == 0


def poison(engine: Engine) -> None:
    free = np.append(engine.allocator.owned_ids(Owner.FREE), 0)
    engine._device.set_pool(engine._device.caches.pool.at[free].set(POISON))


def run(engine: Engine, requests: list[Request]) -> list[Sequence]:
    sequences = [engine.submit(request) for request in requests]
    while not engine.idle:
        engine.step()
        engine.check_pages()
    return sequences


def reused(engine: Engine) -> int:
    return engine.trace[-1].reused_tokens if engine.trace else 0


@pytest.fixture(scope="module")
def expected(engine) -> list[list[int]]:
    """Each text alone, with all of it computed."""
    texts = []
    before = reused(engine)
    for request in requests():
        forget(engine)
        texts += [sequence.generated for sequence in run(engine, [request])]
    assert reused(engine) == before
    forget(engine)
    return texts


def test_shared_pages_change_no_text(engine, expected):
    """Together, while pages are shared, copied, handed on; then once more out of kept pages."""
    poison(engine)
    before, size = reused(engine), engine._kv.block_tokens
    with no_compilation():
        found = run(engine, requests())
    assert [sequence.generated for sequence in found] == expected
    whole = 59 // size * size
    assert reused(engine) - before >= 2 * whole + 39 // size * size + 52 // size * size
    before = reused(engine)
    poison(engine)
    again = run(engine, requests())
    assert [sequence.generated for sequence in again] == expected
    assert reused(engine) - before > 6 * 31  # all but the last token of each, and what is short
    assert engine.allocator.owned(Owner.KV) == 0


def test_a_fork_gets_a_copy_of_the_block_that_the_other_goes_on_writing(engine, expected):
    forget(engine)
    size = engine._kv.block_tokens
    prompt = requests()[0].prompt[: 2 * size + size // 2 + 1]  # its last block is half full
    alone = run(engine, [Request(prompt, 2 * size)])[0].generated
    forget(engine)
    before = reused(engine)
    first, second = run(engine, [Request(prompt, 2 * size), Request(prompt, 2 * size, HOT, 5)])
    assert first.generated == alone
    assert second.generated != alone
    assert reused(engine) - before == len(prompt) - 1  # more than full blocks


def test_kept_pages_are_given_up_before_anyone_is_preempted(engine, expected):
    """Few pages: texts come and go, some are preempted, all read as before."""
    run(engine, requests())
    kept = engine.allocator.owned(Owner.KEPT)
    assert kept > 0
    longest = engine.layout.kv_pages(60 + NEW_TOKENS)
    spare = engine.allocator.free - 2 * longest
    assert spare > 0
    taken = engine.allocator.take(spare, Owner.RESERVED)
    assert engine.allocator.owned(Owner.KEPT) < kept
    forget(engine)
    draw = np.random.default_rng(5)
    texts = [Request(tuple(draw.integers(0, 95, 60).tolist()), NEW_TOKENS) for _ in range(4)]
    for text in texts:  # each needs pages of those before it
        (sequence,) = run(engine, [text])
        assert not sequence.preemptions
    found = run(engine, requests())
    engine.allocator.give(taken, Owner.RESERVED)
    assert [sequence.generated for sequence in found] == expected


def test_without_sharing_or_with_statistics_of_prompts_all_is_computed():
    assert CONFIG.shares_prefixes
    assert not dataclasses.replace(CONFIG, prefix_sharing=False).shares_prefixes
    planner = PlannerConfig(prompt_residual="heads")
    assert not dataclasses.replace(CONFIG, planner=planner).shares_prefixes
