"""Pallas bodies of the pool writes: the pool is operand and result of one aliased call."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int32, UInt32

from pallas_kernels.implementation import triton_call
from pallas_kernels.page_layout import KvLayout

MOST_CHUNK_WORDS = 4096


def write_pages(
    pool: UInt32[Array, "pages words"], ids: Int32[Array, " n"], images: UInt32[Array, "n words"]
) -> UInt32[Array, "pages words"]:
    """See :func:`pallas_kernels.page_write.write_pages`."""
    count, words = images.shape
    chunk = min(words & -words, MOST_CHUNK_WORDS)  # the largest power of two that divides a page

    def body(_, ids_ref, images_ref, pool_ref):
        part, page = pl.program_id(0), pl.program_id(1)
        index = part * chunk + lax.iota(jnp.int32, chunk)
        pool_ref[ids_ref[page], index] = images_ref[page, index]

    return triton_call(
        body,
        jax.ShapeDtypeStruct(pool.shape, pool.dtype),
        name="write_pages",
        grid=(words // chunk, count),
        warps=8 if chunk >= 2048 else 4,
        stages=1,
        aliases={0: 0},
    )(pool, ids, images)


def write_kv(
    pool: UInt32[Array, "pages words"],
    k: Float[Array, "M K H"],
    v: Float[Array, "M K H"],
    pages: Int32[Array, " M"],
    offsets: Int32[Array, " M"],
    layout: KvLayout,
) -> UInt32[Array, "pages words"]:
    """See :func:`pallas_kernels.page_write.write_kv`. A program packs and writes one token."""
    words = layout.words_per_head
    shape = (pl.next_power_of_2(layout.kv_heads), pl.next_power_of_2(words))

    def body(_, k_ref, v_ref, pages_ref, offsets_ref, pool_ref):
        token = pl.program_id(0)
        page, offset = pages_ref[token], offsets_ref[token]
        head, column = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
        mask = (head < layout.kv_heads) & (column < words)

        def half(ref, part):
            x = plt.load(ref.at[token, head, column + part * words], mask=mask, other=0)
            if layout.dtype == "float32":
                return lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
            bits = lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16)
            return bits.astype(jnp.uint32)

        for first, ref in ((0, k_ref), (layout.kv_heads, v_ref)):
            packed = half(ref, 0)
            if layout.dtype == "bfloat16":
                packed |= half(ref, 1) << np.uint32(16)
            start = ((first + head) * layout.tokens_per_page + offset) * words
            plt.store(pool_ref.at[page, start + column], packed, mask=mask)

    return triton_call(
        body,
        jax.ShapeDtypeStruct(pool.shape, pool.dtype),
        name="write_kv",
        grid=(k.shape[0],),
        warps=4,
        stages=1,
        aliases={0: 0},
    )(pool, k, v, pages, offsets)
