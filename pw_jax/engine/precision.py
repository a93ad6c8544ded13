"""Lowers and restores the precision of experts at step boundaries, as the planner says."""

from typing import NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np
from jaxtyping import Float, Int

from pw_jax.paging.allocator import OutOfPagesError, PageAllocator
from pw_jax.paging.host_pages import Block, ExpertArrays, HostPages
from pw_jax.paging.layout import MODULES, ExpertFormat, PagingLayout
from pw_jax.paging.mover import Mover
from pw_jax.paging.weight_pages import WeightPageTable
from pw_jax.planner.config import PlannerConfig
from pw_jax.planner.damage import conditional_damage
from pw_jax.planner.demand import pages_to_release, pages_to_restore, restorable
from pw_jax.planner.initial import initial_bits
from pw_jax.planner.plan import PlanInputs, plan_release, plan_restore
from pw_jax.planner.routing import RoutingMass
from sharding.placement import host_memory


class CalibrationCounts(NamedTuple):
    """What calibration saw of each expert.

    Attributes:
        routing_mass: Router weight summed over tokens, ``[L, E]``.
        tokens_seen: Tokens routed to each expert, ``[L, E]``.
        tokens: Tokens in all.
    """

    routing_mass: np.ndarray
    tokens_seen: np.ndarray
    tokens: int


@runtime_checkable
class ExpertSource(Protocol):
    """Where the engine gets paged experts from: a converted checkpoint, or a test."""

    @property
    def expert_format(self) -> ExpertFormat:
        """Widths and rows a table."""
        ...

    @property
    def calibration(self) -> CalibrationCounts | None:
        """What calibration saw; None if there was none: then damage is a plain squared error."""
        ...

    def load_experts(self, layer: int, module: int) -> ExpertArrays:
        """All experts of a module (0 gate_up, 1 down) of the layer-th MoE layer."""
        ...


class Precision:
    """Which width every block has, now and next.

    Between two steps the engine may ask for pages (:meth:`relieve`) and lets moves go on
    (:meth:`advance`). Both take the pool and return it, so that a step always sees widths whose
    pages have been written.

    Attributes:
        table: The weight page table.
        lowered: Blocks lowered so far.
        raised: Blocks raised so far.

    Args:
        table: The weight page table.
        mover: Copies pages.
        allocator: Owns the pages.
        damage: Conditional sensitivity of each block at each width.
        routing: Routing mass to start from.
        config: The planner's constants.
        kv_block_pages: Pages of one KV block over all layers.
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
    ):
        self.table = table
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
        self._step = 0
        self._last_change = np.zeros(damage.shape[:3], np.int64)
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
    ) -> "Precision":
        """Reads all experts of a source into host memory and compiles the copies.

        Args:
            layout: The model's layouts, with paged experts.
            allocator: Owns the pages.
            source: The experts.
            config: The planner's constants.
            pool: The pool, for its shape and sharding.
        """
        host, modules = HostPages(layout, host_memory()), range(len(MODULES))
        errors = []
        for layer in range(layout.moe_layers):
            arrays = [source.load_experts(layer, module) for module in modules]
            for module in modules:
                host.add(layer, module, arrays[module])
            errors.append(np.stack([both.damage for both in arrays], axis=1))
        damage, seen = np.stack(errors).astype(np.float64), source.calibration
        routing = RoutingMass.uniform(layout.moe_layers, layout.experts, config)
        if seen is not None:
            damage = conditional_damage(
                damage, seen.routing_mass, seen.tokens_seen, config.shrink_tokens
            )
            routing = RoutingMass.start(seen.routing_mass, seen.tokens, config)
        block_pages = sum(len(group.layers) for group in layout.kv_groups)
        table, mover = WeightPageTable(layout, allocator, host), Mover(layout, pool)
        return cls(table, mover, allocator, damage, routing, config, block_pages)

    @property
    def mean_bits(self) -> float:
        """Mean committed width of a weight."""
        sizes = np.array(self.table.block_weights)
        return float((self.table.bits.mean(axis=(0, 1)) * sizes).sum() / sizes.sum())

    @property
    def floor_pages(self) -> int:
        """Pages that the weights hold when every block is at its floor."""
        return int(self._floor_sizes().sum())

    @property
    def releasable_pages(self) -> int:
        """Pages that lowering everything to its floor, and dropping raises, would free."""
        return len(self.table.used_pages()) - int(
            np.minimum(self._floor_sizes(), self._sizes(self.table.bits)).sum()
        )

    def load(self, pool: jax.Array, pages_budget: int) -> jax.Array:
        """Places all blocks at the widths that do least damage within a number of pages.

        Raises:
            BudgetTooSmallError: Not even the floors fit.
        """
        bits = initial_bits(
            self._damage,
            self._pages,
            self._routing.multiplier(),
            self._routing.floors(),
            pages_budget,
            self._seed_bits,
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
        before = self._allocator.free
        for block in reversed(list(self.table.loading)):
            if self._allocator.free - before >= pages:
                break
            self._mover.take(block)
            self.table.cancel_raise(block)
        missing = pages - (self._allocator.free - before)
        if missing > 0:
            plan = plan_release(self._inputs(self._not_loading()), missing)
            transfers = []
            for step in plan:
                self.lowered += 1
                block = (step.layer, step.expert, step.module)
                transfers += self.table.lower(block, step.to_bits)
                self._last_change[block] = self._step
            pool = self._mover.write(pool, transfers)
        return pool, self._allocator.free - before

    def advance(self, pool: jax.Array, *, restore: bool = True) -> jax.Array:
        """One step boundary: commits raises whose copies have landed, and starts new ones.

        Args:
            pool: The pool; donated.
            restore: False while sequences wait for pages, which they need more.
        """
        self._step += 1
        for block in self._mover.landed():
            self.table.commit_raise(block)
            self._last_change[block] = self._step
            self.raised += 1
            pool = self._mover.write(pool, self._mover.take(block))
        if restore:
            self._start_raises()
        return pool

    def _start_raises(self) -> None:
        # One step's worth at a time: the next boundary plans again with what it then finds.
        available = pages_to_restore(
            self._config, self._allocator.free, kv_block_pages=self._kv_block_pages
        )
        if available <= 0 or self._mover.staged_bytes:
            return
        movable = restorable(self._config, self._step, self._last_change, ~self._not_loading())
        for step in plan_restore(self._inputs(movable), available):
            block: Block = (step.layer, step.expert, step.module)
            try:
                self._mover.start(block, self.table.begin_raise(block, step.to_bits))
            except OutOfPagesError:  # the old table is held until the new one has landed
                return

    def _inputs(self, movable: np.ndarray) -> PlanInputs:
        return PlanInputs(
            self.table.bits.astype(np.int64),
            self._damage,
            self._pages,
            self._routing.multiplier(),
            self._routing.floors(),
            movable,
            seed_bits=self._seed_bits,
        )

    def _not_loading(self) -> np.ndarray:
        still = np.ones(self._last_change.shape, bool)
        for block in self.table.loading:
            still[block] = False
        return still

    def _floor_sizes(self) -> Int[np.ndarray, "L E 2"]:
        widths = self.table.widths
        floors = np.clip(self._routing.floors(), widths[0], widths[-1])
        return self._sizes(np.repeat(floors[..., None], len(MODULES), axis=-1))

    def _sizes(self, bits: Int[np.ndarray, "L E 2"]) -> Int[np.ndarray, "L E 2"]:
        return self._pages[np.arange(len(MODULES)), bits.astype(np.int64) - self._seed_bits]
