"""Reads planes and tables of a warp's sixteen rows and turns them into fragments of weights.

Lane l of a warp holds columns of rows ``l // 4`` of two groups of eight: of a chunk of
``4 * words`` words, lane l takes the ``words`` words that start at ``words * (l % 4)``. The order
of columns within a product is free, so activations are permuted to match (activations.py) and no
lane ever needs another's bits.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from pallas_kernels.bitplane_matmul import emit
from pallas_kernels.bitplane_matmul.emit import Word
from pallas_kernels.bitplane_matmul.lookup import byte_codes, look_up_bytes

REGISTER_BITS = 5
"""Widest code whose table is kept in registers; wider tables go to shared memory."""


def keeps_in_registers(bits: int) -> bool:
    """Whether a table of this width is kept in registers."""
    return bits <= REGISTER_BITS


COPY_BYTES = 4
"""Bytes of an entry in shared memory: 16 bits for each of a lane's two rows."""


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


def lanes_per_copy(bits: int, most_bytes: int) -> int:
    """Lanes that read the same copy of a table, so that a warp's tables fit in ``most_bytes``.

    With one, each lane has a bank of its own; with two or four, up to so many meet in a bank.
    """
    return max(1, ((32 * COPY_BYTES) << bits) // most_bytes)


def shared_table_bytes(bits: int, most_bytes: int) -> int:
    """Shared memory that a warp's sixteen rows need at a width."""
    lanes = lanes_per_copy(bits, most_bytes)
    return 0 if keeps_in_registers(bits) else (32 // lanes * COPY_BYTES) << bits


@dataclass(frozen=True)
class Arrays:
    """Addresses of the arrays that describe the weights."""

    pool: Word
    table_pool: Word
    planes: Word
    tables: Word


@dataclass(frozen=True)
class RowTile:
    """Sixteen rows of a matrix: sixteen outputs, or eight gates and the rows that they gate.

    Attributes:
        columns: Outputs of the whole matrix.
        gated: Whether the first half of the rows gates the second.
        index: Which sixteen.
    """

    columns: int
    gated: bool
    index: Word

    def outputs(self, group: Word) -> list[Word]:
        """Output columns of the lanes of a group of four; they may lie past the end."""
        if self.gated:
            return [self.index * 8 + group]
        return [self.index * 16 + group, self.index * 16 + group + 8]

    def rows(self, group: Word) -> list[Word]:
        """Both rows of the lanes of a group of four."""
        rows = [output.minimum(self.columns - 1) for output in self.outputs(group)]
        return [rows[0], rows[0] + self.columns] if self.gated else rows


class RowReader:
    """The two rows of a lane at one width, which is known when compiling."""

    def __init__(
        self,
        geometry: Geometry,
        arrays: Arrays,
        bits: int,
        expert: Word,
        rows_of: Callable[[Word], list[Word]],
        words: int,
        shared: Word,
        most_table_bytes: int,
    ):
        self.geometry, self.arrays, self.bits, self.words = geometry, arrays, bits, words
        # with many planes the other half of 128 bytes would leave L2 before it is wanted
        self.fetch = 128 if bits <= 6 else 64
        self.expert = expert
        lane = emit.thread() & 31
        self.rows = rows = rows_of(lane >> 2)
        self.first_word = (lane & 3) * words
        self.bases = [self._base(row) for row in rows]
        self.pages = [self._pages(row) for row in rows]
        self.in_registers = keeps_in_registers(bits)
        if self.in_registers:
            size = geometry.table_entry_words(bits)
            self.tables = [emit.load_words(self._table(row), size) for row in rows]
        else:
            lanes = lanes_per_copy(bits, most_table_bytes)
            self.copies = 4 // lanes  # of each row's table
            self.stride = 8 * COPY_BYTES * self.copies
            self.shared = shared + (lane // lanes) * COPY_BYTES
            self._fill_shared(shared, rows_of(lane & 7), lane)

    def _base(self, row: Word) -> Word:
        """Where a row's words for this lane would lie in page 0."""
        layout = self.geometry
        inner = (row % layout.rows_per_page) * layout.words_per_row + self.first_word
        return self.arrays.pool + inner.wide() * 4

    def _pages(self, row: Word) -> list[Word]:
        """Pages of a row's planes: half the registers of addresses."""
        layout = self.geometry
        entry = self.expert * (layout.planes * layout.plane_pages) + row // layout.rows_per_page
        return [
            emit.load(self.arrays.planes + (entry + plane * layout.plane_pages).wide() * 4)[0]
            for plane in range(self.bits)
        ]

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

    def _fill_shared(self, shared: Word, rows: Sequence[Word], lane: Word) -> None:
        """Copies the warp's tables to shared memory.

        Lanes l, l + 8, l + 16 and l + 24 share the work of rows ``l`` of both groups: lanes that
        store together write for different rows, so they do not meet in a bank.
        """
        size = self.geometry.table_entry_words(self.bits)
        per_word = (1 << self.bits) // size
        part = lane >> 3
        sources = [self._table(row) + part.wide() * size for row in rows]
        words = [
            [
                word
                for start in range(0, size // 4, 4)
                for word in emit.load(at, 4, offset=4 * start)
            ]
            for at in sources
        ]
        target = shared + part * (self.stride << (self.bits - 2))
        target = target + (lane & 7) * (self.copies * COPY_BYTES)
        emit.sync_warp()
        for index, (first, second) in enumerate(zip(*words, strict=True)):
            for place in range(per_word):
                # 16 bits as they are; bytes extended with their signs
                selector = (0x5410, 0x7632)[place] if per_word == 2 else 0xC480 + 0x1111 * place
                entries = self._stored(emit.permute(first, second, selector))
                offset = (index * per_word + place) * self.stride
                emit.store_shared(target, [entries] * self.copies, offset)
        emit.sync_warp()

    def _stored(self, entries: Word) -> Word:
        """The form in which two entries, an int16 of each row, are kept in shared memory."""
        return entries

    def load(self, offset: Word, static_offset: int = 0) -> list[Word]:
        """Plane words of one chunk, flat in order ``[row, plane, word]``.

        Args:
            offset: 64-bit bytes from the first chunk.
            static_offset: Bytes to add.
        """
        loaded: list[Word] = []
        page_bytes = 4 * self.geometry.plane_page_words
        for base, pages in zip(self.bases, self.pages, strict=True):
            start = base + offset
            for page in pages:
                at = emit.page_address(start, page, page_bytes)
                loaded += emit.load(at, self.words, offset=static_offset, fetch=self.fetch)
        return loaded

    def last_offset(self, chunk: Word) -> Word:
        """Like a chunk's offset, for a chunk that may reach past the row's end.

        Lanes past the end read the row's last words; their activations are zero.
        """
        wanted = chunk * (4 * self.words) + self.first_word
        clamped = wanted.minimum(self.geometry.words_per_row - self.words)
        return (clamped - self.first_word).wide_signed() * 4

    def planes_of(self, chunk: Sequence[Word], row: int, index: int) -> list[Word]:
        """Plane words of one of a row's words, out of a loaded chunk."""
        start = row * self.bits * self.words + index
        return list(chunk[start : start + self.bits * self.words : self.words])

    def weights(self, chunk: Sequence[Word], index: int) -> list[list[list[list[Word]]]]:
        """Entries of one word of both rows as bytes: ``[part][row][r][h]``.

        Part 0 is the entry or its low byte; part 1, above six bits, its high byte.
        """
        rows = []
        for row in range(2):
            planes = self.planes_of(chunk, row, index)
            if self.in_registers:
                rows.append([list(self.register_entries(planes, row))])
            else:
                rows.append(self._look_up_shared(planes, row))
        return [[parts[part] for parts in rows] for part in range(len(rows[0]))]

    def register_entries(self, planes: Sequence[Word], row: int) -> Iterator[list[Word]]:
        """Entries of one word out of registers, four bytes a word: for each r, ``[h]``."""
        return look_up_bytes(emit, planes, self.tables[row])

    def shared_entries(self, planes: Sequence[Word], row: int) -> Iterator[list[list[Word]]]:
        """Entries of one word out of shared memory, 16 bits each: for each r, ``[h][c]``."""
        codes = byte_codes(emit, planes)
        for r in range(4):
            halves = []
            for half in range(2):
                values = []
                for c in range(4):
                    byte = 2 * half + c // 2
                    at = emit.byte_address(codes[r + 4 * (c % 2)], byte, self.stride, self.shared)
                    values.append(emit.load_shared(at, 2 * row))
                halves.append(values)
            yield halves

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
