"""What one of several devices computes in a layer, on one device."""

import statistics
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _tp_benchmark import Timing, wall_times
from _tp_model import DTYPE, Case, drawing, empty_pages, pages_of, shapes_of
from jax import lax
from jax.sharding import AbstractMesh, AxisType

from pw_jax.paging.memory import PagedMemory
from sharding.mesh import AXIS
from sharding.placement import Placement


@dataclass(frozen=True)
class AloneRecord:
    """What one of several devices computes, on one device: products and attention, no collectives.

    Attributes:
        model: Whose layers.
        layout: How they lay.
        devices: That the layer is divided over.
        ratio: As in `TpRecord`.
        kv: ``full``.
        workload: As in `TpRecord`.
        prefill_us: A layer.
        decode_us: A layer.
        weight_bytes: Of a layer on a device.
    """

    model: str
    layout: str
    devices: int
    ratio: float
    kv: str
    workload: str
    prefill_us: float
    decode_us: float
    weight_bytes: int


def measure_alone(case: Case, timing: Timing) -> AloneRecord:
    """Times on one device what each of several would compute in a layer, with full KV."""
    workload = case.workload
    mesh = AbstractMesh((case.devices,), (AXIS,), axis_types=(AxisType.Auto,))
    shapes = shapes_of(case, mesh)
    (layer,) = shapes.layers
    own = [leaf.sharding.shard_shape(leaf.shape) for leaf in jax.tree.leaves(layer)]
    weights = [
        drawing(shape, DTYPE, None)(np.uint32(seed))
        for seed, shape in enumerate(own)
        if len(shape) == 2
    ]
    (kv,), plan = shapes.kv_shapes, shapes.blocks[0].attention.plan
    pages = pages_of(case, shapes)
    pool, tables = empty_pages(pages, workload, Placement.on_one_device())
    times = {}
    for kind, length in (("prefill", workload.prompt), ("decode", 1)):
        start = 0 if kind == "prefill" else workload.middle
        positions = np.broadcast_to(
            np.arange(start, start + length, dtype=np.int32), (workload.batch, length)
        )
        heads = [
            drawing((workload.batch, length, count, kv.head_dim), DTYPE, None)(np.uint32(1))
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
        series, pool = wall_times(lambda pool, c=compiled, a=arguments: c(pool, *a), pool, timing)
        times[kind] = 1e6 * statistics.median(series)
    return AloneRecord(
        **case.labels,
        workload=workload.name,
        prefill_us=round(times["prefill"], 2),
        decode_us=round(times["decode"], 2),
        weight_bytes=sum(int(np.prod(shape)) for shape in own) * jnp.dtype(DTYPE).itemsize,
    )
