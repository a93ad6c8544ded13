"""Quantise one matrix to nested codes of every width, weighted by sensitivity."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int, UInt8

from pallas_kernels.bitplanes import WORD_BITS, pack_codes
from pw_jax.errors import UserError
from pw_jax.quantizer import format as any_precision
from pw_jax.quantizer import kmeans
from pw_jax.quantizer.format import HostOrDevice, QuantizedMatrix

CPU_CHUNK_WEIGHTS = 1 << 18  # working memory near the caches: twice as fast as 1 << 22
ACCELERATOR_CHUNK_WEIGHTS = 1 << 24
SMALLEST_GROUP_WEIGHTS = 1 << 10  # finding the seed takes as much memory in a smaller group
WEIGHT_FLOOR = 1e-6  # of the mean: weights of zero would leave a cluster without a centroid
SMALLEST_SCALE = 1e-30  # rows below this are zero for every purpose


def quantize_matrix(
    weight: Float[HostOrDevice, "..."],
    *,
    name: str,
    column_weight: Float[HostOrDevice, "..."] | None = None,
    row_weight: Float[HostOrDevice, "..."] | None = None,
    seed_bits: int = 3,
    parent_bits: int = 8,
    rows_per_table: int | None = None,
    chunk_weights: int | None = None,
) -> QuantizedMatrix:
    """Quantise a matrix so as to keep ``sum_nk row_n column_k (weight - quantised)**2`` small.

    Deterministic. Rows are divided by their root mean square, and each ``rows_per_table`` rows are
    clustered together: near the optimum at ``seed_bits``, then every cluster is split exactly once
    a bit. Table entries are rounded to integers, and then each row's scale is fitted again at each
    width by weighted least squares (0.2 to 0.5% less error where rows share a table).

    Args:
        weight: The matrix [N, K]; K must be a multiple of 32.
        name: The tensor's name, for error messages.
        column_weight: Sensitivity of each column [K], not negative. None, or all zero: uniform.
        row_weight: Sensitivity of each row [N]; matters only between rows that share a table.
        seed_bits: The narrowest width, 2 or 3.
        parent_bits: The widest width, up to 8.
        rows_per_table: A power of two that divides N; None chooses one (see the format).
        chunk_weights: About how many weights are worked on at once; each takes some 170 bytes of
            working memory. None: 2**18 on a CPU, 2**24 on an accelerator.

    Returns:
        The quantised matrix, as numpy arrays on the host.

    Raises:
        UserError: The matrix or a setting cannot be used; the message names the tensor.
    """
    matrix, columns, rows = _checked_inputs(weight, column_weight, row_weight, name)
    shared = _checked_sharing(matrix.shape, seed_bits, parent_bits, rows_per_table, name)
    if chunk_weights is None:
        on_cpu = jax.default_backend() == "cpu"
        chunk_weights = CPU_CHUNK_WEIGHTS if on_cpu else ACCELERATOR_CHUNK_WEIGHTS
    count = matrix.shape[0] // shared
    group_weights = max(shared * matrix.shape[1], SMALLEST_GROUP_WEIGHTS)
    chunk = min(count, max(1, chunk_weights // group_weights))
    grouped = matrix.reshape(count, shared, -1)
    rows = rows.reshape(count, shared)
    pieces = []
    with jax.enable_x64(True):
        for first in range(0, count, chunk):
            part = slice(first, first + chunk)
            missing = first + chunk - min(first + chunk, count)  # keep one shape: compile once
            pieces.append(
                _quantize_groups(
                    jnp.pad(grouped[part], ((0, missing), (0, 0), (0, 0))),
                    columns,
                    jnp.pad(rows[part], ((0, missing), (0, 0))),
                    seed_bits,
                    parent_bits,
                )
            )
        host = [jax.tree.map(np.asarray, piece) for piece in pieces]

    def join(parts: list[np.ndarray], length: int, axis: int = 0) -> np.ndarray:
        return np.take(np.concatenate(parts, axis), np.arange(length), axis)

    widths = range(seed_bits, parent_bits + 1)
    return QuantizedMatrix(
        planes=join([planes for planes, _, _ in host], count * shared, axis=1),
        tables={b: join([tables[b] for _, tables, _ in host], count) for b in widths},
        scales={b: join([scales[b] for _, _, scales in host], count * shared) for b in widths},
    )


def _checked_inputs(
    weight: HostOrDevice,
    column_weight: HostOrDevice | None,
    row_weight: HostOrDevice | None,
    name: str,
) -> tuple[Array, Array, Array]:
    """The matrix and its column and row weights (mean 1, positive) as float32, or a UserError."""
    if weight.ndim != 2 or 0 in weight.shape or weight.shape[1] % WORD_BITS:
        raise UserError(
            f"tensor {name} of shape {list(weight.shape)} cannot be quantised: it must have two "
            f"dimensions, and columns in a multiple of {WORD_BITS}"
        )
    with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinite, found below
        matrix = jnp.asarray(weight, jnp.float32)
    bad = int(jnp.sum(~jnp.isfinite(matrix)))
    if bad:
        raise UserError(
            f"tensor {name} has {bad} values that are NaN, infinite or beyond float32: "
            "mend the checkpoint before quantising it"
        )
    normalised = []
    for axis, side, sensitivity in ((1, "column", column_weight), (0, "row", row_weight)):
        size = weight.shape[axis]
        values = np.ones(size) if sensitivity is None else np.asarray(sensitivity, np.float64)
        if values.shape != (size,) or not np.isfinite(values).all() or values.min() < 0:
            raise UserError(
                f"the {side} weights of tensor {name} must be {size} finite numbers, none negative"
            )
        mean = values.mean()
        values = values / mean if mean > 0 else np.ones(size)
        normalised.append(jnp.asarray(values + WEIGHT_FLOOR, jnp.float32))
    return matrix, *normalised


def _checked_sharing(
    shape: tuple[int, ...], seed_bits: int, parent_bits: int, shared: int | None, name: str
) -> int:
    """How many rows share a table, given or chosen; a UserError if a setting is out of range."""
    if seed_bits not in (2, 3) or not seed_bits <= parent_bits <= any_precision.MAX_BITS:
        raise UserError(
            f"seed bits must be 2 or 3, and parent bits from there to {any_precision.MAX_BITS}; "
            f"got {seed_bits} and {parent_bits}"
        )
    rows, columns = shape
    if shared is None:
        return any_precision.rows_per_table(rows, columns, parent_bits)
    if shared < 1 or shared & (shared - 1) or rows % shared:
        raise UserError(
            f"rows per table must be a power of two that divides the {rows} rows of tensor {name}; "
            f"got {shared}"
        )
    return shared


@partial(jax.jit, static_argnames=("seed_bits", "parent_bits"))
def _quantize_groups(
    weight: Float32[Array, "T G K"],
    column_weight: Float32[Array, "K"],
    row_weight: Float32[Array, "T G"],
    seed_bits: int,
    parent_bits: int,
) -> tuple[Array, dict[int, Array], dict[int, Array]]:
    """Planes, tables and scales of T groups of G rows. Call with 64-bit types enabled."""
    count, shared, columns = weight.shape
    exact = weight.astype(jnp.float64)
    root_mean_square = jnp.sqrt(jnp.mean(jnp.square(exact), axis=2))
    row_scale = jnp.where(root_mean_square > SMALLEST_SCALE, root_mean_square, 0.0)
    divisor = jnp.where(row_scale > 0, row_scale, 1.0)[:, :, None]
    normalised = jnp.where(row_scale[:, :, None] > 0, exact / divisor, 0.0).astype(jnp.float32)

    # An error of one in a normalised row is an error of row_scale in the matrix.
    between_rows = row_weight.astype(jnp.float64) * jnp.square(row_scale)
    largest = jnp.max(between_rows, axis=1, keepdims=True)
    between_rows /= jnp.where(largest > 0, largest, 1.0)
    between_rows += WEIGHT_FLOOR
    importance = between_rows[:, :, None] * column_weight.astype(jnp.float64)[None, None, :]
    groups = kmeans.sort_groups(
        normalised.reshape(count, -1), importance.astype(jnp.float32).reshape(count, -1)
    )

    borders = kmeans.nested_borders(groups, seed_bits, parent_bits)
    codes = _codes(normalised, groups, borders)
    tables, scales = {}, {}
    for bits in range(seed_bits, parent_bits + 1):
        dtype = any_precision.table_dtype(bits)
        means, _ = kmeans.centroids(groups, borders[:, :: 2 ** (parent_bits - bits)])
        means += groups.offset[:, None]
        peak = jnp.max(jnp.abs(means), axis=1, keepdims=True)
        step = jnp.where(peak > 0, peak, 1.0) / np.iinfo(dtype).max
        tables[bits] = jnp.round(means / step).astype(dtype)
        scales[bits] = _fit_scales(
            exact, codes >> np.uint8(parent_bits - bits), tables[bits], step * row_scale,
            column_weight,
        ).reshape(-1)  # fmt: skip
    planes = pack_codes(codes.reshape(count * shared, columns), parent_bits)
    return planes, tables, scales


def _codes(
    normalised: Float32[Array, "T G K"],
    groups: kmeans.SortedGroups,
    borders: Int[Array, "T borders"],
) -> UInt8[Array, "T G K"]:
    """The cluster of every value in its place, by bisection among the clusters' least values."""
    borders = borders[:, 1:-1]
    size = groups.values.shape[1]
    least = jnp.take_along_axis(groups.values, jnp.minimum(borders, size - 1), axis=1)
    least = jnp.where(borders < size, least, jnp.inf)
    centred = normalised.reshape(groups.values.shape).astype(jnp.float64) - groups.offset[:, None]
    find = partial(jnp.searchsorted, side="right", method="scan_unrolled")
    return jax.vmap(find)(least, centred).astype(jnp.uint8).reshape(normalised.shape)


def _fit_scales(
    weight: Float[Array, "T G K"],
    codes: UInt8[Array, "T G K"],
    table: Int[Array, "T C"],
    scale: Float[Array, "T G"],
    column_weight: Float32[Array, "K"],
) -> Float32[Array, "T G"]:
    """The scale of each row that fits its codes best; the given one where there is no fit."""
    index = codes.reshape(codes.shape[0], -1).astype(jnp.int32)
    entries = jnp.take_along_axis(table, index, axis=1).reshape(codes.shape).astype(jnp.float64)
    weighted = entries * column_weight.astype(jnp.float64)[None, None, :]
    product = jnp.sum(weighted * weight, axis=2)
    square = jnp.sum(weighted * entries, axis=2)
    fitted = product / jnp.where(square > 0, square, 1.0)
    return jnp.where((fitted > 0) & (scale > 0), fitted, scale).astype(jnp.float32)
