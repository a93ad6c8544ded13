"""The jnp form of the pool writes: XLA scatters, which run in place on a donated pool."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32, UInt32

from pallas_kernels.page_layout import KvLayout


def write_pages(pool: jax.Array, ids: jax.Array, images: jax.Array) -> jax.Array:
    """See :func:`pallas_kernels.page_write.write_pages`."""
    return pool.at[ids].set(images, mode="promise_in_bounds")


def pack_heads(x: Float[Array, "M K H"], layout: KvLayout) -> UInt32[Array, "M K words"]:
    """Turns heads into words of the layout."""
    if layout.dtype == "float32":
        return lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    halves = lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16).astype(jnp.uint32)
    low, high = jnp.split(halves, 2, axis=-1)
    return low | (high << jnp.uint32(16))


def unpack_heads(words: UInt32[Array, "*dims words"], layout: KvLayout) -> Float[Array, "*dims H"]:
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
    start = (row[None, :] + offsets[:, None]) * words
    index = jnp.stack([jnp.broadcast_to(pages[:, None], start.shape), start], axis=-1)
    return lax.scatter(
        pool,
        index.reshape(tokens * heads, 2),
        values.reshape(tokens * heads, words),
        lax.ScatterDimensionNumbers(
            update_window_dims=(1,), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0, 1)
        ),
        mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS,
    )
