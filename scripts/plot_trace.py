"""Draws a trace of scripts/generate.py: who holds the pages, widths of experts, and moves.

python scripts/plot_trace.py trace.jsonl --out trace.png
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")  # before pyplot: no screen is needed

import matplotlib.pyplot as plt
from _command import run

from pw_jax.errors import UserError

Records = Sequence[Mapping[str, Any]]


def read_trace(path: Path) -> Records:
    """Reads the steps of a trace: one JSON object a line, plans and moves left out."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        entries = [json.loads(line) for line in lines if line]
        return [entry for entry in entries if entry.get("event", "step") == "step"]
    except (OSError, UnicodeDecodeError, ValueError, AttributeError) as error:
        raise UserError(f"cannot read the trace {path}: {error}") from None


def plot(traces: Mapping[str, Records], path: Path) -> None:
    """Draws one column a trace.

    Args:
        traces: Step records by title.
        path: The PNG to write.
    """
    figure, axes = plt.subplots(
        3, len(traces), figsize=(6 * len(traces), 8), sharex="col", squeeze=False
    )
    for (pages, bits, moves), (title, records) in zip(axes.T, traces.items(), strict=True):
        steps = [record["step"] for record in records]
        held = [
            [record[f"{owner}_pages"] for record in records] for owner in ("weight", "kv", "free")
        ]
        pages.stackplot(
            steps,
            held,
            labels=("expert weights", "keys and values", "free"),
            colors=("#4477aa", "#ee6677", "#dddddd"),
        )
        pages.set(title=title, ylabel="pages of the pool")
        pages.legend(loc="lower right")
        bits.plot(steps, [record["mean_bits"] for record in records], color="#4477aa")
        bits.set(ylabel="mean bits of an expert weight", ylim=(2.5, 8.5))
        bits.grid(alpha=0.3)
        _draw_moves(moves, steps, records)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _draw_moves(axes: Any, steps: Sequence[int], records: Records) -> None:
    """Blocks raised above the axis and lowered below it, and preemptions as lines across."""
    raised, lowered, preempted = (
        np.diff([0, *(record[name] for record in records)])
        for name in ("raised", "lowered", "preemptions")
    )
    axes.bar(steps, raised, width=1.0, color="#228833", label="raised")
    axes.bar(steps, -lowered, width=1.0, color="#aa3377", label="lowered")
    for number, step in enumerate(np.array(steps)[preempted > 0]):
        label = "preempted" if number == 0 else None
        axes.axvline(step, color="black", linestyle=":", linewidth=1, label=label)
    axes.axhline(0, color="black", linewidth=0.5)
    axes.set(xlabel="step", ylabel="blocks in a step")
    axes.legend(loc="lower right")


def main(argv: Sequence[str] | None) -> None:
    """Reads the traces and draws them."""
    parser = argparse.ArgumentParser(description="Plots traces of scripts/generate.py.")
    parser.add_argument("traces", type=Path, nargs="+", help="files written by --trace")
    parser.add_argument("--out", type=Path, required=True, help="PNG to write")
    flags = parser.parse_args(argv)
    plot({path.stem: read_trace(path) for path in flags.traces}, flags.out)
    print(flags.out)


if __name__ == "__main__":
    sys.exit(run(main))
