"""Time of decoder layers under tensor parallelism: prefill, decode step, collectives alone."""

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _tp_model import (
    VOCABULARY,
    Case,
    empty_pages,
    lowered_steps,
    pages_of,
    random_arrays,
    shapes_of,
)
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sharding.collectives import Collective, read_collectives, total_wire_bytes
from sharding.mesh import AXIS, tensor_mesh
from sharding.placement import Placement


@dataclass(frozen=True)
class Timing:
    """How often a step is called.

    Attributes:
        calls: Of a series.
        repeats: Series.
        warm_up: Calls before.
    """

    calls: int = 5
    repeats: int = 5
    warm_up: int = 2


@dataclass(frozen=True)
class TpRecord:
    """One measurement; times are medians, in microseconds a layer.

    Attributes:
        model: Whose layers.
        layout: How they lay.
        devices: Of the mesh.
        ratio: Share of the parameters that factors keep; 1 for ``dense``.
        kv: What is cached: ``full`` keys and values, or the ``latent`` that they come from.
        workload: Name of the workload.
        batch: Its sequences.
        layers: Layers that were timed; embedding and a head of 1024 rows come on top.
        prefill_us: All prompts in one call; None, like what follows from it, where only a step is
            timed.
        prefill_spread_us: Longest less shortest.
        decode_us: One token for every sequence, half-way through the new ones.
        decode_spread_us: Longest less shortest.
        prefill_collectives_us: The same collectives by themselves, one after another.
        decode_collectives_us: The same of the decode step.
        decode_wire_bytes: Sent by a device in a decode step, a token and layer; with the head.
        cache_bytes: Of a token in a layer, on each device.
        model_tokens_per_s: New tokens a second of all sequences, if all layers of the model were
            as these.
        model_first_token_ms: Time to first token of all prompts together, likewise.
        model_per_token_ms: Time a token, likewise.
    """

    model: str
    layout: str
    devices: int
    ratio: float
    kv: str
    workload: str
    batch: int
    layers: int
    prefill_us: float | None
    prefill_spread_us: float | None
    decode_us: float
    decode_spread_us: float
    prefill_collectives_us: float | None
    decode_collectives_us: float
    decode_wire_bytes: float
    cache_bytes: float
    model_tokens_per_s: float
    model_first_token_ms: float | None
    model_per_token_ms: float


def compile_only(case: Case) -> None:
    """Compiles what `measure` runs, into JAX's compilation cache; no weights are made."""
    mesh = tensor_mesh(case.devices)
    shapes = shapes_of(case, mesh)
    pages = pages_of(case, shapes)
    for lowered, _ in lowered_steps(shapes, pages, case.workload, Placement.over(mesh)).values():
        collectives_alone(mesh, read_collectives(lowered, lowered.compile()))


def measure(case: Case, timing: Timing) -> TpRecord:
    """Times the steps of one workload in one layout."""
    mesh, workload, layers = tensor_mesh(case.devices), case.workload, case.layers
    placement = Placement.over(mesh)
    shapes = shapes_of(case, mesh)
    pages = pages_of(case, shapes)
    steps = lowered_steps(shapes, pages, workload, placement)
    model = random_arrays(shapes)
    pool, tables = empty_pages(pages, workload, placement)
    times: dict[str, list[float]] = {}
    alone: dict[str, float] = {}
    sent: dict[str, float] = {}
    for kind, (lowered, positions) in steps.items():
        executable = lowered.compile()
        collectives = read_collectives(lowered, executable)
        rest = (tables, *jax.device_put((positions % VOCABULARY, positions), placement.whole))
        step = partial(_step, executable, model, rest)
        times[kind], pool = wall_times(step, pool, timing)
        only, _ = wall_times(*collectives_alone(mesh, collectives), timing)
        alone[kind], sent[kind] = statistics.median(only), total_wire_bytes(collectives)
    prefill, decode = (statistics.median(times.get(kind, [0.0])) for kind in ("prefill", "decode"))
    scale, micro = case.config.num_layers / layers, 1e6 / layers
    seconds = scale * (prefill + max(1, workload.new - 1) * decode)

    def of_prefill(value: float, digits: int = 2) -> float | None:
        return round(value, digits) if "prefill" in times else None

    return TpRecord(
        **case.labels,
        workload=workload.name,
        batch=workload.batch,
        layers=layers,
        prefill_us=of_prefill(micro * prefill),
        prefill_spread_us=of_prefill(micro * _spread(times.get("prefill", [0.0]))),
        decode_us=round(micro * decode, 2),
        decode_spread_us=round(micro * _spread(times["decode"]), 2),
        prefill_collectives_us=of_prefill(micro * alone.get("prefill", 0.0)),
        decode_collectives_us=round(micro * alone["decode"], 2),
        decode_wire_bytes=round(sent["decode"] / workload.batch / layers, 1),
        cache_bytes=pages.kv_token_bytes / layers,
        model_tokens_per_s=round(workload.batch * workload.new / seconds, 1),
        model_first_token_ms=of_prefill(1e3 * scale * prefill, 3),
        model_per_token_ms=round(1e3 * scale * decode, 3),
    )


def _step(executable: Any, model: Any, rest: tuple[Any, ...], pool: jax.Array) -> jax.Array:
    return executable(model, pool, *rest)[0]


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


def wall_times(call: Callable[[Any], Any], state: Any, timing: Timing) -> tuple[list[float], Any]:
    """Seconds of a call that gives its argument on, of several series of calls; and the last."""
    for _ in range(timing.warm_up):
        state = call(state)
    jax.block_until_ready(state)
    times = []
    for _ in range(timing.repeats):
        start = time.perf_counter()
        for _ in range(timing.calls):
            state = call(state)
        jax.block_until_ready(state)
        times.append((time.perf_counter() - start) / timing.calls)
    return times, state


def _spread(times: list[float]) -> float:
    return max(times) - min(times)
