"""One query a sequence: scores one way or another, then values absorbed.

Values are linear in their latent, so ``o = U_v (P c_v)``: the softmax weighs latents, and only its
result is expanded, once a query head instead of once a token.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, UInt32

from pallas_kernels.kv_reconstruct import kernels, scores
from pallas_kernels.kv_reconstruct.expansion import (
    Rotation,
    UpProjections,
    add_bias,
    group_heads,
)
from pallas_kernels.kv_reconstruct.nodes import Nodes, choose_nodes, tolerance_of
from pallas_kernels.page_layout import LatentLayout


def nodes_of(
    up: UpProjections,
    layout: LatentLayout,
    rotation: Rotation | None,
    query_heads: int,
    blocks: int,
) -> Nodes:
    """Which pairs of the keys are absorbed."""
    if rotation is None:
        return Nodes(0, 1, 1)
    return choose_nodes(
        rotation.frequencies,
        blocks * layout.tokens_per_page,
        layout.tokens_per_page,
        query_heads // up.k.shape[0],
        tolerance_of(layout.dtype),
    )


def decode(
    q: Float[Array, "B N Hq"],
    pool: UInt32[Array, "pages words"],
    pages: Int32[Array, "B blocks"],
    positions: Int32[Array, " B"],
    up: UpProjections,
    *,
    layout: LatentLayout,
    scale: float,
    rotation: Rotation | None,
    absorb_keys: bool,
    use_kernels: bool,
) -> Float[Array, "B N Hv"]:
    """Attention of one query a sequence; see :func:`latent_attention`.

    Args:
        q: Queries.
        pool: The page pool.
        pages: Page tables.
        positions: Position of each query.
        up: Projections.
        layout: Layout of the pages.
        scale: Multiplies the scores.
        rotation: Of the keys.
        absorb_keys: Absorb what can be of the keys, too.
        use_kernels: Pallas where there is a kernel.
    """
    kv_heads, dims, _ = up.k.shape
    half = dims // 2
    nodes = Nodes(half, 1, 0)
    if absorb_keys:
        nodes = nodes_of(up, layout, rotation, q.shape[1], pages.shape[1])
    if nodes.count and rotation is not None:
        pages = _whole_blocks(pages, nodes, layout)
    options = {"layout": layout, "scale": scale}
    if use_kernels and nodes.count and rotation is None:
        found = kernels.absorbed_scores(q, pool, pages, positions, up, **options)
    elif use_kernels and not nodes.count:
        found = kernels.rebuilt_scores(q, pool, pages, positions, up, rotation=rotation, **options)
    else:
        rows = scores.gather_rows(pool, pages, layout)
        found = scores.plain_scores(
            q, rows, positions, up, rotation=rotation, nodes=nodes, **options
        )
    if use_kernels:
        latent = kernels.weighted_latents(found, pool, pages, positions, layout)
    else:
        rows = scores.gather_rows(pool, pages, layout)
        latent = scores.weighted_latents(found, rows, positions, layout)
    grouped = group_heads(latent.astype(up.v.dtype), kv_heads)
    out = jnp.einsum("bkgr,khr->bkgh", grouped, up.v)
    out = out.reshape(q.shape[0], q.shape[1], -1)
    if up.v_bias is not None:
        group = q.shape[1] // kv_heads
        biased = add_bias(out, jnp.repeat(up.v_bias, group, axis=0))
        out = jnp.where((positions >= 0)[:, None, None], biased, out)
    return out.astype(q.dtype)


def _whole_blocks(
    pages: Int32[Array, "B blocks"], nodes: Nodes, layout: LatentLayout
) -> Int32[Array, "B padded"]:
    """Pads tables with page 0 to whole blocks of nodes."""
    step = nodes.block // layout.tokens_per_page
    return jnp.pad(pages, ((0, 0), (0, -pages.shape[1] % step)))
