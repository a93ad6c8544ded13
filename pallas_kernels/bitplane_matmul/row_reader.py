"""Reads planes and tables of a warp's sixteen rows and turns them into fragments of weights.

Lane l of a warp holds columns of rows ``l // 4`` of two groups of eight: of a chunk of
``4 * words`` words, lane l takes the ``words`` words that start at ``words * (l % 4)``. The order
of columns within a product is free, so activations are permuted to match (activations.py) and no
lane ever needs another's bits.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pallas_kernels.bitplane_matmul import emit
from pallas_kernels.bitplane_matmul.emit import Word
from pallas_kernels.bitplane_matmul.lookup import byte_codes, look_up_bytes

REGISTER_BITS = 5
"""Widest code whose table is kept in registers; wider tables go to shared memory."""


def keeps_in_registers(bits: int) -> bool:
    """Whether a table of this width is kept in registers."""
    return bits <= REGISTER_BITS


def lane_bytes(bits: int) -> int:
    """Bytes that each lane has of a table's entry in shared memory.

    Every lane has its own copy of an entry, so lanes do not meet in a bank; at 7 and 8 bits two
    lanes share a word of the bank, because copies of four bytes would not fit.
    """
    return 4 if bits <= 6 else 2


@dataclass(frozen=True)
class Geometry:
    """Where the words of a matrix lie, for the paged and for the plain form alike.

    Attributes:
        rows: Output features N.
        columns: Input features K.
        rows_per_table: Rows that share a table.
        rows_per_page: Rows in a page of a plane.
        plane_page_words: Distance of plane pages.
        table_page_words: Distance of table pages.
        planes: Length of the list of planes P.
        plane_pages: Length of a plane's list of pages.
        table_pages: Length of a table's list of pages.
    """

    rows: int
    columns: int
    rows_per_table: int
    rows_per_page: int
    plane_page_words: int
    table_page_words: int
    planes: int
    plane_pages: int
    table_pages: int

    @property
    def words_per_row(self) -> int:
        """Words of one row of one plane."""
        return self.columns // 32

    def table_entry_words(self, bits: int) -> int:
        """Words of one group's entries."""
        return (1 << bits) * (1 if bits <= 6 else 2) // 4

    def scale_word(self, bits: int) -> int:
        """Words in front of the scales."""
        return self.rows // self.rows_per_table * self.table_entry_words(bits)


def shared_table_bytes(bits: int) -> int:
    """Shared memory that a warp's two groups of rows need at a width."""
    return 2 * 32 * lane_bytes(bits) << bits if not keeps_in_registers(bits) else 0


@dataclass(frozen=True)
class Arrays:
    """Addresses of the arrays that describe the weights."""

    pool: Word
    table_pool: Word
    planes: Word
    tables: Word


class RowReader:
    """The two rows of a lane at one width, which is known when compiling."""

    def __init__(
        self,
        geometry: Geometry,
        arrays: Arrays,
        bits: int,
        expert: Word,
        rows: Sequence[Word],
        words: int,
        shared: Word | None,
    ):
        self.geometry, self.arrays, self.bits, self.words = geometry, arrays, bits, words
        self.rows, self.expert = rows, expert
        lane = emit.thread() & 31
        self.first_word = (lane & 3) * words
        self.pointers = [self._plane_pointers(row) for row in rows]
        self.in_registers = keeps_in_registers(bits)
        if self.in_registers:
            size = geometry.table_entry_words(bits)
            self.tables = [emit.load_words(self._table(row), size) for row in rows]
        else:
            assert shared is not None
            self.stride = 32 * lane_bytes(bits)
            self.shared = shared + lane * lane_bytes(bits)
            self._fill_shared(shared, lane)

    def _plane_pointers(self, row: Word) -> list[Word]:
        layout = self.geometry
        page = row // layout.rows_per_page
        inner = (row % layout.rows_per_page) * layout.words_per_row + self.first_word
        base = self.arrays.pool + inner.wide() * 4
        entry = self.expert * (layout.planes * layout.plane_pages) + page
        pointers = []
        for plane in range(self.bits):
            at = self.arrays.planes + (entry + plane * layout.plane_pages).wide() * 4
            pointers.append(base + emit.load(at)[0].wide() * (4 * layout.plane_page_words))
        return pointers

    def _table_word(self, word: Word) -> Word:
        """Address of a word of the expert's table."""
        layout = self.geometry
        entry = self.expert * layout.table_pages + word // layout.table_page_words
        page = emit.load(self.arrays.tables + entry.wide() * 4)[0]
        inner = (word % layout.table_page_words).wide() * 4
        return self.arrays.table_pool + page.wide() * (4 * layout.table_page_words) + inner

    def _table(self, row: Word) -> Word:
        size = self.geometry.table_entry_words(self.bits)
        return self._table_word((row // self.geometry.rows_per_table) * size)

    def scales(self) -> list[Word]:
        """The bits of the two rows' float32 scales."""
        first = self.geometry.scale_word(self.bits)
        return [emit.load(self._table_word(row + first))[0] for row in self.rows]

    def _fill_shared(self, shared: Word, lane: Word) -> None:
        """Copies both rows' tables to shared memory, an entry for each lane.

        The four lanes of a row share the work. Of each pair of entries odd lanes store the second
        first, so that the lanes of a store spread over all banks.
        """
        emit.sync_warp()
        parity = lane & 1
        size = self.geometry.table_entry_words(self.bits)
        per_word = (1 << self.bits) // size
        lane_words = lane_bytes(self.bits) // 2
        for index, row in enumerate(self.rows):
            source = self._table(row) + (lane & 3).wide() * 4
            start = (lane & 3) * (per_word * self.stride) + (lane >> 2) * (8 * lane_words)
            base = shared + start + index * (self.stride << self.bits)
            targets = (base + parity * self.stride, base - parity * self.stride)
            for step in range(size // 4):
                word = emit.load(source, offset=16 * step)[0]
                for place in range(per_word):
                    entry = (parity ^ place) if place else parity
                    step_of_entry, first = (0x2222, 0x1010) if per_word == 2 else (0x1111, 0x8080)
                    selector = entry * step_of_entry + first
                    value = self._stored(emit.permute(word, emit.word(0), selector))
                    offset = (4 * step * per_word + place) * self.stride
                    emit.store_shared(targets[place & 1], [value] * (2 * lane_words), offset)
        emit.sync_warp()

    def _stored(self, entry: Word) -> Word:
        """The form in which an entry, an int16 in both halves, is kept in shared memory."""
        return entry

    def load(self, offset: Word, static_offset: int = 0) -> list[Word]:
        """Plane words of one chunk, flat in order ``[row, plane, word]``.

        Args:
            offset: 64-bit bytes from the first chunk.
            static_offset: Bytes to add.
        """
        loaded: list[Word] = []
        for pointers in self.pointers:
            for pointer in pointers:
                at = pointer + offset
                loaded += emit.load(at, self.words, offset=static_offset, stream=True)
        return loaded

    def last_offset(self, chunk: Word) -> Word:
        """Like a chunk's offset, for a chunk that may reach past the row's end.

        Lanes past the end read the row's last words; their activations are zero.
        """
        wanted = chunk * (4 * self.words) + self.first_word
        clamped = wanted.minimum(self.geometry.words_per_row - self.words)
        return (clamped - self.first_word).wide_signed() * 4

    def weights(self, chunk: Sequence[Word], index: int) -> list[list[list[list[Word]]]]:
        """Entries of one word of both rows as bytes: ``[part][row][r][h]``.

        Part 0 is the entry or its low byte; part 1, above six bits, its high byte.
        """
        rows = []
        for row in range(2):
            start = row * self.bits * self.words + index
            planes = list(chunk[start : start + self.bits * self.words : self.words])
            if self.in_registers:
                rows.append([self.register_entries(planes, row)])
            else:
                rows.append(self._look_up_shared(planes, row))
        return [[parts[part] for parts in rows] for part in range(len(rows[0]))]

    def register_entries(self, planes: Sequence[Word], row: int) -> list[list[Word]]:
        """Entries of one word out of registers, four bytes a word: ``[r][h]``."""
        return look_up_bytes(emit, planes, self.tables[row])

    def shared_entries(self, planes: Sequence[Word], row: int) -> list[list[list[Word]]]:
        """Entries of one word out of shared memory, 16 bits each: ``[r][h][c]``."""
        codes = byte_codes(emit, planes)
        offset = row * (self.stride << self.bits)
        entries = []
        for r in range(4):
            halves = []
            for half in range(2):
                values = []
                for c in range(4):
                    byte = 2 * half + c // 2
                    at = emit.byte_address(codes[r + 4 * (c % 2)], byte, self.stride, self.shared)
                    values.append(emit.load_shared(at, offset, self.stride // 32))
                halves.append(values)
            entries.append(halves)
        return entries

    def _look_up_shared(self, planes: Sequence[Word], row: int) -> list[list[list[Word]]]:
        parts: list[list[list[Word]]] = [[], []]
        for halves in self.shared_entries(planes, row):
            packed = ([], [])
            for values in halves:
                left = emit.permute(values[0], values[1], 0x5410)
                right = emit.permute(values[2], values[3], 0x5410)
                packed[0].append(emit.permute(left, right, 0x6420))
                if self.bits > 6:
                    packed[1].append(emit.permute(left, right, 0x7531))
            parts[0].append(packed[0])
            parts[1].append(packed[1])
        return parts if self.bits > 6 else parts[:1]
