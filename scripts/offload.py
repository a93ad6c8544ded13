"""Lossless expert offload on real routing: what a cache of whole experts misses, and moves.

    python scripts/offload.py --model HF_FOLDER --text heldout.jsonl --json out.json

The model's routing over held-out text is traced, and a cache of the experts that each layer used
last is replayed on it, one for each number of kept experts. Nothing is rounded, so the quality is
the source's; what it costs is the copying. Its time is measured where host and device have memories
of their own (not on a CPU).
"""

import argparse
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

from checkpoints.evaluate import read_texts
from checkpoints.huggingface import load_dense_model
from checkpoints.manifest import library_versions, write_json
from checkpoints.text import load_tokenizer, sha256
from pw_jax.activations import routing_choices
from pw_jax.errors import UserError
from pw_jax.evaluation.bootstrap import estimate
from pw_jax.evaluation.offload import decode_steps, lru_misses
from pw_jax.models.registry import parameter_count
from sharding.placement import device_memory, host_memory

MIB = 1 << 20
EXPERT_DTYPE = np.dtype("uint16")
"""Of the size of bfloat16."""


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the flags."""
    parser = argparse.ArgumentParser(description="Misses of a cache of whole experts.")
    add = parser.add_argument
    add("--model", type=Path, required=True, help="Hugging Face folder with routed experts")
    add("--text", type=Path, required=True, help=".txt or .jsonl, held out")
    add("--text-tokens", type=int, default=4096, help="of it (default %(default)s)")
    add("--kept", type=int, nargs="+", help="experts a layer keeps (default: 1 to all)")
    add("--batch", type=int, nargs="+", default=[1, 8], help="sequences at once (default 1 8)")
    add("--array-bytes", type=int, default=2, help="a weight that is no expert (%(default)s)")
    add("--json", type=Path, required=True, help="file to write")
    return parser.parse_args(argv)


def copy_seconds(count: int) -> float | None:
    """Seconds to copy one expert from the host, or None where the two memories have one name."""
    import jax

    if host_memory().memory_kind == device_memory().memory_kind:
        return None
    expert = jax.device_put(np.zeros(count, EXPERT_DTYPE), host_memory())
    times = []
    for _ in range(20):
        started = time.perf_counter()
        jax.block_until_ready(jax.device_put(expert, device_memory()))
        times.append(time.perf_counter() - started)
    return float(np.median(times))


def main(argv: Sequence[str] | None) -> None:
    """Traces once, and replays each cache."""
    flags = parse(argv)
    import jax  # here, so that --help is quick

    started = time.monotonic()
    config, model = load_dense_model(flags.model, np.float32)
    if config.expert_shape is None:
        raise UserError(f"{flags.model} has no routed experts")
    shape, layers = config.expert_shape, len(config.moe_layers)
    weights = 3 * shape.embed * shape.ffn
    expert_bytes = weights * EXPERT_DTYPE.itemsize
    arrays = parameter_count(model) - weights * layers * shape.experts
    (tokens,) = read_texts(load_tokenizer(flags.model), [flags.text], flags.text_tokens).values()
    with progress_console().status("routing"):
        chosen = routing_choices(model, tokens)
    seconds = copy_seconds(weights)
    results = []
    for batch in flags.batch:
        steps = decode_steps(chosen, batch)
        most = int(steps.sum(axis=-1).max())
        for kept in flags.kept or range(1, shape.experts + 1):
            found = lru_misses(steps.reshape(-1, layers, shape.experts), kept)
            misses = found.reshape(len(steps), -1).mean(axis=1) / batch
            # A layer that uses more than it keeps needs room for one layer's rest.
            cached = layers * kept + max(0, most - kept)
            mean = estimate(misses)
            results.append(
                {
                    "planner": "offload",
                    "kept": kept,
                    "experts": shape.experts,
                    "batch": batch,
                    "memory": {
                        "arrays": arrays * flags.array_bytes,
                        "expert_pages": cached * expert_bytes,
                    },
                    "misses_a_token": mean._asdict(),
                    "miss_rate": float(found.sum() / steps.sum()),
                    "bytes_a_token": mean.mean * expert_bytes,
                    "copy_seconds_a_token": None if seconds is None else mean.mean * seconds,
                }
            )
    arguments = [Path(a).name if "/" in a else a for a in map(str, argv or sys.argv[1:])]
    record: dict[str, Any] = {
        "command": f"python scripts/offload.py {shlex.join(arguments)}",
        "device": jax.devices()[0].device_kind,
        "text": {"name": flags.text.name, "sha256": sha256(flags.text)},
        "tokens": int(tokens.size),
        "expert_bytes": expert_bytes,
        "intervals": "95%, bootstrap over sequences, or batches of them",
        "seconds": round(time.monotonic() - started, 1),
        "versions": library_versions(),
        "results": results,
    }
    flags.json.parent.mkdir(parents=True, exist_ok=True)
    write_json(flags.json, record)
    table = Table("batch", "kept", "weights, MiB", "misses a token", "MiB a token")
    for result in results:
        memory = sum(result["memory"].values()) / MIB
        moved = result["bytes_a_token"] / MIB
        cells = (result["batch"], result["kept"], f"{memory:.1f}")
        mean = result["misses_a_token"]["mean"]
        table.add_row(*map(str, cells), f"{mean:.2f}", f"{moved:.2f}")
    Console().print(table)


if __name__ == "__main__":
    sys.exit(run(main))
