"""Where bits, tables, keys and values lie inside the pages of the pool.

The pool is ``uint32[pages, page_words]``. A page id is only a number: what a page holds follows
from the layout of whoever owns it. All layouts are frozen, hashable and computed from shapes, so
they are static arguments of a jitted step. Page 0 is never handed out; padding is written there.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pallas_kernels.bitplanes import WORD_BITS

PAGE_WORD_MULTIPLE = 128
"""A table of 256 16-bit entries is 128 words; pages hold whole tables only if they divide."""


def check_page_words(page_words: int) -> None:
    """Raises ValueError unless pages hold whole tables (multiples of 512 bytes)."""
    if page_words <= 0 or page_words % PAGE_WORD_MULTIPLE:
        raise ValueError(f"a page must be a positive multiple of 512 bytes, got {4 * page_words}")


@dataclass(frozen=True)
class MatrixLayout:
    """Pages of one any-precision matrix (one expert's gate_up or down projection).

    Each plane owns ``plane_pages`` pages of whole rows: row n is in page ``n // rows_per_page``. A
    table for width b owns ``table_pages(b)`` pages: first the entries (int8 up to 6 bits, int16
    above; little-endian in words), then one float32 scale a row.

    Attributes:
        rows: Output features N.
        columns: Input features K, a multiple of 32.
        rows_per_table: Rows that share a table of entries, G; divides ``rows``.
        seed_bits: Lowest width.
        parent_bits: Highest width; also the number of planes.
        page_words: uint32 words a page.
    """

    rows: int
    columns: int
    rows_per_table: int
    seed_bits: int
    parent_bits: int
    page_words: int

    def __post_init__(self):
        check_page_words(self.page_words)
        if self.columns % WORD_BITS or self.rows % self.rows_per_table:
            raise ValueError(f"columns must divide by 32 and rows by rows_per_table: {self}")
        if self.words_per_row > self.page_words:
            raise ValueError(
                f"a row of {self.columns} bits does not fit a page of {4 * self.page_words} bytes"
            )

    @property
    def widths(self) -> tuple[int, ...]:
        """All widths, lowest first."""
        return tuple(range(self.seed_bits, self.parent_bits + 1))

    @property
    def words_per_row(self) -> int:
        """Words of one row of one plane."""
        return self.columns // WORD_BITS

    @cached_property
    def plane_pages(self) -> int:
        """Pages of one plane."""
        return -(-self.rows // (self.page_words // self.words_per_row))

    @cached_property
    def rows_per_page(self) -> int:
        """Rows a page, spread evenly and rounded up to the largest power of two that fits.

        Even rows keep a kernel's row tile (8, 16, 32, ...) inside one page.
        """
        most = self.page_words // self.words_per_row
        even = -(-self.rows // self.plane_pages)
        for multiple in (128, 64, 32, 16, 8, 4, 2):
            rounded = -(-even // multiple) * multiple
            if rounded <= most and rounded * (self.plane_pages - 1) < self.rows:
                return rounded
        return even

    def entry_bytes(self, bits: int) -> int:
        """Bytes of a table entry at a width: 8-bit entries cost accuracy above 6 bits."""
        return 1 if bits <= 6 else 2

    def table_words(self, bits: int) -> int:
        """Words of the entries and scales at a width, before rounding to pages."""
        entries = (self.rows // self.rows_per_table) << bits
        return -(-entries * self.entry_bytes(bits) // 4) + self.rows

    def table_pages(self, bits: int) -> int:
        """Pages of the table at a width."""
        return -(-self.table_words(bits) // self.page_words)

    @property
    def most_table_pages(self) -> int:
        """Pages of the largest table: the fixed length of a table's page list."""
        return max(self.table_pages(bits) for bits in self.widths)

    def pages(self, bits: int) -> int:
        """Pages that a matrix holds when committed at a width: its planes and its one table."""
        return bits * self.plane_pages + self.table_pages(bits)

    def plane_images(self, planes: np.ndarray) -> np.ndarray:
        """Pages of planes, ready to be written to the pool.

        Args:
            planes: uint32 ``[P, N, W]``.

        Returns:
            uint32 ``[P, plane_pages, page_words]``; unused words are zero.
        """
        count = planes.shape[0]
        used = self.rows_per_page * self.words_per_row
        padded = np.zeros((count, self.plane_pages * self.rows_per_page, self.words_per_row), "u4")
        padded[:, : self.rows] = planes
        images = np.zeros((count, self.plane_pages, self.page_words), "u4")
        images[:, :, :used] = padded.reshape(count, self.plane_pages, used)
        return images

    def table_image(self, table: np.ndarray, scale: np.ndarray) -> np.ndarray:
        """Pages of one width's table: uint32 ``[table_pages, page_words]``.

        Args:
            table: int8 or int16 ``[N / G, 2**b]``.
            scale: float32 ``[N]``.
        """
        entries = np.ascontiguousarray(table).reshape(-1)
        spare = -entries.nbytes % 4 // entries.itemsize
        words = np.concatenate(
            [np.pad(entries, (0, spare)).view("u4"), np.asarray(scale, np.float32).view("u4")]
        )
        return np.pad(words, (0, -len(words) % self.page_words)).reshape(-1, self.page_words)


@dataclass(frozen=True)
class KvLayout:
    """Pages of keys and values of one layer: ``[key or value, kv head, token, words]`` in a page.

    In bfloat16 a word holds dimensions d (low half) and d + H/2 (high half) of a head, so a shift
    and a mask unpack two bfloat16, and RoPE's half-split pairs sit together. In float32 a word is
    one dimension.

    Attributes:
        kv_heads: Key and value heads K.
        head_dim: Dimensions a head H, even.
        dtype: ``"bfloat16"`` or ``"float32"``.
        page_words: uint32 words a page.
    """

    kv_heads: int
    head_dim: int
    dtype: str
    page_words: int

    def __post_init__(self):
        check_page_words(self.page_words)
        if self.dtype not in ("bfloat16", "float32"):
            raise ValueError(f"keys and values are bfloat16 or float32, not {self.dtype}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even, got {self.head_dim}")
        if self.words_per_token > self.page_words:
            raise ValueError(
                f"one token's keys and values ({4 * self.words_per_token} bytes) do not fit a page "
                f"of {4 * self.page_words} bytes"
            )

    @property
    def words_per_head(self) -> int:
        """Words of one head of one token."""
        return self.head_dim // 2 if self.dtype == "bfloat16" else self.head_dim

    @property
    def words_per_token(self) -> int:
        """Words of one token's keys and values."""
        return 2 * self.kv_heads * self.words_per_head

    @property
    def tokens_per_page(self) -> int:
        """Tokens a page: the largest power of two that fits (a kernel's tile must divide it)."""
        return 1 << ((self.page_words // self.words_per_token).bit_length() - 1)
