"""Which convex steps to take for a given number of pages."""

import dataclasses

import numpy as np
from jaxtyping import Int

from pw_jax.planner.hull import RELEASE, RESTORE, Blocks, Steps

_NEVER = np.iinfo(np.int32).max


@dataclasses.dataclass(frozen=True)
class Selection:
    """The chosen state.

    Attributes:
        width: Width index of each block, [N].
        cost: Damage added; negative in a restore.
        bound: Least cost that any choice could have, from the fractional relaxation.
    """

    width: Int[np.ndarray, "N"]
    cost: float
    bound: float


@dataclasses.dataclass(frozen=True)
class _Finish:
    """A prefix of the steps, and one more move of one block (-1: none)."""

    cost: float
    size: int
    taken: int
    block: int = -1
    width: int = -1


def select(steps: Steps, blocks: Blocks, amount: int) -> Selection:
    """Takes the best prefix of the steps with one more move; a restore then spends what is left.

    The plans compared are all those of "the first k steps, then one block to any width". They do
    not depend on the amount, so asking for more pages never gives less damage, and the shortest
    prefix that still suffices drops steps that a large last move makes unnecessary.

    Args:
        steps: Convex steps, sorted.
        blocks: The blocks that the steps belong to.
        amount: Pages to free at least (at most what all steps free), or to take at most.
    """
    sizes = np.concatenate([[0], np.cumsum(steps.size)])
    costs = np.concatenate([[0.0], np.cumsum(steps.cost)])
    whole, bound = _prefix(steps, sizes, costs, amount, blocks.direction)
    best = _best_finish(steps, sizes, costs, blocks, amount, whole)
    width = blocks.start.copy()
    # Of repeated indices the last assignment stays, and a block's steps are in order.
    width[steps.block[: best.taken]] = steps.target[: best.taken]
    if best.block >= 0:
        width[best.block] = best.width
    cost = best.cost
    if blocks.direction == RESTORE:
        more = _fill(steps, best, amount - best.size)
        width[steps.block[more]] = steps.target[more]
        cost += float(steps.cost[more].sum())
    return Selection(width, cost, bound)


def _prefix(
    steps: Steps, sizes: np.ndarray, costs: np.ndarray, amount: int, direction: int
) -> tuple[_Finish, float]:
    """The plain greedy prefix, and the bound: its last step taken in part."""
    if direction == RELEASE:
        count = int(np.searchsorted(sizes, amount, side="left"))
        inside = max(count - 1, 0)
    else:
        count = inside = int(np.searchsorted(sizes, amount, side="right")) - 1
    bound = float(costs[inside])
    if amount > sizes[inside] and inside < len(steps.size):
        part = (amount - sizes[inside]) / steps.size[inside]
        bound += float(part * steps.cost[inside])
    return _Finish(float(costs[count]), int(sizes[count]), count), bound


def _best_finish(
    steps: Steps, sizes: np.ndarray, costs: np.ndarray, blocks: Blocks, amount: int, best: _Finish
) -> _Finish:
    """Least cost over (prefix, one move); then fewest pages; then the first found.

    How long the prefix must be depends on the move's pages only, that is on (module, from, to):
    a few dozen cases, each looked up once and tried on all blocks that stand at `from` then.
    """
    damage, start, direction = blocks.damage, blocks.start, blocks.direction
    rank = np.arange(len(steps.block), dtype=np.int32)
    arrives = np.full(damage.shape, _NEVER, dtype=np.int32)
    leaves = np.full(damage.shape, _NEVER, dtype=np.int32)
    arrives[start, np.arange(len(start))] = -1
    arrives[steps.target, steps.block] = rank
    leaves[steps.source, steps.block] = rank
    for module, table in enumerate(blocks.table):
        (columns,) = np.nonzero(blocks.module == module)
        if not len(columns):
            continue
        here, came, left = damage[:, columns], arrives[:, columns], leaves[:, columns]
        source, target = np.nonzero(direction * (table - table[:, None]) > 0)
        size = direction * (table[target] - table[source])
        if direction == RELEASE:
            taken = np.searchsorted(sizes, amount - size, side="left")
        else:
            taken = np.searchsorted(sizes, amount - size, side="right") - 1
        # Before its first arrival, no block stands at a width.
        possible = (taken >= 0) & (taken > came.min(axis=1)[source])
        if direction == RELEASE:
            possible &= costs[taken] <= best.cost
        if not possible.any():
            continue
        source, target, size, taken = (a[possible] for a in (source, target, size, taken))
        stands = (came[source] < taken[:, None]) & (taken[:, None] <= left[source])
        stands &= blocks.lowest[columns] <= target[:, None]
        extra = np.where(stands, here[target] - here[source], np.inf)
        column = extra.argmin(axis=1)
        cost = costs[taken] + extra[np.arange(len(column)), column]
        total = sizes[taken] + size
        one = np.lexsort((total, cost))[0]
        if (cost[one], total[one]) < (best.cost, best.size):
            best = _Finish(
                float(cost[one]),
                int(total[one]),
                int(taken[one]),
                int(columns[column[one]]),
                int(target[one]),
            )
    return best


def _fill(steps: Steps, best: _Finish, budget: int) -> Int[np.ndarray, "M"]:
    """Indices of further steps that fit into the budget, in order.

    Each round takes the longest run of what fits. The step that ends a round is too large for good,
    so there are no more rounds than step sizes.
    """
    rank = np.arange(len(steps.block))
    taken = rank < best.taken
    barred = steps.block == best.block
    count = int(steps.block.max(initial=-1)) + 1
    while True:
        # A block stops before its first step that is barred or too large.
        stop = np.full(count, _NEVER)
        halted = np.flatnonzero(~taken & (barred | (steps.size > budget)))[::-1]
        stop[steps.block[halted]] = halted
        (fitting,) = np.nonzero(~taken & (rank < stop[steps.block]))
        running = np.cumsum(steps.size[fitting])
        run = fitting[: int(np.searchsorted(running, budget, side="right"))]
        if not len(run):
            (more,) = np.nonzero(taken & (rank >= best.taken))
            return more
        taken[run] = True
        budget -= int(steps.size[run].sum())
