"""Prefill: a chunk of queries a sequence, over its pages, with a causal mask.

A program owns one kv head and a block of rows; a row is one query head of one query, so all query
heads of the kv head share every key and value that is read.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int32, UInt32

from pallas_kernels.implementation import triton_call
from pallas_kernels.page_layout import KvLayout
from pallas_kernels.paged_attention.configs import PrefillConfig
from pallas_kernels.paged_attention.reference import compute_dtype
from pallas_kernels.paged_attention.tiles import HeadTile, KeyTiles, Scores, attend


def _prefill_body(
    q_ref,  # [B, T, N, H]
    pool_ref,  # uint32 [pages, words]
    pages_ref,  # int32 [B, blocks]
    positions_ref,  # int32 [B, T]
    out_ref,  # [B, T, N, H]
    *,
    heads: HeadTile,
    scores: Scores,
    window: int | None,
    group: int,
    rows: int,
    tile: int,
):
    head, block, sequence = (pl.program_id(axis) for axis in range(3))
    padded = pl.next_power_of_2(group)
    row = lax.iota(jnp.int32, rows)
    query = block * (rows // padded) + lax.div(row, padded)
    member = row & (padded - 1)
    lead = (sequence, query, head * group + member)
    exists = (member < group) & (query < q_ref.shape[1])
    position = plt.load(positions_ref.at[sequence, query], mask=exists, other=-1)
    last = jnp.max(position, axis=0)
    nearest = jnp.min(jnp.where(position >= 0, position, jnp.iinfo(jnp.int32).max), axis=0)
    first = jnp.maximum(nearest - (window - 1), 0) if window else last * 0
    queries = heads.load_parts(q_ref, lead, exists)
    tiles = KeyTiles(heads, pool_ref, pages_ref, sequence, head, tile, first, last)

    def sees(token):
        key_position = lax.broadcast_in_dim(token, (rows, tile), (1,))
        query_position = lax.broadcast_in_dim(position, (rows, tile), (0,))
        seen = key_position <= query_position
        return seen & (key_position > query_position - window) if window else seen

    begin, end = lax.div(first, tile), lax.div(last + tile, tile)
    state = attend(queries, tiles, begin, end, scores, sees)
    total = jnp.where(state.total > 0, state.total, 1.0)[:, None]
    heads.store_parts(out_ref, lead, exists, [part / total for part in state.values])


def paged_prefill(
    q: Float[Array, "B T N H"],
    pool: UInt32[Array, "pages words"],
    pages: Int32[Array, "B blocks"],
    positions: Int32[Array, "B T"],
    *,
    layout: KvLayout,
    scores: Scores,
    window: int | None,
    config: PrefillConfig,
) -> Float[Array, "B T N H"]:
    """Attention of a chunk of queries; see :func:`pallas_kernels.paged_attention`."""
    batch, length, query_heads, _ = q.shape
    group = query_heads // layout.kv_heads
    rows = max(config.rows, pl.next_power_of_2(group))

    def body(*refs):
        _prefill_body(
            *refs,
            heads=HeadTile(layout, compute_dtype(q, layout)),
            scores=scores,
            window=window,
            group=group,
            rows=rows,
            tile=config.tile,
        )

    return triton_call(
        body,
        jax.ShapeDtypeStruct(q.shape, q.dtype),
        name="paged_prefill",
        grid=(layout.kv_heads, pl.cdiv(length, rows // pl.next_power_of_2(group)), batch),
        warps=config.warps,
        stages=config.stages,
    )(q, pool, pages, positions)
