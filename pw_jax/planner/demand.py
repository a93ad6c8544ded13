"""When to plan, and for how many pages: watermarks, supply under way, residence."""

import numpy as np
from jaxtyping import Bool, Int

from pw_jax.planner.config import PlannerConfig


def pages_to_release(
    config: PlannerConfig,
    free_pages: int,
    kv_block_pages: int,
    pending_pages: int = 0,
    *,
    begun: bool = False,
) -> int:
    """Pages that the KV cache needs from the weights: for one block above the mark, and some more.

    Without `release_extra_blocks` this is the paper's equation (7), ``max(0, T + 1 - F) * B``,
    counted in pages.

    Args:
        config: The constants.
        free_pages: Pages that nobody holds.
        kv_block_pages: Pages of one KV block over all layers, what a new block takes at once.
        pending_pages: Pages of releases already planned but not yet committed. They count as
            supply; without them a spike of pressure would lower twice as many blocks as needed.
        begun: A release is on its way: it goes on until all is freed that it set out to free.
    """
    mark, supply = config.release_watermark_blocks + 1, free_pages + pending_pages
    if supply >= mark * kv_block_pages and not begun:
        return 0
    extra = min(config.release_extra_blocks, max(0, config.restore_watermark_blocks - mark))
    return max(0, (mark + extra) * kv_block_pages - supply)


def pages_to_restore(
    config: PlannerConfig, free_pages: int, kv_block_pages: int, reserved_pages: int = 0
) -> int:
    """Pages that one step boundary may spend on precision: those above the restore mark.

    Args:
        config: The constants.
        free_pages: Pages that nobody holds.
        kv_block_pages: Pages of one KV block over all layers.
        reserved_pages: Free pages promised to moves or sequences that have not taken them yet.
    """
    above = free_pages - reserved_pages - config.restore_watermark_blocks * kv_block_pages
    return max(0, min(above, config.restore_pages_per_step))


def restorable(
    config: PlannerConfig,
    step: int,
    last_change_step: Int[np.ndarray, "L E 2"],
    in_flight: Bool[np.ndarray, "L E 2"],
) -> Bool[np.ndarray, "L E 2"]:
    """Blocks that `plan_restore` may move: not in flight, and long enough at their width."""
    return ~in_flight & (step - last_change_step >= config.restore_residence_steps)
