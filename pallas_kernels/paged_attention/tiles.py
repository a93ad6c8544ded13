"""What the decode and the prefill kernel share: reading tiles of heads, and the online softmax.

A word of a bfloat16 page holds dimensions d and d + H/2 of a head. A tile of words therefore
becomes two *parts* (low and high halves) that are never joined: scores are the sum of a product a
part, and each part of the values gives its own part of the result. A float32 page has one part.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.page_layout import KvLayout

HIDDEN = -1e30
"""Score of a key that a query must not see."""
LOWEST = -1e29
"""First running maximum: far above ``HIDDEN``, so that hidden keys weigh 0 with nothing seen."""
LOG2_E = math.log2(math.e)


@dataclass(frozen=True)
class Scores:
    """How products of queries and keys become scores, in base-2 units for ``exp2``."""

    scale: float
    soft_cap: float | None

    def __call__(self, products: jax.Array) -> jax.Array:
        """Scales float32 products."""
        if self.soft_cap is None:
            return products * (self.scale * LOG2_E)
        return jnp.tanh(products * (self.scale / self.soft_cap)) * (self.soft_cap * LOG2_E)


def split_words(words: jax.Array, parts: int, compute: jnp.dtype) -> list[jax.Array]:
    """Turns words into their one or two parts, in the compute dtype."""
    if parts == 1:
        return [lax.bitcast_convert_type(words, jnp.float32)]
    if compute == jnp.bfloat16:
        halves = words.astype(jnp.uint16), (words >> np.uint32(16)).astype(jnp.uint16)
        return [lax.bitcast_convert_type(half, jnp.bfloat16) for half in halves]
    halves = words << np.uint32(16), words & np.uint32(0xFFFF0000)
    return [lax.bitcast_convert_type(half, jnp.float32) for half in halves]


@dataclass(frozen=True)
class HeadTile:
    """Tiles of one kv head's keys or values out of pages.

    Attributes:
        layout: Layout of the pages.
        compute: Dtype of the parts, at least as wide as the pages'.
    """

    layout: KvLayout
    compute: jnp.dtype

    @property
    def parts(self) -> int:
        """Parts a head: 2 in bfloat16 pages, 1 in float32 pages."""
        return self.layout.head_dim // self.layout.words_per_head

    @property
    def columns(self) -> int:
        """Words a head, rounded up to the power of two that Triton wants."""
        return pl.next_power_of_2(self.layout.words_per_head)

    def column_index(self, rows: int) -> jax.Array:
        """int32 ``[rows, columns]``: the word of a head."""
        return lax.broadcasted_iota(jnp.int32, (rows, self.columns), 1)

    def mask(self, rows: jax.Array) -> jax.Array:
        """Which words exist, given which rows do: bool ``[rows, columns]``."""
        wide = lax.broadcast_in_dim(rows, (rows.shape[0], self.columns), (0,))
        if self.columns == self.layout.words_per_head:
            return wide
        return wide & (self.column_index(rows.shape[0]) < self.layout.words_per_head)

    def load_words(self, pool_ref, page, token, head, *, value: bool, present) -> jax.Array:
        """uint32 ``[rows, columns]``; zero where ``present`` is False, whatever the pages hold.

        Args:
            pool_ref: The pool.
            page: int32 ``[rows]``, the page of each row.
            token: int32 ``[rows]``, the position of each row's token.
            head: The kv head.
            value: Values instead of keys.
            present: bool ``[rows]``.
        """
        rows = page.shape[0]
        layout, shape = self.layout, (rows, self.columns)
        run = head + layout.kv_heads if value else head
        row = run * layout.tokens_per_page + (token & (layout.tokens_per_page - 1))
        start = lax.broadcast_in_dim(row * layout.words_per_head, shape, (0,))
        index = (lax.broadcast_in_dim(page, shape, (0,)), start + self.column_index(rows))
        return plt.load(pool_ref.at[index], mask=self.mask(present), other=np.uint32(0))

    def load_parts(self, ref, lead: tuple, rows: jax.Array) -> list[jax.Array]:
        """Reads the parts of heads in a plain array ``[..., H]``.

        Args:
            ref: The array.
            lead: Index of all axes but the last: scalars or int32 ``[rows]``.
            rows: bool ``[rows]``; others read as zero.
        """
        mask = self.mask(rows)
        return [
            plt.load(ref.at[index], mask=mask, other=0).astype(self.compute)
            for index in self._part_indices(lead, rows.shape[0])
        ]

    def store_parts(self, ref, lead: tuple, rows: jax.Array, parts: list[jax.Array]) -> None:
        """Writes parts where :meth:`load_parts` would read them, in the array's dtype."""
        mask = self.mask(rows)
        for index, part in zip(self._part_indices(lead, rows.shape[0]), parts, strict=True):
            plt.store(ref.at[index], part.astype(ref.dtype), mask=mask)

    def _part_indices(self, lead: tuple, rows: int) -> list[tuple]:
        shape = (rows, self.columns)
        lead = tuple(
            lax.broadcast_in_dim(i, shape, (0,)) if jnp.ndim(i) else i  # rows, or one for all
            for i in lead
        )
        column = self.column_index(rows)
        return [(*lead, column + part * self.layout.words_per_head) for part in range(self.parts)]


def dot(a: jax.Array, b: jax.Array, *, transposed: bool = False) -> jax.Array:
    """``a @ b`` or ``a @ b.T`` on the tensor cores; float32 operands stay float32."""
    return plt.dot(a, b, trans_b=transposed, precision=lax.Precision.HIGHEST)


@dataclass(frozen=True)
class SoftmaxState:
    """Running softmax of R rows: maximum and total ``[R]``, and parts of the weighted values."""

    maximum: jax.Array
    total: jax.Array
    values: list[jax.Array]

    @classmethod
    def start(cls, rows: int, columns: int, parts: int) -> "SoftmaxState":
        """Nothing seen yet."""
        return cls(
            jnp.full((rows,), LOWEST, jnp.float32),
            jnp.zeros((rows,), jnp.float32),
            [jnp.zeros((rows, columns), jnp.float32) for _ in range(parts)],
        )

    def add(self, scores: jax.Array, values: list[jax.Array]) -> "SoftmaxState":
        """Adds keys with float32 scores ``[R, tile]`` and value parts ``[tile, columns]``."""
        maximum = jnp.maximum(self.maximum, jnp.max(scores, axis=1))
        weights = jnp.exp2(scores - maximum[:, None])
        old = jnp.exp2(self.maximum - maximum)
        return SoftmaxState(
            maximum,
            self.total * old + jnp.sum(weights, axis=1),
            [
                mine * old[:, None] + dot(weights.astype(part.dtype), part)
                for mine, part in zip(self.values, values, strict=True)
            ],
        )


jax.tree_util.register_dataclass(SoftmaxState)


@dataclass(frozen=True)
class KeyTiles:
    """The keys and values that one program reads, in tiles of tokens.

    Attributes:
        heads: How a head's words are read.
        pool_ref: The pool.
        pages_ref: int32 ``[B, blocks]``.
        sequence: Row of ``pages_ref``.
        head: The kv head.
        size: Tokens a tile.
        first: First position that any query of the program sees.
        last: Last position that any query of the program sees.
    """

    heads: HeadTile
    pool_ref: Any
    pages_ref: Any
    sequence: jax.Array
    head: jax.Array
    size: int
    first: jax.Array
    last: jax.Array

    def tokens(self, index: jax.Array | int) -> tuple[jax.Array, jax.Array]:
        """Positions of a tile, and which of them are read."""
        token = index * self.size + lax.iota(jnp.int32, self.size)
        return token, (token >= self.first) & (token <= self.last)

    def pages(self, index: jax.Array | int) -> jax.Array:
        """Pages of a tile's tokens; 0 for those that are not read."""
        token, present = self.tokens(index)
        block = lax.div(token, self.heads.layout.tokens_per_page)
        return plt.load(self.pages_ref.at[self.sequence, block], mask=present, other=0)

    def parts(self, index: jax.Array, page: jax.Array, *, value: bool) -> list[jax.Array]:
        """Parts of a tile's keys or values."""
        token, present = self.tokens(index)
        words = self.heads.load_words(
            self.pool_ref, page, token, self.head, value=value, present=present
        )
        return split_words(words, self.heads.parts, self.heads.compute)


def attend(
    queries: list[jax.Array],
    tiles: KeyTiles,
    begin: jax.Array | int,
    end: jax.Array,
    scores: Scores,
    sees: Callable[[jax.Array], jax.Array],
) -> SoftmaxState:
    """Attention of R rows of queries over the tiles ``begin`` to ``end``.

    The pages of a tile are read while the tile before is multiplied and carried to it: the
    compiler's pipeline then sees loads of keys and values that wait for no other load.

    Args:
        queries: Parts ``[R, columns]``.
        tiles: The keys and values.
        begin: First tile.
        end: End of the tiles.
        scores: How products become scores.
        sees: Which of a tile's positions ``[tile]`` each row may see, ``[R, tile]``.
    """

    def step(index, carry):
        page, state = carry
        keys = tiles.parts(index, page, value=False)
        values = tiles.parts(index, page, value=True)
        products = [dot(q, k, transposed=True) for q, k in zip(queries, keys, strict=True)]
        score = scores(sum(products[1:], products[0]))
        seen = sees(tiles.tokens(index)[0])
        return tiles.pages(index + 1), state.add(jnp.where(seen, score, HIDDEN), values)

    rows, columns = queries[0].shape
    start = (tiles.pages(begin), SoftmaxState.start(rows, columns, len(queries)))
    return lax.fori_loop(begin, end, step, start)[1]
