"""The GPU form of the plain product: the paged kernels, with one page for each plane."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int, UInt32

from pallas_kernels.bitplane_matmul import tuning
from pallas_kernels.bitplane_matmul.product import large_product, small_product
from pallas_kernels.bitplane_matmul.row_reader import Geometry
from pallas_kernels.bitplane_matmul.warp_matmul import Units, Weights


def plain_weights(
    planes: UInt32[Array, "b N words"],
    table: Int[Array, "groups entries"],
    scale: Float32[Array, " N"],
) -> tuple[Weights, Geometry]:
    """Describes plain arrays as one expert whose planes are a page each."""
    bits, rows, words = planes.shape
    per_word = 4 // table.dtype.itemsize
    entries = lax.bitcast_convert_type(table.reshape(-1, per_word), jnp.uint32)
    tables = jnp.concatenate([entries, lax.bitcast_convert_type(scale, jnp.uint32)])
    weights = Weights(
        planes.reshape(bits, rows * words),
        tables[None, :],
        jnp.full((1,), bits, jnp.int32),
        jnp.arange(bits, dtype=jnp.int32)[None, :, None],
        jnp.zeros((1, 1), jnp.int32),
    )
    geometry = Geometry(
        rows=rows,
        columns=32 * words,
        rows_per_table=rows // table.shape[0],
        rows_per_page=rows,
        plane_page_words=rows * words,
        table_page_words=tables.shape[0],
        planes=bits,
        plane_pages=1,
        table_pages=1,
    )
    return weights, geometry


def bitplane_matmul(
    x: Float[Array, "M K"],
    planes: UInt32[Array, "b N words"],
    table: Int[Array, "groups entries"],
    scale: Float32[Array, " N"],
) -> Float32[Array, "M N"]:
    """See :func:`pallas_kernels.bitplane_matmul.bitplane_matmul`."""
    weights, shape = plain_weights(planes, table, scale)
    bits, tokens = planes.shape[0], x.shape[0]
    capacity = tuning.unit_capacity(tokens, [shape.words_per_row])
    count = -(-tokens // capacity)
    first = jnp.arange(count, dtype=jnp.int32) * capacity
    units = Units(
        jnp.zeros_like(first),
        first,
        jnp.minimum(tokens - first, capacity),
        jnp.full((1,), count, jnp.int32),
    )
    inside = jnp.arange(capacity, dtype=jnp.int32)
    index = jnp.minimum(first[:, None] + inside[None, :], tokens - 1)
    multiply = small_product if tuning.is_small(capacity) else large_product
    return multiply(x, index, units, weights, tokens, shape, (bits,), None).sum(axis=0)
