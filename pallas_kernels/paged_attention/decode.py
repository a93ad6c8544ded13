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
from jaxtyping import Array, Float, Int32, UInt32

from pallas_kernels.implementation import triton_call
from pallas_kernels.page_layout import KvLayout
from pallas_kernels.paged_attention.configs import MOST_SPLITS, DecodeConfig
from pallas_kernels.paged_attention.reference import compute_dtype
from pallas_kernels.paged_attention.tiles import (
    HIDDEN,
    LOWEST,
    HeadTile,
    Scores,
    SoftmaxState,
    dot,
)

LEAST_DOT_ROWS = 16


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
    lanes: bool,
):
    head, split, sequence = (pl.program_id(axis) for axis in range(3))
    position = positions_ref[sequence]
    first, end, each = splits.tiles(position)
    begin = first + split * each
    stop = jnp.minimum(begin + each, end)
    tile = splits.tile

    def load(index):
        token = index * tile + lax.iota(jnp.int32, tile)
        present = (token >= splits.first(position)) & (token <= position)
        block = lax.div(token, heads.layout.tokens_per_page)
        page = plt.load(pages_ref.at[sequence, block], mask=present, other=0)
        keys, values = (
            heads.load_words(pool_ref, page, token, head, value=value, present=present)
            for value in (False, True)
        )
        return heads.split(keys), heads.split(values), present

    def finish(rows: int, start, state: SoftmaxState):
        row = start + lax.iota(jnp.int32, rows)
        kept = row < (head + 1) * group
        heads.store_parts(values_ref, (sequence, row, split), kept, state.values)
        plt.store(maxima_ref.at[sequence, row, split], state.maximum, mask=kept)
        plt.store(totals_ref.at[sequence, row, split], state.total, mask=kept)

    def on_tensor_cores():
        rows = max(LEAST_DOT_ROWS, pl.next_power_of_2(group))
        row = head * group + lax.iota(jnp.int32, rows)
        queries = heads.load_parts(q_ref, (sequence, row), row < (head + 1) * group)

        def step(index, state):
            keys, values, present = load(index)
            products = [dot(q, k, transposed=True) for q, k in zip(queries, keys, strict=True)]
            seen = lax.broadcast_in_dim(present, (rows, tile), (1,))
            return state.add(
                jnp.where(seen, scores(sum(products[1:], products[0])), HIDDEN), values
            )

        state = SoftmaxState.start(rows, heads.columns, heads.parts)
        finish(rows, head * group, lax.fori_loop(begin, stop, step, state))

    def on_lanes():
        one = jnp.full((1,), True)
        queries = [
            heads.load_parts(q_ref, (sequence, jnp.full((1,), head * group + i)), one)
            for i in range(group)
        ]

        def step(index, states):
            keys, values, present = load(index)
            return [
                _add_lanes(state, scores, q, keys, values, present)
                for state, q in zip(states, queries, strict=True)
            ]

        start = [SoftmaxState.start(tile, heads.columns, heads.parts)] * group
        states = lax.fori_loop(begin, stop, step, start)
        for i, state in enumerate(states):
            finish(1, head * group + i, _join_lanes(state))

    pl.when(begin < stop)(on_lanes if lanes else on_tensor_cores)


def _add_lanes(state: SoftmaxState, scores: Scores, q, keys, values, present) -> SoftmaxState:
    """Adds one key to each row's own softmax, for one query: no row waits for another."""
    products = [jnp.sum(k * part, axis=1) for k, part in zip(keys, q, strict=True)]
    score = jnp.where(present, scores(sum(products[1:], products[0])), HIDDEN)
    maximum = jnp.maximum(state.maximum, score)
    old, weight = jnp.exp2(state.maximum - maximum), jnp.exp2(score - maximum)
    return SoftmaxState(
        maximum,
        state.total * old + weight,
        [
            mine * old[:, None] + part * weight[:, None]
            for mine, part in zip(state.values, values, strict=True)
        ],
    )


def _join_lanes(state: SoftmaxState) -> SoftmaxState:
    """Joins the rows' softmaxes into one."""
    maximum = jnp.max(state.maximum, axis=0, keepdims=True)
    weight = jnp.exp2(state.maximum - maximum)
    return SoftmaxState(
        maximum,
        jnp.sum(state.total * weight, axis=0, keepdims=True),
        [jnp.sum(part * weight[:, None], axis=0, keepdims=True) for part in state.values],
    )


def _combine_body(
    values_ref,  # float32 [B, N, splits, H]
    maxima_ref,  # float32 [B, N, splits]
    totals_ref,  # float32 [B, N, splits]
    positions_ref,  # int32 [B]
    out_ref,  # [B, N, H]
    *,
    splits: Splits,
    head_dim: int,
):
    head, sequence = pl.program_id(0), pl.program_id(1)
    first, end, each = splits.tiles(positions_ref[sequence])
    split = lax.iota(jnp.int32, pl.next_power_of_2(splits.count))
    written = split * each < end - first
    maxima = plt.load(maxima_ref.at[sequence, head, split], mask=written, other=LOWEST)
    totals = plt.load(totals_ref.at[sequence, head, split], mask=written, other=0.0)
    weights = jnp.exp2(maxima - jnp.max(maxima, axis=0))
    total = jnp.sum(totals * weights, axis=0)

    column = lax.iota(jnp.int32, pl.next_power_of_2(head_dim))
    shape = (split.shape[0], column.shape[0])
    row = lax.broadcast_in_dim(split, shape, (0,))
    columns = lax.broadcast_in_dim(column, shape, (1,))
    mask = lax.broadcast_in_dim(written, shape, (0,)) & (columns < head_dim)
    values = plt.load(values_ref.at[sequence, head, row, columns], mask=mask, other=0.0)
    out = jnp.sum(values * weights[:, None], axis=0) / jnp.where(total > 0, total, 1.0)
    plt.store(out_ref.at[sequence, head, column], out.astype(out_ref.dtype), mask=column < head_dim)


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
    compute = jnp.dtype(jnp.float32) if config.lanes else compute_dtype(q, layout)

    def body(*refs):
        _decode_body(
            *refs,
            heads=HeadTile(layout, compute),
            scores=scores,
            splits=splits,
            group=query_heads // layout.kv_heads,
            lanes=config.lanes,
        )

    def combine(*refs):
        _combine_body(*refs, splits=splits, head_dim=head_dim)

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
    return triton_call(
        combine,
        jax.ShapeDtypeStruct(q.shape, q.dtype),
        name="paged_decode_combine",
        grid=(query_heads, batch),
        warps=4,
        stages=1,
    )(values, maxima, totals, positions)
