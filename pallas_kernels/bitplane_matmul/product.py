"""Products of units of tokens with any-precision matrices, in the form that suits their size."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.bitplane_matmul import prepare, tuning
from pallas_kernels.bitplane_matmul.activations import TOKENS_PER_BLOCK
from pallas_kernels.bitplane_matmul.row_reader import Geometry
from pallas_kernels.bitplane_matmul.warp_matmul import Gate, Units, WarpMatmul, Weights, warp_matmul
from pallas_kernels.bitplane_matmul.warpgroup_matmul import WarpgroupMatmul, warpgroup_matmul


def small_product(
    x: Float[Array, "R K"],
    index: Int32[Array, "U capacity"],
    units: Units,
    weights: Weights,
    out_rows: int,
    shape: Geometry,
    widths: tuple[int, ...],
    gate: Gate | None,
) -> Float32[Array, "splits out_rows columns"]:
    """For units of few tokens: activations of 16 bits, one warp for sixteen rows.

    Args:
        x: Activations.
        index: Rows of x of each unit.
        units: Which matrix each unit takes, and which rows of the output it makes.
        weights: The matrices.
        out_rows: Rows of the output.
        shape: Geometry of the matrices.
        widths: Widths that occur.
        gate: If given, the first half of the outputs gates the second.

    Returns:
        Parts of the sums; rows of no unit hold anything.
    """
    launch = tuning.small_launch()
    token_blocks = index.shape[1] // TOKENS_PER_BLOCK
    words = launch.words_at_once(shape.words_per_row)
    items = index.shape[0] * -(-shape.rows // 16)
    form = WarpMatmul(
        geometry=shape,
        experts=weights.bits.shape[0],
        widths=widths,
        gate=gate,
        units=index.shape[0],
        out_rows=out_rows,
        token_blocks=token_blocks,
        words=words,
        depths=launch.depths(widths, token_blocks),
        splits=1 if gate else launch.splits(shape.words_per_row, items),
        warps=launch.warps,
        blocks=launch.blocks,
    )
    out = lax.empty((form.splits, out_rows, form.columns_out), jnp.float32)
    return warp_matmul(form, weights, units, *prepare.fragments(x, index, words), out)


def large_product(
    x: Float[Array, "R K"],
    index: Int32[Array, "U capacity"],
    units: Units,
    weights: Weights,
    out_rows: int,
    shape: Geometry,
    widths: tuple[int, ...],
    gate: Gate | None,
) -> Float32[Array, "1 out_rows columns"]:
    """For units of many tokens: float16 and warp groups; see :func:`small_product`."""
    launch = tuning.large_launch()
    form = WarpgroupMatmul(
        geometry=shape,
        widths=widths,
        gate=gate,
        capacity=index.shape[1],
        out_rows=out_rows,
        stages=launch.stages,
        blocks=launch.blocks,
    )
    out = lax.empty((out_rows, form.columns_out), jnp.float32)
    return warpgroup_matmul(form, weights, units, *prepare.tiles(x, index), out)[None]
