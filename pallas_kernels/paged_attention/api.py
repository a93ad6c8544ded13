"""Public paged attention, for prefill chunks (T > 1) and decode (T = 1)."""

from jaxtyping import Array, Float, Int32, UInt32

from pallas_kernels.implementation import Implementation, resolve
from pallas_kernels.page_layout import KvLayout
from pallas_kernels.paged_attention import reference
from pallas_kernels.paged_attention.configs import decode_config, prefill_config
from pallas_kernels.paged_attention.decode import paged_decode
from pallas_kernels.paged_attention.prefill import paged_prefill
from pallas_kernels.paged_attention.tiles import Scores


def paged_attention(
    q: Float[Array, "B T N H"],
    pool: UInt32[Array, "pages words"],
    pages: Int32[Array, "B blocks"],
    positions: Int32[Array, "B T"],
    *,
    layout: KvLayout,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    implementation: Implementation = "auto",
) -> Float[Array, "B T N H"]:
    """Causal attention of new tokens over a sequence's pages, their own keys included.

    Args:
        q: Queries.
        pool: The page pool; the new tokens' keys and values are already written.
        pages: Page of each block of ``layout.tokens_per_page`` tokens; entries past the sequence
            are never used, whatever their pages hold.
        positions: Position of each query; negative for padding and empty slots, which yield zeros.
        layout: Layout of the layer's pages.
        scale: Multiplies the scores.
        window: A query sees the last ``window`` positions only, itself included.
        soft_cap: See :func:`pallas_kernels.attention.masked_attention`.
        implementation: See :mod:`pallas_kernels.implementation`.

    Returns:
        Attention output in q's dtype.
    """
    if resolve(implementation) == "xla":
        return reference.paged_attention(q, pool, pages, positions, layout, scale, window, soft_cap)
    scores, words = Scores(scale, soft_cap), layout.words_per_head
    if q.shape[1] > 1:
        config = prefill_config(words, q.size // q.shape[-1])
        return paged_prefill(
            q, pool, pages, positions, layout=layout, scores=scores, window=window, config=config
        )
    config = decode_config(words)
    out = paged_decode(
        q[:, 0],
        pool,
        pages,
        positions[:, 0],
        layout=layout,
        scores=scores,
        window=window,
        config=config,
    )
    return out[:, None]
