"""Decode: one query a sequence, its keys split over programs, then one combination.

A program owns one kv head, all its query heads and one range of a sequence's tokens, and leaves an
unnormalised result with its softmax maximum and total. A split covers the same number of tiles in
all of a sequence's programs and depends on the sequence's own length: programs past its end return
at once, and the combination reads only the splits that were written.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32, UInt32

from pallas_kernels.implementation import triton_call
from pallas_kernels.page_layout import KvLayout
from pallas_kernels.paged_attention.configs import MOST_SPLITS, DecodeConfig
from pallas_kernels.paged_attention.reference import compute_dtype
from pallas_kernels.paged_attention.tiles import LOWEST, HeadTile, KeyTiles, Scores, attend

LEAST_DOT_ROWS = 16
MOST_COLUMNS = 512


@dataclass(frozen=True)
class Splits:
    """How the tokens that a query sees are shared out; the same in both kernels.

    Attributes:
        count: Programs a kv head and sequence.
        tile: Tokens a step.
        least_tiles: A split has at least so many tiles.
        window: Last positions seen, or None.
    """

    count: int
    tile: int
    least_tiles: int
    window: int | None

    @classmethod
    def plan(cls, config: DecodeConfig, longest: int, lanes: int, window: int | None) -> "Splits":
        """Splits for sequences of at most ``longest`` tokens and ``lanes`` (sequence, head)."""
        if window is not None:
            longest = min(longest, window + config.tile)
        most = min(pl.cdiv(longest, config.split_tokens), MOST_SPLITS)
        wanted = pl.cdiv(config.programs, lanes)
        least_tiles = max(1, config.split_tokens // config.tile)
        return cls(max(1, min(most, wanted)), config.tile, least_tiles, window)

    def first(self, position: jax.Array) -> jax.Array:
        """The first position that a query sees."""
        return jnp.maximum(position + 1 - self.window, 0) if self.window else position * 0

    def tiles(self, position: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """First tile, end of the tiles, and tiles a split, of a query at a position.

        A negative position has no tiles.
        """
        first = lax.div(self.first(position), self.tile)
        end = lax.div(position + self.tile, self.tile)
        each = lax.div(end - first + (self.count - 1), self.count)
        return first, end, jnp.maximum(each, self.least_tiles)


def _decode_body(
    q_ref,  # [B, N, H]
    pool_ref,  # uint32 [pages, words]
    pages_ref,  # int32 [B, blocks]
    positions_ref,  # int32 [B]
    values_ref,  # float32 [B, N, splits, H]
    maxima_ref,  # float32 [B, N, splits]
    totals_ref,  # float32 [B, N, splits]
    *,
    heads: HeadTile,
    scores: Scores,
    splits: Splits,
    group: int,
):
    head, split, sequence = (pl.program_id(axis) for axis in range(3))
    position = positions_ref[sequence]
    first, end, each = splits.tiles(position)
    begin = first + split * each
    stop = jnp.minimum(begin + each, end)

    @pl.when(begin < stop)
    def _():
        rows = max(LEAST_DOT_ROWS, pl.next_power_of_2(group))
        row = head * group + lax.iota(jnp.int32, rows)
        kept = row < (head + 1) * group
        queries = heads.load_parts(q_ref, (sequence, row), kept)
        where = (sequence, head, splits.tile, splits.first(position), position)
        tiles = KeyTiles(heads, pool_ref, pages_ref, *where)

        def sees(token):
            seen = (token >= tiles.first) & (token <= tiles.last)
            return lax.broadcast_in_dim(seen, (rows, splits.tile), (1,))

        state = attend(queries, tiles, begin, stop, scores, sees)
        heads.store_parts(values_ref, (sequence, row, split), kept, state.values)
        plt.store(maxima_ref.at[sequence, row, split], state.maximum, mask=kept)
        plt.store(totals_ref.at[sequence, row, split], state.total, mask=kept)


def _combine_body(
    values_ref,  # float32 [B, N, splits, H]
    maxima_ref,  # float32 [B, N, splits]
    totals_ref,  # float32 [B, N, splits]
    positions_ref,  # int32 [B]
    out_ref,  # [B, N, H]
    *,
    splits: Splits,
    columns: int,
):
    head, sequence, chunk = (pl.program_id(axis) for axis in range(3))
    head_dim = out_ref.shape[2]
    first, end, each = splits.tiles(positions_ref[sequence])
    split = lax.iota(jnp.int32, pl.next_power_of_2(splits.count))
    written = split * each < end - first
    maxima = plt.load(maxima_ref.at[sequence, head, split], mask=written, other=LOWEST)
    totals = plt.load(totals_ref.at[sequence, head, split], mask=written, other=0.0)
    weights = jnp.exp2(maxima - jnp.max(maxima, axis=0))
    total = jnp.sum(totals * weights, axis=0)

    column = chunk * columns + lax.iota(jnp.int32, columns)
    shape = (split.shape[0], columns)
    row = lax.broadcast_in_dim(split, shape, (0,))
    wide = lax.broadcast_in_dim(column, shape, (1,))
    mask = lax.broadcast_in_dim(written, shape, (0,)) & (wide < head_dim)
    values = plt.load(values_ref.at[sequence, head, row, wide], mask=mask, other=0.0)
    out = jnp.sum(values * weights[:, None], axis=0) / jnp.where(total > 0, total, 1.0)
    plt.store(out_ref.at[sequence, head, column], out.astype(out_ref.dtype), mask=column < head_dim)


def combine(
    values: Float[Array, "B N splits H"],
    maxima: Float[Array, "B N splits"],
    totals: Float[Array, "B N splits"],
    positions: Int32[Array, " B"],
    splits: Splits,
    dtype: DTypeLike,
) -> Float[Array, "B N H"]:
    """Joins unnormalised results of splits; those that a query does not reach are not read."""
    batch, query_heads, _, head_dim = values.shape
    columns = min(pl.next_power_of_2(head_dim), MOST_COLUMNS)

    def body(*refs):
        _combine_body(*refs, splits=splits, columns=columns)

    return triton_call(
        body,
        jax.ShapeDtypeStruct((batch, query_heads, head_dim), dtype),
        name="paged_decode_combine",
        grid=(query_heads, batch, pl.cdiv(head_dim, columns)),
        warps=4,
        stages=1,
    )(values, maxima, totals, positions)


def paged_decode(
    q: Float[Array, "B N H"],
    pool: UInt32[Array, "pages words"],
    pages: Int32[Array, "B blocks"],
    positions: Int32[Array, " B"],
    *,
    layout: KvLayout,
    scores: Scores,
    window: int | None,
    config: DecodeConfig,
) -> Float[Array, "B N H"]:
    """Attention of one query a sequence; see :func:`pallas_kernels.paged_attention`."""
    batch, query_heads, head_dim = q.shape
    longest = pages.shape[1] * layout.tokens_per_page
    splits = Splits.plan(config, longest, batch * layout.kv_heads, window)

    def body(*refs):
        _decode_body(
            *refs,
            heads=HeadTile(layout, compute_dtype(q, layout)),
            scores=scores,
            splits=splits,
            group=query_heads // layout.kv_heads,
        )

    partial = (batch, query_heads, splits.count)
    values, maxima, totals = triton_call(
        body,
        [
            jax.ShapeDtypeStruct((*partial, head_dim), jnp.float32),
            jax.ShapeDtypeStruct(partial, jnp.float32),
            jax.ShapeDtypeStruct(partial, jnp.float32),
        ],
        name="paged_decode",
        grid=(layout.kv_heads, splits.count, batch),
        warps=config.warps,
        stages=config.stages,
    )(q, pool, pages, positions)
    return combine(values, maxima, totals, positions, splits, q.dtype)
