"""One module's product for few tokens an expert, by :mod:`pallas_kernels.bitplane_matmul`."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32, UInt32

from pallas_kernels.bitplane_matmul import activations, tuning
from pallas_kernels.bitplane_matmul.row_reader import Geometry
from pallas_kernels.bitplane_matmul.warp_matmul import Units, WarpMatmul, Weights, warp_matmul
from pallas_kernels.page_layout import MatrixLayout
from pallas_kernels.paged_expert_ffn.pages import Activation, ModulePages
from pallas_kernels.paged_expert_ffn.routing import unit_places


def geometry(layout: MatrixLayout) -> Geometry:
    """The paged form's geometry."""
    return Geometry(
        rows=layout.rows,
        columns=layout.columns,
        rows_per_table=layout.rows_per_table,
        rows_per_page=layout.rows_per_page,
        plane_page_words=layout.page_words,
        table_page_words=layout.page_words,
        planes=layout.parent_bits,
        plane_pages=layout.plane_pages,
        table_pages=layout.most_table_pages,
    )


def small_product(
    x: Float[Array, "R K"],
    row_of_place: Int32[Array, " A"],
    units: Units,
    token_blocks: int,
    pool: UInt32[Array, "pages words"],
    module: ModulePages,
    layout: MatrixLayout,
    gate: Activation | None,
) -> Float32[Array, "splits A N"]:
    """Multiplies each place's activations with its expert's matrix.

    Args:
        x: Activations.
        row_of_place: Row of x of each place.
        units: Work list of units of ``4 * token_blocks`` places.
        token_blocks: Blocks of four tokens a unit.
        pool: The page pool.
        module: Pages of the matrices.
        layout: Their layout.
        gate: If given, the first half of the outputs gates the second.

    Returns:
        Partial sums; places of no expert hold anything.
    """
    shape = geometry(layout)
    words = tuning.words_at_once(shape.words_per_row)
    capacity = activations.TOKENS_PER_BLOCK * token_blocks
    places = row_of_place.shape[0]
    index = row_of_place[unit_places(units, capacity, places)]
    integers, scale = activations.quantize(x)
    x_words = activations.gather_units(activations.fragments(integers, words), index)
    columns = layout.rows // (1 if gate is None else 2)
    first = tuning.launch(layout.seed_bits, token_blocks)
    splits = 1
    if gate is None:
        items = units.expert.shape[0] * -(-layout.rows // 16)
        splits = tuning.split_count(shape.words_per_row, items, first.warps * first.blocks)
    out = lax.empty((splits, places, columns), jnp.float32)
    weights = Weights(pool, pool, module.bits, module.planes, module.tables)
    for widths in tuning.families(layout.widths):
        launch = tuning.launch(widths[0], token_blocks)
        kernel = WarpMatmul(
            geometry=shape,
            experts=module.bits.shape[0],
            widths=widths,
            gate=gate,
            units=units.expert.shape[0],
            out_rows=places,
            token_blocks=token_blocks,
            words=words,
            depth=launch.depth,
            splits=splits,
            warps=launch.warps,
            blocks=launch.blocks,
        )
        out = warp_matmul(kernel, weights, units, x_words, scale[index], out)
    return out
