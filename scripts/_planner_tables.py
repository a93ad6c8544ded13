"""Markdown tables of scripts/compare_planners.py and scripts/page_movement.py."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pw_jax.evaluation.bootstrap import interval

MIB = 1 << 20
BASELINE = "uniform"
FULL = "full"


def tables(reports: Sequence[Mapping[str, Any]]) -> str:
    """KL of each planner against uniform, differences to full, and the bytes held."""
    entries = [entry for report in reports for entry in report["results"]]
    step = max(report["largest_step_bytes"] for report in reports)
    parts = (kl_table(entries), difference_table(entries), bytes_line(entries, step))
    return "\n\n".join(parts)


def kl_table(entries: Sequence[Mapping[str, Any]]) -> str:
    """KL in thousandths of a nat; in brackets the interval of the difference to uniform."""

    def cell(entry: Mapping[str, Any]) -> str:
        text = f"{1e3 * entry['kl']:.1f}"
        if entry["planner"] == BASELINE or "kl_less_uniform" not in entry:
            return text
        return f"{text} ({_range(entry['kl_less_uniform_interval'])})"

    return _table(entries, cell)


def difference_table(entries: Sequence[Mapping[str, Any]], to: str = FULL) -> str:
    """KL less that of one planner, paired by text; above 0 is worse."""
    reference = {
        e["budget_bits"]: np.array(e["kl_of_texts"]) for e in entries if e["planner"] == to
    }

    def cell(entry: Mapping[str, Any]) -> str:
        if entry["budget_bits"] not in reference:
            return ""
        difference = np.array(entry["kl_of_texts"]) - reference[entry["budget_bits"]]
        return f"{1e3 * difference.mean():+.1f} ({_range(interval(difference))})"

    return _table([entry for entry in entries if entry["planner"] != to], cell)


def bytes_line(entries: Sequence[Mapping[str, Any]], largest_step: int) -> str:
    """How equal the bytes are."""
    short = [
        entry["budget_bytes"] - held for entry in entries for held in entry["held_bytes_of_texts"]
    ]
    least = min(entry["budget_bytes"] for entry in entries) / MIB
    return (
        f"Weights held {min(short)} to {max(short)} bytes less than the budget, of {least:.1f} MiB "
        f"and more; the largest step of a block is {largest_step} bytes."
    )


def movement_table(report: Mapping[str, Any]) -> str:
    """Of scripts/page_movement.py; KL in thousandths of a nat."""
    lines = [
        "| phase | bits: fixed, moving | KL: fixed, moving | difference (95% interval) |",
        "|---|---|---|---|",
    ]
    for phase, one in report["results"].items():
        lines.append(
            f"| {phase} | {one['fixed_bits']:.2f}, {one['moving_bits']:.2f} | "
            f"{1e3 * one['fixed_kl']:.1f}, {1e3 * one['moving_kl']:.1f} | "
            f"{1e3 * one['moving_less_fixed']:+.1f} ({_range(one['moving_less_fixed_interval'])}) |"
        )
    return "\n".join(lines)


def _range(edges: Sequence[float]) -> str:
    low, high = (1e3 * edge for edge in edges)
    return f"{low:+.1f}..{high:+.1f}"


def _table(entries: Sequence[Mapping[str, Any]], cell: Any) -> str:
    budgets = sorted({entry["budget_bits"] for entry in entries})
    cells = {(entry["planner"], entry["budget_bits"]): cell(entry) for entry in entries}
    lines = [
        "| planner | " + " | ".join(f"{budget:g} bits" for budget in budgets) + " |",
        "|---|" + "---|" * len(budgets),
    ]
    for name in dict.fromkeys(entry["planner"] for entry in entries):
        row = [cells.get((name, budget), "") for budget in budgets]
        lines.append(f"| {name} | " + " | ".join(row) + " |")
    return "\n".join(lines)
