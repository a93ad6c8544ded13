"""Pallas-Triton kernels of a decode step: scores from latents, and latents weighted by scores.

Scores of one query a sequence are few beside the latents, so they go through memory. That keeps
each kernel one loop over the tiles of one product, at any rank, and lets all query heads share
every latent of the values that is read. A tile of words becomes two parts (low and high halves),
as in `paged_attention`.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int32, UInt32

from pallas_kernels.implementation import triton_call
from pallas_kernels.kv_reconstruct.configs import KERNELS, ScoreConfig
from pallas_kernels.kv_reconstruct.expansion import (
    Rotation,
    UpProjections,
    compute_dtype,
    group_heads,
)
from pallas_kernels.page_layout import LatentLayout
from pallas_kernels.paged_attention.decode import LEAST_DOT_ROWS, Splits, combine
from pallas_kernels.paged_attention.tiles import (
    HIDDEN,
    LOG2_E,
    SoftmaxState,
    dot,
    split_words,
)


@dataclass(frozen=True)
class RowTile:
    """Reads tiles of latents out of pages.

    Attributes:
        layout: Layout of the pages.
        compute: Dtype of the parts.
        words: Words a step, a power of two.
    """

    layout: LatentLayout
    compute: jnp.dtype
    words: int

    @property
    def parts(self) -> int:
        """Parts a word: 2 in bfloat16 pages, 1 in float32 pages."""
        return 2 if self.layout.dtype == "bfloat16" else 1

    def chunks(self, words: int) -> int:
        """Steps over so many words."""
        return pl.cdiv(words, self.words)

    def pages(self, pages_ref, sequence, token: jax.Array, present: jax.Array) -> jax.Array:
        """Pages of tokens; 0 for those that are not present."""
        block = lax.div(token, self.layout.tokens_per_page)
        return plt.load(pages_ref.at[sequence, block], mask=present, other=0)

    def load(self, pool_ref, page, token, present, *, start: int, size: int, chunk) -> list:
        """Parts ``[tile, words]`` of one step over the words ``start`` to ``start + size``."""
        shape = (token.shape[0], self.words)
        column = lax.broadcasted_iota(jnp.int32, shape, 1) + chunk * self.words
        row = (token & (self.layout.tokens_per_page - 1)) * self.layout.words_per_token + start
        index = (lax.broadcast_in_dim(page, shape, (0,)), lax.broadcast_in_dim(row, shape, (0,)))
        mask = lax.broadcast_in_dim(present, shape, (0,)) & (column < size)
        words = plt.load(pool_ref.at[index[0], index[1] + column], mask=mask, other=jnp.uint32(0))
        return split_words(words, self.parts, self.compute)


def by_parts(x: jax.Array, words: int, padded: int, parts: int) -> jax.Array:
    """Numbers ``[..., n]`` where a part of ``words`` words has them: ``[..., parts, padded]``."""
    lead = [(0, 0)] * (x.ndim - 1)
    x = jnp.pad(x, [*lead, (0, parts * words - x.shape[-1])])
    x = x.reshape(*x.shape[:-1], parts, words)
    return jnp.pad(x, [*lead, (0, 0), (0, padded - words)])


def _store_scores(scores_ref, lead, token, products, kept, seen, scale: float) -> None:
    """Stores scaled products ``[rows, tile]`` in base-2 units."""
    shape = products.shape
    scaled = jnp.where(lax.broadcast_in_dim(seen, shape, (1,)), products * (scale * LOG2_E), HIDDEN)
    sequence, row = lead
    index = (
        sequence,
        lax.broadcast_in_dim(row, shape, (0,)),
        lax.broadcast_in_dim(token, shape, (1,)),
    )
    plt.store(scores_ref.at[index], scaled, mask=lax.broadcast_in_dim(kept, shape, (0,)))


def _absorbed_body(
    q_ref,  # [B, N, sum of parts' padded numbers]
    pool_ref,  # uint32 [pages, words]
    pages_ref,  # int32 [B, blocks]
    positions_ref,  # int32 [B]
    scores_ref,  # float32 [B, N, S]
    *,
    tile: RowTile,
    runs: tuple[tuple[int, int, int], ...],  # (start in a row, words, start in q)
    scale: float,
    rows: int,
    tokens: int,
):
    block, step, sequence = (pl.program_id(axis) for axis in range(3))
    position = positions_ref[sequence]

    @pl.when(step * tokens <= position)
    def _():
        row = block * rows + lax.iota(jnp.int32, rows)
        kept = row < q_ref.shape[1]
        token = step * tokens + lax.iota(jnp.int32, tokens)
        seen = token <= position
        page = tile.pages(pages_ref, sequence, token, seen)
        products = jnp.zeros((rows, tokens), jnp.float32)
        for start, words, first in runs:
            padded = tile.chunks(words) * tile.words

            def add(chunk, products, start=start, words=words, first=first, padded=padded):
                shape = (rows, tile.words)
                column = first + chunk * tile.words + lax.broadcasted_iota(jnp.int32, shape, 1)
                latents = tile.load(
                    pool_ref, page, token, seen, start=start, size=words, chunk=chunk
                )
                for part, latent in enumerate(latents):
                    index = (
                        sequence,
                        lax.broadcast_in_dim(row, shape, (0,)),
                        column + part * padded,
                    )
                    mask = lax.broadcast_in_dim(kept, shape, (0,))
                    query = plt.load(q_ref.at[index], mask=mask, other=0).astype(tile.compute)
                    products += dot(query, latent, transposed=True)
                return products

            products = lax.fori_loop(0, tile.chunks(words), add, products)
        _store_scores(scores_ref, (sequence, row), token, products, kept, seen, scale)


def absorbed_scores(
    q: Float[Array, "B N Hq"],
    pool: UInt32[Array, "pages words"],
    pages: Int32[Array, "B blocks"],
    positions: Int32[Array, " B"],
    up: UpProjections,
    *,
    layout: LatentLayout,
    scale: float,
) -> Float[Array, "B N S"]:
    """Scores of queries with U_k absorbed, where keys do not rotate; a bias of keys cancels.

    Entries past a sequence's last tile are not written.
    """
    batch, heads, _ = q.shape
    kv_heads, dims, _ = up.k.shape
    dtype, config = compute_dtype(up, layout), KERNELS.absorbed
    tile = RowTile(layout, dtype, config.words)
    plain = group_heads(q[..., :dims], kv_heads).astype(dtype)
    latent = jnp.einsum("bkgh,khr->bkgr", plain, up.k.astype(dtype)).reshape(batch, heads, -1)
    sides = [(latent, 0, layout.k_words)]
    if layout.shared_dim:
        words = layout.part_words(layout.shared_dim)
        sides.append((q[..., dims:].astype(dtype), layout.shared_start, words))
    operands, runs, first = [], [], 0
    for side, start, words in sides:
        padded = tile.chunks(words) * tile.words
        operands.append(by_parts(side, words, padded, tile.parts).reshape(batch, heads, -1))
        runs.append((start, words, first))
        first += tile.parts * padded
    rows = min(config.rows, max(LEAST_DOT_ROWS, pl.next_power_of_2(heads)))
    tokens = pages.shape[1] * layout.tokens_per_page
    steps = pl.cdiv(tokens, config.tokens)

    def body(*refs):
        _absorbed_body(
            *refs, tile=tile, runs=tuple(runs), scale=scale, rows=rows, tokens=config.tokens
        )

    return triton_call(
        body,
        jax.ShapeDtypeStruct((batch, heads, steps * config.tokens), jnp.float32),
        name="absorbed_scores",
        grid=(pl.cdiv(heads, rows), steps, batch),
        warps=config.warps,
        stages=config.stages,
    )(jnp.concatenate(operands, axis=-1), pool, pages, positions)


def _rebuilt_body(
    q_ref,  # [B, N, H]
    pool_ref,  # uint32 [pages, words]
    pages_ref,  # int32 [B, blocks]
    positions_ref,  # int32 [B]
    up_ref,  # [K, H, parts, padded words]
    bias_ref,  # float32 [K, H]
    cosine_ref,  # float32 [S, H / 2]
    sine_ref,  # float32 [S, H / 2]
    scores_ref,  # float32 [B, N, S]
    *,
    tile: RowTile,
    scale: float,
    group: int,
    tokens: int,
):
    head, step, sequence = (pl.program_id(axis) for axis in range(3))
    position = positions_ref[sequence]

    @pl.when(step * tokens <= position)
    def _():
        half = q_ref.shape[2] // 2
        columns = pl.next_power_of_2(half)
        token = step * tokens + lax.iota(jnp.int32, tokens)
        seen = token <= position
        page = tile.pages(pages_ref, sequence, token, seen)
        k_words = tile.layout.k_words
        dims = lax.broadcasted_iota(jnp.int32, (columns, tile.words), 0)

        def add(chunk, keys):
            latents = tile.load(pool_ref, page, token, seen, start=0, size=k_words, chunk=chunk)
            column = chunk * tile.words + lax.broadcasted_iota(jnp.int32, (columns, tile.words), 1)
            made = []
            for which, key in enumerate(keys):
                for part, latent in enumerate(latents):
                    index = (head, dims + which * half, part, column)
                    mask = None if columns == half else dims < half
                    other = None if mask is None else 0
                    up = plt.load(up_ref.at[index], mask=mask, other=other)
                    key += dot(latent, up, transposed=True)
                made.append(key)
            return tuple(made)

        shape = (tokens, columns)
        dim = lax.broadcasted_iota(jnp.int32, shape, 1)
        start = []
        for which in range(2):
            bias = plt.load(bias_ref.at[head, dim + which * half], mask=dim < half, other=0)
            start.append(bias.astype(jnp.float32))
        low, high = lax.fori_loop(0, tile.chunks(k_words), add, tuple(start))
        where = (lax.broadcast_in_dim(token, shape, (0,)), dim)
        cosine = plt.load(cosine_ref.at[where], mask=dim < half, other=0)
        sine = plt.load(sine_ref.at[where], mask=dim < half, other=0)
        low, high = low * cosine - high * sine, high * cosine + low * sine

        rows = max(LEAST_DOT_ROWS, pl.next_power_of_2(group))
        row = head * group + lax.iota(jnp.int32, rows)
        kept = row < (head + 1) * group
        shape = (rows, columns)
        dim = lax.broadcasted_iota(jnp.int32, shape, 1)
        mask = lax.broadcast_in_dim(kept, shape, (0,)) & (dim < half)
        products = jnp.zeros((rows, tokens), jnp.float32)
        for which, key in enumerate((low, high)):
            index = (sequence, lax.broadcast_in_dim(row, shape, (0,)), dim + which * half)
            query = plt.load(q_ref.at[index], mask=mask, other=0).astype(tile.compute)
            products += dot(query, key.astype(tile.compute), transposed=True)
        _store_scores(scores_ref, (sequence, row), token, products, kept, seen, scale)


def rebuilt_scores(
    q: Float[Array, "B N H"],
    pool: UInt32[Array, "pages words"],
    pages: Int32[Array, "B blocks"],
    positions: Int32[Array, " B"],
    up: UpProjections,
    *,
    layout: LatentLayout,
    scale: float,
    rotation: Rotation | None,
    config: ScoreConfig = KERNELS.rebuilt,
) -> Float[Array, "B N S"]:
    """Scores of keys that are made tile by tile on the chip, rotated there, and never stored.

    Entries past a sequence's last tile are not written.
    """
    batch, heads, dims = q.shape
    kv_heads, dtype = up.k.shape[0], compute_dtype(up, layout)
    tile = RowTile(layout, dtype, config.words)
    steps = pl.cdiv(pages.shape[1] * layout.tokens_per_page, config.tokens)
    padded = tile.chunks(layout.k_words) * tile.words
    factor = by_parts(up.k.astype(dtype), layout.k_words, padded, tile.parts)
    bias = jnp.zeros((kv_heads, dims), jnp.float32)
    if up.k_bias is not None:
        bias = up.k_bias.astype(jnp.float32)
    if rotation is None:
        rotation = Rotation((0.0,) * (dims // 2))
    tables = rotation.tables(jnp.arange(steps * config.tokens, dtype=jnp.int32))

    def body(*refs):
        _rebuilt_body(*refs, tile=tile, scale=scale, group=heads // kv_heads, tokens=config.tokens)

    return triton_call(
        body,
        jax.ShapeDtypeStruct((batch, heads, steps * config.tokens), jnp.float32),
        name="rebuilt_scores",
        grid=(kv_heads, steps, batch),
        warps=config.warps,
        stages=config.stages,
    )(q, pool, pages, positions, factor, bias, *tables)


def _weighted_body(
    scores_ref,  # float32 [B, N, S]
    pool_ref,  # uint32 [pages, words]
    pages_ref,  # int32 [B, blocks]
    positions_ref,  # int32 [B]
    values_ref,  # float32 [B, N, splits, parts * padded words]
    maxima_ref,  # float32 [B, N, splits]
    totals_ref,  # float32 [B, N, splits]
    *,
    tile: RowTile,
    splits: Splits,
    rows: int,
    chunks: int,
    start: int,
    words: int,
):
    both, split, sequence = (pl.program_id(axis) for axis in range(3))
    block, chunk = lax.div(both, chunks), lax.rem(both, chunks)
    position = positions_ref[sequence]
    first, end, each = splits.tiles(position)
    begin = first + split * each
    stop = jnp.minimum(begin + each, end)

    @pl.when(begin < stop)
    def _():
        row = block * rows + lax.iota(jnp.int32, rows)
        kept = row < scores_ref.shape[1]

        def tokens(index):
            token = index * splits.tile + lax.iota(jnp.int32, splits.tile)
            return token, token <= position

        def pages(index):
            return tile.pages(pages_ref, sequence, *tokens(index))

        def step(index, carry):
            page, state = carry
            token, seen = tokens(index)
            shape = (rows, splits.tile)
            place = (
                sequence,
                lax.broadcast_in_dim(row, shape, (0,)),
                lax.broadcast_in_dim(token, shape, (1,)),
            )
            mask = lax.broadcast_in_dim(kept, shape, (0,)) & lax.broadcast_in_dim(seen, shape, (1,))
            scores = plt.load(scores_ref.at[place], mask=mask, other=HIDDEN)
            latents = tile.load(pool_ref, page, token, seen, start=start, size=words, chunk=chunk)
            return pages(index + 1), state.add(scores, latents)

        state = SoftmaxState.start(rows, tile.words, tile.parts)
        _, state = lax.fori_loop(begin, stop, step, (pages(begin), state))
        shape = (rows, tile.words)
        column = chunk * tile.words + lax.broadcasted_iota(jnp.int32, shape, 1)
        wide_row = lax.broadcast_in_dim(row, shape, (0,))
        mask = lax.broadcast_in_dim(kept, shape, (0,))
        for part, value in enumerate(state.values):
            index = (sequence, wide_row, split, column + part * (chunks * tile.words))
            plt.store(values_ref.at[index], value, mask=mask)

        @pl.when(chunk == 0)
        def _():
            plt.store(maxima_ref.at[sequence, row, split], state.maximum, mask=kept)
            plt.store(totals_ref.at[sequence, row, split], state.total, mask=kept)


def weighted_latents(
    scores: Float[Array, "B N S"],
    pool: UInt32[Array, "pages words"],
    pages: Int32[Array, "B blocks"],
    positions: Int32[Array, " B"],
    layout: LatentLayout,
) -> Float[Array, "B N Rv"]:
    """The softmax of scores times the values' latents, float32; zeros where nothing is seen."""
    batch, heads, _ = scores.shape
    start, rank = layout.value_part
    words, config = layout.part_words(rank), KERNELS.weighted
    compute = jnp.dtype(layout.dtype)
    tile = RowTile(layout, compute, config.words)
    rows = min(config.rows, max(LEAST_DOT_ROWS, pl.next_power_of_2(heads)))
    chunks, blocks = tile.chunks(words), pl.cdiv(heads, rows)
    longest = pages.shape[1] * layout.tokens_per_page
    splits = Splits.plan(config, longest, batch * blocks * chunks, None)

    def body(*refs):
        _weighted_body(
            *refs,
            tile=tile,
            splits=splits,
            rows=rows,
            chunks=chunks,
            start=start,
            words=words,
        )

    partial, width = (batch, heads, splits.count), tile.parts * chunks * tile.words
    values, maxima, totals = triton_call(
        body,
        [
            jax.ShapeDtypeStruct((*partial, width), jnp.float32),
            jax.ShapeDtypeStruct(partial, jnp.float32),
            jax.ShapeDtypeStruct(partial, jnp.float32),
        ],
        name="weighted_latents",
        grid=(blocks * chunks, splits.count, batch),
        warps=config.warps,
        stages=config.stages,
    )(scores, pool, pages, positions)
    out = combine(values, maxima, totals, positions, splits, jnp.float32)
    out = out.reshape(batch, heads, tile.parts, -1)[..., :words]
    return out.reshape(batch, heads, -1)[..., :rank]
