"""Measures the perplexity of models on a text: Hugging Face folders and decomposed ones.

    python scripts/perplexity.py --models DIR DIR --text valid.jsonl --tokens 4096 --json out.json

With --kv-cache each factored model also runs through a cache of pages that keeps keys and values,
and one that keeps their latents: perplexity and bytes of both. Where no layer's keys and values are
both factored there are no latents to keep, and no figures of them.
"""

import argparse
import math
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _command import progress_console, run
from rich.console import Console
from rich.table import Table

from checkpoints.huggingface import load_dense_model
from checkpoints.low_rank import is_low_rank, load_low_rank_model
from checkpoints.manifest import write_json
from checkpoints.store import MANIFEST
from checkpoints.tensor_files import read_json
from checkpoints.text import load_tokenizer, read_documents, sha256, token_sequences
from checkpoints.verify import mean_loss
from pw_jax.engine.config import EngineConfig, KvCacheKind
from pw_jax.errors import UserError
from pw_jax.evaluation.cached import cached_loss
from pw_jax.models.latent import latent_layers
from pw_jax.models.registry import parameter_count

CACHES: tuple[KvCacheKind, ...] = ("full", "latent")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the flags."""
    parser = argparse.ArgumentParser(description="Perplexity of models on one text.")
    add = parser.add_argument
    add("--models", type=Path, nargs="+", required=True, help="folders; the first is the baseline")
    add("--text", type=Path, required=True, help=".txt or .jsonl that no model was calibrated on")
    add("--tokens", type=int, default=4096, help="how much of it (default %(default)s)")
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="to compute in")
    add("--kv-cache", nargs="+", choices=CACHES, default=[], help="of factored models, see above")
    add("--json", type=Path, help="file to write, with this command in it")
    return parser.parse_args(argv)


def measure(
    directory: Path, text: Path, count: int, dtype: str, caches: Sequence[KvCacheKind]
) -> dict[str, Any]:
    """Perplexity of one model, with what is known of how it was made."""
    low_rank = is_low_rank(directory)
    tokens = token_sequences(load_tokenizer(directory), read_documents(text), count)
    _, model = (load_low_rank_model if low_rank else load_dense_model)(directory, dtype)
    made = read_json(directory / MANIFEST) if low_rank else {}
    started = time.monotonic()
    loss = mean_loss(model, tokens)
    seconds = round(time.monotonic() - started, 1)
    configs = [
        EngineConfig(kv_cache=kind, kv_dtype=dtype)
        for kind in caches
        if low_rank and (kind == "full" or latent_layers(model))
    ]
    found = {config.kv_cache: cached_loss(model, tokens, config) for config in configs}
    return {
        "model": directory.name,
        "method": made.get("method", "dense"),
        "kept_ratio": made.get("kept_ratio", 1.0),
        "allotment": made.get("allotment"),
        "calibration": made.get("calibration"),
        "made_by": command_of(made, directory.name) if made else None,
        "parameters": parameter_count(model),
        "tokens": int(tokens.size),
        "perplexity": math.exp(min(loss, 700.0)),
        "seconds": seconds,
        "caches": {
            kind: {
                "perplexity": math.exp(min(float(one.loss.mean()), 700.0)),
                "pool_bytes": one.pool_bytes,
                "token_bytes": one.token_bytes,
            }
            for kind, one in found.items()
        },
    }


def command_of(made: dict[str, Any], name: str) -> str:
    """The decompose.py command line that a manifest tells of."""
    words = ["python", "scripts/decompose.py", "--model", "dense", "--out", name]
    if made["kept_ratio"] is None:
        words += ["--ranks", "ranks.json"]
    else:
        words += ["--ratio", f"{made['kept_ratio']:g}", "--allotment", made["allotment"]]
    words += ["--method", made["method"], "--dtype", made["dtype"]]
    if made["calibration"] is not None:
        words += ["--calibration", made["calibration"]["name"]]
        words += ["--calibration-tokens", str(made["calibration"]["tokens_wanted"])]
    return shlex.join(words)


def main(argv: Sequence[str] | None) -> None:
    """Measures, prints a table and writes JSON."""
    flags = parse(argv)
    if flags.tokens < 1:
        raise UserError(f"--tokens must be positive, not {flags.tokens}")
    rows = []
    with progress_console().status("starting") as status:
        for directory in flags.models:
            status.update(directory.name)
            rows.append(measure(directory, flags.text, flags.tokens, flags.dtype, flags.kv_cache))
            if flags.json is not None:
                arguments = [Path(a).name if "/" in a else a for a in argv or sys.argv[1:]]
                record = {
                    "command": f"python scripts/perplexity.py {shlex.join(arguments)}",
                    "text": {"name": flags.text.name, "sha256": sha256(flags.text)},
                    "dtype": flags.dtype,
                    "results": rows,
                }
                write_json(flags.json, record)
    table = Table(title=f"{flags.text.name}, {rows[0]['tokens']} tokens")
    for heading in ("model", "method", "kept", "parameters", "perplexity", "against the first"):
        table.add_column(heading, justify="right")
    for row in rows:
        kept = row["kept_ratio"]
        table.add_row(
            row["model"],
            row["method"],
            "given" if kept is None else f"{kept:.0%}",
            f"{row['parameters']:,}",
            f"{row['perplexity']:.3f}",
            f"{row['perplexity'] / rows[0]['perplexity']:.2f} x",
        )
    Console().print(table)


if __name__ == "__main__":
    sys.exit(run(main))
