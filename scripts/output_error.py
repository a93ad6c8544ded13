"""How far the outputs of decomposed linear layers are from the dense ones, on real activations.

python scripts/output_error.py --source DIR --models DIR DIR --text text.jsonl --tokens 2048

Every layer is given what the dense model gives it, so errors do not build up.
"""

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from _command import progress_console, run

from checkpoints.huggingface import Checkpoint
from checkpoints.low_rank import layer_path, read_model_ranks
from checkpoints.manifest import write_json
from checkpoints.store import MANIFEST, load_item
from checkpoints.tensor_files import read_json
from checkpoints.text import load_tokenizer, read_documents, sha256, token_sequences
from pw_jax.errors import UserError
from pw_jax.low_rank.activations import LayerRunner


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the flags."""
    parser = argparse.ArgumentParser(description="Output errors of decomposed linear layers.")
    add = parser.add_argument
    add("--source", type=Path, required=True, help="the dense folder")
    add("--models", type=Path, nargs="+", required=True, help="what decompose.py made of it")
    add("--text", type=Path, required=True, help=".txt or .jsonl")
    add("--tokens", type=int, default=2048, help="how much of it (default %(default)s)")
    add("--json", type=Path, help="file to write, with this command in it")
    return parser.parse_args(argv)


def relative_error(exact: np.ndarray, ours: np.ndarray, inputs: np.ndarray) -> float:
    """Squared error over squared output, every token divided by the length of its input."""
    weight = 1 / np.maximum(np.square(inputs).sum(axis=1), np.finfo(np.float32).tiny)
    error, whole = (np.square(y).sum(axis=1) for y in (exact - ours, exact))
    return float((error * weight).sum() / (whole * weight).sum())


def layer_errors(
    weights: dict[str, np.ndarray],
    inputs: dict[str, np.ndarray],
    factors: list[dict[str, np.ndarray]],
) -> list[list[float]]:
    """Relative squared error of every linear layer, for every model."""
    rows: list[list[float]] = [[] for _ in factors]
    for name, x in inputs.items():
        exact = x @ weights[f"{name}.weight"].T
        for stored, row in zip(factors, rows, strict=True):
            if f"{name}.weight" in stored:
                row.append(0.0)
                continue
            ours = (x @ stored[f"{name}.v"].T) @ stored[f"{name}.u"].T
            row.append(relative_error(exact, ours, x))
    return rows


def main(argv: Sequence[str] | None) -> None:
    """Measures, prints a line a model and writes JSON."""
    flags = parse(argv)
    checkpoint = Checkpoint(flags.source)
    config = checkpoint.model_config
    for directory in flags.models:
        if read_model_ranks(directory)[0] != config:
            raise UserError(f"{directory} was not made from {flags.source}")
    runner = LayerRunner(config, checkpoint.read)
    tokens = token_sequences(load_tokenizer(flags.source), read_documents(flags.text), flags.tokens)
    hidden, mask = runner.embed(tokens), np.ones(tokens.shape, bool)
    errors: list[list[float]] = [[] for _ in flags.models]
    with progress_console().status("starting") as status:
        for layer in range(config.num_layers):
            status.update(f"layer {layer}")
            weights = {
                name: checkpoint.read(name).astype(np.float32)
                for name in runner.weight_names(layer)
            }
            parts = list(runner.run(layer, hidden, mask, weights))
            hidden = np.concatenate([out for out, _ in parts])
            shared = {
                names: np.concatenate([seen[names] for _, seen in parts]) for names in parts[0][1]
            }
            inputs = {name: rows for names, rows in shared.items() for name in names}
            stored = [load_item(layer_path(d, layer), None, np.float32) for d in flags.models]
            for row, new in zip(errors, layer_errors(weights, inputs, stored), strict=True):
                row += new
    results: list[dict[str, Any]] = []
    for directory, row in zip(flags.models, errors, strict=True):
        made = read_json(directory / MANIFEST)
        results.append(
            {
                "model": directory.name,
                "method": made["method"],
                "kept_ratio": made["kept_ratio"],
                "allotment": made["allotment"],
                "mean_relative_squared_error": float(np.mean(row)),
                "largest": float(np.max(row)),
            }
        )
        print(f"{directory.name}: mean {np.mean(row):.5f}, largest {np.max(row):.5f}")
    if flags.json is not None:
        arguments = [Path(a).name if "/" in a else a for a in argv or sys.argv[1:]]
        record = {
            "command": f"python scripts/output_error.py {shlex.join(arguments)}",
            "text": {"name": flags.text.name, "sha256": sha256(flags.text)},
            "tokens": int(tokens.size),
            "results": results,
        }
        write_json(flags.json, record)


if __name__ == "__main__":
    sys.exit(run(main))
