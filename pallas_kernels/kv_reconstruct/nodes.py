"""Where RoPE can be interpolated: the arithmetic behind absorbed keys that rotate.

A score is ``q . R(s) U_k c_s``. Without the rotation R(s) of position s, U_k could be multiplied
into the query once (absorbed), and a head would cost R products a token instead of R x H. With it
the absorbed query ``w(s) = U_k^T R(s)^T q`` differs from token to token, but for a pair that turns
slowly it differs little: over a block of L tokens it is a sum of cosines and sines of at most
``a = frequency (L - 1) / 2`` radians, and a polynomial through m Chebyshev nodes of
the block meets it to an error that falls like ``(a / 2)^m / m!``. So the slow pairs are absorbed at
m positions a block, and scores at those are interpolated; only the fast pairs are rebuilt.

The error is bounded for every query and latent: ``tolerance`` times the sum over the slow pairs of
``|q_j| |k_j|``. It is set below the rounding of the page's own dtype.
"""

import math
from dataclasses import dataclass
from functools import cache

import numpy as np

MOST_NODES = 24


@dataclass(frozen=True)
class Nodes:
    """How the keys' rotation is divided.

    Attributes:
        fast: Leading pairs of a head whose keys are rebuilt and rotated, token by token.
        block: Tokens L of a block.
        count: Nodes m a block; 0 if no pair is absorbed.
    """

    fast: int
    block: int
    count: int

    def weights(self) -> np.ndarray:
        """Interpolation from the nodes to the tokens of a block, float64 ``[L, m]``."""
        return _interpolation(self.count, np.linspace(-1.0, 1.0, self.block))

    def positions(self, blocks: int) -> np.ndarray:
        """Positions of the nodes, float64 ``[blocks, m]``; between tokens as a rule."""
        half = (self.block - 1) / 2
        starts = np.arange(blocks)[:, None] * self.block
        return starts + half + half * _chebyshev(self.count)[None, :]


def _chebyshev(count: int) -> np.ndarray:
    return np.cos((2 * np.arange(count) + 1) * np.pi / (2 * count))


def _interpolation(count: int, points: np.ndarray) -> np.ndarray:
    """Values at points of the polynomials that are 1 at one Chebyshev node and 0 at the others."""
    degree = np.arange(1, count)
    of_points = np.cos(degree[None, :] * np.arccos(np.clip(points, -1, 1))[:, None])
    of_nodes = np.cos(degree[None, :] * np.arccos(_chebyshev(count))[:, None])
    return (1 + 2 * of_points @ of_nodes.T) / count


@cache
def nodes_needed(half_angle: float, tolerance: float) -> int | None:
    """Fewest nodes that meet ``exp(i a x)`` for -1 <= x <= 1 and any angle up to ``half_angle``.

    Returns:
        None if more than ``MOST_NODES`` would be needed.
    """
    if half_angle > MOST_NODES:  # fewer nodes than waves
        return None
    points = np.linspace(-1.0, 1.0, 201)
    exact = np.exp(1j * half_angle * points)
    for count in range(1, MOST_NODES + 1):
        nodes = np.exp(1j * half_angle * _chebyshev(count))
        if np.abs(_interpolation(count, points) @ nodes - exact).max() <= tolerance:
            return count
    return None


def tolerance_of(dtype: str) -> float:
    """An error that the rounding of keys in this dtype hides."""
    return 2.0**-11 if dtype == "bfloat16" else 2.0**-24


@cache
def choose_nodes(
    frequencies: tuple[float, ...],
    tokens: int,
    tokens_per_page: int,
    queries_per_kv_head: int,
    tolerance: float,
) -> Nodes:
    """The cheapest division that absorbs some pair.

    Counted in products a token of a kv head, each times the rank. A rebuilt pair costs 2. A node
    costs one product for each query head, and as many again for its share of making the absorbed
    queries of a block and of their way through memory.

    Args:
        frequencies: Angle a position of each pair, never rising.
        tokens: Tokens S that a sequence's table holds.
        tokens_per_page: Blocks hold whole pages.
        queries_per_kv_head: Query heads that share a key.
        tolerance: See the module.
    """
    half = len(frequencies)
    best, least = Nodes(half, tokens_per_page, 0), math.inf
    doublings = int(math.log2(max(1, tokens // tokens_per_page)))
    sizes = [tokens_per_page << doubling for doubling in range(doublings + 1)]
    for block in sizes:
        for fast in range(half):
            count = nodes_needed(round(frequencies[fast] * (block - 1) / 2, 9), tolerance)
            if count is None:
                continue
            made = 2 * count * (half - fast) / block + W_PASSES * count / block
            cost = 2.0 * fast + queries_per_kv_head * (count + made)
            if cost < least:
                best, least = Nodes(fast, block, count), cost
    return best


W_PASSES = 700
"""Products that a GPU does while a number of an absorbed query goes through memory (four times)."""
