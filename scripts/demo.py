"""The main job in one picture: the same prompts under a roomy and under a tight memory budget.

make demo
"""

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from _command import run
from generate import MIB, default_dtype, with_chat_template
from plot_trace import plot
from rich.console import Console
from rich.table import Table

from checkpoints.engine import load_engine
from pw_jax.engine.config import EngineConfig
from pw_jax.engine.engine import Engine
from pw_jax.engine.generation import finish, make_requests
from pw_jax.engine.sampling import GREEDY
from pw_jax.errors import UserError
from pw_jax.planner.config import PlannerConfig

PLANNER = PlannerConfig(bucket_floors=(4, 4, 4), raise_turns=2)
"""All experts may fall to four bits: at three this small model begins to repeat itself. Raises are
committed by count, so that the texts are the same each time."""


@dataclass(frozen=True)
class DemoRun:
    """One pass over the prompts.

    Attributes:
        engine: The engine that ran them.
        texts: What it generated.
        seconds: Generation time.
        bits_before: Mean bits of each layer when generation began.
        bits_least: The same at the turn with the lowest mean.
    """

    engine: Engine
    texts: list[str]
    seconds: float
    bits_before: np.ndarray
    bits_least: np.ndarray


def generate(model: Path, prompts: list[str], config: EngineConfig, new_tokens: int) -> DemoRun:
    """Runs all prompts under one budget."""
    engine = load_engine(model, config, default_dtype(None))
    precision = engine.precision
    if precision is None:
        raise UserError(f"{model} has no paged experts: convert it with scripts/convert.py")
    stops = engine.model_config.eos_token_ids
    requests = make_requests(
        with_chat_template(engine.tokenizer, prompts), new_tokens, GREEDY, 0, stops, None
    )
    sequences = [engine.submit(request) for request in requests]
    before = least = precision.table.bits
    started = time.perf_counter()
    while not engine.idle:
        engine.step()
        engine.check_pages()
        if precision.table.bits.sum() < least.sum():
            least = precision.table.bits
    seconds = time.perf_counter() - started
    texts = [finish(sequence, engine.tokenizer).text.strip() for sequence in sequences]
    return DemoRun(engine, texts, seconds, before.mean(axis=(1, 2)), least.mean(axis=(1, 2)))


def tight_budget(engine: Engine) -> int:
    """Bytes for weights that are arrays, experts at their floors, and the most KV pages seen."""
    plan, precision = engine.plan, engine.precision
    assert precision is not None
    kv_pages = max(record.kv_pages for record in engine.trace)
    return plan.array_bytes + (precision.floor_pages + kv_pages + 1) * plan.layout.page_bytes


def report(console: Console, prompts: list[str], runs: dict[str, DemoRun]) -> None:
    """Texts side by side, then what each budget bought."""
    for number, prompt in enumerate(prompts):
        console.rule(prompt, align="left")
        for name, one in runs.items():
            console.print(f"{name}: {one.texts[number]}", markup=False, highlight=False)
    layers = Table("layer", *(f"{name}: before, least" for name in runs), title="Bits a weight")
    for layer in range(len(next(iter(runs.values())).bits_before)):
        cells = (f"{r.bits_before[layer]:.2f}, {r.bits_least[layer]:.2f}" for r in runs.values())
        layers.add_row(str(layer), *cells)
    console.print(layers)
    table = Table("", *runs, title="Memory of the device in MiB, XLA's temporaries apart")
    engines = [one.engine for one in runs.values()]
    for label, cells in {
        "budget": [f"{e.plan.budget_bytes / MIB:.1f}" for e in engines],
        "weights that are arrays": [f"{e.plan.array_bytes / MIB:.1f}" for e in engines],
        "page pool": [f"{e.plan.pool_bytes / MIB:.1f}" for e in engines],
        "pages of": [f"{e.layout.page_bytes} bytes" for e in engines],
        "most KV pages": [str(max(r.kv_pages for r in e.trace)) for e in engines],
        "pages handed from experts to KV": [str(_handed_over(e)) for e in engines],
        "blocks lowered, raised": [f"{e.trace[-1].lowered}, {e.trace[-1].raised}" for e in engines],
        "preemptions": [str(e.trace[-1].preemptions) for e in engines],
        "tokens a second": [f"{_tokens(r.engine) / r.seconds:.1f}" for r in runs.values()],
    }.items():
        table.add_row(label, *cells)
    console.print(table)


def _tokens(engine: Engine) -> int:
    return sum(record.decoded_tokens for record in engine.trace)


def _handed_over(engine: Engine) -> int:
    """Weight pages at the start less those at the lowest point."""
    weights = [record.weight_pages for record in engine.trace]
    return weights[0] - min(weights)


def main(argv: Sequence[str] | None) -> None:
    """Runs both budgets and reports."""
    parser = argparse.ArgumentParser(description="One batch at two memory budgets.")
    add = parser.add_argument
    add("--model", type=Path, required=True, help="folder made by scripts/convert.py")
    add("--prompts", type=Path, required=True, help="file with a prompt a line")
    add("--out", type=Path, required=True, help="folder for the picture and the traces")
    add("--slots", type=int, default=4)
    add("--max-new-tokens", type=int, default=96)
    flags = parser.parse_args(argv)
    try:
        lines = flags.prompts.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UserError(f"cannot read --prompts {flags.prompts}: {error}") from None
    prompts = [line for line in lines if line.strip()]
    config = EngineConfig(slots=flags.slots, max_sequence_tokens=256, planner=PLANNER)
    roomy = generate(flags.model, prompts, config, flags.max_new_tokens)
    config = dataclasses.replace(config, memory_budget_bytes=tight_budget(roomy.engine))
    tight = generate(flags.model, prompts, config, flags.max_new_tokens)
    runs = {"roomy": roomy, "tight": tight}
    report(Console(), prompts, runs)
    flags.out.mkdir(parents=True, exist_ok=True)
    traces = {name: [r.as_dict() for r in one.engine.trace] for name, one in runs.items()}
    for name, records in traces.items():
        lines = "".join(json.dumps(record) + "\n" for record in records)
        (flags.out / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    plot(traces, flags.out / "pages_and_bits.png")
    print(f"pages and bits over time: {flags.out / 'pages_and_bits.png'}")


if __name__ == "__main__":
    sys.exit(run(main))
