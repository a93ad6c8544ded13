"""Decomposes the linear layers of a model into thin factors.

    python scripts/decompose.py --model DIR --ratio 0.8 --out DIR --calibration text.jsonl

The ratio is the fraction of parameters KEPT: 0.8 removes a fifth of the linear layers. A
decomposition that was stopped goes on when the same command is given again.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from _command import progress_console, run
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from checkpoints import low_rank
from checkpoints.convert import peak_memory_gib
from checkpoints.low_rank_options import ALLOTMENTS, DecomposeOptions
from checkpoints.manifest import DTYPES
from checkpoints.tensor_files import read_json
from pw_jax.errors import UserError
from pw_jax.low_rank.ranks import read_ranks
from pw_jax.low_rank.whitening import METHODS

LISTED = 4


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the flags."""
    parser = argparse.ArgumentParser(description="Dense checkpoint to low-rank factors.")
    defaults = DecomposeOptions(method="svd")
    add = parser.add_argument
    add("--model", required=True, help="folder with config.json and safetensors")
    add("--out", required=True, help="folder to make; must not exist")
    add("--ratio", type=float, help="fraction of the linear layers' parameters that is KEPT")
    add("--ranks", type=Path, help="JSON of ranks by layer name, instead of --ratio")
    add("--method", choices=METHODS, default="whitened", help="(default %(default)s)")
    add("--calibration", type=Path, help='text: .txt, or .jsonl with "text" in each line')
    add(
        "--calibration-tokens",
        type=int,
        default=defaults.calibration_tokens,
        help="how many tokens of it (default %(default)s)",
    )
    add(
        "--allotment",
        choices=ALLOTMENTS,
        default=defaults.allotment,
        help="ranks by truncation loss, or the same fraction everywhere (default %(default)s)",
    )
    add("--spectra", type=Path, help="folder to keep singular vectors in, for other ratios")
    add("--dtype", choices=DTYPES, default=defaults.dtype, help="of what is stored")
    add("--restart", action="store_true", help="do not go on from an interrupted run")
    flags = parser.parse_args(argv)
    if (flags.ratio is None) == (flags.ranks is None):
        raise UserError("give either --ratio (the fraction of parameters kept) or --ranks FILE")
    return flags


def main(argv: Sequence[str] | None) -> None:
    """Decomposes, with a bar on a terminal and a summary at the end."""
    flags = parse(argv)
    ranks = None
    if flags.ranks is not None:
        ranks = read_ranks(read_json(flags.ranks), str(flags.ranks))
    options = DecomposeOptions(
        ratio=1.0 if flags.ratio is None else flags.ratio,
        method=flags.method,
        allotment=flags.allotment,
        ranks=ranks,
        calibration=flags.calibration,
        calibration_tokens=flags.calibration_tokens,
        dtype=flags.dtype,
    )
    started = time.monotonic()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[memory]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=progress_console()) as bar:
        task = bar.add_task("", total=None, memory="")

        def show(progress: low_rank.Progress) -> None:
            bar.update(
                task,
                description=progress.stage,
                completed=progress.done,
                total=progress.total or None,
                memory=f"peak {peak_memory_gib():.2f} GiB",
            )

        result = low_rank.decompose(
            flags.model,
            flags.out,
            options,
            spectra=flags.spectra,
            restart=flags.restart,
            report=show,
        )
    print(
        f"{result.directory}: {len(result.ranks)} matrices factored by {options.method}, "
        f"{result.kept:.2%} of the linear layers' parameters kept, "
        f"{time.monotonic() - started:.0f} s, peak memory {peak_memory_gib():.2f} GiB"
    )
    if result.wasteful:
        more = ", ..." if len(result.wasteful) > LISTED else ""
        print(
            f"warning: {len(result.wasteful)} ranks save nothing, being at least mn/(m+n) for a "
            f"matrix of m x n: {', '.join(result.wasteful[:LISTED])}{more}",
            file=sys.stderr,
        )


if __name__ == "__main__":
    sys.exit(run(main))
