"""The static optimum: widths chosen once, by an integer program (MxMoE's idea)."""

import numpy as np
from jaxtyping import Float, Int

from pw_jax.errors import UserError
from pw_jax.planner.initial import BudgetTooSmallError, total_pages

SECONDS = 60.0
GAP = 1e-4


def optimal_bits(
    damage: Float[np.ndarray, "L E 2 W"],
    pages: Int[np.ndarray, "2 W"],
    floors: Int[np.ndarray, "L E"],
    pages_budget: int,
    seed_bits: int = 3,
) -> Int[np.ndarray, "L E 2"]:
    """Least total damage within a budget of pages.

    Args:
        damage: Of each block at each width, already weighted.
        pages: Pages of a block of each module at each width.
        floors: Lowest bits of each expert.
        pages_budget: Pages for all blocks together.
        seed_bits: Bits of the first width.

    Raises:
        BudgetTooSmallError: Not even the floors fit.
        UserError: scipy is not installed, or the program found nothing within a minute.
    """
    try:
        from scipy.optimize import Bounds, milp
        from scipy.sparse import csr_array, eye_array, kron, vstack
    except ImportError:
        raise UserError("the static planner needs scipy: install pw-jax[eval]") from None
    layers, experts, modules, widths = damage.shape
    lowest = np.clip(floors, seed_bits, seed_bits + widths - 1)
    lowest = np.repeat(lowest[..., None], modules, axis=-1)
    least = total_pages(lowest, pages, seed_bits)
    if least > pages_budget:
        raise BudgetTooSmallError(least, pages_budget)
    blocks = layers * experts * modules
    size = np.broadcast_to(pages, (layers, experts, modules, widths)).reshape(1, -1)
    allowed = (np.arange(widths) + seed_bits) >= lowest.reshape(-1, 1)
    scale = float(damage.max()) or 1.0
    one_width = kron(eye_array(blocks), np.ones((1, widths)))
    result = milp(
        (damage / scale).reshape(-1),
        integrality=np.ones(blocks * widths),
        bounds=Bounds(0, allowed.reshape(-1).astype(np.float64)),
        constraints=(
            vstack([one_width, csr_array(size)], format="csc"),
            np.append(np.ones(blocks), -np.inf),
            np.append(np.ones(blocks), pages_budget),
        ),
        options={"time_limit": SECONDS, "mip_rel_gap": GAP},
    )
    if result.x is None:
        raise UserError(f"the static planner found no widths: {result.message}")
    chosen = result.x.reshape(layers, experts, modules, widths).argmax(axis=-1)
    return chosen + seed_bits
