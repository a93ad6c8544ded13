"""What each mode costs a decode step, counted from shapes, and the cheapest mode.

Times are ``bytes / bandwidth + operations / rate + launches``, with the rates of `configs.RATES`.
They choose between modes; they are no forecast.
"""

from dataclasses import dataclass, replace
from typing import Literal

from pallas_kernels.kv_reconstruct.configs import RATES
from pallas_kernels.kv_reconstruct.nodes import Nodes
from pallas_kernels.page_layout import LatentLayout

Mode = Literal["auto", "rebuild", "fused", "absorbed"]


@dataclass(frozen=True)
class Shape:
    """One layer of a decode step.

    Attributes:
        layout: Of the latent pages.
        tokens: Tokens of all sequences together, unused places of the buckets included.
        rebuilt_tokens: Tokens that ``rebuild`` makes keys and values of, likewise.
        query_heads: N.
        kv_heads: K.
        k_dim: Dimensions of a key that are rebuilt, H.
        v_dim: Dimensions of a value.
        rotates: Keys rotate.
        nodes: How ``absorbed`` divides the pairs.
    """

    layout: LatentLayout
    tokens: int
    rebuilt_tokens: int
    query_heads: int
    kv_heads: int
    k_dim: int
    v_dim: int
    rotates: bool
    nodes: Nodes

    @property
    def latent_bytes(self) -> int:
        """Bytes of the latents."""
        return 4 * self.layout.words_per_token * self.tokens

    @property
    def full_bytes(self) -> int:
        """Bytes of the keys and values that are rebuilt."""
        per_number = 2 if self.layout.dtype == "bfloat16" else 4
        dims = self.k_dim + self.layout.shared_dim + self.v_dim
        return per_number * self.kv_heads * dims * self.tokens


@dataclass(frozen=True)
class Cost:
    """Of one mode.

    Attributes:
        bytes: Read and written.
        operations: Multiplications and additions in products that XLA does.
        kernel_operations: In products inside our kernels.
        launches: Kernels.
    """

    bytes: int | float
    operations: int | float
    kernel_operations: int | float
    launches: int

    @property
    def microseconds(self) -> float:
        """The estimate."""
        return (
            self.bytes / RATES.bytes
            + self.operations / RATES.operations
            + self.kernel_operations / RATES.kernel_operations
            + self.launches * RATES.launch
        )


def rebuild_cost(shape: Shape) -> Cost:
    """Latents are gathered (read, written, read), keys and values made, packed and read."""
    shape = replace(shape, tokens=shape.rebuilt_tokens)
    k_rank, v_rank = shape.layout.k_rank, shape.layout.value_part[1]
    made = k_rank * shape.k_dim + v_rank * shape.v_dim
    return Cost(
        3 * shape.latent_bytes + 4 * shape.full_bytes,
        2 * shape.tokens * shape.kv_heads * made,
        0,
        8,
    )


def _weighting(shape: Shape) -> Cost:
    """Scores are read, the values' latents are read, all heads at once."""
    rank = shape.layout.value_part[1]
    rows = max(16, shape.query_heads)
    latent = 4 * shape.layout.part_words(rank) * shape.tokens
    scores = 4 * shape.query_heads * shape.tokens
    return Cost(latent + 2 * scores, 0, 2 * shape.tokens * rows * rank, 4)


def fused_cost(shape: Shape) -> Cost:
    """Keys are made on the chip; a kv head's program reads the latents again, out of the cache."""
    made = 2 * shape.tokens * shape.kv_heads * shape.layout.k_rank * shape.k_dim
    return _plus(
        Cost(4 * shape.layout.k_words * shape.tokens, 0, made, 4),
        _weighting(shape),
    )


def absorbed_cost(shape: Shape) -> Cost:
    """Queries in the place of keys: all of them, or at the nodes with the fast pairs rebuilt."""
    layout, nodes, tokens = shape.layout, shape.nodes, shape.tokens
    heads, rank = shape.query_heads, layout.k_rank
    weighting = _weighting(shape)
    if not shape.rotates:
        width = rank + layout.shared_dim
        score = Cost(
            4 * layout.part_words(width) * tokens, 0, 2 * tokens * max(16, heads) * width, 3
        )
        return _plus(score, weighting)
    per_number = 2 if layout.dtype == "bfloat16" else 4
    fast = 2 * nodes.fast * shape.kv_heads
    absorbed = per_number * tokens / nodes.block * heads * nodes.count * rank
    made = 2 * tokens * rank * (fast + heads * nodes.count)
    made += 2 * tokens / nodes.block * heads * nodes.count * rank * (shape.k_dim - 2 * nodes.fast)
    traffic = 4 * 4 * layout.k_words * tokens  # gathered; read for the fast pairs and the nodes
    # Keys of one query head each are read once; others are widened and transposed for a product.
    passes = 2 * per_number if heads == shape.kv_heads else 16
    traffic += passes * fast * tokens + 3 * absorbed + 8 * heads * nodes.count * tokens
    return _plus(Cost(traffic, made, 0, 12), weighting)


def full_cost(shape: Shape) -> Cost:
    """Attention over full keys and values, for comparison."""
    return Cost(shape.full_bytes, 0, 0, 2)


def possible_modes(shape: Shape) -> tuple[Mode, ...]:
    """Modes that a decode step can run in; rebuilding is always possible."""
    modes: list[Mode] = ["rebuild"]
    if not shape.layout.shared_dim:
        modes.append("fused")
    if shape.nodes.count:
        modes.append("absorbed")
    return tuple(modes)


COSTS = {"rebuild": rebuild_cost, "fused": fused_cost, "absorbed": absorbed_cost}


def cheapest(shape: Shape) -> Mode:
    """The mode of the least time by these counts."""
    return min(possible_modes(shape), key=lambda mode: COSTS[mode](shape).microseconds)


def _plus(one: Cost, other: Cost) -> Cost:
    return Cost(
        one.bytes + other.bytes,
        one.operations + other.operations,
        one.kernel_operations + other.kernel_operations,
        one.launches + other.launches,
    )
