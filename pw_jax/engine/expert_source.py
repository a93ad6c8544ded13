"""Where an engine gets paged experts from."""

from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from pw_jax.engine.prompts import PromptCalibration
from pw_jax.paging.host_pages import ExpertArrays
from pw_jax.paging.layout import ExpertFormat


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

    @property
    def prompt_calibration(self) -> PromptCalibration | None:
        """For the prompt correction; None if scripts/calibrate.py was not run."""
        ...

    def load_experts(self, layer: int, module: int) -> ExpertArrays:
        """All experts of a module (0 gate_up, 1 down) of the layer-th MoE layer.

        If its planes are the very array that the layer before had, both share planes and tables in
        host memory.
        """
        ...
