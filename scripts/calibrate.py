"""Calibrates a converted checkpoint, again or for the first time, for the planner.

    python scripts/calibrate.py --checkpoint DIR --text a.jsonl b.txt --out DIR

Measures how much each expert's precision matters (the sensitivity), and what the planner needs to
correct it for the running prompts (generate.py --prompt-residual).
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from _command import progress_console, run
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from checkpoints.calibrate import Calibrated, CalibrateOptions, recalibrate
from pw_jax.planner.ridge import LEAST_R_SQUARED

RARE = 32
"""Experts that fewer calibration tokens chose are named."""


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the flags."""
    defaults = CalibrateOptions()
    parser = argparse.ArgumentParser(description="Sensitivities and prompt heads for a checkpoint.")
    add = parser.add_argument
    add("--checkpoint", required=True, help="folder made by scripts/convert.py")
    add("--text", type=Path, nargs="+", required=True, help='.txt, or .jsonl with "text" in lines')
    add("--out", required=True, help="folder to make; must not exist")
    add(
        "--sensitivity",
        choices=("fisher", "hessian"),
        default=defaults.sensitivity,
        help="hessian needs no gradients, and less memory (default %(default)s)",
    )
    add("--tokens", type=int, default=defaults.tokens, help="of all texts (default %(default)s)")
    add("--prompts", type=int, default=defaults.prompts, help="for heads (default %(default)s)")
    add("--prompt-tokens", type=int, default=defaults.prompt_tokens, help="default %(default)s")
    add("--prompt-bits", type=int, default=defaults.bits, help="compared at (default %(default)s)")
    add("--seed", type=int, default=defaults.seed)
    add(
        "--dtype",
        choices=("float32", "bfloat16"),
        default=defaults.dtype,
        help="of the model; bfloat16 halves its memory (default %(default)s)",
    )
    return parser.parse_args(argv)


def tokens_table(result: Calibrated) -> Table:
    """Tokens that each layer's experts saw."""
    table = Table("MoE layer", "tokens an expert: fewest", "median", "most", f"below {RARE}")
    for layer, seen in enumerate(result.tokens_seen):
        rare = ", ".join(map(str, np.flatnonzero(seen < RARE)))
        cells = (seen.min(), int(np.median(seen)), seen.max())
        table.add_row(str(layer), *map(str, cells), rare or "none")
    return table


def heads_line(result: Calibrated) -> str:
    """Which heads were kept, in words."""
    heads = result.heads
    lines = []
    for module, name in enumerate(("gate_up", "down")):
        kept, quality = heads.kept[:, module], heads.r_squared[:, module]
        dropped = ", ".join(map(str, np.flatnonzero(~kept))) or "none"
        lines.append(
            f"heads of {name}: {kept.sum()} of {len(kept)} kept, median held-out R^2 "
            f"{np.median(quality):.2f}; dropped below {LEAST_R_SQUARED}: layers {dropped}"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None) -> None:
    """Calibrates, with a bar on a terminal and a summary at the end."""
    flags = parse(argv)
    options = CalibrateOptions(
        sensitivity=flags.sensitivity,
        tokens=flags.tokens,
        prompts=flags.prompts,
        prompt_tokens=flags.prompt_tokens,
        seed=flags.seed,
        bits=flags.prompt_bits,
        dtype=flags.dtype,
    )
    started = time.monotonic()
    with Progress(console=progress_console()) as bar:
        task = bar.add_task("", total=None)

        def show(stage: str, done: int, of: int) -> None:
            bar.update(task, description=stage, completed=done, total=of)

        result = recalibrate(flags.checkpoint, flags.text, flags.out, options, show)
    Console().print(tokens_table(result))
    print(heads_line(result))
    print(
        f"{result.path}: {options.sensitivity} sensitivity from {result.tokens} tokens, heads from "
        f"{result.prompts} prompts, {time.monotonic() - started:.0f} s"
    )


if __name__ == "__main__":
    sys.exit(run(main))
