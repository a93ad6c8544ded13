"""Plans: which blocks change width so that pages change hands at the least damage."""

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from pw_jax.planner.hull import RELEASE, RESTORE, Blocks, convex_steps, in_reach
from pw_jax.planner.selection import select


@dataclasses.dataclass(frozen=True)
class PlanInputs:
    """What the planner looks at. Blocks are (layer, expert, module), module 0 gate_up, 1 down.

    Attributes:
        bits: Width of each block: committed, or the target of a move already planned.
        damage: Conditional sensitivity: the error if the block is held at each width seed..parent.
            It may rise with the width here and there (rounding); the hull steps over that.
        pages: Pages of a block of each module at each width: planes and table, page-rounded. Must
            not fall with the width.
        multiplier: Routing multiplier of each expert.
        floors: Bits below which a plan never lowers the expert; clipped to seed..parent. A block
            already below (its expert has become hot since) stays, and may be restored by steps.
        movable: False for blocks that must stay: in flight, or within their minimum residence.
        prompt_factor: Correction for the running prompts; ones if not given.
        seed_bits: Bits of the first width.
    """

    bits: Int[np.ndarray, "L E 2"]
    damage: Float[np.ndarray, "L E 2 W"]
    pages: Int[np.ndarray, "2 W"]
    multiplier: Float[np.ndarray, "L E"]
    floors: Int[np.ndarray, "L E"]
    movable: Bool[np.ndarray, "L E 2"]
    prompt_factor: Float[np.ndarray, "L E 2"] | None = None
    seed_bits: int = 3

    def __post_init__(self):
        blocks, widths = self.bits.shape, self.pages.shape[-1]
        expected = {
            "damage": (*blocks, widths),
            "pages": (2, widths),
            "multiplier": blocks[:2],
            "floors": blocks[:2],
            "movable": blocks,
            "prompt_factor": blocks,
        }
        if len(blocks) != 3 or blocks[2] != 2:
            raise ValueError(f"bits must be [layers, experts, 2], not {blocks}")
        for name, shape in expected.items():
            values = getattr(self, name)
            if values is not None and values.shape != shape:
                raise ValueError(f"{name} must have shape {shape}, not {values.shape}")
        for name in ("damage", "multiplier", "prompt_factor"):
            values = getattr(self, name)
            if values is not None and not (np.isfinite(values).all() and (values >= 0).all()):
                raise ValueError(f"{name} must be finite and not negative")
        if (self.pages < 0).any() or (np.diff(self.pages, axis=1) < 0).any():
            raise ValueError("pages must not be negative, nor fall with the width")
        if ((self.bits < self.seed_bits) | (self.bits > self.parent_bits)).any():
            raise ValueError(f"bits must be within {self.seed_bits}..{self.parent_bits}")

    @property
    def parent_bits(self) -> int:
        """Bits of the last width."""
        return self.seed_bits + self.pages.shape[-1] - 1


class Step(NamedTuple):
    """One block's change of width."""

    layer: int
    expert: int
    module: int
    from_bits: int
    to_bits: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """Changes of width, at most one a block, best damage per page first.

    Attributes:
        steps: Rows of (layer, expert, module, from_bits, to_bits); iterate over the plan for
            `Step` tuples.
        pages_released: Pages that the plan gives back; negative for a restore.
        shortage: Pages wanted that floors and unmovable blocks do not allow; 0 for a restore.
        damage_added: Weighted damage added; negative for a restore. In a release, a step to a
            narrower width with a smaller error counts as 0.
        bound_gap: How much more than the fractional optimum this is, in damage units. No plan for
            the same pages is better by more.
    """

    steps: Int[np.ndarray, "S 5"]
    pages_released: int
    shortage: int
    damage_added: float
    bound_gap: float

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[Step]:
        return (Step(*row) for row in self.steps.tolist())

    def apply(self, bits: Int[np.ndarray, "L E 2"]) -> Int[np.ndarray, "L E 2"]:
        """The bits after the plan; `bits` itself is left alone."""
        layer, expert, module, _, to_bits = self.steps.T
        bits = bits.copy()
        bits[layer, expert, module] = to_bits
        return bits


def plan_release(inputs: PlanInputs, pages_wanted: int) -> Plan:
    """Lowers precision until at least `pages_wanted` pages are free, at the least damage.

    If floors and unmovable blocks do not allow as much, the plan releases all they allow and says
    in `shortage` how many pages are missing; the caller must then free KV pages instead.
    """
    return _plan(inputs, pages_wanted, RELEASE)


def plan_restore(inputs: PlanInputs, pages_available: int) -> Plan:
    """Raises precision where it avoids the most damage, within `pages_available` pages.

    Never above parent bits, and never for nothing: a block whose error no wider width reduces stays
    where it is. Hysteresis is the caller's: pass only the pages above its restore watermark.
    """
    return _plan(inputs, pages_available, RESTORE)


def _plan(inputs: PlanInputs, amount: int, direction: int) -> Plan:
    if amount < 0 or (amount == 0 and direction == RELEASE):
        return Plan(np.zeros((0, 5), dtype=np.int64), 0, 0, 0.0, 0.0)
    block, blocks = _blocks_that_may_move(inputs, direction)
    if direction == RELEASE:
        near = in_reach(blocks, amount)
        block, blocks = block[near], blocks.only(near)
    steps = convex_steps(blocks)
    reachable = int(steps.size.sum())
    shortage = max(0, amount - reachable) if direction == RELEASE else 0
    chosen = select(steps, blocks, amount - shortage)
    (moved,) = np.nonzero(chosen.width != blocks.start)
    before, after, module = blocks.start[moved], chosen.width[moved], blocks.module[moved]
    size = direction * (blocks.table[module, after] - blocks.table[module, before])
    cost = blocks.damage[after, moved] - blocks.damage[before, moved]
    slope = np.divide(cost, size, out=np.full(len(moved), -np.inf), where=size > 0)
    layer, expert, module = np.unravel_index(block[moved], inputs.bits.shape)
    rows = np.stack(
        [layer, expert, module, before + inputs.seed_bits, after + inputs.seed_bits], axis=1
    )
    return Plan(
        steps=rows[np.argsort(slope, kind="stable")],
        pages_released=-direction * int(size.sum()),
        shortage=shortage,
        damage_added=chosen.cost,
        bound_gap=max(0.0, chosen.cost - chosen.bound),
    )


def _blocks_that_may_move(
    inputs: PlanInputs, direction: int
) -> tuple[Int[np.ndarray, "N"], Blocks]:
    """Flat indices of the movable blocks with room to move, and the blocks as columns."""
    widths = inputs.pages.shape[1]
    start = inputs.bits.reshape(-1).astype(np.int64) - inputs.seed_bits
    floors = np.repeat(inputs.floors.reshape(-1), 2).astype(np.int64) - inputs.seed_bits
    lowest = np.clip(floors, 0, widths - 1)
    has_room = start > lowest if direction == RELEASE else start < widths - 1
    (block,) = np.nonzero(inputs.movable.reshape(-1) & has_room)
    start, lowest = start[block], lowest[block]

    weight = np.repeat(inputs.multiplier.reshape(-1).astype(np.float64), 2)
    if inputs.prompt_factor is not None:
        weight = weight * inputs.prompt_factor.reshape(-1)
    damage = inputs.damage.reshape(-1, widths)[block].astype(np.float64) * weight[block, None]
    damage = np.ascontiguousarray(damage.T)
    if direction == RELEASE:
        # If a narrower width is better, the present one counts as no worse than it: giving pages
        # back for nothing comes first, but is no gain that would be taken unasked.
        row = np.arange(widths)[:, None]
        below = np.where((row >= lowest) & (row < start), damage, np.inf).min(axis=0)
        column = np.arange(len(block))
        damage[start, column] = np.minimum(damage[start, column], below)
    else:
        lowest = np.zeros_like(start)  # floors do not bar a way up that passes below them
    table = inputs.pages.astype(np.int64)
    return block, Blocks(damage, table, block % 2, start, lowest, direction)
