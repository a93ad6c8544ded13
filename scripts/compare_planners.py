"""Compares planners at equal bytes: held-out KL to the float32 source, with confidence intervals.

    python scripts/compare_planners.py --model SOURCE --checkpoint DIR --text FILE --out JSON

DIR is a checkpoint of scripts/calibrate.py, made from SOURCE. Prints a table in Markdown.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from _command import progress_console, run

from checkpoints.compare_planners import PLANNERS, Measured, compare_planners, page_table
from checkpoints.manifest import write_json
from checkpoints.store import open_store
from checkpoints.text import load_tokenizer, read_documents, sha256, token_sequences
from pw_jax.errors import UserError

RESAMPLES = 10_000
BASELINE = "uniform"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the flags."""
    parser = argparse.ArgumentParser(description="Planners at equal bytes, by held-out KL.")
    add = parser.add_argument
    add("--model", required=True, help="the Hugging Face folder that was converted")
    add("--checkpoint", required=True, help="its conversion, after scripts/calibrate.py")
    add("--text", type=Path, required=True, help='.txt, or .jsonl with "text"; not calibrated on')
    add("--out", type=Path, required=True, help="JSON to write")
    add("--texts", type=int, default=12, help="of 256 tokens (default %(default)s)")
    add("--budgets", type=float, nargs="+", default=[3.5, 4.0, 4.5, 5.0, 5.5, 6.0])
    add("--planners", nargs="+", choices=list(PLANNERS), default=list(PLANNERS))
    return parser.parse_args(argv)


def interval(values: np.ndarray, seed: int = 0) -> tuple[float, float]:
    """A 95% bootstrap interval of the mean over texts."""
    picks = np.random.default_rng(seed).integers(0, len(values), (RESAMPLES, len(values)))
    low, high = np.percentile(values[picks].mean(axis=1), [2.5, 97.5])
    return float(low), float(high)


def summary(rows: list[Measured], page_bytes: int) -> list[dict[str, Any]]:
    """One entry a planner and budget, differences to uniform paired by text."""
    by_budget = {(row.planner, row.budget_bits): np.array(row.kl) for row in rows}
    entries = []
    for row in rows:
        kl = np.array(row.kl)
        entry = {
            "planner": row.planner,
            "budget_bits": row.budget_bits,
            "budget_bytes": row.budget_pages * page_bytes,
            "mean_bytes": float(np.mean(row.pages)) * page_bytes,
            "mean_bits": float(np.mean(row.mean_bits)),
            "kl": float(kl.mean()),
            "kl_interval": interval(kl),
            "kl_of_texts": row.kl,
        }
        baseline = by_budget.get((BASELINE, row.budget_bits))
        if baseline is not None:
            entry["kl_less_uniform"] = float((kl - baseline).mean())
            entry["kl_less_uniform_interval"] = interval(kl - baseline)
        entries.append(entry)
    return entries


def table(entries: list[dict[str, Any]]) -> str:
    """Markdown: a row a planner, a column a budget; KL in thousandths of a nat."""
    budgets = sorted({entry["budget_bits"] for entry in entries})
    names = list(dict.fromkeys(entry["planner"] for entry in entries))
    lines = [
        "| planner | " + " | ".join(f"{b:g} bits" for b in budgets) + " |",
        "|---|" + "---|" * len(budgets),
    ]
    cells = {(entry["planner"], entry["budget_bits"]): entry for entry in entries}
    for name in names:
        row = []
        for budget in budgets:
            entry = cells.get((name, budget))
            if entry is None:
                row.append("")
                continue
            text = f"{1e3 * entry['kl']:.1f}"
            if name != BASELINE and "kl_less_uniform" in entry:
                low, high = (1e3 * edge for edge in entry["kl_less_uniform_interval"])
                text += f" ({low:+.1f}..{high:+.1f})"
            row.append(text)
        lines.append(f"| {name} | " + " | ".join(row) + " |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None) -> None:
    """Measures, and writes what there is after every planner."""
    flags = parse(argv)
    store = open_store(flags.checkpoint)
    if flags.texts < 2:
        raise UserError(f"--texts must be at least 2, not {flags.texts}")
    tokenizer = load_tokenizer(store.directory)
    tokens = token_sequences(tokenizer, read_documents(flags.text), 256 * flags.texts)
    _, page_bytes = page_table(store)
    words = [Path(sys.argv[0]).name, *(argv if argv is not None else sys.argv[1:])]
    command = " ".join(Path(word).name if "/" in word else word for word in words)
    report: dict[str, Any] = {
        "command": f"python scripts/{command}",
        "text": {"name": flags.text.name, "sha256": sha256(flags.text)},
        "texts": len(tokens),
        "tokens_a_text": tokens.shape[1],
        "measured": "the second half of each text; the first is the prompt",
        "kl": "mean of KL(float32 source || planned widths) over positions, in nats",
        "intervals": f"95%, bootstrap over texts, {RESAMPLES} resamples, paired",
        "page_bytes": page_bytes,
        "calibration": store.manifest["calibration"],
    }
    rows: list[Measured] = []
    started = time.monotonic()
    console = progress_console()
    with console.status("") as status:
        for measured in compare_planners(
            flags.model, store, tokens, flags.budgets, flags.planners, status.update
        ):
            rows.append(measured)
            report["seconds"] = round(time.monotonic() - started)
            report["results"] = summary(rows, page_bytes)
            flags.out.parent.mkdir(parents=True, exist_ok=True)
            write_json(flags.out, report)
    print(table(json.loads(flags.out.read_text())["results"]))


if __name__ == "__main__":
    sys.exit(run(main))
