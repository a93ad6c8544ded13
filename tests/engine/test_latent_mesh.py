"""A cache of latents over a mesh: whole on every device, read for that device's heads alone."""

import dataclasses
import functools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_doubles import no_compilation
from flax import nnx
from parallel_models import LLAMA, MLA, OPT, model_of

from pallas_kernels.page_layout import LatentLayout
from pw_jax.engine.cache_choice import choose_cache, latents_of
from pw_jax.engine.config import EngineConfig
from pw_jax.engine.engine import Engine
from pw_jax.errors import UserError
from pw_jax.models.latent import LatentKvShape, latent_layers
from pw_jax.models.memory import SequenceMemory
from pw_jax.tensor_parallel.model import ParallelModel, parallelize
from sharding import formulas
from sharding.collectives import read_collectives
from sharding.formulas import BlockShape, Matrix
from sharding.mesh import tensor_mesh
from sharding.padding import round_up

SLOW = pytest.mark.slow
CONFIG = EngineConfig(
    memory_budget_bytes=2 << 20,
    slots=3,
    max_sequence_tokens=48,
    prefill_chunk=16,
    kv_dtype="float32",
    kv_cache="latent",
)
MODELS = {
    "llama": {**LLAMA, "num_hidden_layers": 2},
    "opt": {**OPT, "num_hidden_layers": 1},
    "mla": {**MLA, "num_hidden_layers": 1, "first_k_dense_replace": 1},
}
HEADS = {("llama", 8): (2, 1), ("opt", 3): (3, 3), ("mla", 2): (3, 3)}  # a device's query, kv heads
NEW = 16
CASES = [
    pytest.param("llama", "gathered", 8),
    pytest.param("opt", "sharded", 3, marks=SLOW),
    pytest.param("mla", "gathered", 2),
    pytest.param("llama", "sharded", 8, marks=SLOW),
    pytest.param("opt", "gathered", 3, marks=SLOW),
    pytest.param("mla", "sharded", 2, marks=SLOW),
]


def prompts() -> list[list[int]]:
    random = np.random.default_rng(7)
    return [random.integers(0, 131, length).tolist() for length in (5, 20, 30, 7)]


def on_mesh(model, layout: str, devices: int) -> ParallelModel:
    return parallelize(jax.tree.map(np.asarray, model), tensor_mesh(devices), layout)


@pytest.mark.parametrize(("name", "layout", "devices"), CASES)
def test_the_same_texts_from_latents_on_every_device(name, layout, devices):
    model = model_of(MODELS[name])
    expected = [greedy(model, prompt) for prompt in prompts()]
    parallel = on_mesh(model, layout, devices)
    engine = Engine(parallel, CONFIG)
    found = engine.generate(prompts(), NEW, stop_token_ids=())
    assert [g.tokens for g in found] == expected
    with no_compilation():
        found = engine.generate(prompts(), NEW, stop_token_ids=())
    assert [g.tokens for g in found] == expected
    engine.check_pages()
    # Replicated: a token takes on each device what it takes on one, and all pools are alike.
    kept = choose_cache(model.config, latent_layers(model), CONFIG)
    assert choose_cache(model.config, parallel.latent_layers, CONFIG) == kept
    assert all(isinstance(group.layout, LatentLayout) for group in engine.layout.kv_groups)
    pools = [np.asarray(part.data)[1:] for part in engine._device.caches.pool.addressable_shards]
    assert all(np.array_equal(pool, pools[0]) for pool in pools[1:])
    made = {(latent.heads, latent.kv_heads) for latent in parallel.latent_layers.values()}
    assert made == {HEADS[name, devices]}
    found = read_collectives(engine._device.compiled.decode_steps[-1])
    measured = Counter((one.kind, shape[-1]) for one in found for shape in one.shapes)
    expected = by_formula(parallel, layout, devices)
    assert not expected - measured
    # What comes on top is the head's: hidden states, logits, and the best of each device's.
    around = {round_up(size, devices) for size in (devices, 131, model.config.hidden_size)}
    assert (measured - expected).keys() <= {("all-gather", width) for width in around}


@SLOW
@pytest.mark.parametrize("name", MODELS)
def test_engines_on_one_device_write_that_too(name):
    model = model_of(MODELS[name])
    expected = [greedy(model, prompt) for prompt in prompts()]
    for kv_cache in ("full", "latent"):
        engine = Engine(model, dataclasses.replace(CONFIG, kv_cache=kv_cache))
        found = engine.generate(prompts(), NEW, stop_token_ids=())
        assert [g.tokens for g in found] == expected


@functools.partial(jax.jit, static_argnums=0)
def best(graph, state, tokens):
    memory = SequenceMemory(jnp.ones(tokens.shape, bool))
    positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    model = nnx.merge(graph, state)
    return model.logits(model(tokens, positions, memory).hidden).argmax(-1)[0]


def greedy(model, prompt: list[int]) -> tuple[int, ...]:
    """What follows, by the whole sequence anew for each token."""
    graph, state = nnx.split(model)
    text = list(prompt)
    for _ in range(NEW):
        padded = np.zeros((1, CONFIG.max_sequence_tokens), np.int32)
        padded[0, : len(text)] = text
        text.append(int(best(graph, state, padded)[len(text) - 1]))
    return tuple(text[len(prompt) :])


def by_formula(model: ParallelModel, layout: str, devices: int) -> Counter[tuple[str, int]]:
    """Kind and width of what the layers and the last norm communicate."""
    found: Counter[tuple[str, int]] = Counter()
    centred = model.config.model_type == "opt"
    for parts in model.layers:
        for block in (parts.attention, parts.mlp):
            entries = tuple(Matrix(name, 0, 0, rank) for name, rank in block["entry"].ranks)
            last = Matrix("last", 0, model.config.hidden_size, block["exit"].v.array.shape[1])
            moves = formulas.transfers(layout, BlockShape(entries, last), devices)
            moves += formulas.norm_transfers(layout, centred=centred)
            found.update((one.kind, one.width) for one in moves)
    found.update((one.kind, one.width) for one in formulas.norm_transfers(layout, centred=centred))
    return found


def test_auto_counts_what_a_device_keeps():
    """MHA of 7 heads: latents of 19 and 6 are the smaller on one device, one head is on eight."""
    model = model_of(MODELS["opt"])
    auto = dataclasses.replace(CONFIG, kv_cache="auto", slots=1024, max_sequence_tokens=512)
    assert isinstance(choose_cache(model.config, latent_layers(model), auto)[0], LatentKvShape)
    parallel = on_mesh(model, "gathered", 8)
    on_device = dataclasses.replace(model.config, kv_shapes=parallel.kv_shapes)
    assert choose_cache(on_device, latents_of(parallel, auto), auto) == parallel.kv_shapes
    naive = on_mesh(model, "naive", 8)
    assert latents_of(naive, auto) == {}


def test_layouts_without_whole_latents_are_refused():
    model = model_of({**MLA, "num_hidden_layers": 1})
    with pytest.raises(UserError, match=r"--layout naive: .* choose gathered or sharded"):
        Engine(on_mesh(model, "naive", 2), CONFIG)
    whole = model_of({**LLAMA, "num_hidden_layers": 1}, factored=False)
    with pytest.raises(UserError, match="factored"):
        Engine(on_mesh(whole, "dense", 2), CONFIG)


def test_normalised_keys_are_kept_as_heads():
    raw = LLAMA | {"model_type": "gemma3_text", "sliding_window": 8, "sliding_window_pattern": 2}
    assert not latent_layers(model_of(raw))
