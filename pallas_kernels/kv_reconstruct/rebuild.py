"""The paper's form: used pages to a compact buffer, one large product, RoPE, then attention.

Source: DeInfer (arXiv 2604.17709). There keys are rotated in place, all of a fixed buffer is
rebuilt, and a page that two sequences share would be rotated twice. Here the rebuilt pages are new
values, as many as the caller's bucket of used pages, and a shared page is rebuilt once.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, UInt32

from pallas_kernels.implementation import Implementation
from pallas_kernels.kv_reconstruct.compact import CompactBlocks, all_blocks
from pallas_kernels.kv_reconstruct.expansion import (
    Rotation,
    UpProjections,
    compute_dtype,
    expand,
    join_shared,
    read_latents,
)
from pallas_kernels.page_layout import PAGE_WORD_MULTIPLE, KvLayout, LatentLayout
from pallas_kernels.page_write.reference import pack_heads
from pallas_kernels.paged_attention import paged_attention


def rebuilt_layout(up: UpProjections, layout: LatentLayout) -> KvLayout:
    """Layout of the pages of rebuilt keys and values: as many tokens a page as the latents'."""
    kv_heads, k_dim, _ = up.k.shape
    head_dim = max(k_dim + layout.shared_dim, up.v.shape[1])
    head_dim += head_dim % 2
    dtype = compute_dtype(up, layout)
    words = kv_heads * head_dim * dtype.itemsize // 2
    page_words = -(-layout.tokens_per_page * words // PAGE_WORD_MULTIPLE) * PAGE_WORD_MULTIPLE
    return KvLayout(kv_heads, head_dim, dtype.name, page_words, layout.tokens_per_page)


def rebuild_pages(
    pool: UInt32[Array, "pages words"],
    pages: Int32[Array, "B blocks"],
    up: UpProjections,
    compact: CompactBlocks,
    layout: LatentLayout,
    rotation: Rotation | None,
) -> UInt32[Array, "C rebuilt_words"]:
    """Keys and values of the compact pages, as pages of :func:`rebuilt_layout`."""
    made, tokens = rebuilt_layout(up, layout), layout.tokens_per_page
    ids = pages[jnp.asarray(compact.sequence), jnp.asarray(compact.block)]
    rows = pool[ids, : tokens * layout.words_per_token]
    rows = rows.reshape(-1, tokens, layout.words_per_token)
    k_latent, v_latent, shared = read_latents(rows, layout)
    dtype = compute_dtype(up, layout)
    k = expand(k_latent, up.k, up.k_bias, dtype)
    if rotation is not None:
        token = jnp.arange(tokens, dtype=jnp.int32)[None, :]
        k = rotation(k, jnp.asarray(compact.block)[:, None] * tokens + token)
    k = join_shared(k, shared)
    v = expand(v_latent, up.v, up.v_bias, dtype)
    words = [pack_heads(_pad_last(x, made.head_dim), made).swapaxes(1, 2) for x in (k, v)]
    packed = jnp.stack(words, axis=1)  # [C, key or value, K, tokens, words]
    packed = packed.reshape(packed.shape[0], -1)
    return jnp.pad(packed, ((0, 0), (0, made.page_words - packed.shape[1])))


def rebuilt_attention(
    q: Float[Array, "B T N Hq"],
    pool: UInt32[Array, "pages words"],
    pages: Int32[Array, "B blocks"],
    positions: Int32[Array, "B T"],
    up: UpProjections,
    compact: CompactBlocks | None,
    *,
    layout: LatentLayout,
    scale: float,
    rotation: Rotation | None,
    implementation: Implementation,
) -> Float[Array, "B T N Hv"]:
    """See :func:`pallas_kernels.kv_reconstruct.latent_attention`."""
    compact = all_blocks(*pages.shape) if compact is None else compact
    made = rebuilt_layout(up, layout)
    out = paged_attention(
        _pad_last(q, made.head_dim),
        rebuild_pages(pool, pages, up, compact, layout, rotation),
        jnp.asarray(compact.remap),
        positions,
        layout=made,
        scale=scale,
        implementation=implementation,
    )
    return out[..., : up.v.shape[1]]


def _pad_last(x: Float[Array, "*dims H"], size: int) -> Float[Array, "*dims padded"]:
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, size - x.shape[-1])])
