"""The GPU form: tokens sorted by expert, and kernels that read each expert's pages once."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32, UInt32

from pallas_kernels.bitplane_matmul import activations, tuning
from pallas_kernels.page_layout import MatrixLayout
from pallas_kernels.paged_expert_ffn.pages import Activation, ModulePages
from pallas_kernels.paged_expert_ffn.product import small_product
from pallas_kernels.paged_expert_ffn.routing import Routing, make_units, route


def combine(
    parts: Float32[Array, "splits A D"], routing: Routing, weights: Float32[Array, "M k"]
) -> Float32[Array, "M D"]:
    """Sums partial products over K's parts and over each token's experts, in a fixed order."""
    picked = parts.sum(axis=0)[routing.place]
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
    experts = gate_up.bits.shape[0]
    routing = route(expert_ids, experts)
    choices = expert_ids.size
    blocks = tuning.token_blocks(choices / experts)
    units = make_units(routing, activations.TOKENS_PER_BLOCK * blocks)
    hidden = small_product(
        x, routing.token, units, blocks, pool, gate_up, gate_up_layout, activation
    )[0]
    own = jnp.arange(choices, dtype=jnp.int32)
    parts = small_product(hidden, own, units, blocks, pool, down, down_layout, None)
    return combine(parts, routing, expert_weights)
