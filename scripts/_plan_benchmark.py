"""How long a plan over many blocks takes, on the core that this process may use."""

import time
from typing import Any

import numpy as np

from pw_jax.planner.hull import RELEASE, convex_steps
from pw_jax.planner.plan import PlanInputs, _blocks_that_may_move, plan_release

LAYERS, EXPERTS = 40, 100
PAGES = np.array(
    [[11 * b + 2**b // 16 for b in range(3, 9)], [6 * b + 2**b // 16 for b in range(3, 9)]]
)
"""Of gate_up and down blocks at 3 to 8 bits."""

RUNS = 200


def many_blocks(seed: int = 0) -> PlanInputs:
    """8,000 blocks at parent bits, whose convex steps are 40,000."""
    generator = np.random.default_rng(seed)
    shape = (LAYERS, EXPERTS, 2)
    scale = generator.lognormal(0.0, 1.5, (*shape, 1))
    damage = scale * np.cumprod(generator.uniform(0.2, 0.4, (*shape, 6)), axis=-1)
    return PlanInputs(
        np.full(shape, 8),
        damage,
        PAGES,
        generator.choice([1.0, 1.25, 2.0], shape[:2]),
        np.full(shape[:2], 3),
        np.ones(shape, dtype=bool),
    )


def measure() -> dict[str, Any]:
    """Plans to free half of what can be freed, again and again."""
    inputs = many_blocks()
    steps = convex_steps(_blocks_that_may_move(inputs, RELEASE)[1])
    wanted = int(steps.size.sum()) // 2
    seconds, on_core = [], []
    for _ in range(RUNS):
        began, core_began = time.perf_counter(), time.process_time()
        plan_release(inputs, wanted)
        seconds.append(time.perf_counter() - began)
        on_core.append(time.process_time() - core_began)
    return {
        "blocks": int(inputs.bits.size),
        "steps": len(steps.size),
        "pages_wanted": wanted,
        "runs": RUNS,
        "median_ms": 1e3 * float(np.median(seconds)),
        "least_ms": 1e3 * min(seconds),
        "p90_ms": 1e3 * float(np.percentile(seconds, 90)),
        "median_cpu_ms": 1e3 * float(np.median(on_core)),
        "least_cpu_ms": 1e3 * min(on_core),
    }
