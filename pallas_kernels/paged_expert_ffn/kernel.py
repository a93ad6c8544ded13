"""The GPU form: tokens sorted by expert, and kernels that read each expert's pages once."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32, UInt32

from pallas_kernels.bitplane_matmul import tuning
from pallas_kernels.page_layout import MatrixLayout
from pallas_kernels.paged_expert_ffn.pages import Activation, ModulePages
from pallas_kernels.paged_expert_ffn.product import product
from pallas_kernels.paged_expert_ffn.routing import Routing, make_units, route, unit_places


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
    words = [layout.words_per_row for layout in (gate_up_layout, down_layout)]
    capacity = tuning.unit_capacity(expert_ids.size / gate_up.bits.shape[0], words)
    cost = 2 * gate_up.bits + down.bits  # gate_up has twice the rows
    units, places = make_units(routing, capacity, cost), expert_ids.size
    own = unit_places(units, capacity, places)
    hidden = product(
        x, routing.token[own], units, places, pool, gate_up, gate_up_layout, activation
    )[0]
    parts = product(hidden, own, units, places, pool, down, down_layout, None)
    return combine(parts, routing.place, routing, expert_weights)
