"""Any-precision rows to float16 in global memory, for products with many tokens.

The same reading and look-up as :mod:`warp_matmul`, with a store in place of the product. Entries
are written as they are, without the row's scale: integers up to 2048 are exact in float16 and
larger ones keep eleven bits. Columns come out in the order of :func:`activations.permuted`.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from jaxtyping import Array, Float16

from pallas_kernels.bitplane_matmul import emit, interpret
from pallas_kernels.bitplane_matmul.activations import chunks
from pallas_kernels.bitplane_matmul.emit import Word
from pallas_kernels.bitplane_matmul.row_reader import (
    Arrays,
    Geometry,
    RowReader,
    shared_table_bytes,
)
from pallas_kernels.bitplane_matmul.warp_matmul import Units, Weights
from pallas_kernels.implementation import on_gpu


@dataclass(frozen=True)
class WarpDequantize:
    """One compiled form; see :class:`warp_matmul.WarpMatmul` for what is not told here.

    Attributes:
        geometry: Where the weights lie.
        widths: Widths that this launch serves.
        words: Words that a lane takes from a row at once.
        warps: Warps a block.
        blocks: Blocks of the grid.
    """

    geometry: Geometry
    widths: tuple[int, ...]
    words: int
    warps: int
    blocks: int

    @property
    def tiles(self) -> int:
        """Warp tiles of sixteen rows."""
        return -(-self.geometry.rows // 16)

    @property
    def columns(self) -> int:
        """Columns of the output: K rounded up to whole chunks."""
        return chunks(self.geometry.words_per_row, self.words) * 128 * self.words


def warp_dequantize(
    kernel: WarpDequantize,
    weights: Weights,
    units: Units,
    out: Float16[Array, "E N padded"],
) -> Float16[Array, "E N padded"]:
    """Writes the entries of the experts that units name; the rest of ``out`` is kept.

    Args:
        kernel: The form.
        weights: The matrices.
        units: One unit for each expert to write.
        out: Array to write to.
    """
    if not on_gpu():
        return interpret.warp_dequantize(kernel, weights, units, out)
    arrays = (
        weights.pool,
        weights.table_pool,
        weights.bits,
        weights.planes,
        weights.tables,
        units.expert,
        units.count,
        out,
    )
    shapes = tuple((array.shape, array.dtype.name) for array in arrays)
    return _compiled(kernel, shapes)(*arrays)[0]


@lru_cache(maxsize=256)
def _compiled(kernel: WarpDequantize, shapes: tuple[tuple[tuple[int, ...], str], ...]) -> Any:
    shared = max(shared_table_bytes(bits) for bits in kernel.widths) * kernel.warps
    return emit.compile_kernel(
        lambda *refs: _body(kernel, *refs),
        name="bitplane_warp_dequantize",
        blocks=kernel.blocks,
        warps=kernel.warps,
        inputs=shapes[:-1],
        in_place=shapes[-1],
        shared_bytes=shared,
    )


def _body(kernel: WarpDequantize, *refs: Any) -> None:
    *global_refs, shared_ref = refs
    at = [emit.address(ref) for ref in global_refs]
    pool, table_pool, bits, planes, tables, unit_expert, count, out = at
    arrays = Arrays(pool, table_pool, planes, tables)
    warp = emit.thread() >> 5
    shared_bytes = max(shared_table_bytes(b) for b in kernel.widths)
    shared = emit.address(shared_ref) + warp * shared_bytes if shared_bytes else None
    items = emit.load(count)[0] * kernel.tiles

    def do_item(item: Word, carry: list[Word]) -> list[Word]:
        expert = emit.load(unit_expert + (item // kernel.tiles).wide() * 4)[0]
        width = emit.load(bits + expert.wide() * 4)[0]
        for width_here in kernel.widths:
            with emit.when(width.equals(width_here)):
                _write_tile(kernel, arrays, width_here, expert, item % kernel.tiles, shared, out)
        return carry

    start = emit.block() * kernel.warps + warp
    emit.loop(start, items, emit.word(kernel.blocks * kernel.warps), [], do_item)


def _write_tile(
    kernel: WarpDequantize,
    arrays: Arrays,
    bits: int,
    expert: Word,
    tile: Word,
    shared: Word | None,
    out: Word,
) -> None:
    lane = emit.thread() & 31
    last = kernel.geometry.rows - 1
    # rows past the end repeat the last row, and write the same values to it
    rows = [(tile * 16 + (lane >> 2) + 8 * half).minimum(last) for half in range(2)]
    reader = _Float16Reader(kernel.geometry, arrays, bits, expert, rows, kernel.words, shared)
    bases = []
    for row in rows:
        index = (expert * kernel.geometry.rows + row).wide() * kernel.columns
        bases.append(out + (index + ((lane & 3) * 8).wide()) * 2)
    count = chunks(kernel.geometry.words_per_row, kernel.words)
    chunk_bytes = 256 * kernel.words
    zero = emit.word(0).wide()

    def write(chunk: list[Word], offset: Word) -> None:
        for index in range(kernel.words):
            for base, quads in zip(bases, reader.halves(chunk, index), strict=True):
                for r, values in enumerate(quads):
                    emit.store(base + offset, values, offset=(4 * index + r) * 64)

    def body(step: Word, carry: list[Word]) -> list[Word]:
        offset, store_offset, *held = carry
        ahead = reader.load(offset, 16 * kernel.words)
        write(held, store_offset)
        return [offset + 16 * kernel.words, store_offset + chunk_bytes, *ahead]

    held = reader.load(reader.last_offset(emit.word(0)) if count == 1 else zero)
    if count > 2:
        carry = emit.loop(
            emit.word(0), emit.word(count - 2), emit.word(1), [zero, zero, *held], body
        )
        held = list(carry[2:])
    for chunk in range(max(0, count - 2), count):
        ahead = reader.load(reader.last_offset(emit.word(count - 1))) if chunk < count - 1 else []
        write(held, zero + chunk * chunk_bytes)
        held = ahead


class _Float16Reader(RowReader):
    """Entries as float16: converted when stored to shared memory, or after the look-up."""

    def _stored(self, entry: Word) -> Word:
        text = "{ .reg .b16 a, b, c; mov.b32 {a, b}, $1; cvt.rn.f16.s16 c, a; mov.b32 $0, {c, c}; }"
        return emit.assemble(text, 1, [entry])[0]

    def halves(self, chunk: list[Word], index: int) -> list[list[list[Word]]]:
        """Pairs of float16 of one word of both rows: ``[row][r][4]``, in order ``[h, c]``."""
        result = []
        for row in range(2):
            start = row * self.bits * self.words + index
            planes = list(chunk[start : start + self.bits * self.words : self.words])
            if self.in_registers:
                result.append([_as_halves(halves) for halves in self.register_entries(planes, row)])
            else:
                result.append(
                    [
                        [
                            emit.permute(values[c], values[c + 1], 0x5410)
                            for values in halves
                            for c in (0, 2)
                        ]
                        for halves in self.shared_entries(planes, row)
                    ]
                )
        return result


def _as_halves(words: list[Word]) -> list[Word]:
    """Signed bytes to float16: the byte plus 128 becomes the low bits of 1024, less 1152."""
    result = []
    for word in words:
        biased = word ^ 0x80808080
        for selector in (0x4140, 0x4342):
            pair = emit.permute(biased, emit.word(0x64646464), selector)
            text = "sub.rn.f16x2 $0, $1, $2;"
            result.append(emit.assemble(text, 1, [pair, emit.word(0x64806480)])[0])
    return result
