"""Public attention over latents in pages, for prefill chunks (T > 1) and decode (T = 1)."""

from jaxtyping import Array, Float, Int32, UInt32

from pallas_kernels.implementation import Implementation, resolve
from pallas_kernels.kv_reconstruct.compact import CompactBlocks
from pallas_kernels.kv_reconstruct.counts import Mode, Shape, cheapest, possible_modes
from pallas_kernels.kv_reconstruct.decode import decode, nodes_of
from pallas_kernels.kv_reconstruct.expansion import Rotation, UpProjections
from pallas_kernels.kv_reconstruct.rebuild import rebuilt_attention
from pallas_kernels.page_layout import LatentLayout


def latent_attention(
    q: Float[Array, "B T N Hq"],
    pool: UInt32[Array, "pages words"],
    pages: Int32[Array, "B blocks"],
    positions: Int32[Array, "B T"],
    up: UpProjections,
    *,
    layout: LatentLayout,
    scale: float,
    rotation: Rotation | None,
    compact: CompactBlocks | None = None,
    mode: Mode = "auto",
    implementation: Implementation = "auto",
) -> Float[Array, "B T N Hv"]:
    """Causal attention of new tokens over a sequence's latents, their own included.

    The modes give the same result, up to rounding:

    - ``rebuild``: used pages are gathered, keys and values made of them by one product each, keys
      rotated by their positions, then :func:`paged_attention`. Prefill chunks always do this.
    - ``fused``: a kernel makes keys tile by tile on the chip and keeps only scores; values are
      absorbed, ``o = U_v (P c_v)``. Neither keys nor values ever exist in memory.
    - ``absorbed``: values likewise, and U_k is multiplied into the query. Where keys do not rotate
      that is all; where they do, slow pairs are absorbed at a few nodes a block and their scores
      interpolated, and only fast pairs are rebuilt (`kv_reconstruct.nodes`).
    - ``auto``: the cheapest by the counts of `kv_reconstruct.counts`.

    Args:
        q: Queries, rotated. The last ``layout.shared_dim`` dimensions meet the shared key.
        pool: The page pool; the new tokens' latents are already written.
        pages: Page of each block of ``layout.tokens_per_page`` tokens; entries past the sequence
            are never used, whatever their pages hold.
        positions: Position of each query; negative for padding and empty slots, which yield zeros.
        up: What turns latents into keys and values.
        layout: Layout of the layer's pages.
        scale: Multiplies the scores.
        rotation: How keys rotate, the shared key apart; None if they do not.
        compact: The used pages, numbered on the host; None for all of ``pages``. ``rebuild`` makes
            those only; the other modes look at as many columns of ``pages`` as ``remap`` has.
        mode: See above.
        implementation: See :mod:`pallas_kernels.implementation`.

    Returns:
        Attention output in q's dtype.

    Raises:
        ValueError: A mode that these shapes do not have.
    """
    body = resolve(implementation)
    columns = pages.shape[1] if compact is None else compact.remap.shape[1]
    if q.shape[1] == 1:
        capacity = None if compact is None else compact.sequence.shape[0]
        shape = decode_shape(up, layout, rotation, q.shape[2], pages.shape[0], columns, capacity)
        mode = cheapest(shape) if mode == "auto" else mode
        if mode not in possible_modes(shape):
            raise ValueError(f"mode {mode!r} is not possible for {shape}")
        if mode != "rebuild":
            out = decode(
                q[:, 0],
                pool,
                pages[:, :columns],
                positions[:, 0],
                up,
                layout=layout,
                scale=scale,
                rotation=rotation,
                absorb_keys=mode == "absorbed",
                use_kernels=body == "pallas",
            )
            return out[:, None]
    return rebuilt_attention(
        q,
        pool,
        pages,
        positions,
        up,
        compact,
        layout=layout,
        scale=scale,
        rotation=rotation,
        implementation=body,
    )


def decode_shape(
    up: UpProjections,
    layout: LatentLayout,
    rotation: Rotation | None,
    query_heads: int,
    batch: int,
    blocks: int,
    capacity: int | None = None,
) -> Shape:
    """What the counts need to know of a decode step; shapes of ``up`` will do.

    Args:
        up: Projections.
        layout: Layout of the pages.
        rotation: Of the keys.
        query_heads: N.
        batch: Sequences.
        blocks: Columns of the page tables.
        capacity: Pages that ``rebuild`` rebuilds; None for all of the tables.
    """
    rebuilt = batch * blocks if capacity is None else capacity
    return Shape(
        layout,
        batch * blocks * layout.tokens_per_page,
        rebuilt * layout.tokens_per_page,
        query_heads,
        up.k.shape[0],
        up.k.shape[1],
        up.v.shape[1],
        rotation is not None,
        nodes_of(up, layout, rotation, query_heads, blocks),
    )
