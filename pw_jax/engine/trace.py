"""What happened at each step, for tables and plots."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class StepRecord:
    """One turn of the engine's loop.

    Attributes:
        step: Number of the turn.
        seconds: Time since the engine was made ready.
        running: Sequences with a slot.
        waiting: Sequences without one.
        prefilled_tokens: Prompt tokens that this turn ran.
        decoded_tokens: Tokens that this turn's decode step draws.
        free_pages: Free pages of the pool.
        kv_pages: Pages of keys and values.
        weight_pages: Pages of expert weights, those on their way included.
        mean_bits: Mean committed width, weighted by the blocks' weights; None without paged
            experts.
        lowered: Blocks lowered since the engine was made ready.
        raised: Blocks raised likewise.
        preemptions: Sequences preempted likewise.
    """

    step: int
    seconds: float
    running: int
    waiting: int
    prefilled_tokens: int
    decoded_tokens: int
    free_pages: int
    kv_pages: int
    weight_pages: int
    mean_bits: float | None
    lowered: int
    raised: int
    preemptions: int

    def as_dict(self) -> dict[str, Any]:
        """The record as JSON values."""
        return asdict(self)
