"""What each layout communicates and stores, from shapes alone.

Counts are per token, per layer and per device. On the wire of a ring of N devices an all-gather of
x elements costs f x, a reduce-scatter f x and an all-reduce 2 f x, with f = (N - 1) / N.
"""

import dataclasses
from collections.abc import Sequence

from sharding.collectives import ring_factor
from sharding.padding import plan_heads, round_up

BLOCKS = ("attention", "mlp")


@dataclasses.dataclass(frozen=True)
class Matrix:
    """One linear layer.

    Attributes:
        name: Of the projection.
        inputs: Columns of its input.
        outputs: Columns of its output.
        rank: Of its factors; None where it is whole.
    """

    name: str
    inputs: int
    outputs: int
    rank: int | None = None


@dataclasses.dataclass(frozen=True)
class BlockShape:
    """The linear layers of an attention or an MLP.

    Attributes:
        entries: The ways in.
        last: The way out.
        shared_key: MLA: columns of the kv latent behind its rank; 0 elsewhere.
        latents: MLA: which ways in are factors in the model itself; they are so in any layout.
    """

    entries: tuple[Matrix, ...]
    last: Matrix
    shared_key: int = 0
    latents: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Transfer:
    """One collective of a layer.

    Attributes:
        kind: As in `collectives.KINDS`.
        width: Elements a token: gathered, or before scattering, or reduced.
    """

    kind: str
    width: int

    def wire(self, devices: int) -> float:
        """Elements on the wire a token."""
        if self.kind == "reduce-scatter":
            return self.width * (devices - 1) / devices
        return self.width * ring_factor(self.kind, devices)


def rank_for_ratio(inputs: int, outputs: int, ratio: float) -> int:
    """The rank at which factors keep that share of a matrix's parameters; at least 1."""
    return max(1, int(ratio * inputs * outputs / (inputs + outputs)))


def attention_shape(
    hidden: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    ranks: Sequence[int | None] | None = None,
) -> BlockShape:
    """Multi-head or grouped-query attention.

    Args:
        hidden: Width of the residual.
        heads: Query heads.
        kv_heads: Key and value heads.
        head_dim: Width of a head.
        ranks: Of q, k, v and o; None for whole matrices.
    """
    q, kv = heads * head_dim, kv_heads * head_dim
    sizes = [("q", hidden, q), ("k", hidden, kv), ("v", hidden, kv), ("o", q, hidden)]
    *entries, last = _matrices(sizes, ranks)
    return BlockShape(tuple(entries), last)


def latent_attention_shape(
    hidden: int,
    heads: int,
    dims: tuple[int, int, int],
    ranks: tuple[int | None, int, int | None],
    *,
    q_is_latent: bool = True,
) -> BlockShape:
    """Latent attention (MLA).

    Args:
        hidden: Width of the residual.
        heads: Heads.
        dims: Plain and rotated dimensions of a key, and the value's.
        ranks: Of q, kv and o; q and o may be whole.
        q_is_latent: q has factors in the model itself, rather than by decomposition.
    """
    plain, turning, value = dims
    return BlockShape(
        (
            Matrix("q", hidden, heads * (plain + turning), ranks[0]),
            Matrix("kv", hidden, heads * (plain + value), ranks[1]),
        ),
        Matrix("o", heads * value, hidden, ranks[2]),
        shared_key=turning,
        latents=("q", "kv") if q_is_latent else ("kv",),
    )


def mlp_shape(
    hidden: int, ffn: int, gated: bool, ranks: Sequence[int | None] | None = None
) -> BlockShape:
    """An MLP.

    Args:
        hidden: Width of the residual.
        ffn: Hidden width.
        gated: It has a gate.
        ranks: Of gate, up and down, or up and down; None for whole matrices.
    """
    sizes = [("gate", hidden, ffn)] if gated else []
    sizes += [("up", hidden, ffn), ("down", ffn, hidden)]
    *entries, last = _matrices(sizes, ranks)
    return BlockShape(tuple(entries), last)


def transfers(
    layout: str, shape: BlockShape, devices: int, *, padded: bool = True
) -> tuple[Transfer, ...]:
    """The collectives of one block, norms not counted.

    Args:
        layout: A name of `layouts.LAYOUTS`.
        shape: The block. Ranks are ignored by ``dense`` but for MLA's latents.
        devices: N.
        padded: Count what is padded on the wire; without, the formula as it is written.

    Raises:
        ValueError: The layout is not known, or cannot hold a matrix that is whole.
    """
    up = (lambda size: round_up(size, devices)) if padded else (lambda size: size)
    last, hidden = shape.last, shape.last.outputs
    latent = sum(m.rank for m in shape.entries if m.rank is not None) + shape.shared_key
    whole = [m.name for m in (*shape.entries, last) if m.rank is None]
    match layout:
        case "dense":
            return (Transfer("all-reduce", hidden),)
        case "naive":
            if whole:
                raise ValueError(f"the naive layout needs factors of {', '.join(whole)}")
            return tuple(Transfer("all-reduce", m.outputs) for m in (*shape.entries, last))
        case "gathered":
            first = (Transfer("all-gather", up(latent)),) if latent else ()
            return (*first, Transfer("all-reduce", hidden if last.rank is None else last.rank))
        case "sharded":
            if any(m.rank is None for m in shape.entries):
                raise ValueError(f"the sharded layout needs factors of {', '.join(whole)}")
            out = Transfer("all-reduce", last.rank) if last.rank is not None else (
                Transfer("reduce-scatter", up(hidden))
            )  # fmt: skip
            return (Transfer("all-reduce", latent), out)
    raise ValueError(f"layout {layout!r} is not known")


def norm_transfers(layout: str, *, centred: bool = False) -> tuple[Transfer, ...]:
    """What the norm before a block communicates: float32 sums, where the residual is divided.

    Args:
        layout: A name of `layouts.LAYOUTS`.
        centred: It is a LayerNorm.
    """
    return (Transfer("all-reduce", 1),) * (1 + centred) if layout == "sharded" else ()


def wire_elements(layout: str, shape: BlockShape, devices: int, *, padded: bool = True) -> float:
    """Elements on the wire a token, norms not counted."""
    return sum(one.wire(devices) for one in transfers(layout, shape, devices, padded=padded))


def weight_elements(layout: str, shape: BlockShape, devices: int) -> float:
    """Weights that a device stores, padding, biases and norms not counted.

    ``gathered`` keeps the last factor of a block whole, and ``dense`` the down projections of MLA;
    ``naive`` all first factors of MLA.
    """
    total = 0.0
    for matrix in (*shape.entries, shape.last):
        own = matrix.name in shape.latents
        if matrix.rank is None or (layout == "dense" and not own):
            total += matrix.inputs * matrix.outputs / devices
            continue
        first = matrix.inputs * (matrix.rank + (shape.shared_key if matrix.name == "kv" else 0))
        second = matrix.rank * matrix.outputs
        last = matrix is shape.last
        whole = layout == "dense" or (layout == "naive" and bool(shape.latents) and not last)
        total += first / (1 if whole else devices)
        total += second / (1 if layout == "gathered" and last else devices)
    return total


def kv_elements(layout: str, heads: int, kv_heads: int, head_dim: int, devices: int) -> int:
    """Elements of keys and values that a device caches a token, padded and copied heads counted."""
    devices = 1 if layout == "naive" else devices
    return 2 * plan_heads(heads, kv_heads, devices).groups * head_dim


def _matrices(
    sizes: list[tuple[str, int, int]], ranks: Sequence[int | None] | None
) -> list[Matrix]:
    ranks = [None] * len(sizes) if ranks is None else ranks
    return [Matrix(*size, rank) for size, rank in zip(sizes, ranks, strict=True)]
