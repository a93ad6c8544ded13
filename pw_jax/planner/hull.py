"""Convex steps: the moves of each block that are worth making, cheapest first."""

import dataclasses

import numpy as np
from jaxtyping import Float, Int

RELEASE = -1
RESTORE = 1


@dataclasses.dataclass(frozen=True)
class Blocks:
    """The blocks that may move, as columns.

    Attributes:
        damage: Weighted damage of each block at each width, [W, N].
        table: Pages of a block of each module at each width, not falling with the width, [2, W].
        module: Module of each block, [N].
        start: Present width index, [N].
        lowest: Lowest width index that a release may reach, [N].
        direction: `RELEASE` or `RESTORE`.
    """

    damage: Float[np.ndarray, "W N"]
    table: Int[np.ndarray, "2 W"]
    module: Int[np.ndarray, "N"]
    start: Int[np.ndarray, "N"]
    lowest: Int[np.ndarray, "N"]
    direction: int


@dataclasses.dataclass(frozen=True)
class Steps:
    """Moves along the lower convex hull of (pages, damage) of each block, by damage per page.

    The steps of one block follow one another in this order, so any prefix of the list is a valid
    state of all blocks.

    Attributes:
        block: Column of the block, [S].
        source: Width index before the step, [S].
        target: Width index after the step, [S].
        size: Pages freed (release) or taken (restore), [S], not negative.
        cost: Damage added, [S]; negative in a restore.
    """

    block: Int[np.ndarray, "S"]
    source: Int[np.ndarray, "S"]
    target: Int[np.ndarray, "S"]
    size: Int[np.ndarray, "S"]
    cost: Float[np.ndarray, "S"]


def convex_steps(blocks: Blocks) -> Steps:
    """Finds the steps along each block's hull away from its present width, all blocks at once.

    A width is on the hull if no segment between a nearer and a further width passes below it: the
    steepest way in is no steeper than the flattest way out. Widths that free no page, and, upwards,
    widths that avoid no damage, are left out. Points on a straight line stay, for the finer steps.
    """
    damage, start, direction = blocks.damage, blocks.start, blocks.direction
    widths, count = damage.shape
    pages = np.ascontiguousarray(blocks.table.T[:, blocks.module])
    rows = range(widths)[::direction]  # in the order of the walk
    index = np.arange(widths)[:, None]
    released = (blocks.lowest <= index) & (index <= start)
    inside = released if direction == RELEASE else index >= start
    # An outside width is infinitely bad: the way in from it is -inf, the way out to it inf, and so
    # it bars no width inside.
    barred = np.where(inside, damage, np.inf)
    steepest_in = np.full((widths, count), -np.inf)
    flattest_out = np.full((widths, count), np.inf)
    with np.errstate(invalid="ignore"):  # inf - inf, between two outside widths
        for i, near in enumerate(rows):
            for far in rows[i + 1 :]:
                slope = _slope(barred[far] - barred[near], direction * (pages[far] - pages[near]))
                np.maximum(steepest_in[far], slope, out=steepest_in[far])
                np.minimum(flattest_out[near], slope, out=flattest_out[near])
    on_hull = inside & (steepest_in <= flattest_out) & (steepest_in < np.inf)

    # Walk: each block steps from the last width of its hull to the next.
    column = np.arange(count)
    here = start.astype(np.int8)  # small types: at this size, fresh memory is what takes time
    here_damage, here_pages = damage[start, column], pages[start, column]
    least_slope = np.full(count, -np.inf)
    alive = np.ones(count, dtype=bool)
    found = []
    for row in rows:
        (block,) = np.nonzero(on_hull[row] & (start != row) & alive)
        cost = damage[row, block] - here_damage[block]
        if direction == RESTORE:
            alive[block[cost >= 0]] = False
            block, cost = block[cost < 0], cost[cost < 0]
        size = direction * (pages[row, block] - here_pages[block])
        # Rounding must not put a later step of a block before an earlier one.
        slope = np.maximum(_slope(cost, size), least_slope[block])
        source, target = here[block], np.full(len(block), row, dtype=here.dtype)
        found.append((block.astype(np.int32), source, target, size, cost, slope))
        here[block], least_slope[block] = row, slope
        here_damage[block], here_pages[block] = damage[row, block], pages[row, block]
    *columns, slopes = (np.concatenate(column) for column in zip(*found, strict=True))
    order = _stable_order(slopes)
    return Steps(*(column[order] for column in columns))


def _slope(cost: np.ndarray, size: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore", invalid="ignore"):
        slope = cost / size
    if not size.all():
        # For no page: minus infinity if it lowers the damage, else never worth it.
        slope[(size == 0) & ~(cost < 0)] = np.inf
    return slope


def _stable_order(keys: np.ndarray) -> np.ndarray:
    # The default sort is several times faster, and without ties the order is the same.
    order = np.argsort(keys)
    ordered = keys[order]
    if (ordered[1:] == ordered[:-1]).any():
        return np.argsort(keys, kind="stable")
    return order
