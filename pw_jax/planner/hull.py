"""Convex steps: the moves of each block that are worth making, cheapest first."""

import dataclasses

import numpy as np
from jaxtyping import Bool, Float, Int

RELEASE = -1
RESTORE = 1

SMALL_SHARE = 0.125
"""Of all pages that could be released: up to there it pays to look at few blocks only."""

LEAST_BLOCKS = 64
"""Blocks that are looked at however small the release."""


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

    def only(self, columns: Int[np.ndarray, "M"]) -> "Blocks":
        """Some of the blocks."""
        if len(columns) == len(self.start):
            return self
        return dataclasses.replace(
            self,
            damage=self.damage[:, columns],
            module=self.module[columns],
            start=self.start[columns],
            lowest=self.lowest[columns],
        )


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
    inside = _inside(blocks)
    # An outside width is infinitely bad: the way in from it is -inf, the way out to it inf, and so
    # it bars no width inside.
    barred, held = np.where(inside, damage, np.inf)[::direction], pages[::direction]
    steepest_in = np.full((widths, count), -np.inf)
    flattest_out = np.full((widths, count), np.inf)
    with np.errstate(invalid="ignore"):  # inf - inf, between two outside widths
        for apart in range(1, widths):
            size = direction * (held[apart:] - held[:-apart])
            slope = _slope(barred[apart:] - barred[:-apart], size)
            np.maximum(steepest_in[apart:], slope, out=steepest_in[apart:])
            np.minimum(flattest_out[:-apart], slope, out=flattest_out[:-apart])
    steepest_in, flattest_out = steepest_in[::direction], flattest_out[::direction]
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


def in_reach(blocks: Blocks, amount: int) -> Int[np.ndarray, "M"]:
    """Columns of the blocks that a release of some pages could come to; the others need no look.

    A step costs at least as much a page as its block's first one. So where the blocks with the
    cheapest first steps free the pages with these alone, greedy takes no step of another block. As
    many again are kept for the last move.
    """
    column = np.arange(len(blocks.start))
    pages = blocks.table.T[:, blocks.module]
    freed = pages[blocks.start, column] - pages
    if SMALL_SHARE * int(freed[blocks.lowest, column].sum()) < amount:
        return column
    cost = blocks.damage - blocks.damage[blocks.start, column]
    slope = np.where(_inside(blocks) & (freed > 0), _slope(cost, freed), np.inf)
    first = slope.argmin(axis=0)
    slope = slope[first, column]
    order = np.argsort(slope, kind="stable")
    freed_so_far = np.cumsum(np.where(slope < np.inf, freed[first, column], 0)[order])
    count = int(np.searchsorted(freed_so_far, amount)) + 1
    return np.sort(order[: max(2 * count, LEAST_BLOCKS)])


def _inside(blocks: Blocks) -> Bool[np.ndarray, "W N"]:
    """Widths that each block may have."""
    index = np.arange(len(blocks.damage))[:, None]
    if blocks.direction == RELEASE:
        return (blocks.lowest <= index) & (index <= blocks.start)
    return index >= blocks.start


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
