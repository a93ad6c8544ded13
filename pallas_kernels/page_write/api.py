"""Public writes into the pool: whole pages, and the keys and values of single tokens."""

from jaxtyping import Array, Float, Int32, UInt32

from pallas_kernels.implementation import Implementation, resolve
from pallas_kernels.page_layout import KvLayout
from pallas_kernels.page_write import kernels, reference


def write_pages(
    pool: UInt32[Array, "pages words"],
    ids: Int32[Array, " n"],
    images: UInt32[Array, "n words"],
    *,
    implementation: Implementation = "auto",
) -> UInt32[Array, "pages words"]:
    """Returns the pool with whole pages replaced; in place when the pool is donated.

    Args:
        pool: The page pool.
        ids: Page ids; page 0 takes padding and may repeat, other ids must not.
        images: New content.
        implementation: See :mod:`pallas_kernels.implementation`.
    """
    body = kernels if resolve(implementation) == "pallas" else reference
    return body.write_pages(pool, ids, images)


def write_kv(
    pool: UInt32[Array, "pages words"],
    k: Float[Array, "M K H"],
    v: Float[Array, "M K H"],
    pages: Int32[Array, " M"],
    offsets: Int32[Array, " M"],
    *,
    layout: KvLayout,
    implementation: Implementation = "auto",
) -> UInt32[Array, "pages words"]:
    """Returns the pool with the keys and values of M tokens written.

    Args:
        pool: The page pool; in place when donated.
        k: Keys, after RoPE.
        v: Values.
        pages: The page of each token; 0 for padding.
        offsets: The token's place in its page, below ``layout.tokens_per_page``.
        layout: Layout of the layer's pages.
        implementation: See :mod:`pallas_kernels.implementation`.
    """
    body = kernels if resolve(implementation) == "pallas" else reference
    return body.write_kv(pool, k, v, pages, offsets, layout)
