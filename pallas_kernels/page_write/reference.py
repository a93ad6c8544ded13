"""The jnp form of the pool writes: XLA scatters, which run in place on a donated pool."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32, UInt32

from pallas_kernels.page_layout import KvLayout, LatentLayout


def write_pages(pool: jax.Array, ids: jax.Array, images: jax.Array) -> jax.Array:
    """See :func:`pallas_kernels.page_write.write_pages`."""
    return pool.at[ids].set(images, mode="promise_in_bounds")


def pack_heads(
    x: Float[Array, "*dims H"], layout: KvLayout | LatentLayout
) -> UInt32[Array, "*dims words"]:
    """Turns heads, or parts of latents, into words of the layout."""
    if layout.dtype == "float32":
        return lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    halves = lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16).astype(jnp.uint32)
    low, high = jnp.split(halves, 2, axis=-1)
    return low | (high << jnp.uint32(16))


def unpack_heads(
    words: UInt32[Array, "*dims words"], layout: KvLayout | LatentLayout
) -> Float[Array, "*dims H"]:
    """The inverse of :func:`pack_heads`, in the layout's dtype."""
    if layout.dtype == "float32":
        return lax.bitcast_convert_type(words, jnp.float32)
    low = lax.bitcast_convert_type((words & jnp.uint32(0xFFFF)).astype(jnp.uint16), jnp.bfloat16)
    high = lax.bitcast_convert_type((words >> jnp.uint32(16)).astype(jnp.uint16), jnp.bfloat16)
    return jnp.concatenate([low, high], axis=-1)


def write_kv(
    pool: UInt32[Array, "pages words"],
    k: Float[Array, "M K H"],
    v: Float[Array, "M K H"],
    pages: Int32[Array, " M"],
    offsets: Int32[Array, " M"],
    layout: KvLayout,
) -> UInt32[Array, "pages words"]:
    """See :func:`pallas_kernels.page_write.write_kv`."""
    tokens, heads, words = k.shape[0], 2 * layout.kv_heads, layout.words_per_head
    values = jnp.concatenate([pack_heads(k, layout), pack_heads(v, layout)], axis=1)
    row = jnp.arange(heads, dtype=jnp.int32) * layout.tokens_per_page
    place = row[None, :] + offsets[:, None]
    page = jnp.broadcast_to(pages[:, None], place.shape)
    rows = values.reshape(tokens * heads, words)
    return write_rows(pool, rows, page.reshape(-1), place.reshape(-1))


def pack_latents(
    parts: Sequence[Float[Array, "M _"]], layout: LatentLayout
) -> UInt32[Array, "M words"]:
    """Turns the parts of M tokens' latents into rows of the layout; empty parts are left out."""
    rows = []
    for part in parts:
        words = layout.part_words(part.shape[1])
        width = 2 * words if layout.dtype == "bfloat16" else words
        padded = jnp.pad(part, ((0, 0), (0, width - part.shape[1])))
        rows.append(pack_heads(padded, layout))
    return jnp.concatenate(rows, axis=1)


def unpack_latents(
    rows: UInt32[Array, "*dims words"], layout: LatentLayout
) -> tuple[Float[Array, "*dims Wk"], Float[Array, "*dims Wv"], Float[Array, "*dims Ws"]]:
    """The three parts with the zeros behind their numbers; empty where the layout has none."""
    found, start = [], 0
    for numbers in layout.parts:
        words = layout.part_words(numbers)
        found.append(unpack_heads(rows[..., start : start + words], layout))
        start += words
    return found[0], found[1], found[2]


def write_rows(
    pool: UInt32[Array, "pages words"],
    rows: UInt32[Array, "M row_words"],
    pages: Int32[Array, " M"],
    offsets: Int32[Array, " M"],
) -> UInt32[Array, "pages words"]:
    """Writes row ``offsets`` of each page, counted in rows of this length."""
    start = offsets * rows.shape[1]
    return lax.scatter(
        pool,
        jnp.stack([pages, start], axis=-1),
        rows,
        lax.ScatterDimensionNumbers(
            update_window_dims=(1,), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0, 1)
        ),
        mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS,
    )
