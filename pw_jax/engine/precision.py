"""Lowers and restores the precision of experts at step boundaries, as the planner says."""

import itertools
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float, Int

from pw_jax.engine.expert_source import ExpertSource
from pw_jax.engine.moves import Moves
from pw_jax.engine.prompts import RunningPrompts
from pw_jax.paging.allocator import Owner, PageAllocator
from pw_jax.paging.expert_slices import slice_experts
from pw_jax.paging.host_pages import HostPages
from pw_jax.paging.layout import MODULES, PagingLayout
from pw_jax.paging.mover import Mover
from pw_jax.paging.weight_pages import WeightPageTable
from pw_jax.planner.config import PlannerConfig
from pw_jax.planner.damage import conditional_damage
from pw_jax.planner.demand import pages_to_release, pages_to_restore, restorable
from pw_jax.planner.initial import initial_bits
from pw_jax.planner.kinds import floors_of, weigh
from pw_jax.planner.plan import PlanInputs, Step, plan_release, plan_restore
from pw_jax.planner.routing import RoutingMass
from pw_jax.planner.static import optimal_bits
from sharding.placement import Placement


class _Nothing(NamedTuple):
    """A plan that could raise nothing: it need not be made again while all this holds.

    Attributes:
        until: Boundary at which a block comes of age.
        pages: Pages that were to be had.
        histogram: Of the table: another object once a width has changed.
    """

    until: int
    pages: int
    histogram: dict[int, int]

    def still(self, step: int, pages: int, histogram: dict[int, int]) -> bool:
        """Whether a plan would find nothing again."""
        return step < self.until and pages <= self.pages and histogram is self.histogram


class Precision:
    """Which width every block has, now and next.

    Between two steps the engine may ask for pages (:meth:`relieve`) and lets moves go on
    (:meth:`advance`). Both take the pool and return it, so that a step always sees widths whose
    pages have been written.

    Attributes:
        table: The weight page table.
        moves: Carries out what is planned, and counts it.
        prompts: Statistics of the running prompts.

    Args:
        table: The weight page table.
        mover: Copies pages.
        allocator: Owns the pages.
        damage: Conditional sensitivity of each block at each width.
        routing: Routing mass to start from.
        config: The planner's constants.
        kv_block_pages: Pages of one KV block over all layers.
        prompts: Statistics of the running prompts.
    """

    def __init__(
        self,
        table: WeightPageTable,
        mover: Mover,
        allocator: PageAllocator,
        damage: Float[np.ndarray, "L E 2 W"],
        routing: RoutingMass,
        config: PlannerConfig,
        kv_block_pages: int,
        prompts: RunningPrompts,
    ):
        self.table = table
        self.moves = Moves(table, mover, config.raise_turns)
        self.prompts = prompts
        self._mover = mover
        self._allocator = allocator
        self._damage = damage
        self._routing = routing
        self._config = config
        self._kv_block_pages = kv_block_pages
        self._seed_bits = table.widths[0]
        self._pages = np.array(
            [
                [table.pages_at(module, bits) for bits in table.widths]
                for module in range(len(MODULES))
            ]
        )
        self._seconds = 0.0
        self._releases: deque[Step] = deque()  # planned and not done yet
        self._raises: deque[Step] = deque()
        self._nothing: _Nothing | None = None
        self._lowest: dict[int, int] | None = None  # the histogram at which no block could fall
        self._seen_mass = np.zeros(routing.mass.shape)
        self._seen_tokens = 0

    @classmethod
    def create(
        cls,
        layout: PagingLayout,
        allocator: PageAllocator,
        source: ExpertSource,
        config: PlannerConfig,
        pool: jax.Array,
        placement: Placement | None = None,
    ) -> "Precision":
        """Reads all experts of a source into host memory and compiles the copies.

        Args:
            layout: The model's layouts, with paged experts.
            allocator: Owns the pages.
            source: The experts.
            config: The planner's constants.
            pool: The pool, for its shape.
            placement: Where the pool is; default on one device.
        """
        placement = placement or Placement.on_one_device()
        host, modules = HostPages(layout, placement.host), range(len(MODULES))
        errors, before = [], []
        for layer in range(layout.moe_layers):
            arrays = [source.load_experts(layer, module) for module in modules]
            for module in modules:
                if before and arrays[module].planes is before[module].planes:
                    host.share(layer, module, layer - 1)
                else:
                    parts = slice_experts(arrays[module], module, placement.devices)
                    host.add(layer, module, parts)
            before = arrays
            errors.append(np.stack([both.damage for both in arrays], axis=1))
        damage, seen = np.stack(errors).astype(np.float64), source.calibration
        routing = RoutingMass.uniform(layout.moe_layers, layout.experts, config)
        if seen is not None:
            damage = conditional_damage(
                damage, seen.routing_mass, seen.tokens_seen, config.shrink_tokens
            )
            routing = RoutingMass.start(seen.routing_mass, seen.tokens, config)
        block_pages = sum(len(group.layers) for group in layout.kv_groups)
        table = WeightPageTable(layout, allocator, host, placement.whole)
        mover = Mover(layout, pool, placement)
        of_prompts = source.prompt_calibration if config.prompt_statistics != "off" else None
        prompts = RunningPrompts(config, of_prompts, layout.experts)
        return cls(table, mover, allocator, damage, routing, config, block_pages, prompts)

    @property
    def mean_bits(self) -> float:
        """Mean committed width of a weight."""
        return self.table.mean_bits

    def counters(self) -> dict[str, Any]:
        """What a `StepRecord` says about experts, by its fields; seconds since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return {
            "plan_seconds": seconds,
            "mean_bits": self.mean_bits,
            "lowered": self.moves.lowered,
            "raised": self.moves.raised,
            "failed": self.moves.failed,
            "bytes_moved": self.bytes_moved,
            "bits": self.table.histogram(),
        }

    @property
    def floor_pages(self) -> int:
        """Pages that the weights hold when every block is as low as it may go."""
        if not self._config.moves_pages:
            return len(self.table.used_pages())
        return int(self._floor_sizes().sum())

    @property
    def bytes_moved(self) -> int:
        """Bytes copied into the pool so far."""
        return self._mover.bytes_moved

    @property
    def releasable_pages(self) -> int:
        """Pages that lowering everything to its floor, and dropping raises, would free."""
        if not self._config.moves_pages:
            return 0
        return self._allocator.owned(Owner.WEIGHT) - int(
            np.minimum(self._floor_sizes(), self._sizes(self.table.bits)).sum()
        )

    def load(self, pool: jax.Array, pages_budget: int) -> jax.Array:
        """Places all blocks at the widths that do least damage within a number of pages.

        Raises:
            BudgetTooSmallError: Not even the floors fit.
        """
        weighing = weigh(self._config, self._damage, self._pages, self._routing)
        damage, floors = weighing.damage, weighing.floors
        if self._config.kind == "static":
            bits = optimal_bits(damage, self._pages, floors, pages_budget, self._seed_bits)
        else:
            multiplier = weighing.multiplier
            bits = initial_bits(
                damage, self._pages, multiplier, floors, pages_budget, self._seed_bits
            )
        return self._mover.write(pool, self.table.place(bits.astype(np.int8)))

    def pages_wanted(self, free_pages: int) -> int:
        """Pages to ask for when ``free_pages`` are left; see `pages_to_release`."""
        begun = bool(self._releases)
        return pages_to_release(self._config, free_pages, self._kv_block_pages, begun=begun)

    def observe(self, mass: Float[np.ndarray, "L E"], tokens: int) -> None:
        """Takes in routing mass, both summed since the engine started."""
        before = self._routing.buckets
        self._routing = self._routing.update(mass - self._seen_mass, tokens - self._seen_tokens)
        if not np.array_equal(before, self._routing.buckets):  # floors and multipliers are others
            self._forget_plans()
        self._seen_mass, self._seen_tokens = mass, tokens

    def relieve(self, pool: jax.Array, pages: int) -> tuple[jax.Array, int]:
        """Frees pages at once: gives up raises on the way, then lowers the least harmful blocks.

        Args:
            pool: The pool; donated.
            pages: Pages wanted.

        Returns:
            The pool and the pages freed; fewer than wanted if floors do not allow more.
        """
        if not self._config.moves_pages:
            return pool, 0
        before = self._allocator.free
        with self._timed("release"):
            self._cancel_raises(before + pages)
            pool = self.moves.lower(pool, self._next_releases(before + pages))
            if self._allocator.free < before + pages:  # what was planned already is not enough
                self._plan_release(before + pages)
                pool = self.moves.lower(pool, self._next_releases(before + pages))
        return pool, self._allocator.free - before

    def cancel_moves(self) -> None:
        """Gives up everything on its way: committed widths stay, reserved pages are returned."""
        self._forget_plans()
        while self.moves.cancel():
            pass

    def advance(self, pool: jax.Array, *, needed: int = 0, restore: bool = True) -> jax.Array:
        """One step boundary, called while the device runs the step before it.

        Commits raises whose copies have landed. Then it either plans, or moves a few blocks of the
        last plan (`PlannerConfig.moves_per_turn`): down if the next step would leave too few free
        pages, else up.

        Args:
            pool: The pool; donated.
            needed: Pages that the next step will take.
            restore: False while sequences wait for pages, which they need more.
        """
        with self._timed("plan and move"):
            pool, done = self.moves.commit(pool, self._config.moves_per_turn)
            if self._config.moves_pages:
                most = max(0, self._config.moves_per_turn - done)
                pool = self._look_ahead(pool, self._allocator.free - needed, restore, most)
        self.moves.turn += 1
        return pool

    def _look_ahead(self, pool: jax.Array, free: int, restore: bool, most: int) -> jax.Array:
        """Plans or moves, for the pages that will be free."""
        wanted = self.pages_wanted(free)
        if wanted > 0:
            return self._release_ahead(pool, self._allocator.free + wanted, most)
        self._releases.clear()
        if restore:
            self._raise_ahead(free, most)
        return pool

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        with jax.profiler.TraceAnnotation(name):
            yield
        self._seconds += time.perf_counter() - began

    def _release_ahead(self, pool: jax.Array, free: int, most: int) -> jax.Array:
        """Plans to have so many free pages, or lowers some of the blocks planned."""
        if self._releases:
            return self.moves.lower(pool, self._next_releases(free, most))
        self._cancel_raises(free)
        self._plan_release(free)
        return pool

    def _plan_release(self, free: int) -> None:
        """Plans to have so many free pages."""
        missing, histogram = free - self._allocator.free, self.table.histogram()
        if missing <= 0 or self._lowest is histogram:
            return
        plan = plan_release(self._inputs(~self.moves.loading()), missing)
        self.moves.planned(plan, missing)
        self._releases.extend(plan)
        if not len(plan):
            self._lowest = histogram

    def _next_releases(self, free: int, most: int | None = None) -> list[Step]:
        """Takes steps off the plan, until that makes so many free pages."""
        steps: list[Step] = []
        missing = free - self._allocator.free
        while missing > 0 and self._releases and len(steps) != most:
            steps.append(self._releases.popleft())
            missing -= self._pages_freed(steps[-1])
        return steps

    def _raise_ahead(self, free: int, most: int) -> None:
        """Plans what to do with pages above the mark, or starts some of the raises planned."""
        available = pages_to_restore(self._config, free, kv_block_pages=self._kv_block_pages)
        if not self._raises:
            # One plan at a time: the next begins from what this one has made.
            if available > 0 and not self._mover.staged_bytes and not self.table.at_parent:
                self._plan_restore(available)
            return
        steps: list[Step] = []
        for step in itertools.islice(self._raises, most):
            available += self._pages_freed(step)
            if available < 0:
                break
            steps.append(step)
        for _ in steps:
            self._raises.popleft()
        if not self.moves.begin_raises(steps) or available < 0:
            self._raises.clear()

    def _plan_restore(self, available: int) -> None:
        histogram, turn = self.table.histogram(), self.moves.turn
        if self._nothing is not None and self._nothing.still(turn, available, histogram):
            return
        last_change = self.moves.last_change
        movable = restorable(self._config, turn, last_change, self.moves.loading())
        plan = plan_restore(self._inputs(movable), available)
        if len(plan):
            self.moves.planned(plan, available)
            self._raises.extend(plan)
            return
        age = self._config.restore_residence_steps - (turn - last_change)
        rest = age.min(initial=self._config.restore_residence_steps, where=age > 0)
        self._nothing = _Nothing(turn + int(rest), available, histogram)

    def _cancel_raises(self, free: int) -> None:
        """Gives up raises, planned or on their way, until so many pages are free."""
        self._raises.clear()
        while self._allocator.free < free and self.moves.cancel():
            pass

    def _forget_plans(self) -> None:
        self._releases.clear()
        self._raises.clear()
        self._lowest = None

    def _pages_freed(self, step: Step) -> int:
        """Pages that a step frees; negative for a raise."""
        of_module = self._pages[step.module]
        before, after = step.from_bits - self._seed_bits, step.to_bits - self._seed_bits
        return int(of_module[before] - of_module[after])

    def _inputs(self, movable: np.ndarray) -> PlanInputs:
        weighing = weigh(
            self._config,
            self._damage,
            self._pages,
            self._routing,
            self.prompts.factor(),
            self.prompts.oracle(self._damage),
        )
        return PlanInputs(
            self.table.bits.astype(np.int64),
            weighing.damage,
            self._pages,
            weighing.multiplier,
            weighing.floors,
            movable,
            weighing.prompt_factor,
            self._seed_bits,
        )

    def _floor_sizes(self) -> Int[np.ndarray, "L E 2"]:
        widths = self.table.widths
        floors = np.clip(floors_of(self._config, self._routing), widths[0], widths[-1])
        return self._sizes(np.repeat(floors[..., None], len(MODULES), axis=-1))

    def _sizes(self, bits: Int[np.ndarray, "L E 2"]) -> Int[np.ndarray, "L E 2"]:
        return self._pages[np.arange(len(MODULES)), bits.astype(np.int64) - self._seed_bits]
