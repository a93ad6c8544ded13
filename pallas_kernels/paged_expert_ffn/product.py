"""One module's product with all its experts, by :mod:`pallas_kernels.bitplane_matmul`."""

from jaxtyping import Array, Float, Float32, Int32, UInt32

from pallas_kernels.bitplane_matmul import tuning
from pallas_kernels.bitplane_matmul.product import large_product, small_product
from pallas_kernels.bitplane_matmul.row_reader import Geometry
from pallas_kernels.bitplane_matmul.warp_matmul import Units, Weights
from pallas_kernels.page_layout import MatrixLayout
from pallas_kernels.paged_expert_ffn.pages import Activation, ModulePages


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


def product(
    x: Float[Array, "R K"],
    index: Int32[Array, "U capacity"],
    units: Units,
    places: int,
    pool: UInt32[Array, "pages words"],
    module: ModulePages,
    layout: MatrixLayout,
    gate: Activation | None,
) -> Float32[Array, "splits A N"]:
    """Multiplies each place's activations with its expert's matrix.

    Args:
        x: Activations.
        index: Rows of x of each unit; the capacity is one of :func:`tuning.unit_capacity`.
        units: Work list.
        places: Rows of the output.
        pool: The page pool.
        module: Pages of the matrices.
        layout: Their layout.
        gate: If given, the first half of the outputs gates the second.

    Returns:
        Partial sums; places of no expert hold anything.
    """
    weights = Weights(pool, pool, module.bits, module.planes, module.tables)
    multiply = small_product if tuning.is_small(index.shape[1]) else large_product
    return multiply(x, index, units, weights, places, geometry(layout), layout.widths, gate)
