"""Which experts the running sequences use: decayed routing mass, and buckets of it."""

import dataclasses

import numpy as np
from jaxtyping import Float, Int

from pw_jax.planner.config import PlannerConfig


@dataclasses.dataclass(frozen=True)
class RoutingMass:
    """An exponentially decayed mean of the router weight an expert gets from one token.

    Immutable; `update` returns the next value. It starts from the calibration's mass, which is an
    estimate of the same mean, so there is no start-up bias to correct.

    Attributes:
        config: The constants.
        mass: Mean router weight a token, after top-k and the model's own normalisation, [L, E].
        buckets: Bucket of each expert, 0 the coldest, [L, E].
    """

    config: PlannerConfig
    mass: Float[np.ndarray, "L E"]
    buckets: Int[np.ndarray, "L E"]

    @classmethod
    def start(
        cls, calibration_mass: Float[np.ndarray, "L E"], tokens: int, config: PlannerConfig
    ) -> "RoutingMass":
        """Starts from calibration.

        Args:
            calibration_mass: Router weight summed over the calibration's tokens, [L, E].
            tokens: How many tokens that were.
            config: The constants.
        """
        if tokens <= 0:
            raise ValueError(f"calibration must have at least one token, not {tokens}")
        mass = _checked(calibration_mass) / tokens
        edges = np.asarray(config.bucket_edges, dtype=np.float64)
        return cls(config, mass, _edges_passed(_relative(mass), edges))

    @classmethod
    def uniform(cls, layers: int, experts: int, config: PlannerConfig) -> "RoutingMass":
        """Starts where nothing is known: every expert at its uniform share."""
        return cls.start(np.full((layers, experts), 1.0 / experts), 1, config)

    def update(self, mass_of_step: Float[np.ndarray, "L E"], tokens: int) -> "RoutingMass":
        """Takes in one step; a prefill of many tokens weighs as much as that many decoded ones.

        Args:
            mass_of_step: Router weight summed over the step's real tokens (no padding), [L, E].
            tokens: How many real tokens that were; 0 changes nothing.
        """
        mass_of_step = _checked(mass_of_step)
        if mass_of_step.shape != self.mass.shape:
            raise ValueError(f"routing mass of {mass_of_step.shape}, expected {self.mass.shape}")
        if tokens < 0:
            raise ValueError(f"a step cannot have {tokens} tokens")
        if tokens == 0:
            return self
        kept = 0.5 ** (tokens / self.config.half_life_tokens)
        mass = kept * self.mass + (1.0 - kept) * (mass_of_step / tokens)
        return dataclasses.replace(self, mass=mass, buckets=self._next_buckets(mass))

    def relative(self) -> Float[np.ndarray, "L E"]:
        """Mass relative to the uniform share of the layer, ``m_e * E / sum(m)``, [L, E]."""
        return _relative(self.mass)

    def multiplier(self) -> Float[np.ndarray, "L E"]:
        """Damage multiplier of each expert's bucket, [L, E]."""
        return np.asarray(self.config.bucket_multipliers, dtype=np.float64)[self.buckets]

    def floors(self) -> Int[np.ndarray, "L E"]:
        """Lowest bits allowed in each expert's bucket, [L, E]."""
        return np.asarray(self.config.bucket_floors, dtype=np.int64)[self.buckets]

    def _next_buckets(self, mass: Float[np.ndarray, "L E"]) -> Int[np.ndarray, "L E"]:
        # An expert leaves its bucket only when both shifted edges agree that it must.
        edges = np.asarray(self.config.bucket_edges, dtype=np.float64)
        relative = _relative(mass)
        lowest = _edges_passed(relative, edges * (1.0 + self.config.bucket_hysteresis))
        highest = _edges_passed(relative, edges * (1.0 - self.config.bucket_hysteresis))
        return np.clip(self.buckets, lowest, highest)


def _checked(mass: np.ndarray) -> np.ndarray:
    mass = np.asarray(mass, dtype=np.float64)
    if not np.isfinite(mass).all() or (mass < 0).any():
        raise ValueError("routing mass must be finite and not negative")
    return mass


def _relative(mass: np.ndarray) -> np.ndarray:
    # A layer that no token has reached counts as uniform.
    total = mass.sum(axis=-1, keepdims=True)
    return np.where(total > 0, mass * mass.shape[-1] / np.where(total > 0, total, 1.0), 1.0)


def _edges_passed(relative: np.ndarray, edges: np.ndarray) -> np.ndarray:
    return np.searchsorted(edges, relative, side="right").astype(np.int64)
