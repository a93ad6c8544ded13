"""Planners to compare: each only changes what the same greedy choice looks at.

* full: routing multiplier x calibrated sensitivity x prompt correction.
* uniform: every block alike, so that all have one width, or two neighbouring ones.
* random: blocks in a random order.
* frequency: the more a block is routed to, the later it loses bits (DynaExq's rule).
* static: the optimum of the calibrated damage for the load-time budget (MxMoE's integer program,
  see `pw_jax.planner.static`); widths never change.
* per_layer: all experts of a layer and module alike, chosen by the input (the granularity of
  DP-LLM).
* oracle: damage by the prompts' own routing and inputs, without shrinking or clipping.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from pw_jax.planner.config import PlannerConfig
from pw_jax.planner.routing import RoutingMass

DECAY_A_BIT = 0.25
"""How the error of a block shrinks with each bit where no sensitivity is known."""


class Weighing(NamedTuple):
    """What a plan looks at; the fields go into `PlanInputs`.

    Attributes:
        damage: [L, E, 2, W].
        multiplier: [L, E].
        floors: Bits, [L, E].
        prompt_factor: [L, E, 2], or None.
    """

    damage: Float[np.ndarray, "L E 2 W"]
    multiplier: Float[np.ndarray, "L E"]
    floors: Int[np.ndarray, "L E"]
    prompt_factor: Float[np.ndarray, "L E 2"] | None = None


def weigh(
    config: PlannerConfig,
    damage: Float[np.ndarray, "L E 2 W"],
    pages: Int[np.ndarray, "2 W"],
    routing: RoutingMass,
    prompt_factor: Float[np.ndarray, "L E 2"] | None = None,
    oracle: Float[np.ndarray, "L E 2 W"] | None = None,
) -> Weighing:
    """What the planner of `config.kind`, less what `config` takes out, looks at.

    Args:
        config: Kind and switches.
        damage: Conditional sensitivity.
        pages: Pages of a block of each module at each width.
        routing: Routing mass, now.
        prompt_factor: From `pw_jax.planner.residual`.
        oracle: Likewise; without it (no prompt yet) "oracle" is "full".
    """
    layers, experts = routing.mass.shape
    ones, relative = np.ones((layers, experts)), routing.relative()
    if config.kind == "oracle" and oracle is not None:
        return Weighing(oracle, ones, _lowest(config, ones))
    if config.kind == "random":
        drawn = random_damage(pages, layers, experts, config.random_seed)
        return Weighing(drawn, ones, _lowest(config, ones))
    if config.kind in ("uniform", "frequency"):
        flat = flat_damage(pages, layers, experts)
        if config.kind == "frequency":
            flat = flat * relative[..., None, None]
        return Weighing(flat, ones, _lowest(config, ones))
    if not config.sensitivity:
        damage = flat_damage(pages, layers, experts)
    if config.kind == "per_layer":
        weighted = damage * (relative if config.routing else ones)[..., None, None]
        if prompt_factor is not None:
            weighted = weighted * prompt_factor[..., None]
        mean = weighted.mean(axis=1, keepdims=True)
        return Weighing(np.broadcast_to(mean, damage.shape), ones, _lowest(config, ones))
    if config.kind == "static":
        # What the integer program minimises: the error on calibration's own mix of experts.
        return Weighing(damage * relative[..., None, None], ones, _lowest(config, ones))
    if not config.routing:
        return Weighing(damage, ones, _lowest(config, ones), prompt_factor)
    return Weighing(damage, routing.multiplier(), routing.floors(), prompt_factor)


def floors_of(config: PlannerConfig, routing: RoutingMass) -> Int[np.ndarray, "L E"]:
    """Lowest bits of each expert under a kind: only routing raises a floor."""
    if config.routing and config.kind == "full":
        return routing.floors()
    return _lowest(config, routing.mass)


def flat_damage(
    pages: Int[np.ndarray, "2 W"], layers: int, experts: int
) -> Float[np.ndarray, "L E 2 W"]:
    """An error by width and size only: every block's step to a width costs the same a page."""
    return _from_slopes(pages, np.ones((layers, experts, 2, pages.shape[1] - 1)), decay=True)


def random_damage(
    pages: Int[np.ndarray, "2 W"], layers: int, experts: int, seed: int
) -> Float[np.ndarray, "L E 2 W"]:
    """Steps in a random order, those of one block in theirs."""
    generator = np.random.default_rng(seed)
    slopes = generator.random((layers, experts, 2, pages.shape[1] - 1))
    return _from_slopes(pages, np.sort(slopes, axis=-1)[..., ::-1], decay=False)


def _from_slopes(pages: np.ndarray, slopes: np.ndarray, *, decay: bool) -> np.ndarray:
    """Damages whose steps cost, a page, what `slopes` says; 0 at parent bits."""
    widths = pages.shape[1]
    if decay:
        slopes = slopes * DECAY_A_BIT ** np.arange(widths - 1)
    steps = slopes * np.diff(pages, axis=1)
    falling = np.cumsum(steps[..., ::-1], axis=-1)[..., ::-1]
    return np.concatenate([falling, np.zeros((*steps.shape[:3], 1))], axis=-1)


def _lowest(config: PlannerConfig, like: np.ndarray) -> np.ndarray:
    return np.full(like.shape, config.bucket_floors[0], np.int64)
