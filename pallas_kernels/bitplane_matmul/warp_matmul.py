"""The product of a few tokens with any-precision rows: one warp for sixteen rows.

Every warp works alone: it streams its rows' plane words from global memory to registers, looks the
weights up there, and feeds them to the tensor cores as int8 left operands. Activations are int16,
split into two int8 columns, so sums are exact in int32. Blocks stay on the device and loop over
work items, whose number is data.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from jaxtyping import Array, Float32, Int32, UInt32

from pallas_kernels.bitplane_matmul import emit, interpret
from pallas_kernels.bitplane_matmul.activations import TOKENS_PER_BLOCK, chunks
from pallas_kernels.bitplane_matmul.emit import Word
from pallas_kernels.bitplane_matmul.row_reader import (
    Arrays,
    Geometry,
    RowReader,
    RowTile,
    shared_table_bytes,
)
from pallas_kernels.implementation import on_gpu

MOST_TABLE_BYTES = 16384
"""Of a warp, so that eight warps leave some first-level cache to activations."""

Gate = Literal["silu", "gelu_tanh"]


class Weights(NamedTuple):
    """Any-precision matrices of one shape.

    Attributes:
        pool: Pages of planes.
        table_pool: Pages of tables; often the same array.
        bits: Width of each matrix.
        planes: Pages of its planes.
        tables: Pages of its table.
    """

    pool: UInt32[Array, "pages words"]
    table_pool: UInt32[Array, "table_pages table_words"]
    bits: Int32[Array, " E"]
    planes: Int32[Array, "E P plane_pages"]
    tables: Int32[Array, "E table_pages"]


class Units(NamedTuple):
    """A list of work: tokens of one expert that are multiplied together.

    Attributes:
        expert: Expert of each unit.
        first: Its first row of the output.
        tokens: Number of its rows.
        count: Length of the list that is in use.
    """

    expert: Int32[Array, " U"]
    first: Int32[Array, " U"]
    tokens: Int32[Array, " U"]
    count: Int32[Array, "1"]


@dataclass(frozen=True)
class WarpMatmul:
    """One compiled form.

    Attributes:
        geometry: Where the weights lie.
        experts: Number of matrices.
        widths: Widths that this launch serves; work of other widths is skipped.
        gate: If given, the first half of the rows gates the second: out has N / 2 columns.
        units: Length of the unit list. A unit is one expert and at most ``4 * token_blocks`` rows
            of activations.
        out_rows: Rows of the output.
        token_blocks: Blocks of four tokens in a unit.
        words: Words that a lane takes from a row at once: 1, 2 or 4.
        depths: Chunks in flight of each width.
        splits: Parts that K is cut into; partial sums are returned apart.
        warps: Warps a block.
        blocks: Blocks of the grid.
    """

    geometry: Geometry
    experts: int
    widths: tuple[int, ...]
    gate: Gate | None
    units: int
    out_rows: int
    token_blocks: int
    words: int
    depths: tuple[int, ...]
    splits: int
    warps: int
    blocks: int

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a warp."""
        return max(shared_table_bytes(bits, MOST_TABLE_BYTES) for bits in self.widths)

    @property
    def columns_out(self) -> int:
        """Columns of the output."""
        return self.geometry.rows // (1 if self.gate is None else 2)

    @property
    def tiles(self) -> int:
        """Warp tiles of one unit."""
        return -(-self.columns_out // (16 if self.gate is None else 8))

    @property
    def chunks(self) -> int:
        """Chunks of a whole row."""
        return chunks(self.geometry.words_per_row, self.words)

    def __post_init__(self):
        if self.chunks % self.splits:
            raise ValueError(f"{self.splits} splits do not divide {self.chunks} chunks")
        if self.geometry.words_per_row % self.words:
            raise ValueError("a lane's words must divide a row's")


def warp_matmul(
    kernel: WarpMatmul,
    weights: Weights,
    units: Units,
    x_words: UInt32[Array, "U S blocks 2 32 4"],
    x_scale: Float32[Array, "U capacity"],
    out: Float32[Array, "splits rows columns"],
) -> Float32[Array, "splits rows columns"]:
    """Runs a form, writing into ``out``.

    Args:
        kernel: The form.
        weights: The matrices.
        units: The work.
        x_words: Activations of :func:`activations.gather_units`.
        x_scale: Their scales.
        out: Array to write to; rows of no unit, and units of other widths, keep what they hold.
    """
    if not on_gpu():
        return interpret.warp_matmul(kernel, weights, units, x_words, x_scale, out)
    arrays = (*weights, *units, x_words, x_scale, out)
    shapes = tuple((array.shape, array.dtype.name) for array in arrays)
    return _compiled(kernel, shapes)(*arrays)[0]


@lru_cache(maxsize=256)
def _compiled(kernel: WarpMatmul, shapes: tuple[tuple[tuple[int, ...], str], ...]) -> Any:
    return emit.compile_kernel(
        lambda *refs: _body(kernel, *refs),
        name="bitplane_warp_matmul",
        blocks=kernel.blocks,
        warps=kernel.warps,
        inputs=shapes[:-1],
        in_place=shapes[-1],
        shared_bytes=kernel.shared_bytes * kernel.warps,
    )


@dataclass(frozen=True)
class _Work:
    """One item: a unit, a part of K and a tile of rows."""

    unit: Word
    split: Word
    tile: Word
    expert: Word


def _body(kernel: WarpMatmul, *refs: Any) -> None:
    *global_refs, shared_ref = refs
    at = [emit.address(ref) for ref in global_refs]
    pool, table_pool, bits, planes, tables, unit_expert, first, tokens, count, x, scale, out = at
    arrays = Arrays(pool, table_pool, planes, tables)
    warp = emit.thread() >> 5
    shared = emit.address(shared_ref) + warp * kernel.shared_bytes
    items = emit.load(count)[0] * (kernel.tiles * kernel.splits)

    def do_item(item: Word, carry: Sequence[Word]) -> Sequence[Word]:
        rest = item // kernel.tiles
        unit = rest // kernel.splits
        expert = emit.load(unit_expert + unit.wide() * 4)[0]
        work = _Work(unit, rest % kernel.splits, item % kernel.tiles, expert)
        width = emit.load(bits + expert.wide() * 4)[0]
        for width_here, depth in zip(kernel.widths, kernel.depths, strict=True):
            with emit.when(width.equals(width_here)):
                tile = _Tile(kernel, arrays, width_here, depth, work, shared)
                place, used = (emit.load(a + unit.wide() * 4)[0] for a in (first, tokens))
                tile.write(tile.multiply(x), place, used, scale, out)
        return carry

    start = emit.block() * kernel.warps + warp
    emit.loop(start, items, emit.word(kernel.blocks * kernel.warps), [], do_item)


class _Tile:
    """One warp's sixteen rows at one width."""

    def __init__(
        self,
        kernel: WarpMatmul,
        arrays: Arrays,
        bits: int,
        depth: int,
        work: _Work,
        shared: Word,
    ):
        self.kernel, self.depth, self.work = kernel, depth, work
        self.parts = 1 if bits <= 6 else 2
        self.lane = emit.thread() & 31
        self.rows = RowTile(kernel.columns_out, kernel.gate is not None, work.tile)
        self.reader = RowReader(
            kernel.geometry,
            arrays,
            bits,
            work.expert,
            self.rows.rows,
            kernel.words,
            shared,
            MOST_TABLE_BYTES,
        )

    def multiply(self, x: Word) -> list[Word]:
        """Sums over this item's part of K, flat: ``[part, token block, 4]``."""
        kernel = self.kernel
        blocks, depth = kernel.token_blocks, self.depth
        count = kernel.chunks // kernel.splits
        chunk_bytes = 16 * kernel.words
        step_bytes = blocks * 1024
        x_chunk = kernel.words * step_bytes
        first = self.work.split * count
        x_at = x + self.work.unit.wide() * (kernel.chunks * x_chunk)
        x_at = x_at + first.wide() * x_chunk + self.lane.wide() * 16
        begin = first.wide() * chunk_bytes
        last = self.reader.last_offset(first + (count - 1))

        def fetch(chunk: int) -> list[Word]:
            if chunk == count - 1:
                return self.reader.load(last)
            return self.reader.load(begin, chunk * chunk_bytes)

        buffers = [fetch(chunk) for chunk in range(min(depth, count))]
        size = len(buffers[0])
        sums = [emit.word(0)] * (4 * blocks * self.parts)
        trips = max(0, (count - 1) // depth - 1)
        if trips:

            def body(trip: Word, carry: Sequence[Word]) -> Sequence[Word]:
                offset, x_offset = carry[0], carry[1]
                held = list(carry[2 : 2 + size * depth])
                totals = list(carry[2 + size * depth :])
                for slot in range(depth):
                    chunk = held[slot * size : (slot + 1) * size]
                    ahead = self.reader.load(offset, (depth + slot) * chunk_bytes)
                    totals = self._add(totals, chunk, x_offset, slot * x_chunk)
                    held[slot * size : (slot + 1) * size] = ahead
                return [
                    offset + depth * chunk_bytes,
                    x_offset + depth * x_chunk,
                    *held,
                    *totals,
                ]

            flat = [item for buffer in buffers for item in buffer]
            carry = emit.loop(
                emit.word(0), emit.word(trips), emit.word(1), [begin, x_at, *flat, *sums], body
            )
            held, sums = carry[2 : 2 + size * depth], list(carry[2 + size * depth :])
            buffers = [list(held[slot * size : (slot + 1) * size]) for slot in range(depth)]
        for chunk in range(trips * depth, count):
            current = buffers[chunk % depth]
            if chunk + depth < count:
                buffers[chunk % depth] = fetch(chunk + depth)
            sums = self._add(sums, current, x_at, chunk * x_chunk)
        return sums

    def _add(
        self, sums: Sequence[Word], chunk: Sequence[Word], x_at: Word, offset: int
    ) -> list[Word]:
        kernel = self.kernel
        sums = list(sums)
        for index in range(kernel.words):
            parts = self.reader.weights(chunk, index)
            for token_block in range(kernel.token_blocks):
                at = offset + (index * kernel.token_blocks + token_block) * 1024
                words = [emit.load(x_at, 4, offset=at + half * 512) for half in range(2)]
                for r in range(4):
                    right = words[r // 2][2 * (r % 2) : 2 * (r % 2) + 2]
                    for part, (top, bottom) in enumerate(parts):
                        left = [top[r][0], bottom[r][0], top[r][1], bottom[r][1]]
                        where = 4 * (part * kernel.token_blocks + token_block)
                        sums[where : where + 4] = emit.multiply_add(
                            left,
                            right,
                            sums[where : where + 4],
                            unsigned=self.parts == 2 and part == 0,
                        )
        return sums

    def write(
        self, sums: Sequence[Word], first: Word, tokens: Word, x_scale: Word, out: Word
    ) -> None:
        """Scales sums and stores those of real tokens and columns."""
        kernel = self.kernel
        scales = [emit.bits_as_float(scale) for scale in self.reader.scales()]
        columns = self.rows.outputs(self.lane >> 2)
        capacity = TOKENS_PER_BLOCK * kernel.token_blocks
        for token_block in range(kernel.token_blocks):
            token = (self.lane & 3) + token_block * TOKENS_PER_BLOCK
            at = x_scale + (self.work.unit * capacity + token).wide() * 4
            token_scale = emit.bits_as_float(emit.load(at)[0])
            values = []
            for row in range(2):
                total = self._total(sums, token_block, row)
                values.append(total * (scales[row] * token_scale))
            if kernel.gate is not None:
                values = [activate(values[0], kernel.gate) * values[1]]
            row = self.work.split * kernel.out_rows + first + token
            base = out + row.wide() * (4 * kernel.columns_out)
            with emit.when(token.less(tokens)):
                for column, value in zip(columns, values, strict=True):
                    with emit.when(column.less(kernel.columns_out)):
                        emit.store(base + column.wide() * 4, [emit.float_as_bits(value)])

    def _total(self, sums: Sequence[Word], token_block: int, row: int) -> emit.Float:
        """256 * (product with high bytes) + (product with low bytes), in float32."""
        total = None
        for part in reversed(range(self.parts)):
            where = 4 * (part * self.kernel.token_blocks + token_block) + 2 * row
            value = emit.as_float(sums[where]) * 256.0 + emit.as_float(sums[where + 1])
            total = value if total is None else total * 256.0 + value
        assert total is not None
        return total


def activate(gate: emit.Float, name: Gate) -> emit.Float:
    """SiLU, or GELU by tanh: both are ``gate * sigmoid(argument)``."""
    if name == "silu":
        return gate * emit.sigmoid(gate)
    argument = gate * (gate * gate * 0.044715 + 1.0) * 1.5957691216057308
    return gate * emit.sigmoid(argument)
