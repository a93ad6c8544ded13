"""Converts a Hugging Face checkpoint to paged any-precision form.

    python scripts/convert.py --model DIR --out DIR --calibration text.jsonl

A conversion that was stopped goes on when the same command is given again.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from _command import progress_console, run
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from checkpoints import convert as conversion
from checkpoints.manifest import DTYPES, ConvertOptions


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the flags."""
    parser = argparse.ArgumentParser(description="Hugging Face checkpoint to any-precision pages.")
    defaults = ConvertOptions()
    add = parser.add_argument
    add("--model", required=True, help="folder with config.json and safetensors")
    add("--out", required=True, help="folder to make; must not exist")
    add(
        "--parent-bits", type=int, default=defaults.parent_bits, help="widest (default %(default)s)"
    )
    add("--seed-bits", type=int, default=defaults.seed_bits, help="narrowest (default %(default)s)")
    add("--calibration", type=Path, help='text: .txt, or .jsonl with "text" in each line')
    add(
        "--calibration-tokens",
        type=int,
        default=defaults.calibration_tokens,
        help="how many tokens of it (default %(default)s)",
    )
    add("--dtype", choices=DTYPES, default=defaults.dtype, help="of what is not quantised")
    add("--restart", action="store_true", help="do not go on from an interrupted conversion")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None) -> None:
    """Converts, with a bar on a terminal and a summary at the end."""
    flags = parse(argv)
    options = ConvertOptions(
        parent_bits=flags.parent_bits,
        seed_bits=flags.seed_bits,
        dtype=flags.dtype,
        calibration=flags.calibration,
        calibration_tokens=flags.calibration_tokens,
    )
    started = time.monotonic()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total} matrices, {task.fields[sizes]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    last = conversion.Progress("")
    with Progress(*columns, console=progress_console()) as bar:
        task = bar.add_task("", total=None, sizes="")

        def show(progress: conversion.Progress) -> None:
            nonlocal last
            last = progress
            peak = conversion.peak_memory_gib()
            bar.update(
                task,
                description=progress.stage,
                completed=progress.matrices,
                total=progress.total or None,
                sizes=f"{progress.read_bytes / 2**30:.2f} GiB read, peak {peak:.2f} GiB",
            )

        out = conversion.convert(
            flags.model, flags.out, options, restart=flags.restart, report=show
        )
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    print(
        f"{out}: {last.total} expert matrices, {options.seed_bits} to {options.parent_bits} bits, "
        f"{size / 2**30:.3f} GiB on disk, {time.monotonic() - started:.0f} s, "
        f"peak memory {conversion.peak_memory_gib():.2f} GiB"
    )
    if options.calibration is None:
        print(
            "no --calibration: all weights count alike, and damage is the plain squared error",
            file=sys.stderr,
        )


if __name__ == "__main__":
    sys.exit(run(main))
