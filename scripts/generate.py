"""Generates text in batches under a memory budget.

    python scripts/generate.py --model DIR --prompt "Write a haiku." --chat

DIR is a folder made by scripts/convert.py (experts are paged) or a Hugging Face folder.
"""

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import jax
from _command import run
from _watch import watched
from rich.console import Console
from rich.table import Table

from checkpoints.dummy import dummy_engine
from checkpoints.engine import TensorParallel, load_engine
from pallas_kernels.page_layout import LatentLayout
from pw_jax.engine.config import EngineConfig, KvCacheKind
from pw_jax.engine.engine import Engine
from pw_jax.engine.generation import Generation, finish, make_requests
from pw_jax.engine.sampling import Sampling
from pw_jax.engine.trace import write_trace
from pw_jax.errors import UserError
from pw_jax.planner.config import PlannerConfig, PlannerKind, PromptMode
from sharding.layouts import LAYOUTS

MIB = 1 << 20


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the flags."""
    parser = argparse.ArgumentParser(description="Batch generation under a memory budget.")
    add = parser.add_argument
    add("--model", required=True, help="folder made by scripts/convert.py, or a Hugging Face one")
    add(
        "--load-format",
        choices=("checkpoint", "dummy"),
        default="checkpoint",
        help="dummy: random weights, from the config.json of --model alone",
    )
    add("--ratio", type=float, help="dummy weights: factored, keeping this fraction of each layer")
    add("--prompt", action="append", default=[], help="a prompt; may be given again")
    add("--prompts", type=Path, help='file: a prompt a line, or .jsonl with "prompt" in each line')
    add("--chat", action="store_true", help="put each prompt into the model's chat template")
    add("--samples", type=int, default=1, help="texts a prompt, with draws of their own")
    add("--max-new-tokens", type=int, default=64, help="a prompt (default %(default)s)")
    add("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    add("--top-k", type=int, default=0, help="0 means all (default)")
    add("--top-p", type=float, default=1.0, help="1 means all (default)")
    add("--seed", type=int, default=0)
    budget = parser.add_mutually_exclusive_group()
    budget.add_argument("--memory-budget-mib", type=float, help="weights and pages, in MiB")
    budget.add_argument("--memory-budget-gib", type=float, help="the same in GiB; default: roomy")
    add("--slots", type=int, default=4, help="sequences at once (default %(default)s)")
    add("--max-sequence-tokens", type=int, default=1024, help="default %(default)s")
    add("--prefill-chunk", type=int, default=64, help="tokens a prefill step (default %(default)s)")
    add("--page-kib", type=float, help="default: the largest page that wastes little")
    add("--min-bits", type=int, help="no expert goes below; default: by routing, see the planner")
    add("--dtype", choices=("float32", "bfloat16"), help="default: bfloat16 on a GPU, else float32")
    add("--kv-dtype", choices=("bfloat16", "float32"), default="bfloat16")
    add(
        "--kv-cache",
        choices=get_args(KvCacheKind),
        default="auto",
        help="keys and values, or the latents of factored layers; default: the cheaper",
    )
    add(
        "--no-prefix-sharing",
        action="store_true",
        help="compute every prompt, also where another begins alike and its pages are there",
    )
    add("--stream", action="store_true", help="print the first prompt's text as it comes")
    add("--json", type=Path, metavar="PATH", help="write results here; - for standard output")
    add("--trace", type=Path, metavar="PATH", help="write a JSON line a step, plan and move here")
    add("--tp", type=int, help="divide a model over this many devices; see --layout")
    add("--layout", choices=list(LAYOUTS), help="how, with --tp (default gathered)")
    add("--distributed", action="store_true", help="one of several processes, as srun starts them")
    add("--watch", action="store_true", help="show pages and bits while generating")
    add_planner_flags(parser)
    return parser.parse_args(argv)


def add_planner_flags(parser: argparse.ArgumentParser) -> None:
    """Which planner runs, and what is taken out of it."""
    group = parser.add_argument_group("planner")
    group.add_argument(
        "--planner",
        choices=get_args(PlannerKind),
        default="full",
        help="all but full are there to compare with (default %(default)s)",
    )
    prompt = group.add_mutually_exclusive_group()
    prompt.add_argument(
        "--prompt-residual",
        choices=get_args(PromptMode),
        default="off",
        help="correct the damage for the running prompts; needs scripts/calibrate.py",
    )
    prompt.add_argument(
        "--no-prompt-residual", action="store_const", const="off", dest="prompt_residual"
    )
    for name, what in {
        "routing": "how often experts are chosen",
        "sensitivity": "the calibrated sensitivity",
        "page-movement": "moving pages after loading",
    }.items():
        group.add_argument(f"--no-{name}", action="store_true", help=f"without {what}")


def planner_config(flags: argparse.Namespace) -> PlannerConfig:
    """The planner's settings from flags."""
    config = PlannerConfig(
        kind=flags.planner,
        prompt_residual=flags.prompt_residual,
        routing=not flags.no_routing,
        sensitivity=not flags.no_sensitivity,
        page_movement=not flags.no_page_movement,
        random_seed=flags.seed,
    )
    if flags.min_bits is not None:
        config = dataclasses.replace(config, bucket_floors=(flags.min_bits,) * 3)
    return config


def engine_config(flags: argparse.Namespace) -> EngineConfig:
    """The engine's settings from flags.

    Raises:
        UserError: A value out of range.
    """
    budget = None
    if flags.memory_budget_mib is not None:
        budget = int(flags.memory_budget_mib * MIB)
    elif flags.memory_budget_gib is not None:
        budget = int(flags.memory_budget_gib * 1024 * MIB)
    try:
        return EngineConfig(
            memory_budget_bytes=budget,
            slots=flags.slots,
            max_sequence_tokens=flags.max_sequence_tokens,
            prefill_chunk=flags.prefill_chunk,
            page_bytes=None if flags.page_kib is None else int(flags.page_kib * 1024),
            kv_dtype=flags.kv_dtype,
            kv_cache=flags.kv_cache,
            prefix_sharing=not flags.no_prefix_sharing,
            planner=planner_config(flags),
        )
    except ValueError as problem:
        raise UserError(str(problem)) from problem


def tensor_parallel(flags: argparse.Namespace) -> TensorParallel | None:
    """Over which devices to run, from flags; meets the other processes first, if there are any.

    Raises:
        UserError: Too few devices; or a layout, or several processes, but no --tp.
    """
    for name in ("layout", "distributed"):
        if getattr(flags, name) and flags.tp is None:
            raise UserError(f"--{name} needs --tp N, the number of devices")
    if flags.tp is None:
        return None
    if flags.distributed:
        jax.distributed.initialize()
    return TensorParallel.over(flags.tp, flags.layout or "gathered")


def default_dtype(name: str | None) -> str:
    """bfloat16 where the device multiplies it quickly."""
    return name or ("bfloat16" if jax.default_backend() == "gpu" else "float32")


def read_prompts(flags: argparse.Namespace) -> list[str]:
    """Prompts from flags and file, each as often as it is to be sampled."""
    if flags.samples < 1:
        raise UserError(f"--samples must be at least 1, got {flags.samples}")
    prompts = list(flags.prompt)
    if flags.prompts is not None:
        try:
            lines = flags.prompts.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"cannot read --prompts {flags.prompts}: {error}") from None
        for number, line in enumerate(lines, start=1):
            if line.strip():
                prompts.append(_prompt_of(line, flags.prompts, number))
    if not prompts:
        raise UserError("no prompt: give --prompt TEXT or --prompts FILE")
    return [prompt for prompt in prompts for _ in range(flags.samples)]


def _prompt_of(line: str, path: Path, number: int) -> str:
    if path.suffix != ".jsonl":
        return line
    try:
        return str(json.loads(line)["prompt"])
    except (ValueError, TypeError, KeyError):
        raise UserError(f'{path} line {number} is not a JSON object with a "prompt"') from None


def with_chat_template(tokenizer: Any, prompts: list[str]) -> list[list[int]]:
    """Tokens of prompts as user turns of the model's chat template."""
    if not getattr(tokenizer, "chat_template", None):
        raise UserError("--chat: this model's tokenizer has no chat template; leave --chat out")
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=False
        )
        for prompt in prompts
    ]


def summary_table(engine: Engine, generations: list[Generation], seconds: float) -> Table:
    """What the budget was spent on, and what came of it."""
    plan, last, tokens = engine.plan, engine.trace[-1], sum(len(g.tokens) for g in generations)
    table = Table("what", "value", title="Memory in MiB of the device; XLA's temporaries apart")
    table.add_row("budget", f"{plan.budget_bytes / MIB:.1f}")
    table.add_row("weights that are arrays", f"{plan.array_bytes / MIB:.1f}")
    table.add_row(
        "page pool",
        f"{plan.pool_bytes / MIB:.1f} ({plan.pool_pages} pages of {plan.layout.page_bytes} bytes)",
    )
    latent = any(isinstance(group.layout, LatentLayout) for group in plan.layout.kv_groups)
    table.add_row(
        "KV cache of a token",
        f"{plan.layout.kv_token_bytes / 1024:.2f} KiB{', latents' if latent else ''}",
    )
    table.add_row("temporaries of a step", f"{engine.temporary_bytes / MIB:.1f}")
    if engine.precision is not None:
        bits = [record.mean_bits or 0.0 for record in engine.trace]
        table.add_row(
            "bits a weight: first, least, last", f"{bits[0]:.2f}, {min(bits):.2f}, {bits[-1]:.2f}"
        )
        table.add_row("blocks lowered, raised", f"{last.lowered}, {last.raised}")
    table.add_row("most KV pages", str(max(record.kv_pages for record in engine.trace)))
    table.add_row("preemptions", str(last.preemptions))
    if engine.config.shares_prefixes:
        computed = sum(record.prefilled_tokens for record in engine.trace)
        table.add_row("prompt tokens run, taken from pages", f"{computed}, {last.reused_tokens}")
    table.add_row(
        "generated", f"{tokens} tokens in {seconds:.1f} s, {tokens / seconds:.1f} a second"
    )
    return table


def main(argv: Sequence[str] | None) -> None:
    """Loads, generates and reports."""
    flags = parse(argv)
    prompts, config = read_prompts(flags), engine_config(flags)
    try:
        sampling = Sampling(flags.temperature, flags.top_k, flags.top_p)
    except ValueError as problem:
        raise UserError(str(problem)) from problem
    parallel = tensor_parallel(flags)
    is_first = jax.process_index() == 0  # all processes do the same, and one of them tells
    dtype = default_dtype(flags.dtype)
    if flags.ratio is not None and flags.load_format != "dummy":
        raise UserError("--ratio needs --load-format dummy; decompose.py factors a checkpoint")
    if flags.load_format == "dummy":
        engine = dummy_engine(
            Path(flags.model), config, dtype, ratio=flags.ratio, parallel=parallel
        )
    else:
        engine = load_engine(flags.model, config, dtype, parallel=parallel)
    tokenizer: Any = engine.tokenizer
    requests = make_requests(
        with_chat_template(tokenizer, prompts) if flags.chat else prompts,
        flags.max_new_tokens,
        sampling,
        flags.seed,
        engine.model_config.eos_token_ids,
        tokenizer,
    )
    for request in requests:
        engine.check(request)
    started = time.perf_counter()
    sequences = [engine.submit(request) for request in requests]
    shown = ""
    for event in watched(engine) if flags.watch and is_first else engine.run():
        if flags.stream and is_first and event.sequence is sequences[0]:
            text = tokenizer.decode(event.sequence.generated, skip_special_tokens=True)
            if not text.endswith("\ufffd"):  # half of a character
                print(text[len(shown) :], end="", flush=True)
                shown = text
    if not is_first:
        return
    seconds = time.perf_counter() - started
    generations = [finish(sequence, tokenizer) for sequence in sequences]
    if flags.trace is not None:
        moves = engine.precision.moves.events if engine.precision is not None else ()
        write_trace(flags.trace, engine.trace, moves)
    if flags.json is not None:
        report = json.dumps(as_json(engine, prompts, generations, seconds), indent=2)
        if str(flags.json) == "-":
            print(report)
            return
        flags.json.write_text(report + "\n", encoding="utf-8")
    console = Console()
    for prompt, generation in zip(prompts, generations, strict=True):
        console.rule(prompt if len(prompt) < 72 else prompt[:69] + "...", align="left")
        console.print(generation.text.strip(), markup=False, highlight=False)
    console.print(summary_table(engine, generations, seconds))


def as_json(
    engine: Engine, prompts: list[str], generations: list[Generation], seconds: float
) -> dict[str, Any]:
    """Results for a machine; sizes in bytes."""
    last = engine.trace[-1]
    return {
        "generations": [
            {
                "prompt": prompt,
                "text": generation.text,
                "tokens": list(generation.tokens),
                "stopped": generation.stopped,
                "preemptions": generation.preemptions,
            }
            for prompt, generation in zip(prompts, generations, strict=True)
        ],
        "seconds": seconds,
        "tokens_per_second": sum(len(g.tokens) for g in generations) / seconds,
        "budget_bytes": engine.plan.budget_bytes,
        "array_bytes": engine.plan.array_bytes,
        "pool_bytes": engine.plan.pool_bytes,
        "page_bytes": engine.layout.page_bytes,
        "temporary_bytes": engine.temporary_bytes,
        "last_step": last.as_dict(),
        "least_bits": min((r.mean_bits for r in engine.trace if r.mean_bits), default=None),
    }


if __name__ == "__main__":
    sys.exit(run(main))
