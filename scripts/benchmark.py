"""Benchmarks on one GPU.

python scripts/benchmark.py kernels --json docs/results/h200/kernels.json
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
from _command import run as run_command

from pw_jax.errors import UserError


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the flags."""
    parser = argparse.ArgumentParser(description="Benchmarks on one GPU.")
    commands = parser.add_subparsers(dest="command", required=True)
    kernels = commands.add_parser("kernels", help="expert products against bfloat16")
    kernels.add_argument("--json", type=Path, required=True, help="where results go")
    kernels.add_argument("--models", nargs="*", default=[], help="only these shapes")
    return parser.parse_args(argv)


def kernels(arguments: argparse.Namespace) -> None:
    """The ``kernels`` command."""
    from _kernel_benchmark import Record, run

    if jax.default_backend() != "gpu":
        raise UserError("scripts/benchmark.py kernels needs an NVIDIA GPU and JAX's CUDA plugin")

    result: dict[str, Any] = {
        "command": " ".join(["python", *sys.argv]),
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "records": [],
    }
    arguments.json.parent.mkdir(parents=True, exist_ok=True)

    def report(record: Record) -> None:
        print(
            f"{record.model} {record.module} {record.bits} bits {record.rows} rows: "
            f"{record.ours_us:.1f} us (kernels {record.kernel_us:.1f}), bf16 {record.bf16_us:.1f}, "
            f"ratio {record.ratio:.2f}, {record.tbytes_per_s:.2f} TB/s, "
            f"error {record.max_rel_err:.1e}",
            flush=True,
        )

        result["records"].append(asdict(record))  # written each time: a long run may be cut short
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")

    run(arguments.models, report)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs one command."""
    arguments = parse(argv)
    {"kernels": kernels}[arguments.command](arguments)


if __name__ == "__main__":
    sys.exit(run_command(main))
