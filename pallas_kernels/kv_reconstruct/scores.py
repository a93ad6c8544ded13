"""Scores of one query a sequence against latents, in plain JAX; base-2 units, as `exp2` wants.

The sequences' pages are gathered side by side, so the time follows the length of the page table:
the caller cuts the table to a bucket of the longest sequence.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32, UInt32

from pallas_kernels.kv_reconstruct.expansion import (
    Rotation,
    UpProjections,
    compute_dtype,
    expand,
    group_heads,
    read_latents,
    turn,
    widen,
)
from pallas_kernels.kv_reconstruct.nodes import Nodes
from pallas_kernels.page_layout import LatentLayout
from pallas_kernels.paged_attention.tiles import HIDDEN, LOG2_E


def gather_rows(
    pool: UInt32[Array, "pages words"], pages: Int32[Array, "B blocks"], layout: LatentLayout
) -> UInt32[Array, "B S row"]:
    """Rows of all tokens of the page tables, S = blocks * tokens_per_page."""
    words = layout.words_per_token
    rows = pool[pages.reshape(-1), : layout.tokens_per_page * words]
    return rows.reshape(pages.shape[0], -1, words)


def plain_scores(
    q: Float[Array, "B N Hq"],
    rows: UInt32[Array, "B S row"],
    positions: Int32[Array, " B"],
    up: UpProjections,
    *,
    layout: LatentLayout,
    scale: float,
    rotation: Rotation | None,
    nodes: Nodes,
) -> Float[Array, "B N S"]:
    """Scores, ``HIDDEN`` where a query does not see a token.

    Args:
        q: Queries, rotated; dimensions of the shared key last.
        rows: As of :func:`gather_rows`.
        positions: Position of each query; negative for empty slots.
        up: Projections.
        layout: Layout of the pages.
        scale: Multiplies the products.
        rotation: Of the keys; None if they do not rotate.
        nodes: Which pairs are absorbed. Without a rotation, ``fast`` is 0 or all.
    """
    kv_heads, dims, _ = up.k.shape
    latent, _, shared = read_latents(rows, layout)
    plain = group_heads(q[..., :dims], kv_heads)
    scores = jnp.float32(0)
    if nodes.fast:
        scores += _rebuilt(plain, latent, up, layout, rotation, nodes.fast)
    if nodes.count:
        scores += _absorbed(plain, latent, up, layout, rotation, nodes)
    if shared.shape[-1]:
        turning = group_heads(q[..., dims:], kv_heads)
        scores += jnp.einsum(
            "bkgh,bsh->bkgs", turning, shared.astype(q.dtype), preferred_element_type=jnp.float32
        )
    scores = scores.reshape(*q.shape[:2], -1) * jnp.float32(scale * LOG2_E)
    token = jnp.arange(rows.shape[1], dtype=jnp.int32)[None, None, :]
    return jnp.where(token <= positions[:, None, None], scores, jnp.float32(HIDDEN))


def _pairs(x: jax.Array, axis: int, start: int, stop: int) -> jax.Array:
    """Pairs ``start`` to ``stop`` of heads along an axis."""
    halves = jnp.split(x, 2, axis=axis)
    return jnp.concatenate(
        [jax.lax.slice_in_dim(half, start, stop, axis=axis) for half in halves], axis=axis
    )


def _rebuilt(
    q: Float[Array, "B K G H"],
    latent: Float[Array, "B S Rk"],
    up: UpProjections,
    layout: LatentLayout,
    rotation: Rotation | None,
    fast: int,
) -> Float[Array, "B K G S"]:
    """The part of the fast pairs: their keys are made, rotated and multiplied."""
    bias = None if up.k_bias is None else _pairs(up.k_bias, 1, 0, fast)
    k = expand(latent, _pairs(up.k, 1, 0, fast), bias, compute_dtype(up, layout))
    query = _pairs(q, 3, 0, fast).astype(jnp.float32)
    k = k.astype(jnp.float32)
    if rotation is not None:
        part = Rotation(rotation.frequencies[:fast], rotation.factor)
        position = jnp.arange(latent.shape[1], dtype=jnp.int32)
        cosine, sine = (table[None, :, None, :] for table in part.tables(position))
        k = turn(k, cosine, sine)
    if q.shape[2] == 1:  # one pass over the keys, which a product would transpose first
        return (k * query[:, None, :, 0]).sum(axis=-1).swapaxes(1, 2)[:, :, None]
    return jnp.einsum("bkgh,bskh->bkgs", query, k)


def _absorbed(
    q: Float[Array, "B K G H"],
    latent: Float[Array, "B S Rk"],
    up: UpProjections,
    layout: LatentLayout,
    rotation: Rotation | None,
    nodes: Nodes,
) -> Float[Array, "B K G S"]:
    """The part of the slow pairs: queries absorbed at the nodes, scores interpolated."""
    batch, tokens, rank = latent.shape
    dtype, half = compute_dtype(up, layout), up.k.shape[1] // 2
    slow = _pairs(q, 3, nodes.fast, half).astype(jnp.float32)
    if rotation is None:
        blocks, turned, weights = 1, slow[:, None, :, :, None], np.ones((tokens, 1), np.float32)
    else:
        blocks = tokens // nodes.block
        frequency = np.array(rotation.frequencies[nodes.fast :])
        angle = nodes.positions(blocks)[..., None] * frequency
        # The transposed rotation: q . R k = (R^T q) . k.
        cosine = (np.cos(angle) * rotation.factor).astype(np.float32)
        sine = (-np.sin(angle) * rotation.factor).astype(np.float32)
        cosine, sine = (jnp.asarray(t)[None, :, None, None] for t in (cosine, sine))
        turned = turn(slow[:, None, :, :, None], cosine, sine)
        weights = nodes.weights().astype(np.float32)
    turned = turned.astype(dtype)  # [B, blocks, K, G, nodes, slow dimensions]
    keys = widen(_pairs(up.k, 1, nodes.fast, half), latent).astype(dtype)
    query = jnp.einsum("bxkgmd,kdr->bxkgmr", turned, keys)
    by_block = latent.astype(dtype).reshape(batch, blocks, -1, rank)
    at_nodes = jnp.einsum(
        "bxkgmr,bxtr->bxkgmt", query, by_block, preferred_element_type=jnp.float32
    )
    if up.k_bias is not None:
        bias = _pairs(up.k_bias, 1, nodes.fast, half).astype(dtype)
        product = jnp.einsum("bxkgmd,kd->bxkgm", turned, bias, preferred_element_type=jnp.float32)
        at_nodes += product[..., None]
    weights = jnp.asarray(weights.T)[None, None, None, None]
    scores = (at_nodes * weights).sum(axis=4)  # [B, blocks, K, G, tokens of a block]
    return scores.transpose(0, 2, 3, 1, 4).reshape(*q.shape[:3], tokens)


def weighted_latents(
    scores: Float[Array, "B N S"],
    rows: UInt32[Array, "B S row"],
    positions: Int32[Array, " B"],
    layout: LatentLayout,
) -> Float[Array, "B N Rv"]:
    """The softmax of scores times the values' latents, float32; zeros where nothing is seen."""
    seen = scores > HIDDEN / 2
    weights = jnp.where(seen, jnp.exp2(scores - scores.max(axis=-1, keepdims=True)), 0)
    total = weights.sum(axis=-1, keepdims=True)
    weights = weights / jnp.where(total > 0, total, 1)
    _, latent, _ = read_latents(rows, layout)
    token = jnp.arange(rows.shape[1], dtype=jnp.int32)[None, :, None]
    latent = jnp.where(token <= positions[:, None, None], latent, 0)  # beyond may be NaN
    out = jnp.einsum(
        "bns,bsr->bnr", weights.astype(latent.dtype), latent, preferred_element_type=jnp.float32
    )
    return out[..., : layout.value_part[1]]
