"""Public writes into the pool: whole pages, and what single tokens leave in the cache."""

from jaxtyping import Array, Float, Int32, UInt32

from pallas_kernels.implementation import Implementation, resolve
from pallas_kernels.page_layout import KvLayout, LatentLayout
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


def write_latents(
    pool: UInt32[Array, "pages words"],
    k: Float[Array, "M Rk"],
    v: Float[Array, "M Rv"] | None,
    shared: Float[Array, "M Hs"] | None,
    pages: Int32[Array, " M"],
    offsets: Int32[Array, " M"],
    *,
    layout: LatentLayout,
) -> UInt32[Array, "pages words"]:
    """Returns the pool with the latents of M tokens written.

    A token is one row, and XLA's scatter writes rows in place as fast as a kernel of ours would
    (docs/kernels_attention.md), so there is one implementation.

    Args:
        pool: The page pool; in place when donated.
        k: Latents of the keys, before RoPE.
        v: Latents of the values; None where the layout has none.
        shared: Rotated keys that all heads share; None where the layout has none.
        pages: The page of each token; 0 for padding.
        offsets: The token's place in its page, below ``layout.tokens_per_page``.
        layout: Layout of the layer's pages.

    Raises:
        ValueError: Parts of other sizes than the layout's.
    """
    parts = [part for part in (k, v, shared) if part is not None]
    if tuple(part.shape[1] for part in parts) != tuple(size for size in layout.parts if size):
        raise ValueError(f"latents {[part.shape for part in parts]} do not suit {layout}")
    return reference.write_rows(pool, reference.pack_latents(parts, layout), pages, offsets)
