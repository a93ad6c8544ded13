"""Carries out changes of width: page table, copies and what is told of them."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Bool

from pw_jax.engine.trace import PlanEvent
from pw_jax.paging.allocator import OutOfPagesError
from pw_jax.paging.host_pages import Block, Transfer
from pw_jax.paging.mover import Mover
from pw_jax.paging.weight_pages import WeightPageTable
from pw_jax.planner.plan import Plan, Step

_NO_PAGES = np.zeros(0, np.int32)


class _Raise(NamedTuple):
    """A raise on its way, and the turn it began in."""

    step: Step
    turn: int


class Moves:
    """Lowers blocks at once, and raises them when their copies have landed.

    A move that fails leaves its block at the committed width.

    Attributes:
        table: The weight page table.
        turn: Number of the engine's turn; the caller counts.
        last_change: Turn at which each block last changed its width, or failed to.
        lowered: Blocks lowered so far.
        raised: Blocks raised so far.
        failed: Moves given up because a copy failed.
        events: Plans and moves so far.

    Args:
        table: The weight page table.
        mover: Copies pages.
        raise_turns: See `PlannerConfig.raise_turns`.
    """

    def __init__(self, table: WeightPageTable, mover: Mover, raise_turns: int | None):
        self.table = table
        self.turn = 1
        self.last_change = np.zeros(table.bits.shape, np.int64)
        self.lowered = self.raised = self.failed = 0
        self.events: list[PlanEvent] = []
        self._mover = mover
        self._raise_turns = raise_turns
        self._begun: dict[Block, _Raise] = {}

    def loading(self) -> Bool[np.ndarray, "L E 2"]:
        """Blocks with a raise on the way."""
        found = np.zeros(self.last_change.shape, bool)
        for block in self._begun:
            found[block] = True
        return found

    def lower(self, pool: jax.Array, steps: Sequence[Step]) -> jax.Array:
        """Lowers blocks; their pages are free when this returns.

        Args:
            pool: The pool; donated.
            steps: One a block.
        """
        if not steps:
            return pool
        moves = [(_block(step), step.to_bits) for step in steps]
        images = [Transfer(self.table.table_image(*move), _NO_PAGES) for move in moves]
        try:  # the new tables travel first: after that, nothing can fail between commit and write
            sent = self._mover.send(images)
        except RuntimeError:
            self._fail(steps)
            return pool
        transfers = []
        for move, table in zip(moves, sent, strict=True):
            transfers += [Transfer(table.image, t.ids) for t in self.table.lower(*move)]
            self.last_change[move[0]] = self.turn
        self.lowered += len(steps)
        self._event("release", steps)
        return self._mover.scatter(pool, transfers)

    def begin_raises(self, steps: Iterable[Step]) -> bool:
        """Starts the copies of wider widths, as far as pages go.

        Returns:
            True if all of them began.
        """
        begun: dict[Step, list[Transfer]] = {}
        complete = True
        for step in steps:
            try:
                begun[step] = self.table.begin_raise(_block(step), step.to_bits)
            except OutOfPagesError:  # the old table is held until the new one has landed
                complete = False
                break
        if not begun:
            return complete
        try:
            self._mover.start({_block(step): transfers for step, transfers in begun.items()})
        except RuntimeError:
            for step in begun:
                self.table.cancel_raise(_block(step))
            self._fail(list(begun))
            return False
        self._begun |= {_block(step): _Raise(step, self.turn) for step in begun}
        self._event("restore", begun)
        return complete

    def commit(self, pool: jax.Array, most: int) -> tuple[jax.Array, int]:
        """Commits raises whose copies have landed.

        Args:
            pool: The pool; donated.
            most: Blocks to commit at most.

        Returns:
            The pool, and how many were committed or given up.
        """
        landed, failed = self._mover.settled(self._due(most))
        steps = []
        transfers: list[Transfer] = []
        for block in landed[:most]:
            transfers += self._mover.take(block)
            self.table.commit_raise(block)
            steps.append(self._begun.pop(block).step)
            self.last_change[block] = self.turn
        if failed:
            self._fail([self._give_up(block) for block in failed])
        if steps:
            self.raised += len(steps)
            self._event("commit", steps)
        return self._mover.scatter(pool, transfers), len(steps) + len(failed)

    def cancel(self) -> bool:
        """Gives up the youngest raise on its way: its reserved pages are returned.

        Returns:
            False if there is none.
        """
        if not self._begun:
            return False
        self._event("cancel", [self._give_up(next(reversed(self._begun)))])
        return True

    def planned(self, plan: Plan, pages_wanted: int) -> None:
        """Tells of a plan."""
        numbers = {
            "pages_wanted": pages_wanted,
            "pages_released": plan.pages_released,
            "shortage": plan.shortage,
            "damage": plan.damage_added,
            "bound_gap": plan.bound_gap,
        }
        self._event("plan", plan, numbers)

    def _due(self, most: int) -> list[Block] | None:
        """Raises whose turn has come; None if time decides."""
        if self._raise_turns is None:
            return None
        due = [b for b, r in self._begun.items() if self.turn - r.turn >= self._raise_turns]
        return due[:most]

    def _give_up(self, block: Block) -> Step:
        self._mover.take(block)
        self.table.cancel_raise(block)
        return self._begun.pop(block).step

    def _fail(self, steps: Sequence[Step]) -> None:
        self.failed += len(steps)
        for step in steps:
            self.last_change[_block(step)] = self.turn  # not tried again at once
        self._event("failed", steps)

    def _event(
        self, kind: str, steps: Iterable[Step], numbers: dict[str, int | float] | None = None
    ) -> None:
        moves = tuple(tuple(step) for step in steps)
        self.events.append(PlanEvent(self.turn, kind, moves, numbers or {}))


def _block(step: Step) -> Block:
    return step.layer, step.expert, step.module
