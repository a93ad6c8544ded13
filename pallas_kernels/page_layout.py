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
        most_tokens: A page holds no more tokens, a power of two; None for as many as fit.
    """

    kv_heads: int
    head_dim: int
    dtype: str
    page_words: int
    most_tokens: int | None = None

    def __post_init__(self):
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even, got {self.head_dim}")
        _check_cache_page(self.dtype, self.words_per_token, self.page_words)

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
        fitting = _tokens_per_page(self.words_per_token, self.page_words)
        return fitting if self.most_tokens is None else min(fitting, self.most_tokens)


LATENT_WORD_MULTIPLE = 4
"""Each part of a token's latents begins at 16 bytes, so that kernels load 16 bytes at once."""


@dataclass(frozen=True)
class LatentLayout:
    """Pages of latents of one layer: ``[token, words]``, a row a token.

    A row has up to three parts: the latent that keys are rebuilt from (before RoPE), that of
    values, and a rotated key that all heads share (MLA). A part of n numbers takes
    ``n / 2`` words in bfloat16 (n in float32), rounded up to a multiple of 4; in bfloat16, with w
    words, word i holds numbers i (low half) and w + i (high half). What rounding adds is zero.

    Attributes:
        k_rank: Rank of the keys' latent.
        v_rank: Rank of the values' latent; 0 where values are rebuilt from the keys' (MLA).
        shared_dim: Dimensions of the shared key; 0 if there is none.
        dtype: ``"bfloat16"`` or ``"float32"``.
        page_words: uint32 words a page.
    """

    k_rank: int
    v_rank: int
    shared_dim: int
    dtype: str
    page_words: int

    def __post_init__(self):
        if self.k_rank < 1 or self.v_rank < 0 or self.shared_dim < 0:
            raise ValueError(f"ranks must be positive: {self}")
        _check_cache_page(self.dtype, self.words_per_token, self.page_words)

    def part_words(self, numbers: int) -> int:
        """Words of a part of so many numbers."""
        per_word = 2 if self.dtype == "bfloat16" else 1
        return -(-numbers // (per_word * LATENT_WORD_MULTIPLE)) * LATENT_WORD_MULTIPLE

    @property
    def parts(self) -> tuple[int, int, int]:
        """Numbers of each part: keys' latent, values' latent, shared key."""
        return self.k_rank, self.v_rank, self.shared_dim

    @property
    def k_words(self) -> int:
        """Words of the keys' latent, the first part."""
        return self.part_words(self.k_rank)

    @property
    def value_part(self) -> tuple[int, int]:
        """Where the latent of values begins in a row, in words, and its rank."""
        return (self.k_words, self.v_rank) if self.v_rank else (0, self.k_rank)

    @property
    def shared_start(self) -> int:
        """Where the shared key begins in a row, in words."""
        return self.k_words + self.part_words(self.v_rank)

    @property
    def words_per_token(self) -> int:
        """Words of one token."""
        return sum(self.part_words(part) for part in self.parts)

    @property
    def tokens_per_page(self) -> int:
        """Tokens a page: the largest power of two that fits."""
        return _tokens_per_page(self.words_per_token, self.page_words)


def _check_cache_page(dtype: str, token_words: int, page_words: int) -> None:
    check_page_words(page_words)
    if dtype not in ("bfloat16", "float32"):
        raise ValueError(f"keys and values are bfloat16 or float32, not {dtype}")
    if token_words > page_words:
        raise ValueError(
            f"one token's keys and values ({4 * token_words} bytes) do not fit a page of "
            f"{4 * page_words} bytes"
        )


def _tokens_per_page(token_words: int, page_words: int) -> int:
    return 1 << ((page_words // token_words).bit_length() - 1)
