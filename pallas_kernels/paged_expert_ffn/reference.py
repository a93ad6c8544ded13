"""The jnp form: one expert after another is dequantised and multiplied with all tokens.

A branch a width (``lax.switch``) reads only the planes that the committed width has, and an expert
without tokens costs nothing. All tokens are multiplied, weighted by zero where the expert was not
chosen: right everywhere and quick enough on a CPU, where dequantising dominates.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32, UInt32

from pallas_kernels.bitplanes import look_up, unpack_codes
from pallas_kernels.page_layout import MatrixLayout
from pallas_kernels.paged_expert_ffn.pages import Activation, ModulePages


def dequantize_pages(
    pool: UInt32[Array, "pages words"],
    planes: Int32[Array, "P plane_pages"],
    tables: Int32[Array, " table_pages"],
    bits: int,
    layout: MatrixLayout,
) -> Float32[Array, "N K"]:
    """Reads one matrix out of the pool at a width known when compiling."""
    used = layout.rows_per_page * layout.words_per_row
    words = pool[planes[:bits].reshape(-1), :used].reshape(bits, -1, layout.words_per_row)
    codes = unpack_codes(words[:, : layout.rows])
    table_words = pool[tables[: layout.table_pages(bits)]].reshape(-1)
    groups = layout.rows // layout.rows_per_table
    entry = jnp.int8 if layout.entry_bytes(bits) == 1 else jnp.int16
    entry_words = layout.table_words(bits) - layout.rows
    entries = lax.bitcast_convert_type(table_words[:entry_words], entry).reshape(-1)
    table = entries[: groups << bits].reshape(groups, 1 << bits)
    scales = table_words[entry_words : entry_words + layout.rows]
    return look_up(codes, table, lax.bitcast_convert_type(scales, jnp.float32))


def dequantize_expert(
    pool: UInt32[Array, "pages words"],
    module: ModulePages,
    expert: jax.Array,
    layout: MatrixLayout,
) -> Float32[Array, "N K"]:
    """Reads one expert's matrix at its committed width, which is data."""
    branches = [partial(dequantize_pages, bits=b, layout=layout) for b in layout.widths]
    choice = module.bits[expert] - layout.seed_bits
    return lax.switch(choice, branches, pool, module.planes[expert], module.tables[expert])


def activate(gate: jax.Array, activation: Activation) -> jax.Array:
    """The gate's activation, in float32."""
    return jax.nn.silu(gate) if activation == "silu" else jax.nn.gelu(gate, approximate=True)


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
    chosen = expert_ids[:, :, None] == jnp.arange(experts, dtype=jnp.int32)[None, None, :]
    combine = jnp.sum(jnp.where(chosen, expert_weights[:, :, None], 0), axis=1)
    tokens = chosen.any(axis=1).sum(axis=0)
    product = partial(jnp.einsum, "mk,nk->mn", preferred_element_type=jnp.float32)

    def add_expert(expert: jax.Array, total: jax.Array) -> jax.Array:
        weight = dequantize_expert(pool, gate_up, expert, gate_up_layout)
        gate, up = jnp.split(product(x, weight.astype(x.dtype)), 2, axis=-1)
        hidden = (activate(gate, activation) * up).astype(x.dtype)
        weight = dequantize_expert(pool, down, expert, down_layout)
        return total + product(hidden, weight.astype(x.dtype)) * combine[:, expert, None]

    def body(expert: jax.Array, total: jax.Array) -> jax.Array:
        return lax.cond(tokens[expert] > 0, add_expert, lambda _, same: same, expert, total)

    return lax.fori_loop(0, experts, body, jnp.zeros(x.shape, jnp.float32))
