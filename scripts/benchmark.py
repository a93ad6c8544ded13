"""Benchmarks on GPUs.

python scripts/benchmark.py kernels --json docs/results/h200/kernels.json
python scripts/benchmark.py tp --config DIR_OR_FILE --tp 8 --json docs/results/h200/tp.json
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
from _command import run as run_command

from checkpoints.tensor_files import read_json
from pw_jax.errors import UserError
from pw_jax.models import registry


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the flags."""
    parser = argparse.ArgumentParser(description="Benchmarks on GPUs.")
    commands = parser.add_subparsers(dest="command", required=True)
    kernels = commands.add_parser("kernels", help="expert products against bfloat16")
    kernels.add_argument("--json", type=Path, required=True, help="where results go")
    kernels.add_argument("--models", nargs="*", default=[], help="only these shapes")
    tp = commands.add_parser("tp", help="factored layers under tensor parallelism")
    tp.add_argument("--config", type=Path, required=True, help="a config.json, or its folder")
    tp.add_argument("--tp", type=int, default=8, help="devices (default %(default)s)")
    tp.add_argument("--ratios", type=float, nargs="+", default=[0.8, 0.6, 0.4], help="kept shares")
    tp.add_argument("--tokens", type=int, nargs="+", default=[64, 512], help="in one call")
    tp.add_argument("--layers", type=int, default=8, help="in one call (default %(default)s)")
    tp.add_argument("--json", type=Path, required=True, help="where results go")
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


def tp(arguments: argparse.Namespace) -> None:
    """The ``tp`` command; any devices will do, but only GPUs' times mean much."""
    from _layer_shapes import check_family
    from _tp_benchmark import TpRecord, run

    path = arguments.config
    path = path / "config.json" if path.is_dir() else path
    config = registry.read_config(read_json(path), str(path))
    check_family(config, str(path))
    if len(jax.devices()) < arguments.tp:
        raise UserError(f"--tp {arguments.tp}, but there are {len(jax.devices())} devices")
    result: dict[str, Any] = {
        "command": " ".join(["python", *sys.argv]),
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "nccl_p2p_disable": os.environ.get("NCCL_P2P_DISABLE", "0"),
        "records": [],
    }
    arguments.json.parent.mkdir(parents=True, exist_ok=True)

    def report(record: TpRecord) -> None:
        print(
            f"{record.model} {record.layout} keeps {record.ratio:g}, {record.tokens} tokens: "
            f"{record.us_per_layer:.1f} us a layer, {record.wire_bytes / 1024:.1f} KiB a token",
            flush=True,
        )
        result["records"].append(asdict(record))
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")

    name = path.parent.name if path.name == "config.json" else path.stem
    ratios, tokens = arguments.ratios, arguments.tokens
    run(config, name, arguments.tp, ratios, tokens, arguments.layers, report)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs one command."""
    arguments = parse(argv)
    {"kernels": kernels, "tp": tp}[arguments.command](arguments)


if __name__ == "__main__":
    sys.exit(run_command(main))
