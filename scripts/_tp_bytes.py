"""Bytes that layers send, keep and cache, compiled from shapes alone: nothing runs."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _layer_shapes import block_shapes, ranks_by_ratio
from _tp_model import DTYPE, Case, empty_pages, pages_of, shapes_of

from pw_jax.paging.memory import PagedMemory
from sharding import formulas
from sharding.collectives import read_collectives, total_wire_bytes
from sharding.mesh import tensor_mesh
from sharding.placement import Placement


@dataclass(frozen=True)
class BytesRecord:
    """Of a decode step without a head; the norm behind the last layer counts.

    Attributes:
        model: Whose layers.
        layout: How they lie.
        devices: Of the mesh.
        ratio: As in `TpRecord`.
        kv: As in `TpRecord`.
        layers: That were compiled.
        wire_bytes: Sent by a device, a token and layer, read from the compiled program.
        formula_bytes: The same by `sharding.formulas`.
        cache_bytes: Of a token in a layer, on each device.
        weight_bytes: Of a layer, on each device.
    """

    model: str
    layout: str
    devices: int
    ratio: float
    kv: str
    layers: int
    wire_bytes: float
    formula_bytes: float
    cache_bytes: float
    weight_bytes: float


def bytes_of(case: Case) -> BytesRecord:
    """Compiles and counts.

    Raises:
        RuntimeError: The program sends something else than the formulas say.
    """
    mesh, layers, batch = tensor_mesh(case.devices), case.layers, case.workload.batch
    placement = Placement.over(mesh)
    model = shapes_of(case, mesh)
    pages = pages_of(case, model)

    def step(model: Any, pool: Any, tables: Any, positions: Any) -> Any:
        memory = PagedMemory(pool, tables, positions, None, pages)
        out = model(jnp.zeros_like(positions), positions, memory)
        return out.memory.pool, out.hidden

    pool, tables = jax.eval_shape(lambda: empty_pages(pages, case.workload, placement))
    pool = jax.ShapeDtypeStruct(pool.shape, pool.dtype, sharding=placement.pool)
    positions = jax.ShapeDtypeStruct((batch, 1), jnp.int32)
    lowered = jax.jit(step, donate_argnums=1).lower(model, pool, tables, positions)
    sent = total_wire_bytes(read_collectives(lowered)) / batch / layers
    formula = _formula(case)
    if not np.isclose(sent, formula, rtol=1e-9, atol=0):
        raise RuntimeError(f"{case.labels} sends {sent} bytes a token and layer, not {formula}")
    leaves = jax.tree.leaves(model.layers)
    own = sum(int(np.prod(leaf.sharding.shard_shape(leaf.shape))) for leaf in leaves)
    return BytesRecord(
        **case.labels,
        layers=layers,
        wire_bytes=round(sent, 2),
        formula_bytes=round(formula, 2),
        cache_bytes=pages.kv_token_bytes / layers,
        weight_bytes=jnp.dtype(DTYPE).itemsize * own / layers,
    )


def _formula(case: Case) -> float:
    """Bytes a token and layer: transfers in the dtype of the model, sums of norms in float32."""
    shapes = block_shapes(case.config, ranks_by_ratio(case.ratio))
    centred = case.config.model_type == "opt"
    sent = [one for shape in shapes.values() for one in _transfers(case, shape)]
    norms = formulas.norm_transfers(case.layout, centred=centred)
    norm = sum(one.wire(case.devices) for one in norms) * jnp.dtype(jnp.float32).itemsize
    size = jnp.dtype(DTYPE).itemsize
    each = sum(size * one.wire(case.devices) for one in sent) + len(shapes) * norm
    return each + norm / case.layers


def _transfers(case: Case, shape: formulas.BlockShape) -> tuple[formulas.Transfer, ...]:
    return formulas.transfers(case.layout, shape, case.devices)
