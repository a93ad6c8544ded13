"""Measures what moving pages is worth, against widths that are fixed at load time.

    python scripts/page_movement.py --model SOURCE --checkpoint DIR --text FILE --out JSON
    python scripts/page_movement.py --tables JSON

Held-out texts run while a second load of sequences comes and goes; see checkpoints.page_movement.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _command import run
from _tables import movement
from flax import nnx

from checkpoints.huggingface import load_dense_model
from checkpoints.manifest import write_json
from checkpoints.page_movement import PHASES, Load, PageMovement, Turn
from checkpoints.store import open_store
from checkpoints.tensor_files import read_json
from checkpoints.text import SEQUENCE, load_tokenizer, read_documents, sha256, token_sequences
from pw_jax.errors import UserError
from pw_jax.evaluation.bootstrap import RESAMPLES, interval
from pw_jax.models.memory import SequenceMemory


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the flags.

    Raises:
        UserError: A flag is missing, or texts do not fill batches or turns.
    """
    parser = argparse.ArgumentParser(description="Moving pages against fixed widths.")
    add = parser.add_argument
    add("--tables", type=Path, help="only print the table of an earlier --out")
    add("--model", help="the Hugging Face folder that was converted")
    add("--checkpoint", help="its conversion, after scripts/calibrate.py")
    add("--text", type=Path, help='.txt, or .jsonl with "text"; not calibrated on')
    add("--out", type=Path, help="JSON to write")
    add("--texts", type=int, default=24, help="default %(default)s")
    add("--text-tokens", type=int, default=SEQUENCE, help="of each text (default %(default)s)")
    add("--batch", type=int, default=8, help="texts at once (default %(default)s)")
    add("--turn-tokens", type=int, default=8, help="of each text a turn (default %(default)s)")
    add("--load", type=int, default=4, help="sequences that come and go (default %(default)s)")
    add("--load-tokens", type=int, default=128, help="when they come (default %(default)s)")
    add("--fixed-bits", type=float, default=4.0, help="of fixed widths (default %(default)s)")
    flags = parser.parse_args(argv)
    if flags.tables is None and None in (flags.model, flags.checkpoint, flags.text, flags.out):
        raise UserError("give --model, --checkpoint, --text and --out, or --tables alone")
    if flags.texts % flags.batch or flags.text_tokens % flags.turn_tokens:
        raise UserError("--texts must be whole batches and --text-tokens whole turns")
    if flags.text_tokens // flags.turn_tokens < 4 or flags.text_tokens > SEQUENCE:
        raise UserError(f"--text-tokens must be 4 turns or more, and at most {SEQUENCE}")
    return flags


def summary(turns: list[list[Turn]], phase: str | None) -> dict[str, Any]:
    """Moving against fixed over the turns of a phase (None: all), paired by text.

    Args:
        turns: Of each batch, both runs.
        phase: One of `PHASES`.
    """
    kl, bits = {}, {}
    for moving in (False, True):
        chosen = [
            [t for t in batch if t.moving == moving and phase in (None, t.phase)] for batch in turns
        ]
        kl[moving] = np.concatenate([np.mean([t.kl for t in batch], axis=0) for batch in chosen])
        bits[moving] = float(np.mean([t.mean_bits for batch in chosen for t in batch]))
    less = kl[True] - kl[False]
    return {
        "fixed_bits": bits[False],
        "moving_bits": bits[True],
        "fixed_kl": float(kl[False].mean()),
        "moving_kl": float(kl[True].mean()),
        "moving_less_fixed": float(less.mean()),
        "moving_less_fixed_interval": interval(less),
        "fixed_kl_of_texts": kl[False].tolist(),
        "moving_kl_of_texts": kl[True].tolist(),
    }


def main(argv: Sequence[str] | None) -> None:
    """Measures, and prints a table."""
    flags = parse(argv)
    if flags.tables is None:
        measure(flags, argv if argv is not None else sys.argv[1:])
    print(movement(read_json(flags.tables or flags.out)))


def measure(flags: argparse.Namespace, argv: Sequence[str]) -> None:
    """Runs both arms on each batch of texts and writes `--out`."""
    store = open_store(flags.checkpoint)
    documents = read_documents(flags.text)
    tokens = token_sequences(load_tokenizer(store.directory), documents, SEQUENCE * flags.texts)
    if len(tokens) < flags.texts:
        raise UserError(f"{flags.text} holds {len(tokens)} texts, fewer than {flags.texts}")
    tokens = tokens[:, : flags.text_tokens]
    config, model = load_dense_model(flags.model, np.float32)
    if config != store.model_config:
        raise UserError(f"{flags.checkpoint} was not made from {flags.model}")
    graph, state = nnx.split(model)
    del model

    @jax.jit
    def source(state: Any, rows: jax.Array) -> jax.Array:
        running = nnx.merge(graph, state)
        positions = jnp.broadcast_to(jnp.arange(rows.shape[1], dtype=jnp.int32), rows.shape)
        hidden = running(rows, positions, SequenceMemory(jnp.ones(rows.shape, bool))).hidden
        return jax.nn.log_softmax(running.logits(hidden))

    count = flags.text_tokens // flags.turn_tokens
    load = Load(flags.load, flags.load_tokens, comes=count // 4, goes=5 * count // 8)
    experiment = PageMovement(store, load, flags.turn_tokens, flags.fixed_bits)
    started, turns = time.monotonic(), []
    for first in range(0, len(tokens), flags.batch):
        rows = tokens[first : first + flags.batch]
        reference = np.asarray(source(state, jnp.asarray(rows)))
        turns.append(
            [
                turn
                for moving in (False, True)
                for turn in experiment.run(rows, reference, moving=moving)
            ]
        )
    report = {
        "command": "python scripts/page_movement.py "
        + " ".join(Path(word).name if "/" in word else word for word in argv),
        "text": {"name": flags.text.name, "sha256": sha256(flags.text)},
        "texts": len(tokens),
        "tokens_a_text": flags.text_tokens,
        "load": vars(load),
        "kl": "mean of KL(float32 source || committed widths) over tokens, in nats",
        "intervals": f"95%, bootstrap over texts, {RESAMPLES} resamples, paired",
        "seconds": round(time.monotonic() - started),
        "results": {phase or "all": summary(turns, phase) for phase in (*PHASES, None)},
        "turns_of_first_batch": [
            {
                "moving": turn.moving,
                "phase": turn.phase,
                "mean_bits": round(turn.mean_bits, 4),
                "weight_pages": turn.weight_pages,
                "kv_pages": turn.kv_pages,
            }
            for turn in turns[0]
        ],
    }
    flags.out.parent.mkdir(parents=True, exist_ok=True)
    write_json(flags.out, report)


if __name__ == "__main__":
    sys.exit(run(main))
