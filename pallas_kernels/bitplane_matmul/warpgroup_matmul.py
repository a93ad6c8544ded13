"""The product of many tokens with any-precision rows: eight warps for 128 rows.

As in :mod:`warp_matmul`, every warp streams its sixteen rows' plane words to registers and looks
the weights up there, here as float16. Four warps hold a left operand of ``wgmma`` between them, so
weights reach the tensor cores without touching memory, and each is multiplied with a whole unit of
up to 256 tokens, which pays for its look-up. Another thread copies the activations of the unit to
a ring in shared memory. The two warp groups take turns: one looks up while the other multiplies.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from jaxtyping import Array, Float16, Float32

from pallas_kernels.bitplane_matmul import emit, interpret
from pallas_kernels.bitplane_matmul.activations import chunks
from pallas_kernels.bitplane_matmul.emit import Word
from pallas_kernels.bitplane_matmul.row_reader import (
    Arrays,
    Geometry,
    RowReader,
    RowTile,
    shared_table_bytes,
)
from pallas_kernels.bitplane_matmul.warp_matmul import Gate, Units, Weights, activate
from pallas_kernels.implementation import on_gpu

WARPS = 8
COPY_WARPS = 4
"""A warp group, because registers are given to whole groups; one thread of it works."""
WORDS = 2
"""Words that a lane takes from a row at once."""
STEPS_PER_STAGE = 4
"""Products of 16 columns that one stage of the ring feeds: a quarter of a lane's words."""
MOST_TABLE_BYTES = 8192
"""Of a warp, so that the ring of activations has room."""
UNITS_TOGETHER = 4
"""Units that take a tile of rows one after another, so that its planes are read from L2 again."""


@dataclass(frozen=True)
class WarpgroupMatmul:
    """One compiled form; see :class:`warp_matmul.WarpMatmul` for what is not told here.

    Attributes:
        geometry: Where the weights lie.
        widths: Widths that occur.
        gate: If given, the first half of the rows gates the second.
        capacity: Most tokens of a unit, a multiple of 8 up to 256.
        out_rows: Rows of the output.
        stages: Stages of the ring.
        blocks: Blocks of the grid.
    """

    geometry: Geometry
    widths: tuple[int, ...]
    gate: Gate | None
    capacity: int
    out_rows: int
    stages: int
    blocks: int

    @property
    def words(self) -> int:
        """Words that a lane takes from a row at once."""
        return WORDS

    @property
    def columns_out(self) -> int:
        """Columns of the output."""
        return self.geometry.rows // (1 if self.gate is None else 2)

    @property
    def tiles(self) -> int:
        """Tiles of rows, one for all eight warps."""
        return -(-self.columns_out // (WARPS * (16 if self.gate is None else 8)))

    @property
    def chunks(self) -> int:
        """Chunks of a row."""
        return chunks(self.geometry.words_per_row, WORDS)

    @property
    def turns(self) -> int:
        """Stages that a unit's activations fill."""
        return 4 * self.chunks

    @property
    def step_bytes(self) -> int:
        """Activations of a unit in 16 columns."""
        return 32 * self.capacity

    @property
    def stage_bytes(self) -> int:
        """Bytes of a stage of the ring."""
        return STEPS_PER_STAGE * self.step_bytes

    @property
    def table_bytes(self) -> int:
        """Bytes of a warp's tables."""
        return max(shared_table_bytes(bits, MOST_TABLE_BYTES) for bits in self.widths)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block: ring, tables, two barriers a stage."""
        return self.stages * (self.stage_bytes + 16) + WARPS * self.table_bytes


def warpgroup_matmul(
    kernel: WarpgroupMatmul,
    weights: Weights,
    units: Units,
    x: Float16[Array, "U S capacity 8"],
    x_scale: Float32[Array, "U capacity"],
    out: Float32[Array, "rows columns"],
) -> Float32[Array, "rows columns"]:
    """Runs a form, writing into ``out``.

    Args:
        kernel: The form.
        weights: The matrices.
        units: The work.
        x: Activations of :func:`activations.gather_tiles`.
        x_scale: Their scales.
        out: Array to write to; rows of no unit keep what they hold.
    """
    if not on_gpu():
        return interpret.warpgroup_matmul(kernel, weights, units, x, x_scale, out)
    arrays = (*weights, *units, x, x_scale, out)
    shapes = tuple((array.shape, array.dtype.name) for array in arrays)
    return _compiled(kernel, shapes)(*arrays)[0]


@lru_cache(maxsize=256)
def _compiled(kernel: WarpgroupMatmul, shapes: tuple[tuple[tuple[int, ...], str], ...]) -> Any:
    return emit.compile_kernel(
        lambda *refs: _body(kernel, *refs),
        name="bitplane_warpgroup_matmul",
        blocks=kernel.blocks,
        warps=WARPS + COPY_WARPS,
        inputs=shapes[:-1],
        in_place=shapes[-1],
        shared_bytes=kernel.shared_bytes,
    )


@dataclass(frozen=True)
class _Ring:
    """The stages of activations in shared memory; turn n uses stage n modulo their number."""

    kernel: WarpgroupMatmul
    data: Word
    barriers: Word

    def stage(self, turn: Word) -> Word:
        """Stage of a turn."""
        return turn % self.kernel.stages

    def parity(self, turn: Word) -> Word:
        """Parity of the barriers' phase in a turn."""
        return (turn // self.kernel.stages) & 1

    def at(self, turn: Word) -> Word:
        """Address of the activations of a turn."""
        return self.data + self.stage(turn) * self.kernel.stage_bytes

    def full(self, turn: Word) -> Word:
        """Barrier of the copy."""
        return self.barriers + self.stage(turn) * 16

    def empty(self, turn: Word) -> Word:
        """Barrier of the warps that are done with a stage."""
        return self.full(turn) + 8


def _body(kernel: WarpgroupMatmul, *refs: Any) -> None:
    *global_refs, shared_ref = refs
    at = [emit.address(ref) for ref in global_refs]
    pool, table_pool, bits, planes, tables, unit_expert, first, tokens, count, x, scale, out = at
    shared = emit.address(shared_ref)
    tables_at = shared + kernel.stages * kernel.stage_bytes
    ring = _Ring(kernel, shared, tables_at + WARPS * kernel.table_bytes)
    thread = emit.thread()
    warp, lane = thread >> 5, thread & 31
    with emit.when(thread.equals(0)):
        for stage in range(kernel.stages):
            emit.start_barrier(ring.barriers + 16 * stage, 1)
            emit.start_barrier(ring.barriers + (16 * stage + 8), WARPS)
        emit.publish_barriers()
    emit.sync_block()
    used = emit.load(count)[0]
    start, step = emit.block(), emit.word(kernel.blocks)
    items = used * kernel.tiles

    def place(item: Word) -> tuple[Word, Word]:
        """Unit and tile of an item; a few units share a tile."""
        group = item // (UNITS_TOGETHER * kernel.tiles)
        inside = item % (UNITS_TOGETHER * kernel.tiles)
        size = (used - group * UNITS_TOGETHER).minimum(UNITS_TOGETHER)
        return group * UNITS_TOGETHER + inside % size, inside // size

    def width_and_turns(unit: Word) -> tuple[Word, Word, Word]:
        """Expert, its width, and turns of the ring: none for widths of other launches."""
        expert = emit.load(unit_expert + unit.wide() * 4)[0]
        width = emit.load(bits + expert.wide() * 4)[0]
        turns = emit.word(0)
        for width_here in kernel.widths:
            turns = turns + emit.flag(width.equals(width_here)) * kernel.turns
        return expert, width, turns

    def copy_item(item: Word, carry: Sequence[Word]) -> Sequence[Word]:
        unit, _ = place(item)
        source = x + unit.wide() * (kernel.turns * kernel.stage_bytes)

        def copy_stage(_: Word, carry: Sequence[Word]) -> Sequence[Word]:
            turn, source = carry
            emit.wait_for(ring.empty(turn), ring.parity(turn) ^ 1)
            emit.copy_to_shared(ring.at(turn), source, kernel.stage_bytes, ring.full(turn))
            return [turn + 1, source + kernel.stage_bytes]

        loop = emit.word(0), width_and_turns(unit)[2], emit.word(1)
        return emit.loop(*loop, [carry[0], source], copy_stage)[:1]

    def multiply_item(item: Word, carry: Sequence[Word]) -> Sequence[Word]:
        unit, tile = place(item)
        expert, width, turns = width_and_turns(unit)
        rows = RowTile(kernel.columns_out, kernel.gate is not None, tile * WARPS + warp)
        for width_here in kernel.widths:
            with emit.when(width.equals(width_here)):
                reader = _HalfReader(
                    kernel.geometry,
                    Arrays(pool, table_pool, planes, tables),
                    width_here,
                    expert,
                    rows.rows,
                    WORDS,
                    tables_at + warp * kernel.table_bytes,
                    MOST_TABLE_BYTES,
                )
                sums = _multiply(kernel, reader, ring, carry[0], lane)
                row, here = (emit.load(a + unit.wide() * 4)[0] for a in (first, tokens))
                scales = scale + unit.wide() * (4 * kernel.capacity)
                _write(kernel, reader, rows, sums, scales, row, here, out)
        return [carry[0] + turns]

    with emit.when(warp.less(WARPS)):
        emit.limit_registers(240, more=True)
        emit.loop(start, items, step, [emit.word(0)], multiply_item)
    with emit.when(emit.word(WARPS - 1).less(warp)):
        emit.limit_registers(24, more=False)
        with emit.when(thread.equals(32 * WARPS)):
            emit.loop(start, items, step, [emit.word(0)], copy_item)


def _multiply(
    kernel: WarpgroupMatmul, reader: "_HalfReader", ring: _Ring, turn: Word, lane: Word
) -> list[Word]:
    """Float32 sums of a lane's two rows: ``[8 tokens, row, 2 tokens]``."""
    size = 2 * WORDS * reader.bits
    zero = emit.word(0)

    def release(turn: Word, first: Word) -> None:
        """Ends the products of the turn before, if there was one."""
        emit.warpgroup_wait()
        with emit.when((lane | first).equals(0)):
            emit.arrive(ring.empty(turn - 1))

    def body(chunk: Word, carry: Sequence[Word]) -> Sequence[Word]:
        turn, held, sums = carry[0], carry[1 : 1 + size], list(carry[1 + size :])
        ahead = reader.load(reader.last_offset(chunk + 1))
        for r, rows in enumerate(reader.halves(held)):
            # looked up while the last products run: the compiler would move it behind their end,
            # but not over the loop that waits for activations
            left = emit.settle(_fragments(rows))
            emit.wait_for(ring.full(turn), ring.parity(turn))
            release(turn, zero if r else emit.flag(chunk.equals(0)))
            emit.warpgroup_begin()
            right = emit.tile_descriptor(ring.at(turn), 128, 16 * kernel.capacity)
            for step in range(STEPS_PER_STAGE):
                part = left[4 * step : 4 * step + 4]
                sums = emit.warpgroup_multiply(part, right + (step * kernel.step_bytes >> 4), sums)
            emit.warpgroup_commit()
            turn = turn + 1
        return [turn, *ahead, *sums]

    held = reader.load(reader.last_offset(zero))
    sums = [zero] * (kernel.capacity // 2)
    bounds = zero, emit.word(kernel.chunks), emit.word(1)
    turn, *rest = emit.loop(*bounds, [turn, *held, *sums], body)
    release(turn, zero)
    return emit.settle(rest[size:])


def _fragments(rows: Sequence[Sequence[Sequence[Word]]]) -> list[Word]:
    """Left operands of the four products of one r, out of ``[row][h][c]``."""
    return [rows[row][h][c] for h in range(2) for c in range(4) for row in range(2)]


def _write(
    kernel: WarpgroupMatmul,
    reader: "_HalfReader",
    rows: RowTile,
    sums: Sequence[Word],
    x_scale: Word,
    first: Word,
    tokens: Word,
    out: Word,
) -> None:
    """Scales sums and stores those of real tokens and columns."""
    scales = [emit.bits_as_float(scale) for scale in reader.scales()]
    lane = emit.thread() & 31
    token = (lane & 3) * 2
    row_bytes = 4 * kernel.columns_out
    base = out + (first + token).wide() * row_bytes
    x_scale = x_scale + token.wide() * 4
    for index, column in enumerate(rows.outputs(lane >> 2)):
        at = base + column.wide() * 4
        with emit.when(column.less(kernel.columns_out)):
            for block in range(kernel.capacity // 8):
                factors = emit.load(x_scale, 2, offset=32 * block)
                for place, factor in enumerate(factors):
                    values = [
                        emit.bits_as_float(sums[4 * block + 2 * row + place])
                        * (scales[row] * emit.bits_as_float(factor))
                        for row in range(2)
                    ]
                    value = values[index]
                    if kernel.gate is not None:
                        value = activate(values[0], kernel.gate) * values[1]
                    inside = 8 * block + place
                    bits = emit.float_as_bits(value)
                    emit.store_below(at, bits, token + inside, tokens, offset=inside * row_bytes)


class _HalfReader(RowReader):
    """Entries as float16, in fragments of the left operand.

    Integers up to 2048 are exact in float16, larger ones keep eleven bits.
    """

    def _stored(self, entries: Word) -> Word:
        text = (
            "{ .reg .b16 a, b; mov.b32 {a, b}, $1; cvt.rn.f16.s16 a, a; cvt.rn.f16.s16 b, b; "
            "mov.b32 $0, {a, b}; }"
        )
        return emit.assemble(text, 1, [entries])[0]

    def halves(self, chunk: Sequence[Word]) -> Iterator[list[list[list[Word]]]]:
        """Pairs of float16 of a lane's two words: for each r, ``[row][h][c]``."""
        found = []
        for row in range(2):
            words = [self.planes_of(chunk, row, index) for index in range(WORDS)]
            if self.in_registers:
                both = [self.register_entries(planes, row) for planes in words]
                found.append(map(_pairs_of_bytes, *both))
            else:
                both = [self.shared_entries(planes, row) for planes in words]
                found.append(map(_pairs, *both))
        yield from map(list, zip(*found, strict=True))


def _pairs(first: Sequence[Sequence[Word]], second: Sequence[Sequence[Word]]) -> list[list[Word]]:
    """Float16 of two words ``[h][c]``, side by side in one register."""
    return [
        [emit.permute(a, b, 0x5410) for a, b in zip(*half, strict=True)]
        for half in zip(first, second, strict=True)
    ]


def _pairs_of_bytes(first: Sequence[Word], second: Sequence[Word]) -> list[list[Word]]:
    """Signed bytes of two words to float16: 128 more are the low bits of 1024, less 1152."""
    result = []
    for a, b in zip(first, second, strict=True):
        result.append([])
        for selector in (0x5140, 0x7362):
            biased = emit.permute(a, b, selector) ^ 0x80808080
            for place in (0x4140, 0x4342):
                pair = emit.permute(biased, emit.word(0x64646464), place)
                text = "sub.rn.f16x2 $0, $1, $2;"
                result[-1].append(emit.assemble(text, 1, [pair, emit.word(0x64806480)])[0])
    return result
