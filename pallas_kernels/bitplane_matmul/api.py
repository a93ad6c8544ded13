"""Public product with one any-precision matrix."""

from jaxtyping import Array, Float, Float32, Int, UInt32

from pallas_kernels.bitplane_matmul import kernel, reference
from pallas_kernels.implementation import Implementation, resolve


def bitplane_matmul(
    x: Float[Array, "M K"],
    planes: UInt32[Array, "b N words"],
    table: Int[Array, "groups entries"],
    scale: Float32[Array, " N"],
    *,
    implementation: Implementation = "auto",
) -> Float32[Array, "M N"]:
    """Computes ``x @ weight.T`` with ``weight[n, k] = scale[n] * table[n // G, code[n, k]]``.

    Args:
        x: Activations, bfloat16, float16 or float32.
        planes: The first b planes of the codes, most significant first, for b from 2 to 8.
        table: Entries for each group of G = N / groups rows: int8 up to 6 bits, int16 above.
        scale: Scale of each row.
        implementation: See :mod:`pallas_kernels.implementation`.

    Raises:
        ValueError: The table does not fit the planes.
    """
    bits, rows, words = planes.shape
    wanted = "int8" if bits <= 6 else "int16"
    if table.shape[1] != 1 << bits or table.dtype.name != wanted or rows % table.shape[0]:
        raise ValueError(
            f"{bits} bits and {rows} rows need a table of {wanted} [groups, {1 << bits}] whose "
            f"groups divide the rows, got {table.dtype.name} {table.shape}"
        )
    if x.shape[1] != 32 * words:
        raise ValueError(f"x has {x.shape[1]} columns, the planes {32 * words}")
    if resolve(implementation) == "xla":
        return reference.bitplane_matmul(x, planes, table, scale)
    return kernel.bitplane_matmul(x, planes, table, scale)
