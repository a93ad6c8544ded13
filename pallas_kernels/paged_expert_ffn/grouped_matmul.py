"""Many tokens an expert: float16 tiles of activations and weights through the tensor cores.

Units are blocks of 128 rows of one expert, padded. A block of the grid multiplies one unit with
two tiles of rows of its expert's matrix: two neighbours, or a tile of gates and the tile of what
they gate, so that gating costs no memory traffic.
"""

# pyright: reportAbstractUsage=false, reportPrivateImportUsage=false
# (plgpu's transforms and accumulators are as its own kernels use them)

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float16, Float32, Int32

from pallas_kernels.implementation import on_gpu
from pallas_kernels.paged_expert_ffn.pages import Activation
from pallas_kernels.paged_expert_ffn.reference import activate

UNIT_ROWS = 128
_GROUP_ROWS = UNIT_ROWS // 2


@dataclass(frozen=True)
class GroupedMatmul:
    """One compiled form.

    Attributes:
        gate: If given, the first half of the matrix's rows gates the second.
        tile: Rows of a matrix in one tile.
        tile_k: Columns in one step.
        steps: Steps in flight.
        blocks: Blocks of the grid.
        grid_width: Units that share a run of tiles, for the second-level cache.
    """

    gate: Activation | None
    tile: int
    tile_k: int
    steps: int
    blocks: int
    grid_width: int


def tile_rows(rows: int, gate: Activation | None) -> int:
    """The largest tile that divides a matrix's rows in pairs."""
    half = rows // 2
    return next((tile for tile in (128, 64, 32) if half % tile == 0), 0)


def grouped_matmul(
    form: GroupedMatmul,
    x: Float16[Array, "U 128 K"],
    weights: Float16[Array, "E N K"],
    unit_expert: Int32[Array, " U"],
    unit_count: Int32[Array, "1"],
    x_scale: Float32[Array, "U 128"],
    row_scale: Float32[Array, "E N"],
) -> Float32[Array, "U 128 columns"]:
    """Multiplies each unit with its expert's matrix and applies both scales.

    Args:
        form: The form.
        x: Activations of each unit.
        weights: Entries of the experts.
        unit_expert: Expert of each unit.
        unit_count: Units in use; the rest of the output is not written.
        x_scale: Scale of each row of x.
        row_scale: Scale of each row of the matrices.
    """
    if not on_gpu():
        return _interpret(form, x, weights, unit_expert, x_scale, row_scale)
    units, _, columns = x.shape
    rows = weights.shape[1]
    out_columns = rows // 2 if form.gate else rows
    kernel = plgpu.kernel(
        functools.partial(_kernel, form),
        out_type=jax.ShapeDtypeStruct((units * UNIT_ROWS, out_columns), jnp.float32),
        grid=(form.blocks,),
        grid_names=("grid",),
        num_threads=3,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )
    out = kernel(
        x.reshape(units * UNIT_ROWS, columns),
        weights,
        unit_expert,
        unit_count,
        x_scale.reshape(-1),
        row_scale,
    )
    return out.reshape(units, UNIT_ROWS, out_columns)


def _kernel(form: GroupedMatmul, x_ref, w_ref, expert_ref, count_ref, xs_ref, ws_ref, out_ref):
    columns = x_ref.shape[1]
    rows = w_ref.shape[1]
    units = x_ref.shape[0] // UNIT_ROWS
    tile, tile_k = form.tile, form.tile_k
    pairs = rows // (2 * tile)
    swizzle = plgpu.find_swizzle(tile_k * 16)
    transforms = (plgpu.TilingTransform((8, swizzle // 2)), plgpu.SwizzleTransform(swizzle))
    out_tiles = 1 if form.gate else 2

    def pipeline(body, context):
        def spec(size):
            return plgpu.BlockSpec(
                (size, tile_k),
                lambda k: (0, k),
                transforms=transforms,
                memory_space=plgpu.SMEM,
            )

        return plgpu.emit_pipeline_warp_specialized(
            body,
            grid=(columns // tile_k,),
            memory_registers=40,
            in_specs=[spec(UNIT_ROWS), spec(tile), spec(tile)],
            wg_axis="wg",
            num_compute_wgs=2,
            max_concurrent_steps=form.steps,
            compute_context=context,
        )

    def nothing(*_, **__):
        return None

    out_swizzle = plgpu.find_swizzle(32 * 32)
    out_transforms = (
        plgpu.TilingTransform((8, out_swizzle // 4)),
        plgpu.SwizzleTransform(out_swizzle),
    )

    @functools.partial(
        pl.run_scoped,
        allocations=pipeline(nothing, nothing).get_allocations(x_ref, w_ref.at[0], w_ref.at[0]),
        out_smem=plgpu.SMEM((2, _GROUP_ROWS, 32), jnp.float32, transforms=out_transforms),
        collective_axes="wg",
    )
    def _scope(allocations, out_smem):
        group = lax.axis_index("wg")
        count = count_ref[0]

        @plgpu.nd_loop((units * pairs,), collective_axes="grid")
        def _loop(info):
            unit, pair = plgpu.planar_snake(info.index[0], (units, pairs), 1, form.grid_width)

            @pl.when(unit < count)
            def _unit():
                expert = expert_ref[unit]
                first = pair * tile if form.gate else 2 * pair * tile
                second = first + (rows // 2 if form.gate else tile)
                own = pl.ds(group * _GROUP_ROWS, _GROUP_ROWS)

                def context(run):
                    @functools.partial(
                        pl.run_scoped,
                        first_ref=plgpu.ACC((_GROUP_ROWS, tile), jnp.float32),
                        second_ref=plgpu.ACC((_GROUP_ROWS, tile), jnp.float32),
                    )
                    def _sums(first_ref, second_ref):
                        run((first_ref, second_ref))
                        row = unit * UNIT_ROWS + group * _GROUP_ROWS
                        scale = plgpu.load(
                            xs_ref.at[pl.ds(row, _GROUP_ROWS)],
                            layout=plgpu.Layout.WGMMA.reduce(1),
                            optimized=False,
                        )
                        results = []
                        for total, start in ((first_ref[...], first), (second_ref[...], second)):
                            row_scale = plgpu.load(
                                ws_ref.at[expert, pl.ds(start, tile)],
                                layout=plgpu.Layout.WGMMA.reduce(0),
                                optimized=False,
                            )
                            shape = (_GROUP_ROWS, tile)
                            scaled = total * lax.broadcast_in_dim(scale, shape, (0,))
                            results.append(scaled * lax.broadcast_in_dim(row_scale, shape, (1,)))
                        if form.gate:
                            results = [_gated(results[0], results[1], form.gate)]
                        starts = [pair * tile * out_tiles + index * tile for index in range(2)]
                        for value, start in zip(results, starts, strict=False):
                            for part in range(tile // 32):
                                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                                out_smem[group] = value[:, part * 32 : (part + 1) * 32]
                                plgpu.commit_smem()
                                plgpu.copy_smem_to_gmem(
                                    out_smem.at[group],
                                    out_ref.at[
                                        pl.ds(row, _GROUP_ROWS), pl.ds(start + part * 32, 32)
                                    ],
                                )

                def multiply(_, x_smem, first_smem, second_smem, sums):
                    left = x_smem.at[own]
                    plgpu.wgmma(sums[0], left, first_smem.transpose((1, 0)))
                    plgpu.wgmma(sums[1], left, second_smem.transpose((1, 0)))
                    plgpu.wgmma_wait(0)
                    return sums

                pipeline(multiply, context)(
                    x_ref.at[pl.ds(unit * UNIT_ROWS, UNIT_ROWS), :],
                    w_ref.at[expert, pl.ds(first, tile), :],
                    w_ref.at[expert, pl.ds(second, tile), :],
                    allocations=allocations,
                )

    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _gated(gate: jax.Array, up: jax.Array, activation: Activation) -> jax.Array:
    if activation == "silu":
        return gate * up / (1 + jnp.exp(-gate))
    return activate(gate, activation) * up


def _interpret(
    form: GroupedMatmul,
    x: Array,
    weights: Array,
    unit_expert: Array,
    x_scale: Array,
    row_scale: Array,
) -> Array:
    """The same product in jnp, for machines without a GPU."""
    total = jnp.einsum("urk,unk->urn", x, weights[unit_expert], preferred_element_type=jnp.float32)
    total *= x_scale[:, :, None] * row_scale[unit_expert][:, None, :]
    if form.gate is None:
        return total
    gate, up = jnp.split(total, 2, axis=-1)
    return _gated(gate, up, form.gate)
