"""Work lists: which rows of which expert are multiplied together.

Everything is counted by comparing all with all, which XLA fuses into a few sums. A sort, a running
sum or a binary search is a loop to XLA, and each of its turns a launch; on a decode step they took
longer than the products.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from pallas_kernels.bitplane_matmul.warp_matmul import Units

MOST_COUNTED = 4096
"""Choices beyond which comparing all pairs costs more than two sorts."""


class Routing(NamedTuple):
    """Choices sorted by expert; a place is a position in that order.

    Attributes:
        token: Token of each place.
        place: Place of each token's choices.
        real: Whether a choice names an expert.
        starts: First place of each expert.
        counts: Places of each expert; choices of no expert come last and are not counted.
    """

    token: Int32[Array, " A"]
    place: Int32[Array, "M k"]
    real: Bool[Array, "M k"]
    starts: Int32[Array, " E"]
    counts: Int32[Array, " E"]


def route(expert_ids: Int32[Array, "M k"], experts: int) -> Routing:
    """Sorts choices by expert, keeping the order of tokens."""
    flat = expert_ids.reshape(-1)
    index = jnp.arange(flat.shape[0], dtype=jnp.int32)
    expert = jnp.arange(experts, dtype=jnp.int32)[:, None]
    place = _places(flat)
    order = jnp.zeros_like(index).at[place].set(index, unique_indices=True)
    return Routing(
        order // expert_ids.shape[1],
        place.reshape(expert_ids.shape),
        expert_ids < experts,
        _count(flat[None] < expert),
        _count(flat[None] == expert),
    )


def _places(flat: Int32[Array, " A"]) -> Int32[Array, " A"]:
    """Place of each choice in the stable order by expert."""
    if flat.shape[0] > MOST_COUNTED:
        return jnp.argsort(jnp.argsort(flat, stable=True)).astype(jnp.int32)
    index = jnp.arange(flat.shape[0], dtype=jnp.int32)
    earlier = (flat[None] == flat[:, None]) & (index[None] < index[:, None])
    return _count((flat[None] < flat[:, None]) | earlier)


def _count(true: Bool[Array, "rows columns"]) -> Int32[Array, " rows"]:
    return jnp.sum(true, axis=1, dtype=jnp.int32)


def most_units(choices: int, experts: int, capacity: int) -> int:
    """An upper bound on the units of any routing."""
    return min(choices, min(choices, experts) + choices // capacity)


def make_units(routing: Routing, capacity: int, cost: Int32[Array, " E"]) -> Units:
    """Cuts each expert's places into units of at most ``capacity``; idle experts have none.

    A kernel's warps take work in turn, so the costliest comes first: then each round is of nearly
    equal work, and no warp gets the widest experts again and again.

    Args:
        routing: Places of each expert.
        capacity: Most tokens of a unit.
        cost: About how long a unit of each expert takes, by any measure, at least 0.
    """
    experts = routing.counts.shape[0]
    length = most_units(routing.token.shape[0], experts, capacity)
    needed = -(-routing.counts // capacity)
    index = jnp.arange(experts + 1, dtype=jnp.int32)[:, None]
    own_cost = jnp.append(cost, -1)[:, None]  # one more, behind all others
    others = index[:-1, 0]
    first = (cost[None] > own_cost) | ((cost[None] == own_cost) & (others[None] < index))
    before = jnp.sum(jnp.where(first, needed[None], 0), axis=1, dtype=jnp.int32)
    unit = jnp.arange(length, dtype=jnp.int32)
    start, end = before[None, :-1], before[None, :-1] + needed[None]
    own = (start <= unit[:, None]) & (unit[:, None] < end)
    expert = jnp.sum(jnp.where(own, others[None], 0), axis=1, dtype=jnp.int32)
    skipped = (unit - before[expert]) * capacity
    tokens = jnp.clip(routing.counts[expert] - skipped, 0, capacity)
    return Units(expert, routing.starts[expert] + skipped, tokens, before[-1:])


def unit_places(units: Units, capacity: int, places: int) -> Int32[Array, "U capacity"]:
    """Place of each of a unit's rows; rows past its tokens repeat some valid place."""
    inside = jnp.arange(capacity, dtype=jnp.int32)
    return jnp.clip(units.first[:, None] + inside[None, :], 0, places - 1)
