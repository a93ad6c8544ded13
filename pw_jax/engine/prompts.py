"""The running prompts' own statistics, and the correction that they make to the damage."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Float32

from pw_jax.errors import UserError
from pw_jax.paging.observer import PromptStatistics
from pw_jax.planner.config import PlannerConfig
from pw_jax.planner.residual import Heads, PromptSums, oracle_damage, prompt_factor


class PromptCalibration(NamedTuple):
    """What scripts/calibrate.py measured for the prompt correction.

    Attributes:
        column_error: Column errors of gate_up, ``c_j = sum_r r_r (w_rj - w_rj(b))^2``, ``[L, E,
            D]``, at the width that the calibration chose.
        mean_square: Mean of ``x_j^2`` over the tokens routed to each expert, ``[L, E, D]``.
        heads: Regression heads.
    """

    column_error: np.ndarray
    mean_square: np.ndarray
    heads: Heads

    def column_weight(self) -> Float32[np.ndarray, "L E D"]:
        """``c_j / (sum_j E[x_j^2] c_j)``: a token like calibration's has a direct ratio of 1."""
        error = np.asarray(self.column_error, np.float64)
        error = np.where(error.sum(axis=-1, keepdims=True) > 0, error, 1.0)
        scale = (error * self.mean_square).sum(axis=-1, keepdims=True)
        return np.divide(error, scale, out=np.zeros_like(error), where=scale > 0).astype(np.float32)


class RunningPrompts:
    """Sums of the prompts that run, and what the planner makes of them.

    Args:
        config: The planner's constants.
        calibration: None if the checkpoint has none; then the mode must be "off".
        experts: Experts a layer.

    Raises:
        UserError: The mode needs a calibration that the checkpoint does not have.
    """

    def __init__(self, config: PlannerConfig, calibration: PromptCalibration | None, experts: int):
        mode = config.prompt_statistics
        if mode != "off" and calibration is None:
            raise UserError(
                f"this checkpoint has no prompt calibration, which prompt residual {mode!r} needs: "
                f"make one with scripts/calibrate.py"
            )
        self._config = config
        self._experts = experts
        self._heads = calibration.heads if calibration is not None else None
        self._prompts: dict[int, PromptSums] = {}
        self._factor: np.ndarray | None = None
        self.column_weight = None
        if mode == "direct" and calibration is not None:
            self.column_weight = calibration.column_weight()

    def add(self, number: int, chunk: PromptStatistics, tokens: int, *, first: bool) -> None:
        """Takes in a chunk of a sequence's prefill; the first one starts it over."""
        ratio = None if chunk.ratio is None else np.asarray(chunk.ratio, np.float64)
        norms, routed = (np.asarray(part, np.float64) for part in (chunk.norms, chunk.routed))
        sums = PromptSums(tokens, norms, routed, ratio)
        before = None if first else self._prompts.get(number)
        self._prompts[number] = sums if before is None else before + sums
        self._update()

    def forget(self, number: int) -> None:
        """Drops a sequence that has left."""
        if self._prompts.pop(number, None) is not None:
            self._update()

    def factor(self) -> Float[np.ndarray, "L E 2"] | None:
        """The correction now; None if there is none."""
        return self._factor

    def oracle(self, damage: Float[np.ndarray, "L E 2 W"]) -> Float[np.ndarray, "L E 2 W"] | None:
        """See `oracle_damage`; None for other kinds."""
        if self._config.kind != "oracle":
            return None
        return oracle_damage(self._prompts, damage)

    def _update(self) -> None:
        self._factor = prompt_factor(self._prompts, self._heads, self._config, self._experts)
