"""One module's product for many tokens an expert: dequantise each used expert once, then multiply.

The scratch copy of the used module is float16, E * N * K * 2 bytes, and lives for one product.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float16, Float32, UInt32

from pallas_kernels.bitplane_matmul import activations, tuning
from pallas_kernels.bitplane_matmul.warp_dequantize import WarpDequantize, warp_dequantize
from pallas_kernels.bitplane_matmul.warp_matmul import Units, Weights
from pallas_kernels.page_layout import MatrixLayout
from pallas_kernels.paged_expert_ffn.grouped_matmul import (
    UNIT_ROWS,
    GroupedMatmul,
    grouped_matmul,
    tile_rows,
)
from pallas_kernels.paged_expert_ffn.pages import Activation, ModulePages
from pallas_kernels.paged_expert_ffn.product import geometry

LARGEST = 1024.0
"""Rows are scaled to this, so that float16 keeps eleven bits down to 6e-8 of a row's largest."""


def row_scales(
    pool: UInt32[Array, "pages words"], module: ModulePages, layout: MatrixLayout
) -> Float32[Array, "E N"]:
    """Scales of all rows at each expert's width."""
    starts = [layout.table_words(bits) - layout.rows for bits in layout.widths]
    start = jnp.asarray(starts, jnp.int32)[module.bits - layout.seed_bits]
    word = start[:, None] + jnp.arange(layout.rows, dtype=jnp.int32)[None, :]
    page = jnp.take_along_axis(module.tables, word // layout.page_words, axis=1)
    return lax.bitcast_convert_type(pool[page, word % layout.page_words], jnp.float32)


def dequantize_experts(
    pool: UInt32[Array, "pages words"],
    module: ModulePages,
    layout: MatrixLayout,
    used: Units,
) -> Float16[Array, "E N padded"]:
    """Unscaled entries of the experts that ``used`` names; other experts hold anything."""
    shape = geometry(layout)
    words = tuning.words_at_once(shape.words_per_row)
    weights = Weights(pool, pool, module.bits, module.planes, module.tables)
    out = None
    for family in tuning.families(layout.widths):
        launch = tuning.launch(family[0], "dequantize")
        kernel = WarpDequantize(shape, family, words, launch.warps, launch.blocks)
        if out is None:
            experts = module.bits.shape[0]
            out = lax.empty((experts, layout.rows, kernel.columns), jnp.float16)
        out = warp_dequantize(kernel, weights, used, out)
    assert out is not None
    return out


def large_product(
    x: Float[Array, "U 128 K"],
    units: Units,
    used: Units,
    pool: UInt32[Array, "pages words"],
    module: ModulePages,
    layout: MatrixLayout,
    gate: Activation | None,
) -> Float32[Array, "U 128 columns"]:
    """Multiplies units of 128 rows with their experts' matrices.

    Args:
        x: Activations of each unit; rows past a unit's tokens may hold anything.
        units: Work list of units of 128 places.
        used: One unit for each expert with tokens.
        pool: The page pool.
        module: Pages of the matrices.
        layout: Their layout.
        gate: If given, the first half of the outputs gates the second.
    """
    words = tuning.words_at_once(layout.words_per_row)
    rows = x.astype(jnp.float32).reshape(-1, layout.columns)
    largest = jnp.max(jnp.abs(rows), axis=-1)
    factor = jnp.where(largest > 0, LARGEST / jnp.where(largest > 0, largest, 1), 0)
    scaled = (rows * factor[:, None]).astype(jnp.float16)
    ordered = activations.permuted(scaled, words).reshape(*x.shape[:2], -1)
    form = GroupedMatmul(gate, tile_rows(layout.rows, gate), **tuning.grouped())
    return grouped_matmul(
        form,
        ordered,
        dequantize_experts(pool, module, layout, used),
        units.expert,
        units.count,
        (largest / LARGEST).reshape(-1, UNIT_ROWS),
        row_scales(pool, module, layout),
    )


def supports(layout: MatrixLayout, gate: Activation | None) -> bool:
    """Whether a shape divides into the tiles of the product with many tokens."""
    return tile_rows(layout.rows, gate) > 0
