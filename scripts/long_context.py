"""Quality under a fixed budget while keys and values take the experts' pages.

    python scripts/long_context.py --checkpoint PAGED --text heldout.jsonl --bits-left 3.5 \
        --lengths 512 1024 2048 4096 8192 --planner full uniform --json out.json

The budget is what all slots at the greatest length need beside all experts at --bits-left, so that
short texts run with wide experts and the longest ones with narrow ones. Each length is a number of
texts with a pass key in them, asked for by greedy decoding; a key counts as found if the five
digits come first. Prompts are read one after another and answers are short: with several slots few
texts are ever whole at the same time, and the pressure is less than the budget was made for.
"""

import argparse
import dataclasses
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from _command import progress_console, run
from rich.console import Console
from rich.table import Table

from checkpoints.engine import load_engine
from checkpoints.evaluate import text_filler
from checkpoints.held import PLANNERS, budget_at
from checkpoints.manifest import library_versions, write_json
from checkpoints.store import open_store
from checkpoints.text import load_tokenizer, sha256
from pw_jax.engine.config import EngineConfig
from pw_jax.engine.engine import Engine
from pw_jax.evaluation.bootstrap import estimate
from pw_jax.evaluation.encoding import Encoder
from pw_jax.evaluation.long_context import passkey

ANSWER_TOKENS = 8


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the flags."""
    parser = argparse.ArgumentParser(description="Pass keys in long texts under a fixed budget.")
    add = parser.add_argument
    add("--checkpoint", type=Path, required=True, help="made by scripts/convert.py")
    add("--text", type=Path, nargs="+", required=True, help="what keys are hidden in")
    add("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8000])
    add("--planner", nargs="+", choices=list(PLANNERS), default=["full", "uniform"])
    add("--bits-left", type=float, default=3.5, help="see above (default %(default)s)")
    add("--slots", type=int, default=1, help="texts at once (default %(default)s)")
    add("--keys", type=int, default=16, help="texts of each length (default %(default)s)")
    add("--prefill-chunk", type=int, default=256, help="default %(default)s")
    add("--dtype", choices=("float32", "bfloat16"), help="default bfloat16 on a GPU")
    add("--json", type=Path, required=True, help="file to write")
    return parser.parse_args(argv)


def probe(engine: Engine, encoder: Encoder, task: Any) -> dict[str, Any]:
    """Asks for all keys of one length, and says what the pages did meanwhile."""
    (first, *_) = pairs = [question.pairs[0] for question in task.questions]
    before, started = len(engine.trace), time.monotonic()
    prompts = [encoder.text(pair.context) for pair in pairs]
    found = engine.generate(prompts, ANSWER_TOKENS, stop_token_ids=())
    right = []
    for pair, generation in zip(pairs, found, strict=True):
        answer = encoder.decode(generation.tokens).strip()
        right.append(float(answer.startswith(pair.continuation.strip())))
    turns = engine.trace[before:]
    bits = [turn.mean_bits for turn in turns if turn.mean_bits is not None]
    return {
        "tokens": len(encoder.text(first.context)),
        "found": estimate(np.array(right))._asdict(),
        "items": right,
        "mean_bits_at_start": bits[0] if bits else None,
        "mean_bits_at_end": bits[-1] if bits else None,
        "least_bits": min(bits) if bits else None,
        "most_kv_pages": max(turn.kv_pages for turn in turns),
        "blocks_lowered": turns[-1].lowered,
        "preemptions": turns[-1].preemptions,
        "seconds": round(time.monotonic() - started, 1),
    }


def main(argv: Sequence[str] | None) -> None:
    """Runs each planner through all lengths, and writes what there is after each."""
    flags = parse(argv)
    import jax  # here, so that --help is quick

    on_gpu = jax.default_backend() == "gpu"
    dtype = flags.dtype or ("bfloat16" if on_gpu else "float32")
    store, tokenizer = open_store(flags.checkpoint), load_tokenizer(flags.checkpoint)
    encoder = Encoder(tokenizer, store.model_config.max_positions)
    filler = text_filler(encoder, flags.text)
    tasks = [passkey(filler, length, flags.keys) for length in sorted(flags.lengths)]
    config = EngineConfig(
        slots=flags.slots,
        max_sequence_tokens=max(flags.lengths) + 2 * ANSWER_TOKENS,
        prefill_chunk=flags.prefill_chunk,
        prefix_sharing=False,  # every text is read at the widths of its own time
    )
    arguments = [Path(a).name if "/" in a else a for a in map(str, argv or sys.argv[1:])]
    record: dict[str, Any] = {
        "command": f"python scripts/long_context.py {shlex.join(arguments)}",
        "device": jax.devices()[0].device_kind,
        "dtype": dtype,
        "texts": {path.name: sha256(path) for path in flags.text},
        "intervals": "95%, bootstrap over texts",
        "versions": library_versions(),
        "results": [],
    }
    with progress_console().status("") as status:
        for name in flags.planner:
            status.update(f"{name}: loading")
            own = dataclasses.replace(config, planner=PLANNERS[name])
            budget = budget_at(store, own, flags.bits_left, dtype)
            own = dataclasses.replace(own, memory_budget_bytes=budget)
            engine = load_engine(flags.checkpoint, own, dtype, with_tokenizer=False)
            for task in tasks:
                status.update(f"{name}: {task.name}")
                result = {"planner": name, "budget_bytes": budget} | probe(engine, encoder, task)
                record["results"].append(result)
                flags.json.parent.mkdir(parents=True, exist_ok=True)
                write_json(flags.json, record)
            del engine
    Console().print(table(record["results"]))


def table(results: Sequence[dict[str, Any]]) -> Table:
    """The results for people."""
    out = Table("planner", "tokens", "keys found", "bits: start, least, end", "most KV pages")
    for result in results:
        bits = [result[f"{name}"] for name in ("mean_bits_at_start", "least_bits")]
        bits.append(result["mean_bits_at_end"])
        out.add_row(
            result["planner"],
            str(result["tokens"]),
            f"{result['found']['mean']:.0%}",
            ", ".join("" if value is None else f"{value:.2f}" for value in bits),
            str(result["most_kv_pages"]),
        )
    return out


if __name__ == "__main__":
    sys.exit(run(main))
