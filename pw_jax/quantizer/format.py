"""The any-precision format: nested codes in bitplanes, with a small table for each width."""

import dataclasses
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float

from pallas_kernels.bitplanes import look_up, unpack_codes

HostOrDevice = Array | np.ndarray

MAX_BITS = 8
MAX_INT8_TABLE_BITS = 6  # an int8 entry costs accuracy above this width


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True)
class QuantizedMatrix:
    """One matrix of N rows and K columns at every width from seed_bits to parent_bits.

    At width ``b`` the weight in row ``n`` with parent code ``c`` is
    ``scales[b][n] * tables[b][n // G, c >> (P - b)]``; G rows share a table, and G is read off the
    shapes. The codes are nested, so the first ``b`` planes are the codes of width ``b``.

    Attributes:
        planes: uint32 [P, N, K // 32]. Plane 0 holds the most significant bit; bit ``j`` of word
            ``w`` belongs to column ``j * (K // 32) + w``.
        tables: for each width ``b`` the rounded centroids, ascending, int8 (int16 above 6 bits)
            [N // G, 2**b].
        scales: for each width float32 [N].
    """

    planes: HostOrDevice
    tables: dict[int, HostOrDevice]
    scales: dict[int, HostOrDevice]

    @property
    def parent_bits(self) -> int:
        """The widest width P, which is the number of planes."""
        return self.planes.shape[-3]

    @property
    def seed_bits(self) -> int:
        """The narrowest width."""
        return min(self.tables)

    @property
    def widths(self) -> tuple[int, ...]:
        """All widths, ascending."""
        return tuple(sorted(self.tables))

    @property
    def shape(self) -> tuple[int, int]:
        """Rows N and columns K of the matrix."""
        return self.planes.shape[-2], 32 * self.planes.shape[-1]

    @property
    def rows_per_table(self) -> int:
        """How many consecutive rows share a table (G)."""
        return self.planes.shape[-2] // self.tables[self.seed_bits].shape[-2]

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], None]:
        """Children for jax.tree_util, by attribute name."""
        names = ("planes", "tables", "scales")
        return [(jax.tree_util.GetAttrKey(name), getattr(self, name)) for name in names], None

    @classmethod
    def tree_unflatten(cls, auxiliary: None, children: Any) -> "QuantizedMatrix":
        """Rebuild without checks: jax also fills trees with placeholders that are no arrays."""
        del auxiliary
        matrix = object.__new__(cls)
        for name, child in zip(("planes", "tables", "scales"), children, strict=True):
            object.__setattr__(matrix, name, child)
        return matrix


def table_dtype(bits: int) -> type[np.signedinteger]:
    """The integer type of a table entry at one width."""
    return np.int8 if bits <= MAX_INT8_TABLE_BITS else np.int16


def rows_per_table(rows: int, columns: int, parent_bits: int) -> int:
    """How many rows should share a table.

    A table a row is best for the error, but with short rows the tables outweigh the codes: 2**8
    entries of 16 bits are 4 bits a weight in a row of 1024. The answer is the smallest power of two
    that divides ``rows`` and keeps the widest table to at most one bit a weight, or else the
    largest power of two that divides ``rows``.
    """
    shared = 1
    while 16 * 2**parent_bits > columns * shared and rows % (2 * shared) == 0:
        shared *= 2
    return shared


def dequantize(matrix: QuantizedMatrix, bits: int) -> Float[Array, "N K"]:
    """The float32 matrix at one width. Works inside jit, and under vmap for stacked matrices."""
    return _dequantize(matrix.planes[:bits], matrix.tables[bits], matrix.scales[bits])


@jax.jit  # one program a shape and width, not one an operation
def _dequantize(planes: jax.Array, table: jax.Array, scales: jax.Array) -> jax.Array:
    return look_up(unpack_codes(planes), table, scales)
