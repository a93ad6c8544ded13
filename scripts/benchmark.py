"""Benchmarks; most are for GPUs.

python scripts/benchmark.py kernels --json docs/results/h200/kernels.json
python scripts/benchmark.py tp --config CONFIG --json docs/results/multi_gpu/nvlink.json
python scripts/benchmark.py engine --model DIR_OR_FILE --batch 1 --bits 4 --json PATH
python scripts/benchmark.py experts --json PATH
python scripts/benchmark.py transformers --model DIR_OR_FILE --batch 1 --json PATH
python scripts/benchmark.py latent-kv --json docs/results/h200/latent_kv.json
python scripts/benchmark.py latent-steps --json docs/results/cpu/latent_steps.json
python scripts/benchmark.py ramp --shape qwen1.5-moe --json docs/results/h200/kv_ramp.json
python scripts/benchmark.py plan --json docs/results/cpu/planning.json
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

import jax
from _command import run as run_command
from _ramp_benchmark import SHAPES
from _tp_command import add_flags as add_tp_flags
from _tp_command import run as run_tp

from checkpoints.tensor_files import read_json
from pallas_kernels.implementation import Implementation
from pw_jax.errors import UserError
from pw_jax.planner.config import PlannerConfig, PlannerKind


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the flags."""
    parser = argparse.ArgumentParser(description="Benchmarks; most are for GPUs.")
    commands = parser.add_subparsers(dest="command", required=True)
    kernels = commands.add_parser("kernels", help="expert products against bfloat16")
    kernels.add_argument("--json", type=Path, required=True, help="where results go")
    kernels.add_argument("--models", nargs="*", default=[], help="only these shapes")
    tp = commands.add_parser("tp", help="factored layers under tensor parallelism")
    add_tp_flags(tp)
    engine = commands.add_parser("engine", help="whole generations, with random weights")
    _add_generation_flags(engine)
    engine.add_argument("--experts", choices=("paged", "bf16"), default="paged")
    engine.add_argument(
        "--budget-gib", type=float, help="weights and pages; default what is needed"
    )
    width = engine.add_mutually_exclusive_group()
    width.add_argument("--bits", type=int, help="one width for all experts, which stays")
    width.add_argument("--planner", choices=get_args(PlannerKind), default="full")
    engine.add_argument("--kv-ramp", action="store_true", help="the first text outlives the others")
    engine.add_argument("--prefill-chunk", type=int, default=256, help="default %(default)s")
    engine.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    engine.add_argument("--implementation", choices=get_args(Implementation), default="auto")
    engine.add_argument("--profile", action="store_true", help="also a decode step by kernel")
    engine.add_argument("--wait-for", type=Path, help="be ready, then wait until this file exists")
    experts = commands.add_parser("experts", help="unquantised experts: all, or the chosen ones")
    experts.add_argument("--json", type=Path, required=True, help="where results go")
    peer = commands.add_parser("transformers", help="the same with torch, to compare with")
    _add_generation_flags(peer)
    peer.add_argument("--mode", choices=("eager", "compiled"), default="eager")
    latent = commands.add_parser("latent-kv", help="attention over latents against full KV")
    latent.add_argument("--contexts", type=int, nargs="+", default=[512, 8192], help="tokens")
    latent.add_argument(
        "--dispatch-only",
        action="store_true",
        help="only fixed shapes against steps op by op and of new lengths; runs anywhere",
    )
    latent.add_argument("--batch", type=int, default=64, help="sequences of that")
    latent.add_argument("--layers", type=int, default=8, help="layers of that")
    latent.add_argument("--json", type=Path, required=True, help="where results go")
    ramp = commands.add_parser("ramp", help="decoding while keys and values ramp up and down")
    ramp.add_argument("--shape", choices=list(SHAPES), default="small", help="default %(default)s")
    ramp.add_argument("--layers", type=int, default=4, help="default %(default)s")
    ramp.add_argument("--steady", type=int, default=2, help="sequences throughout")
    ramp.add_argument("--burst", type=int, default=6, help="sequences that come and go")
    ramp.add_argument("--burst-tokens", type=int, default=128, help="of each (default %(default)s)")
    ramp.add_argument("--quiet-turns", type=int, default=48, help="before the burst")
    ramp.add_argument("--prompt-tokens", type=int, default=32, help="default %(default)s")
    for name in ("moves_per_turn", "restore_pages_per_step"):
        flag, default = "--" + name.replace("_", "-"), getattr(PlannerConfig, name)
        ramp.add_argument(flag, type=int, default=default, help="default %(default)s")
    ramp.add_argument("--idle-device", action="store_true", help="the host's work by itself")
    ramp.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    ramp.add_argument("--implementation", choices=("auto", "xla", "pallas"), default="auto")
    where = ramp.add_mutually_exclusive_group(required=True)
    where.add_argument("--json", type=Path, help="where results go")
    where.add_argument("--tables", type=Path, nargs="+", help="only print those of earlier files")
    steps = commands.add_parser("latent-steps", help="steps over latents in long page tables")
    steps.add_argument("--contexts", type=int, nargs="+", default=[64, 256, 1024])
    steps.add_argument("--table-tokens", type=int, default=4096, help="default %(default)s")
    steps.add_argument("--json", type=Path, required=True, help="where results go")
    plan = commands.add_parser("plan", help="time to plan 40,000 steps, on one CPU core")
    plan.add_argument("--json", type=Path, required=True, help="where results go")
    return parser.parse_args(argv)


def _add_generation_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", type=Path, required=True, help="a config.json, or its folder")
    add("--batch", type=int, nargs="+", default=[1], help="sequences at once; several run in turn")
    add("--input-len", type=int, default=128, help="tokens of a prompt (default %(default)s)")
    add("--output-len", type=int, default=128, help="tokens to generate (default %(default)s)")
    add("--json", type=Path, required=True, help="where results go")


def ramp(arguments: argparse.Namespace) -> None:
    """The ``ramp`` command."""
    from _tables import ramps

    if arguments.tables:
        named = {f"{path.parent.name}/{path.stem}": read_json(path) for path in arguments.tables}
        print(ramps(named))
        return

    from _idle_device import idle_device
    from _ramp_benchmark import Ramp, make_engine, measure, model_config, report

    load = Ramp(
        steady=arguments.steady,
        burst=arguments.burst,
        quiet_turns=arguments.quiet_turns,
        burst_tokens=arguments.burst_tokens,
        prompt_tokens=arguments.prompt_tokens,
    )
    config = model_config(arguments.shape, arguments.layers)
    planner = PlannerConfig(
        moves_per_turn=arguments.moves_per_turn,
        restore_pages_per_step=arguments.restore_pages_per_step,
    )
    engine = make_engine(config, load, arguments.dtype, arguments.implementation, planner)
    if arguments.idle_device:
        idle_device(engine)
    found = measure(engine, load)
    print(report(found))
    settings = {
        "shape": arguments.shape,
        "layers": arguments.layers,
        "moves_per_turn": planner.moves_per_turn,
        "restore_pages_per_step": planner.restore_pages_per_step,
    }
    _write_one(arguments.json, settings | found)


def plan(arguments: argparse.Namespace) -> None:
    """The ``plan`` command."""
    from _plan_benchmark import measure

    found = measure()
    print(
        f"{found['steps']} steps: median {found['median_ms']:.2f} ms, "
        f"least {found['least_ms']:.2f} ms, of {found['runs']} runs; on the core itself "
        f"{found['median_cpu_ms']:.2f} and {found['least_cpu_ms']:.2f} ms"
    )
    _write_one(arguments.json, found)


def _write_one(path: Path, found: dict[str, Any]) -> None:
    header = {
        "command": " ".join(["python", "scripts/benchmark.py", *sys.argv[1:]]),
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "load_average": [round(load, 1) for load in os.getloadavg()],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(header | found, indent=1) + "\n")


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
    """The ``tp`` command."""
    run_tp(arguments)


def engine(arguments: argparse.Namespace) -> None:
    """The ``engine`` command; runs anywhere, but only a GPU's times mean much."""
    from _engine_benchmark import Job, run

    records = []
    for batch in arguments.batch:
        job = Job(
            config=arguments.model,
            batch=batch,
            input_len=arguments.input_len,
            output_len=arguments.output_len,
            experts="dense" if arguments.experts == "bf16" else "paged",
            bits=arguments.bits,
            planner=arguments.planner,
            budget_gib=arguments.budget_gib,
            kv_ramp=arguments.kv_ramp,
            prefill_chunk=arguments.prefill_chunk,
            dtype=arguments.dtype,
            implementation=arguments.implementation,
        )
        record = run(job, profile=arguments.profile, wait_for=arguments.wait_for)
        records.append(record)
        print(
            f"{job.config} batch {batch}, {job.experts} {job.bits or job.planner}: "
            f"{record['decode_tokens_per_second']:.0f} tokens/s decoding, token "
            f"{record['token_ms'][0]:.2f} ms (99%: {record['token_ms'][1]:.2f}), roofline "
            f"{record['roofline_ms']:.2f} ms, host {record['host_ms'][0]:.2f} ms, first token "
            f"{record['first_token_ms'][0]:.0f} ms, ready in {record['ready_seconds']:.0f} s",
            flush=True,
        )
        _write(arguments.json, records)
        if record["compilations"]:
            raise RuntimeError(f"{record['compilations']} compilations after warm-up")


def experts(arguments: argparse.Namespace) -> None:
    """The ``experts`` command."""
    from _dense_experts_benchmark import run

    if jax.default_backend() != "gpu":
        raise UserError("scripts/benchmark.py experts needs an NVIDIA GPU and JAX's CUDA plugin")
    records = []
    for record in run():
        records.append(record)
        print(f"{record['tokens']} tokens, {record['product']}: {record['us']} us", flush=True)
    _write(arguments.json, records)


def transformers(arguments: argparse.Namespace) -> None:
    """The ``transformers`` command."""
    from _transformers_benchmark import run

    records = []
    for batch in arguments.batch:
        sizes = batch, arguments.input_len, arguments.output_len
        record = run(arguments.model, *sizes, arguments.mode)
        records.append(record)
        print(f"{record['mode']} batch {batch}: token {record['token_ms']:.2f} ms", flush=True)
        _write(arguments.json, records)


def _write(path: Path, records: list[dict[str, Any]]) -> None:
    result = {"command": " ".join(["python", *sys.argv]), "records": records}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


def latent_kv(arguments: argparse.Namespace) -> None:
    """The ``latent-kv`` command."""
    from _latent_benchmark import dispatch_record, run

    sizes = (arguments.batch, arguments.contexts[0], arguments.layers)
    if arguments.dispatch_only:
        found = dispatch_record(*sizes)
        print(found)
        _write_one(arguments.json, {"dispatch": found})
        return
    if jax.default_backend() != "gpu":
        raise UserError("scripts/benchmark.py latent-kv needs an NVIDIA GPU and JAX's CUDA plugin")
    result: dict[str, Any] = {
        "command": " ".join(["python", *sys.argv]),
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "dispatch": None,
        "records": [],
    }
    arguments.json.parent.mkdir(parents=True, exist_ok=True)

    def report(record: dict) -> None:
        print(
            f"{record['model']} tp {record['tp']} {record['context']} {record['mode']}: "
            f"{record['us']:.1f} us (counted {record['counted_us']:.1f}), "
            f"difference {record['difference']:.1e}",
            flush=True,
        )
        result["records"].append(record)
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")

    run(arguments.contexts, report)
    result["dispatch"] = dispatch_record(*sizes)
    print(result["dispatch"])
    arguments.json.write_text(json.dumps(result, indent=1) + "\n")


def latent_steps(arguments: argparse.Namespace) -> None:
    """The ``latent-steps`` command."""
    from _latent_step_benchmark import run

    records: list[dict[str, Any]] = []

    def report(record: dict[str, Any]) -> None:
        print(
            f"{record['context']} of {record['table_tokens']} tokens, {record['programs']} "
            f"programs: decode {record['decode_ms']:.1f} ms, prefill {record['prefill_ms']} ms",
            flush=True,
        )
        records.append(record)
        _write_one(arguments.json, {"records": records})

    run(arguments.contexts, arguments.table_tokens, report)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs one command."""
    arguments = parse(argv)
    commands = (kernels, tp, engine, experts, transformers, latent_kv, latent_steps, ramp, plan)
    named = {command.__name__.replace("_", "-"): command for command in commands}
    named[arguments.command](arguments)


if __name__ == "__main__":
    sys.exit(run_command(main))
