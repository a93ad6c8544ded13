"""Compares planners at equal bytes: held-out KL to the float32 source, with confidence intervals.

    python scripts/compare_planners.py --model SOURCE --checkpoint DIR --text FILE --out JSON
    python scripts/compare_planners.py --tables JSON...

DIR is a checkpoint of scripts/calibrate.py, made from SOURCE. Prints tables in Markdown.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from _command import progress_console, run
from _tables import BASELINE, planners

from checkpoints.compare_planners import PLANNERS, Measured, compare_planners
from checkpoints.manifest import write_json
from checkpoints.mixed_widths import expert_layout
from checkpoints.store import open_store
from checkpoints.tensor_files import read_json
from checkpoints.text import SEQUENCE, load_tokenizer, read_documents, sha256, token_sequences
from pw_jax.errors import UserError
from pw_jax.evaluation.bootstrap import RESAMPLES, interval


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the flags.

    Raises:
        UserError: A flag is missing or out of range.
    """
    parser = argparse.ArgumentParser(description="Planners at equal bytes, by held-out KL.")
    add = parser.add_argument
    add("--tables", type=Path, nargs="+", help="only print the tables of earlier --out files")
    add("--model", help="the Hugging Face folder that was converted")
    add("--checkpoint", help="its conversion, after scripts/calibrate.py")
    add("--text", type=Path, help='.txt, or .jsonl with "text"; not calibrated on')
    add("--out", type=Path, help="JSON to write")
    add("--texts", type=int, default=24, help="default %(default)s")
    add("--text-tokens", type=int, default=SEQUENCE, help="of each text (default %(default)s)")
    add("--budgets", type=float, nargs="+", default=[3.5, 4.0, 4.5, 5.0, 5.5, 6.0])
    add("--planners", nargs="+", choices=list(PLANNERS), default=list(PLANNERS))
    flags = parser.parse_args(argv)
    if flags.tables is None and None in (flags.model, flags.checkpoint, flags.text, flags.out):
        raise UserError("give --model, --checkpoint, --text and --out, or --tables alone")
    if flags.texts < 2:
        raise UserError(f"--texts must be at least 2, not {flags.texts}")
    if not 4 <= flags.text_tokens <= SEQUENCE:
        raise UserError(f"--text-tokens must be 4..{SEQUENCE}, not {flags.text_tokens}")
    return flags


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
            "held_bytes_of_texts": [pages * page_bytes for pages in row.pages],
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


def main(argv: Sequence[str] | None) -> None:
    """Measures, and writes what there is after every planner."""
    flags = parse(argv)
    if flags.tables is None:
        measure(flags, argv if argv is not None else sys.argv[1:])
    print(planners([read_json(path) for path in flags.tables or [flags.out]]))


def measure(flags: argparse.Namespace, argv: Sequence[str]) -> None:
    """Runs the comparison and writes `--out`."""
    store = open_store(flags.checkpoint)
    tokenizer = load_tokenizer(store.directory)
    tokens = token_sequences(tokenizer, read_documents(flags.text), SEQUENCE * flags.texts)
    tokens = tokens[:, : flags.text_tokens]
    layout = expert_layout(store)
    assert layout.matrices is not None
    steps = [m.pages(b) - m.pages(b - 1) for m in layout.matrices for b in m.widths[1:]]
    command = " ".join(Path(word).name if "/" in word else word for word in argv)
    report: dict[str, Any] = {
        "command": f"python scripts/compare_planners.py {command}",
        "text": {"name": flags.text.name, "sha256": sha256(flags.text)},
        "texts": len(tokens),
        "tokens_a_text": tokens.shape[1],
        "measured": "the second half of each text; the first is the prompt",
        "kl": "mean of KL(float32 source || planned widths) over positions, in nats",
        "bytes": "pages that the weights own in the page table, times page_bytes",
        "intervals": f"95%, bootstrap over texts, {RESAMPLES} resamples, paired",
        "page_bytes": layout.page_bytes,
        "largest_step_bytes": max(steps) * layout.page_bytes,
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
            report["results"] = summary(rows, layout.page_bytes)
            flags.out.parent.mkdir(parents=True, exist_ok=True)
            write_json(flags.out, report)


if __name__ == "__main__":
    sys.exit(run(main))
