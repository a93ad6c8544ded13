"""The widths to load a model at, for a given number of pages."""

import numpy as np
from jaxtyping import Float, Int

from pw_jax.errors import UserError
from pw_jax.planner.plan import PlanInputs, plan_release, plan_restore


class BudgetTooSmallError(UserError):
    """The weights do not fit, not even at their floors.

    Attributes:
        pages_needed: Pages of all blocks at their floors.
        pages_budget: Pages that there are.
    """

    def __init__(self, pages_needed: int, pages_budget: int):
        super().__init__(
            f"the expert weights need {pages_needed} pages at their lowest allowed bits, but the "
            f"budget leaves {pages_budget}: raise the memory budget or lower the floors"
        )
        self.pages_needed = pages_needed
        self.pages_budget = pages_budget


def total_pages(
    bits: Int[np.ndarray, "L E 2"], pages: Int[np.ndarray, "2 W"], seed_bits: int = 3
) -> int:
    """Pages that all blocks take at these widths."""
    return int(pages[np.arange(2), bits - seed_bits].sum())


def initial_bits(
    damage: Float[np.ndarray, "L E 2 W"],
    pages: Int[np.ndarray, "2 W"],
    multiplier: Float[np.ndarray, "L E"],
    floors: Int[np.ndarray, "L E"],
    pages_budget: int,
    seed_bits: int = 3,
) -> Int[np.ndarray, "L E 2"]:
    """Least damage within a budget: parent bits, lowered until they fit.

    Args:
        damage: Conditional sensitivity of each block at each width seed..parent.
        pages: Pages of a block of each module at each width.
        multiplier: Routing multiplier of each expert.
        floors: Lowest bits of each expert.
        pages_budget: Pages for all blocks together.
        seed_bits: Bits of the first width.

    Raises:
        BudgetTooSmallError: Even the floors need more; it holds both sizes, in pages.
    """
    layers, experts = multiplier.shape
    parent_bits = seed_bits + pages.shape[1] - 1
    bits = np.full((layers, experts, 2), parent_bits, dtype=np.int64)

    def inputs(bits: np.ndarray) -> PlanInputs:
        movable = np.ones(bits.shape, dtype=bool)
        return PlanInputs(bits, damage, pages, multiplier, floors, movable, seed_bits=seed_bits)

    plan = plan_release(inputs(bits), total_pages(bits, pages, seed_bits) - pages_budget)
    if plan.shortage:
        raise BudgetTooSmallError(pages_budget + plan.shortage, pages_budget)
    bits = plan.apply(bits)
    # The last step may have released more than was missing: spend what is left over.
    left = pages_budget - total_pages(bits, pages, seed_bits)
    return plan_restore(inputs(bits), left).apply(bits)
