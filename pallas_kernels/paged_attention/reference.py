"""The jnp form of paged attention: gathers every page of a sequence, then plain attention."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, UInt32

from pallas_kernels.attention import masked_attention
from pallas_kernels.page_layout import KvLayout
from pallas_kernels.page_write.reference import unpack_heads


def compute_dtype(q: jax.Array, layout: KvLayout) -> jnp.dtype:
    """The dtype of products: the queries' if the pages hold the same, else float32."""
    return q.dtype if q.dtype == layout.dtype else jnp.dtype(jnp.float32)


def gather_kv(
    pool: UInt32[Array, "pages words"], pages: Int32[Array, "B blocks"], layout: KvLayout
) -> tuple[Float[Array, "B S K H"], Float[Array, "B S K H"]]:
    """Reads the keys and values of B sequences; S = blocks * tokens_per_page."""
    batch, blocks = pages.shape
    tokens = layout.tokens_per_page
    shape = (batch, blocks, 2, layout.kv_heads, tokens, layout.words_per_head)
    words = pool[pages.reshape(-1), : layout.words_per_token * tokens].reshape(shape)
    heads = unpack_heads(words, layout).transpose(2, 0, 1, 4, 3, 5)
    heads = heads.reshape(2, batch, blocks * tokens, layout.kv_heads, layout.head_dim)
    return heads[0], heads[1]


def paged_attention(
    q: Float[Array, "B T N H"],
    pool: UInt32[Array, "pages words"],
    pages: Int32[Array, "B blocks"],
    positions: Int32[Array, "B T"],
    layout: KvLayout,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> Float[Array, "B T N H"]:
    """See :func:`pallas_kernels.paged_attention.paged_attention`."""
    k, v = gather_kv(pool, pages, layout)
    key_position = jnp.arange(k.shape[1], dtype=jnp.int32)[None, None, :]
    mask = key_position <= positions[:, :, None]
    if window is not None:
        mask &= key_position > positions[:, :, None] - window
    seen = mask.any(axis=1)[:, :, None, None]
    k, v = jnp.where(seen, k, 0), jnp.where(seen, v, 0)  # pages beyond may hold NaN patterns
    compute = q.dtype if q.dtype == k.dtype else jnp.float32
    out = masked_attention(
        q.astype(compute),
        k.astype(compute),
        v.astype(compute),
        mask,
        scale=scale,
        soft_cap=soft_cap,
    )
    return out.astype(q.dtype)
