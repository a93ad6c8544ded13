"""The ``tp`` command: a matrix of models, layouts, devices, caches and workloads."""

import argparse
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jax
from _tp_alone import AloneRecord, measure_alone
from _tp_benchmark import Timing, TpRecord, compile_only, measure
from _tp_bytes import BytesRecord, bytes_of
from _tp_model import WORKLOADS, Case, cases, shrunk

from checkpoints.tensor_files import read_json
from pw_jax.engine.config import KvCacheKind
from pw_jax.errors import UserError
from pw_jax.models import registry
from sharding.layouts import LAYOUTS

LABELS = ("model", "layout", "devices", "ratio", "kv", "workload")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """What is measured, and where the results go."""
    add = parser.add_argument
    add("--config", type=Path, nargs="+", required=True, help="config.json or its folder")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--tp", type=int, nargs="+", help="devices (default: 1, 2, 4 ... all)")
    where.add_argument(
        "--alone", type=int, nargs="+", help="what one of so many devices computes, on one device"
    )
    add("--layouts", nargs="+", choices=list(LAYOUTS), default=list(LAYOUTS))
    add("--ratios", type=float, nargs="+", default=[0.8, 0.6, 0.4], help="kept shares")
    add("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    add("--kv", nargs="+", choices=["full", "latent"], default=["full", "latent"], help="the cache")
    add("--layers", type=int, default=4, help="layers timed (default %(default)s)")
    add("--calls", type=int, default=Timing.calls, help="of a step in a series")
    add("--repeats", type=int, default=Timing.repeats, help="series of calls")
    add(
        "--shrink",
        type=int,
        default=1,
        help="divide widths and batches: runs anywhere, and its times say nothing",
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--compile-only", action="store_true", help="fill JAX's compilation cache")
    what.add_argument("--bytes", action="store_true", help="only what is sent, kept and cached")
    add("--resume", action="store_true", help="keep what the file has, and go on behind it")
    add("--json", type=Path, required=True, help="where results go")


def run(arguments: argparse.Namespace) -> None:
    """Measures; any devices will do, but only GPUs' times mean much."""
    present = len(jax.devices())
    counts = arguments.tp or [n for n in range(1, present + 1) if n & (n - 1) == 0]
    if max(counts) > present:
        raise UserError(f"--tp {max(counts)}, but there are {present} devices")
    result: dict[str, Any] = {
        "commands": [" ".join(["python", "scripts/benchmark.py", *sys.argv[1:]])],
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "environment": {
            name: os.environ.get(name, "")
            for name in ("NCCL_P2P_DISABLE", "NCCL_NVLS_ENABLE", "XLA_FLAGS")
        },
        "shrink": arguments.shrink,
        "records": [],
    }
    if arguments.resume and arguments.json.exists():
        before = read_json(arguments.json)
        result["records"] = before["records"]
        result["commands"] = list(dict.fromkeys(before.get("commands", []) + result["commands"]))
        for key in ("device", "environment", "shrink"):
            if before[key] != result[key]:
                raise UserError(f"{arguments.json} was made with another {key}: do not resume it")
    done = {tuple(record.get(label) for label in LABELS) for record in result["records"]}
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    timing = Timing(arguments.calls, arguments.repeats)
    for case in _cases(arguments, arguments.alone or counts):
        labels = case.labels | ({} if arguments.bytes else {"workload": case.workload.name})
        if tuple(labels.get(label) for label in LABELS) in done:
            continue
        if arguments.compile_only:
            compile_only(case)
            continue
        if arguments.bytes:
            record = bytes_of(case)
        else:
            record = measure_alone(case, timing) if arguments.alone else measure(case, timing)
        print(describe(record), flush=True)
        result["records"].append(asdict(record))  # written each time: a run may be cut short
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


def _cases(arguments: argparse.Namespace, counts: list[int]) -> Iterator[Case]:
    layers = 1 if arguments.alone else arguments.layers
    kinds: list[KvCacheKind] = ["full"] if arguments.alone else arguments.kv
    workloads = [WORKLOADS[kind] for kind in arguments.workloads]
    workloads = [replace(one, batch=max(1, one.batch // arguments.shrink)) for one in workloads]
    for path in arguments.config:
        path = path / "config.json" if path.is_dir() else path
        name = path.parent.name if path.name == "config.json" else path.stem
        config = shrunk(registry.read_config(read_json(path), str(path)), arguments.shrink)
        for devices in counts:
            for workload in workloads[:1] if arguments.bytes else workloads:
                for how in cases(arguments.ratios, arguments.layouts, kinds):
                    yield Case(name, config, devices, *how, layers, workload)


def describe(record: TpRecord | AloneRecord | BytesRecord) -> str:
    """A line about it."""
    what = f"{record.model} {record.layout} over {record.devices}, keeps {record.ratio:g}"
    if isinstance(record, BytesRecord):
        found = f"{record.wire_bytes:.0f} bytes sent, {record.cache_bytes:.0f} cached"
    else:
        prefill = "" if record.prefill_us is None else f"prefill {record.prefill_us:.0f}, "
        found = f"{record.workload}: {prefill}decode step {record.decode_us:.1f} us a layer"
    return f"{what}, {record.kv} KV, {found}"
