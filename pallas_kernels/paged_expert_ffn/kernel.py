"""The GPU form: tokens sorted by expert, and kernels that read each expert's pages once."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32, UInt32

from pallas_kernels.bitplane_matmul import activations, tuning
from pallas_kernels.page_layout import MatrixLayout
from pallas_kernels.paged_expert_ffn.grouped_matmul import UNIT_ROWS
from pallas_kernels.paged_expert_ffn.large import large_product, supports
from pallas_kernels.paged_expert_ffn.pages import Activation, ModulePages
from pallas_kernels.paged_expert_ffn.product import small_product
from pallas_kernels.paged_expert_ffn.routing import (
    Routing,
    make_units,
    route,
    unit_places,
    unit_rows,
)


def combine(
    parts: Float32[Array, "splits rows D"],
    row: Int32[Array, "M k"],
    routing: Routing,
    weights: Float32[Array, "M k"],
) -> Float32[Array, "M D"]:
    """Sums partial products over K's parts and over each token's experts, in a fixed order."""
    picked = parts.sum(axis=0)[row]
    picked = jnp.where(routing.real[:, :, None], picked, 0)
    return jnp.sum(picked * weights[:, :, None], axis=1)


def paged_expert_ffn(
    x: Float[Array, "M D"],
    expert_ids: Int32[Array, "M k"],
    expert_weights: Float32[Array, "M k"],
    pool: UInt32[Array, "pages words"],
    gate_up: ModulePages,
    down: ModulePages,
    gate_up_layout: MatrixLayout,
    down_layout: MatrixLayout,
    activation: Activation,
) -> Float32[Array, "M D"]:
    """See :func:`pallas_kernels.paged_expert_ffn.paged_expert_ffn`."""
    routing = route(expert_ids, gate_up.bits.shape[0])
    tokens = expert_ids.size / gate_up.bits.shape[0]
    fits = supports(gate_up_layout, activation) and supports(down_layout, None)
    if tuning.is_large(tokens) and fits:
        units, used = make_units(routing, UNIT_ROWS), make_units(routing, expert_ids.size)
        gathered = x[routing.token[unit_places(units, UNIT_ROWS, expert_ids.size)]]
        hidden = large_product(gathered, units, used, pool, gate_up, gate_up_layout, activation)
        result = large_product(hidden, units, used, pool, down, down_layout, None)
        rows = unit_rows(routing, UNIT_ROWS)
        return combine(
            result.reshape(1, -1, x.shape[1]), rows[routing.place], routing, expert_weights
        )
    blocks = tuning.token_blocks(tokens)
    units = make_units(routing, activations.TOKENS_PER_BLOCK * blocks)
    hidden = small_product(
        x, routing.token, units, blocks, pool, gate_up, gate_up_layout, activation
    )[0]
    own = jnp.arange(expert_ids.size, dtype=jnp.int32)
    parts = small_product(hidden, own, units, blocks, pool, down, down_layout, None)
    return combine(parts, routing.place, routing, expert_weights)
