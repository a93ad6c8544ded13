"""Lowers and restores the precision of experts at step boundaries, as the planner says."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float, Int

from pw_jax.engine.expert_source import ExpertSource
from pw_jax.engine.prompts import RunningPrompts
from pw_jax.engine.trace import PlanEvent
from pw_jax.paging.allocator import OutOfPagesError, Owner, PageAllocator
from pw_jax.paging.expert_slices import slice_experts
from pw_jax.paging.host_pages import Block, HostPages, Transfer
from pw_jax.paging.layout import MODULES, PagingLayout
from pw_jax.paging.mover import Mover
from pw_jax.paging.weight_pages import WeightPageTable
from pw_jax.planner.config import PlannerConfig
from pw_jax.planner.damage import conditional_damage
from pw_jax.planner.demand import pages_to_release, pages_to_restore, restorable
from pw_jax.planner.initial import initial_bits
from pw_jax.planner.kinds import floors_of, weigh
from pw_jax.planner.plan import Plan, PlanInputs, plan_release, plan_restore
from pw_jax.planner.routing import RoutingMass
from pw_jax.planner.static import optimal_bits
from sharding.placement import Placement

_NO_PAGES = np.zeros(0, np.int32)


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
        lowered: Blocks lowered so far.
        raised: Blocks raised so far.
        failed: Moves given up because a copy failed.
        events: Plans and commits so far.
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
        self.lowered = 0
        self.raised = 0
        self.failed = 0
        self.events: list[PlanEvent] = []
        self._step = 0
        self._nothing: _Nothing | None = None
        self._last_change = np.zeros(damage.shape[:3], np.int64)
        self._started: dict[Block, int] = {}  # raises on the way, and the step they began at
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
        """What a `StepRecord` says about experts, by its fields."""
        return {
            "mean_bits": self.mean_bits,
            "lowered": self.lowered,
            "raised": self.raised,
            "failed": self.failed,
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
        return pages_to_release(self._config, free_pages, kv_block_pages=self._kv_block_pages)

    def observe(self, mass: Float[np.ndarray, "L E"], tokens: int) -> None:
        """Takes in routing mass, both summed since the engine started."""
        self._routing = self._routing.update(mass - self._seen_mass, tokens - self._seen_tokens)
        self._seen_mass, self._seen_tokens = mass, tokens

    def relieve(self, pool: jax.Array, pages: int) -> tuple[jax.Array, int]:
        """Frees pages: gives up raises on the way, then lowers the least harmful blocks.

        Args:
            pool: The pool; donated.
            pages: Pages wanted.

        Returns:
            The pool and the pages freed; fewer than wanted if floors do not allow more.
        """
        if not self._config.moves_pages:
            return pool, 0
        before = self._allocator.free
        for block in reversed(list(self.table.loading)):
            if self._allocator.free - before >= pages:
                break
            self._cancel(block)
        missing = pages - (self._allocator.free - before)
        if missing > 0:
            pool = self._lower(pool, missing)
        return pool, self._allocator.free - before

    def cancel_moves(self) -> None:
        """Gives up everything on its way: committed widths stay, reserved pages are returned."""
        for block in list(self.table.loading):
            self._cancel(block)

    def advance(self, pool: jax.Array, *, restore: bool = True) -> jax.Array:
        """One step boundary: commits raises whose copies have landed, and starts new ones.

        Args:
            pool: The pool; donated.
            restore: False while sequences wait for pages, which they need more.
        """
        self._step += 1
        landed, failed = self._mover.settled(self._due())
        for block in failed:
            self._fail(block)
        transfers: list[Transfer] = []
        for block in landed:
            transfers += self._mover.take(block)
            self._event("commit", blocks=[[*block, self._bits(block), self.table.loading[block]]])
            self.table.commit_raise(block)
            del self._started[block]
            self._last_change[block] = self._step
            self.raised += 1
        pool = self._mover.scatter(pool, transfers)
        if restore and self._config.moves_pages:
            self._start_raises()
        return pool

    def _due(self) -> list[Block] | None:
        """Raises whose turn has come; None if time decides, see `PlannerConfig.raise_turns`."""
        turns = self._config.raise_turns
        if turns is None:
            return None
        return [block for block, step in self._started.items() if self._step - step >= turns]

    def _lower(self, pool: jax.Array, pages: int) -> jax.Array:
        plan = plan_release(self._inputs(self._not_loading()), pages)
        self._plan_event("release", plan, pages)
        steps: list[tuple[Block, int]] = [((s.layer, s.expert, s.module), s.to_bits) for s in plan]
        images = [Transfer(self.table.table_image(*step), _NO_PAGES) for step in steps]
        try:  # the new tables travel first: after that, nothing can fail between commit and write
            sent = self._mover.send(images)
        except RuntimeError:
            self.failed += len(steps)
            self._event("failed", blocks=[[*block, self._bits(block), to] for block, to in steps])
            return pool
        transfers = []
        for (block, bits), table in zip(steps, sent, strict=True):
            transfers += [Transfer(table.image, t.ids) for t in self.table.lower(block, bits)]
            self._last_change[block] = self._step
            self.lowered += 1
        return self._mover.scatter(pool, transfers)

    def _cancel(self, block: Block) -> None:
        self._mover.take(block)
        self._event("cancel", blocks=[[*block, self._bits(block), self.table.loading[block]]])
        self.table.cancel_raise(block)
        del self._started[block]

    def _fail(self, block: Block) -> None:
        self.failed += 1
        self._cancel(block)
        self._last_change[block] = self._step  # not tried again at once

    def _start_raises(self) -> None:
        # One step's worth at a time: the next boundary plans again with what it then finds.
        available = pages_to_restore(
            self._config, self._allocator.free, kv_block_pages=self._kv_block_pages
        )
        if available <= 0 or self._mover.staged_bytes or self.table.at_parent:
            return
        histogram = self.table.histogram()
        if self._nothing is not None and self._nothing.still(self._step, available, histogram):
            return
        movable = restorable(self._config, self._step, self._last_change, ~self._not_loading())
        plan = plan_restore(self._inputs(movable), available)
        if not len(plan):
            age = self._config.restore_residence_steps - (self._step - self._last_change)
            until = self._step + int(
                age.min(initial=self._config.restore_residence_steps, where=age > 0)
            )
            self._nothing = _Nothing(until, available, histogram)
            return
        self._plan_event("restore", plan, available)
        moves: dict[Block, list[Transfer]] = {}
        for step in plan:
            block: Block = (step.layer, step.expert, step.module)
            try:
                moves[block] = self.table.begin_raise(block, step.to_bits)
            except OutOfPagesError:  # the old table is held until the new one has landed
                break
        try:
            self._mover.start(moves)
            self._started |= dict.fromkeys(moves, self._step)
        except RuntimeError:
            loading = self.table.loading
            self.failed += len(moves)
            self._event("failed", blocks=[[*b, self._bits(b), loading[b]] for b in moves])
            for block in moves:
                self.table.cancel_raise(block)
                self._last_change[block] = self._step

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

    def _bits(self, block: Block) -> int:
        return int(self.table.bits[block])

    def _plan_event(self, kind: str, plan: Plan, pages_wanted: int) -> None:
        self._event(
            kind,
            blocks=plan.steps.tolist(),
            pages_wanted=pages_wanted,
            pages_released=plan.pages_released,
            shortage=plan.shortage,
            damage=plan.damage_added,
            bound_gap=plan.bound_gap,
        )

    def _event(self, kind: str, blocks: Iterable[list[int]], **numbers: int | float) -> None:
        moves = tuple(tuple(block) for block in blocks)
        self.events.append(PlanEvent(self._step, kind, moves, numbers))

    def _not_loading(self) -> np.ndarray:
        still = np.ones(self._last_change.shape, bool)
        for block in self.table.loading:
            still[block] = False
        return still

    def _floor_sizes(self) -> Int[np.ndarray, "L E 2"]:
        widths = self.table.widths
        floors = np.clip(floors_of(self._config, self._routing), widths[0], widths[-1])
        return self._sizes(np.repeat(floors[..., None], len(MODULES), axis=-1))

    def _sizes(self, bits: Int[np.ndarray, "L E 2"]) -> Int[np.ndarray, "L E 2"]:
        return self._pages[np.arange(len(MODULES)), bits.astype(np.int64) - self._seed_bits]
