"""What happened at each step, for tables and plots: one JSON object a line."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from heapq import merge
from pathlib import Path
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
        free_pages: Free pages of the pool, those included that are only kept.
        kv_pages: Pages of keys and values that sequences use; shared ones count once.
        weight_pages: Pages of expert weights, those on their way included.
        mean_bits: Mean committed width, weighted by the blocks' weights; None without paged
            experts.
        lowered: Blocks lowered since the engine was made ready.
        raised: Blocks raised likewise.
        preemptions: Sequences preempted likewise.
        reused_tokens: Prompt tokens that were not run, as their pages were there, likewise.
        kept_pages: Free pages with texts that may be wanted again.
        failed: Moves given up because a copy failed, likewise.
        bytes_moved: Bytes copied from the host into the pool likewise, load included.
        bits: Blocks at each committed width, by width.
        plan_seconds: Time of this turn that went into planning and moving.
        step_seconds: Time of this turn on the host, waiting for the step before included.
        wait_seconds: Time of this turn that the host waited for the device.
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
    preemptions: int
    reused_tokens: int = 0
    kept_pages: int = 0
    mean_bits: float | None = None
    lowered: int = 0
    raised: int = 0
    failed: int = 0
    bytes_moved: int = 0
    bits: Mapping[int, int] | None = None
    plan_seconds: float = 0.0
    step_seconds: float = 0.0
    wait_seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """The record as JSON values."""
        return {"event": "step", **asdict(self)}


@dataclass(frozen=True)
class PlanEvent:
    """A plan, or moves.

    Attributes:
        step: Number of the turn.
        kind: "plan", what is to move; "release", blocks lowered, which commits at once; "restore",
            raises whose copies have begun; "commit", raises that have landed; "cancel", a raise
            that a release took the pages of; "failed", moves whose copies failed.
        moves: (MoE layer, expert, module, from bits, to bits) of each block.
        numbers: Of a plan: pages wanted, pages released (negative in raises), shortage, damage and
            bound gap.
    """

    step: int
    kind: str
    moves: tuple[tuple[int, ...], ...]
    numbers: Mapping[str, int | float]

    def as_dict(self) -> dict[str, Any]:
        """The event as JSON values."""
        return {
            "event": self.kind,
            "step": self.step,
            "moves": [list(move) for move in self.moves],
            **self.numbers,
        }


def write_trace(path: Path, steps: Iterable[StepRecord], events: Iterable[PlanEvent]) -> None:
    """Writes steps and events, each event before the step that it belongs to."""
    lines = merge(events, steps, key=lambda entry: entry.step)
    text = "".join(json.dumps(entry.as_dict()) + "\n" for entry in lines)
    path.write_text(text, encoding="utf-8")
