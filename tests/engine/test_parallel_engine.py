"""The engine over a mesh writes what it writes on one device, paged, batched and preempted."""

import dataclasses

import jax
import numpy as np
import pytest
from engine_doubles import no_compilation
from parallel_models import LLAMA, MLA, OPT, model_of

from pw_jax.engine.config import EngineConfig
from pw_jax.engine.engine import Engine
from pw_jax.engine.sampling import Sampling
from pw_jax.paging.layout import paging_layout
from pw_jax.planner.config import PlannerConfig
from pw_jax.tensor_parallel.model import parallelize
from sharding.mesh import tensor_mesh
from sharding.placement import bytes_on_a_device

PAGE = 1024
CONFIG = EngineConfig(
    slots=3,
    max_sequence_tokens=48,
    prefill_chunk=16,
    kv_dtype="float32",
    page_bytes=PAGE,
    planner=PlannerConfig(release_watermark_blocks=0),
)
MODELS = {
    "llama": (LLAMA, True),  # 12 query heads, 3 kv heads
    "whole llama": (LLAMA, False),
    "divided logits": ({**LLAMA, "vocab_size": 132, "num_hidden_layers": 1}, True),
    "opt": (OPT, True),
    "mla": (MLA, True),
}
CASES = [
    pytest.param("llama", "gathered", 8),
    pytest.param("llama", "gathered", 1, marks=pytest.mark.gpu),
    pytest.param("mla", "sharded", 1, marks=pytest.mark.gpu),
    pytest.param("llama", "gathered", 2, marks=pytest.mark.gpu),
    pytest.param("opt", "sharded", 2, marks=pytest.mark.gpu),
    pytest.param("divided logits", "sharded", 4),
    pytest.param("mla", "sharded", 3, marks=pytest.mark.slow),
    pytest.param("opt", "gathered", 5, marks=pytest.mark.slow),
    pytest.param("opt", "sharded", 8, marks=pytest.mark.slow),
    pytest.param("llama", "naive", 2, marks=pytest.mark.slow),
    pytest.param("whole llama", "dense", 8, marks=pytest.mark.slow),
    pytest.param("mla", "gathered", 8, marks=pytest.mark.slow),
]


def prompts() -> list[list[int]]:
    random = np.random.default_rng(7)
    return [random.integers(0, 131, length).tolist() for length in (5, 20, 30, 7, 17)]


def on_host(model):
    return jax.tree.map(np.asarray, model)


@pytest.mark.parametrize(("name", "layout", "devices"), CASES)
def test_the_engine_writes_the_same_over_a_mesh(name, layout, devices):
    if devices > jax.device_count():
        pytest.skip(f"needs {devices} devices")
    raw, factored = MODELS[name]
    model = model_of(raw, factored)
    alone = Engine(model, CONFIG)
    expected = alone.generate(prompts(), 16, stop_token_ids=())
    parallel = parallelize(on_host(model), tensor_mesh(devices), layout)
    # The longest sequence fits the pages of a device, and not another beside it.
    layout_of_pages = paging_layout(parallel.kv_shapes, kv_dtype="float32", page_words=PAGE // 4)
    pages = 1 + layout_of_pages.kv_pages(48) * 3 // 2
    array_bytes = sum(bytes_on_a_device(leaf) for leaf in jax.tree.leaves(parallel))
    tight = dataclasses.replace(CONFIG, memory_budget_bytes=array_bytes + pages * PAGE)
    engine = Engine(parallel, tight)
    found = engine.generate(prompts(), 16, stop_token_ids=())
    assert [g.tokens for g in found] == [g.tokens for g in expected]
    assert sum(g.preemptions for g in found) > 0
    engine.check_pages()
    assert (engine.plan.array_bytes < alone.plan.array_bytes) == (devices > 1)
    before = engine.trace[-1].reused_tokens
    with no_compilation():
        known = engine.generate(prompts()[-1:], 16, stop_token_ids=())  # out of kept pages
        again = engine.generate(prompts()[:2], 8, Sampling(0.8), stop_token_ids=())
    assert known[0].tokens == expected[-1].tokens
    assert engine.trace[-1].reused_tokens > before
    sampled = alone.generate(prompts()[:2], 8, Sampling(0.8), stop_token_ids=())
    assert [g.tokens for g in again] == [g.tokens for g in sampled]


@pytest.mark.slow
def test_experts_in_pages_are_sliced_over_a_mesh(experts):
    """At the highest width and, after all are lowered, at the floors."""
    planner = PlannerConfig(restore_watermark_blocks=10**6)  # what is lowered stays so
    config = dataclasses.replace(CONFIG, planner=planner)
    model = experts.paged()
    parallel = parallelize(on_host(model), tensor_mesh(3), "gathered")
    written, sizes = [], []
    for engine in (Engine(model, config, experts), Engine(parallel, config, experts)):
        assert engine.precision is not None
        assert engine.layout.matrices is not None
        sizes.append(engine.layout.matrices[0].rows)
        texts = [[p[:20] for p in prompts()], [p[:7] for p in prompts()]]
        tokens = [g.tokens for g in engine.generate(vocabulary(texts[0]), 12, stop_token_ids=())]
        assert engine.precision.mean_bits == 8
        pool, freed = engine.precision.relieve(engine._device.caches.pool, 10**6)
        engine._device.set_pool(pool)
        assert freed > 0
        assert engine.precision.mean_bits < 8
        tokens += [g.tokens for g in engine.generate(vocabulary(texts[1]), 12, stop_token_ids=())]
        engine.check_pages()
        written.append(tokens)
    assert written[0] == written[1]
    assert sizes == [64, 64]  # 32 hidden units do not divide by three: padded to 3 x 32


def vocabulary(texts: list[list[int]]) -> list[list[int]]:
    return [[token % 95 for token in text] for text in texts]
