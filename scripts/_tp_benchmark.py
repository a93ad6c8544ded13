"""Time of decoder layers under tensor parallelism: prefill, decode step, collectives alone."""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jax.stages import Lowered

from pw_jax.low_rank.layers import factorable_shapes
from pw_jax.low_rank.ranks import uniform_ranks
from pw_jax.models import registry
from pw_jax.models.config import ModelConfig
from pw_jax.paging.layout import PagingLayout, choose_page_words, paging_layout
from pw_jax.paging.memory import PagedMemory
from pw_jax.tensor_parallel.model import ParallelModel, parallelize
from sharding.collectives import Collective, read_collectives, total_wire_bytes
from sharding.layouts import LAYOUTS
from sharding.mesh import AXIS, abstract, tensor_mesh
from sharding.placement import Placement

DTYPE, KV_DTYPE = jnp.bfloat16, "bfloat16"
VOCABULARY = 1024  # small, since the head of a few layers would otherwise count for most of them
WARM_UP, CALLS, REPEATS = 2, 5, 5


@dataclass(frozen=True)
class Workload:
    """A batch of prompts of one length that generates to one length.

    Attributes:
        name: What flags call it.
        batch: Sequences.
        prompt: Tokens of each prompt.
        new: Tokens to generate for each.
    """

    name: str
    batch: int
    prompt: int
    new: int

    @property
    def tokens(self) -> int:
        """Tokens of a sequence at the end."""
        return self.prompt + self.new


WORKLOADS = {one.name: one for one in (Workload("s1", 512, 32, 128), Workload("s2", 64, 64, 448))}
"""The two of the paper."""


@dataclass(frozen=True)
class TpRecord:
    """One measurement; times are medians, in microseconds a layer.

    Attributes:
        model: Whose layers.
        layout: How they lay.
        devices: Of the mesh.
        ratio: Share of the parameters that factors keep; 1 for ``dense``.
        workload: Name of the workload.
        layers: Layers that were timed; embedding and a head of 1024 rows come on top.
        prefill_us: All prompts in one call.
        prefill_spread_us: Longest less shortest.
        decode_us: One token for every sequence, half-way through the new ones.
        decode_spread_us: Longest less shortest.
        prefill_collectives_us: The same collectives by themselves, one after another.
        decode_collectives_us: The same of the decode step.
        decode_wire_bytes: Sent by a device in a decode step, a token and layer.
        model_tokens_per_s: New tokens a second of all sequences, if all layers of the model were
            as these.
        model_first_token_ms: Time to first token of all prompts together, likewise.
        model_per_token_ms: Time a token, likewise.
    """

    model: str
    layout: str
    devices: int
    ratio: float
    workload: str
    layers: int
    prefill_us: float
    prefill_spread_us: float
    decode_us: float
    decode_spread_us: float
    prefill_collectives_us: float
    decode_collectives_us: float
    decode_wire_bytes: float
    model_tokens_per_s: float
    model_first_token_ms: float
    model_per_token_ms: float


@dataclass(frozen=True)
class AloneRecord:
    """What one of several devices computes, on one device: products and attention, no collectives.

    Attributes:
        model: Whose layers.
        layout: How they lay.
        devices: That the layer is divided over.
        ratio: As in `TpRecord`.
        workload: As in `TpRecord`.
        prefill_us: A layer.
        decode_us: A layer.
        weight_bytes: Of a layer on a device.
    """

    model: str
    layout: str
    devices: int
    ratio: float
    workload: str
    prefill_us: float
    decode_us: float
    weight_bytes: int


def shapes_of(
    config: ModelConfig, layout: str, mesh: Mesh | AbstractMesh, ratio: float, layers: int
) -> ParallelModel:
    """A model of some layers in a layout, of shapes."""
    few = dataclasses.replace(
        config,
        kv_shapes=config.kv_shapes[:layers],
        moe_layers=tuple(layer for layer in config.moe_layers if layer < layers),
        vocab_size=VOCABULARY,
        tie_word_embeddings=True,
    )
    ranks = {}
    if layout != "dense":
        ranks = uniform_ranks(factorable_shapes(registry.build_model(few)), ratio)
    model = registry.build_model(few, dtype=DTYPE, ranks=ranks)
    return parallelize(model, mesh, layout, abstract)


@functools.cache
def _drawing(shape: tuple[int, ...], dtype: Any, sharding: Any) -> Callable[[Any], jax.Array]:
    def draw(seed: jax.Array) -> jax.Array:
        scale = jnp.asarray(0.02, dtype)
        return jax.random.normal(jax.random.key(seed), shape, dtype) * scale

    return jax.jit(draw, out_shardings=sharding)


def random_arrays(shapes: Any) -> Any:
    """Random arrays, made where they are to be."""
    leaves, tree = jax.tree.flatten(shapes)
    drawn = [
        _drawing(leaf.shape, leaf.dtype, leaf.sharding)(np.uint32(seed))
        for seed, leaf in enumerate(leaves)
    ]
    return jax.tree.unflatten(tree, drawn)


def pages_of(model: ParallelModel) -> PagingLayout:
    """Pages of keys and values as a device has them."""
    words = choose_page_words(model.kv_shapes, kv_dtype=KV_DTYPE, expert_shape=None)
    return paging_layout(model.kv_shapes, kv_dtype=KV_DTYPE, page_words=words)


def empty_pages(
    layout: PagingLayout, workload: Workload, placement: Placement
) -> tuple[jax.Array, tuple[np.ndarray, ...]]:
    """A pool, and tables that give every sequence pages of its own for all its tokens."""
    tables, first = [], 1
    for group in layout.kv_groups:
        shape = (len(group.layers), workload.batch, group.blocks(workload.tokens))
        count = int(np.prod(shape))
        tables.append(np.arange(first, first + count, dtype=np.int32).reshape(shape))
        first += count
    pages = placement.devices * first
    pool = jnp.zeros((pages, layout.page_words), jnp.uint32, device=placement.pool)
    return pool, tuple(jax.device_put(tables, placement.whole))


def lowered_steps(
    model: ParallelModel, pages: PagingLayout, workload: Workload, placement: Placement
) -> dict[str, tuple[Lowered, np.ndarray]]:
    """Prefill and decode step, lowered from shapes alone, and the positions that each is for."""

    def step(model: Any, pool: Any, tables: Any, tokens: Any, positions: Any) -> tuple[Any, Any]:
        memory = PagedMemory(pool, tables, positions, None, pages)
        out = model(tokens, positions, memory)
        best = jnp.argmax(model.logits(out.hidden[:, -1]), axis=-1)
        return out.memory.pool, best

    jitted = jax.jit(step, donate_argnums=1, out_shardings=(placement.pool, placement.whole))
    pool, tables = jax.eval_shape(lambda: empty_pages(pages, workload, placement))
    pool = jax.ShapeDtypeStruct(pool.shape, pool.dtype, sharding=placement.pool)
    prompt = np.arange(workload.prompt, dtype=np.int32)
    steps = {}
    for kind, positions in {
        "prefill": np.tile(prompt, (workload.batch, 1)),
        "decode": np.full((workload.batch, 1), workload.prompt + workload.new // 2, np.int32),
    }.items():
        whole = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placement.whole),
            (tables, positions, positions),
        )
        steps[kind] = jitted.lower(model, pool, *whole), positions
    return steps


def compile_only(
    config: ModelConfig, layout: str, devices: int, ratio: float, layers: int, workload: Workload
) -> None:
    """Compiles what `measure` runs, into JAX's compilation cache; no weights are made."""
    mesh = tensor_mesh(devices)
    shapes = shapes_of(config, layout, mesh, ratio, layers)
    steps = lowered_steps(shapes, pages_of(shapes), workload, Placement.over(mesh))
    for lowered, _ in steps.values():
        collectives_alone(mesh, read_collectives(lowered, lowered.compile()))


def measure(
    config: ModelConfig, name: str, layout: str, devices: int, ratio: float, layers: int,
    workload: Workload,
) -> TpRecord:  # fmt: skip
    """Times the two steps of one workload in one layout."""
    mesh = tensor_mesh(devices)
    placement = Placement.over(mesh)
    shapes = shapes_of(config, layout, mesh, ratio, layers)
    pages = pages_of(shapes)
    steps = lowered_steps(shapes, pages, workload, placement)
    model = random_arrays(shapes)
    pool, tables = empty_pages(pages, workload, placement)
    found: dict[str, tuple[list[float], float, float]] = {}
    for kind, (lowered, positions) in steps.items():
        executable = lowered.compile()
        collectives = read_collectives(lowered, executable)
        rest = (tables, *jax.device_put((positions % VOCABULARY, positions), placement.whole))
        times, pool = wall_times(lambda pool, e=executable, r=rest: e(model, pool, *r)[0], pool)
        alone, _ = wall_times(*collectives_alone(mesh, collectives))
        found[kind] = (times, statistics.median(alone), total_wire_bytes(collectives))
    prefill, decode = (statistics.median(found[kind][0]) for kind in ("prefill", "decode"))
    scale = config.num_layers / layers
    seconds = scale * (prefill + (workload.new - 1) * decode)
    micro = 1e6 / layers
    return TpRecord(
        model=name,
        layout=layout,
        devices=devices,
        ratio=1.0 if layout == "dense" else ratio,
        workload=workload.name,
        layers=layers,
        prefill_us=round(micro * prefill, 2),
        prefill_spread_us=round(micro * _spread(found["prefill"][0]), 2),
        decode_us=round(micro * decode, 2),
        decode_spread_us=round(micro * _spread(found["decode"][0]), 2),
        prefill_collectives_us=round(micro * found["prefill"][1], 2),
        decode_collectives_us=round(micro * found["decode"][1], 2),
        decode_wire_bytes=round(found["decode"][2] / workload.batch / layers, 1),
        model_tokens_per_s=round(workload.batch * workload.new / seconds, 1),
        model_first_token_ms=round(1e3 * scale * prefill, 3),
        model_per_token_ms=round(1e3 * scale * decode, 3),
    )


def collectives_alone(
    mesh: Mesh, collectives: Iterable[Collective]
) -> tuple[Callable[[Any], Any], Any]:
    """A program of these collectives alone, each waiting for the one before; and its input."""
    collectives, devices = tuple(collectives), mesh.shape[AXIS]
    kinds = {"bf16": jnp.bfloat16, "f32": jnp.float32, "s32": jnp.int32, "u32": jnp.uint32}
    inputs, order = [], []
    for one in collectives:
        for shape, dtype in zip(one.shapes, one.dtypes, strict=True):
            size = int(np.prod(shape))
            own = {"all-gather": size // devices, "reduce-scatter": size * devices}
            inputs.append(jnp.zeros(own.get(one.kind, size), kinds[dtype]))
            order += [(one.kind, len(inputs) - 1)] * one.runs

    def body(arrays: list[jax.Array]) -> list[jax.Array]:
        arrays = list(arrays)
        before = jnp.zeros((), jnp.float32)
        for kind, index in order:
            x, _ = lax.optimization_barrier((arrays[index], before))
            match kind:
                case "all-gather":
                    out = lax.all_gather(x, AXIS, tiled=True)
                case "reduce-scatter":
                    out = lax.psum_scatter(x, AXIS, tiled=True)
                case _:
                    out = lax.psum(x, AXIS)
            before = out[0].astype(jnp.float32)
        return [lax.optimization_barrier((array, before))[0] for array in arrays]

    whole = PartitionSpec()
    mapped = jax.shard_map(body, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)
    arrays = jax.device_put(inputs, NamedSharding(mesh, whole))
    return jax.jit(mapped).lower(arrays).compile(), arrays


def measure_alone(
    config: ModelConfig, name: str, layout: str, devices: int, ratio: float, workload: Workload
) -> AloneRecord:
    """Times on one device what each of several would compute in a layer."""
    mesh = AbstractMesh((devices,), (AXIS,), axis_types=(AxisType.Auto,))
    shapes = shapes_of(config, layout, mesh, ratio, 1)
    (layer,) = shapes.layers
    own = [leaf.sharding.shard_shape(leaf.shape) for leaf in jax.tree.leaves(layer)]
    weights = [
        _drawing(shape, DTYPE, None)(np.uint32(seed))
        for seed, shape in enumerate(own)
        if len(shape) == 2
    ]
    (kv,), plan = shapes.kv_shapes, shapes.blocks[0].attention.plan
    pages = pages_of(shapes)
    pool, tables = empty_pages(pages, workload, Placement.on_one_device())
    middle = workload.prompt + workload.new // 2
    times = {}
    for kind, length in (("prefill", workload.prompt), ("decode", 1)):
        start = 0 if kind == "prefill" else middle
        positions = np.broadcast_to(
            np.arange(start, start + length, dtype=np.int32), (workload.batch, length)
        )
        heads = [
            _drawing((workload.batch, length, count, kv.head_dim), DTYPE, None)(np.uint32(1))
            for count in (plan.local_heads, kv.kv_heads, kv.kv_heads)
        ]

        def run(
            pool: Any, weights: Any, tables: Any, positions: Any, heads: Any, length: int = length
        ) -> Any:
            memory = PagedMemory(pool, tables, positions, None, pages)
            out, memory = memory.attend(
                0, *heads, scale=kv.head_dim**-0.5, window=kv.window, soft_cap=None
            )
            before = out.reshape(-1)[0]
            for weight in weights:
                x = jnp.broadcast_to(before, (workload.batch * length, weight.shape[0]))
                before = (lax.optimization_barrier(x) @ weight)[0, 0]
            return lax.optimization_barrier((memory.pool, before))[0]

        arguments = (weights, tables, positions, heads)
        compiled = jax.jit(run, donate_argnums=0).lower(pool, *arguments).compile()
        series, pool = wall_times(lambda pool, c=compiled, a=arguments: c(pool, *a), pool)
        times[kind] = 1e6 * statistics.median(series)
    return AloneRecord(
        model=name,
        layout=layout,
        devices=devices,
        ratio=1.0 if layout == "dense" else ratio,
        workload=workload.name,
        prefill_us=round(times["prefill"], 2),
        decode_us=round(times["decode"], 2),
        weight_bytes=sum(int(np.prod(shape)) for shape in own) * jnp.dtype(DTYPE).itemsize,
    )


def wall_times(call: Callable[[Any], Any], state: Any) -> tuple[list[float], Any]:
    """Seconds of a call that gives its argument on, of several series of calls; and the last."""
    for _ in range(WARM_UP):
        state = call(state)
    jax.block_until_ready(state)
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        for _ in range(CALLS):
            state = call(state)
        jax.block_until_ready(state)
        times.append((time.perf_counter() - start) / CALLS)
    return times, state


def cases(ratios: list[float], layouts: Iterable[str] = LAYOUTS) -> list[tuple[str, float]]:
    """Layouts and ratios; ``dense`` once, since it does not depend on the ratio."""
    return [
        (layout, ratio)
        for layout in layouts
        for ratio in (ratios[:1] if layout == "dense" else ratios)
    ]


def _spread(times: list[float]) -> float:
    return max(times) - min(times)
