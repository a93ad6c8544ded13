"""What quantising a matrix costs at each width."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32

from pw_jax.quantizer.format import HostOrDevice, QuantizedMatrix, dequantize


def damage(
    weight: Float[HostOrDevice, "N K"],
    matrix: QuantizedMatrix,
    row_weight: Float[HostOrDevice, "N"],
    column_weight: Float[HostOrDevice, "K"],
) -> Float32[np.ndarray, "widths"]:
    """The sensitivity ``G(b)`` of PagedWeight with a rank-one Fisher matrix, for each width.

    ``G(b) = sum_rj F_rj (w_rj - w_rj(b))**2`` where ``F_rj = row_r column_j / sum(column)``: the
    row and column weights are the marginals of F, which have the same sum.

    Returns:
        One number a width, from the narrowest to the widest; 0 if all column weights are 0.
    """
    total = float(np.sum(np.asarray(column_weight, np.float64)))
    share = np.asarray(column_weight, np.float64) / (total if total > 0 else 1.0)
    # Fisher values may be far below what float32 resolves; their scale goes back on at the end.
    peak = float(np.max(np.asarray(row_weight, np.float64), initial=0.0))
    rows = np.asarray(row_weight, np.float64) / (peak if peak > 0 else 1.0)
    sums = _weighted_error(
        jnp.asarray(weight, jnp.float32),
        matrix,
        jnp.asarray(rows, jnp.float32),
        jnp.asarray(share, jnp.float32),
    )
    return (np.asarray(sums, np.float64) * (peak if total > 0 else 0.0)).astype(np.float32)


def column_errors(
    matrix: QuantizedMatrix, row_weight: Float[HostOrDevice, "N"]
) -> Float32[np.ndarray, "widths K"]:
    """``c_j = sum_r r_r (w_rj - w_rj(b))^2`` against parent bits, r scaled to a mean of 1."""
    rows = np.asarray(row_weight, np.float64)
    mean = rows.mean()
    rows = rows / mean if mean > 0 else np.ones_like(rows)
    return np.asarray(_column_error(matrix, jnp.asarray(rows, jnp.float32)))


@jax.jit
def _column_error(
    matrix: QuantizedMatrix, row_weight: Float32[Array, "N"]
) -> Float32[Array, "widths K"]:
    parent = dequantize(matrix, matrix.parent_bits)
    return jnp.stack(
        [row_weight @ jnp.square(parent - dequantize(matrix, bits)) for bits in matrix.widths]
    )


@jax.jit
def _weighted_error(
    weight: Float32[Array, "N K"],
    matrix: QuantizedMatrix,
    row_weight: Float32[Array, "N"],
    column_weight: Float32[Array, "K"],
) -> Float32[Array, "widths"]:
    return jnp.stack(
        [
            row_weight @ (jnp.square(weight - dequantize(matrix, bits)) @ column_weight)
            for bits in matrix.widths
        ]
    )
