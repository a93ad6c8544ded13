"""Fits the artefact that make_demo_moe.py needs, or measures the perplexity that it leaves.

    python scripts/calibrate_demo_moe.py --text train.jsonl scripts/assets/chat.jsonl
    python scripts/calibrate_demo_moe.py --evaluate scripts/assets/heldout.jsonl

Text is JSON lines with "text" and "group". Takes about half an hour on two CPU cores.
"""

import argparse
import json
import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _command import run
from _gguf_file import open_gguf
from _gguf_llama import GgufLlama
from _moe_distill import ROUTER_SCALE, Fitted, distill, ffn_inputs, freeze
from _moe_split import Geometry, fit_router, order_neurons
from flax import nnx
from jaxtyping import Array, Float, Int
from make_demo_moe import ARTEFACT, WHEEL, Calibration, build
from tokenizers import Tokenizer

from checkpoints.huggingface import load_dense_model
from checkpoints.text import sha256
from pw_jax.errors import UserError
from pw_jax.models import registry
from pw_jax.models.decoder import CausalLm
from pw_jax.models.memory import SequenceMemory

SEQUENCE = 256
BATCH = 8  # sequences
HELD_OUT = 64  # sequences of each group that are measured
# How much of each kind of text: mostly what the demo is about, prose and chats.
SHARES = {"prose_doc": 0.4, "literature": 0.2, "dictionary": 0.06, "code_py": 0.04, "chat": 0.3}

Tokens = Int[np.ndarray, "S T"]


def read_groups(paths: Sequence[Path]) -> dict[str, list[str]]:
    """Texts by the "group" that each line of a .jsonl file names."""
    groups: dict[str, list[str]] = {}
    for path in paths:
        number = 0
        try:
            for line in filter(None, path.read_text(encoding="utf-8").split("\n")):
                number += 1
                record = json.loads(line)
                groups.setdefault(record["group"], []).append(record["text"])
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}") from None
        except (ValueError, TypeError, KeyError):
            raise UserError(f'{path}: line {number} is no object with "group" and "text"') from None
    return groups


def windows(tokenizer: Any, texts: list[str], count: int, seed: int) -> Tokens:
    """Draws sequences from random places of random texts, the same for the same seed.

    Chats begin at their beginning, as they do for a user.
    """
    generator, rows = np.random.default_rng(seed), []
    for _ in range(count * 20):
        if len(rows) == count:
            break
        text = texts[generator.integers(len(texts))]
        room = 0 if text.startswith("<|im_start|>") else max(len(text) - 8 * SEQUENCE, 0)
        start = int(generator.integers(room + 1))
        ids = tokenizer.encode(text[start : start + 8 * SEQUENCE]).ids
        if len(ids) >= SEQUENCE:
            rows.append(ids[:SEQUENCE])
    if len(rows) < count:
        raise UserError(f"too few texts of at least {SEQUENCE} tokens")
    return np.asarray(rows, np.int32).reshape(count, SEQUENCE)


def mixture(tokenizer: Any, groups: dict[str, list[str]], count: int, seed: int) -> Tokens:
    """Sequences in the proportions of `SHARES`, shuffled; groups that are absent give none."""
    present = {name: share for name, share in SHARES.items() if name in groups}
    if not present:
        raise UserError(f"the texts have none of the groups {', '.join(SHARES)}")
    total = sum(present.values())
    counts = {name: int(count * share / total) for name, share in present.items()}
    counts[next(iter(present))] += count - sum(counts.values())
    rows = [
        windows(tokenizer, groups[name], n, seed + i) for i, (name, n) in enumerate(counts.items())
    ]
    return np.random.default_rng(seed).permutation(np.concatenate(rows))


@jax.jit
def _neuron_outputs(
    x: Float[Array, "T D"], gate: Array, up: Array, down: Array
) -> tuple[Float[Array, "T F"], Float[Array, " T"]]:
    """Hidden activations times the size of their column of down, and each output's square."""
    hidden = jax.nn.silu(jnp.einsum("td,fd->tf", x, gate)) * jnp.einsum("td,fd->tf", x, up)
    square = jnp.square(jnp.einsum("tf,df->td", hidden, down)).sum(axis=1)
    return hidden, square


def split_layer(
    dense: dict[str, np.ndarray], x: Float[Array, "T D"], geometry: Geometry, seed: int
) -> tuple[np.ndarray, Array]:
    """Orders the neurons of one layer and fits its first router.

    Args:
        dense: float32 weights of the layer.
        x: what its FFN is given.
        geometry: the division.
        seed: of the clustering.

    Returns:
        Neuron order [F] and router float32 [E, D].
    """
    gate, up, down = (jnp.asarray(dense[f"mlp.{n}_proj.weight"]) for n in ("gate", "up", "down"))
    hidden, square = _neuron_outputs(x, gate, up, down)
    # The first token of a text has outputs a thousand times as large: every token counts alike.
    norm = square + 1e-3 * square.mean()
    every = max(len(x) // 8192, 1)
    sample = jnp.square(hidden[::every]) * jnp.square(down).sum(axis=0)[None] / norm[::every, None]
    order = order_neurons(np.asarray(sample), geometry, seed=seed)
    experts = order[geometry.shared :].reshape(geometry.experts, geometry.width)
    energies = [
        jnp.square(jnp.einsum("tf,df->td", hidden[:, part], down[:, part])).sum(axis=1) / norm
        for part in experts
    ]
    return order, fit_router(x, jnp.log(jnp.stack(energies, axis=1) + 1e-6))


def load_dense(gguf: GgufLlama) -> CausalLm:
    """The dense model in bfloat16."""
    weights = gguf.other_tensors()
    for layer in range(gguf.layers):
        weights |= {f"model.layers.{layer}.{n}": w for n, w in gguf.layer(layer).items()}
    config = registry.read_config(gguf.config(), gguf.name)
    return registry.set_weights(registry.build_model(config, dtype=jnp.bfloat16), weights)


def mean_loss(model: CausalLm, tokens: Tokens) -> float:
    """Mean negative log likelihood, in nats, of all tokens but the first of a sequence."""
    graph, state = nnx.split(model)

    @jax.jit
    def losses(state: Any, tokens: Array) -> Array:
        merged: Any = nnx.merge(graph, state)
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
        memory = SequenceMemory(jnp.ones(tokens.shape, bool))
        hidden = merged(tokens, positions, memory).hidden[:, :-1]
        scores = jax.nn.log_softmax(merged.logits(hidden), axis=-1)
        return -jnp.take_along_axis(scores, tokens[:, 1:, None], axis=-1)[..., 0]

    batches = [tokens[i : i + BATCH] for i in range(0, len(tokens), BATCH)]
    return float(np.concatenate([losses(state, batch) for batch in batches]).mean())


def evaluate(gguf: GgufLlama, source: Path, artefact: Path, paths: Sequence[Path]) -> None:
    """Prints the perplexity of the dense and of the cut-up model for each group of texts."""
    tokenizer = Tokenizer.from_str(json.dumps(gguf.tokenizer()))
    dense = load_dense(gguf)
    with tempfile.TemporaryDirectory() as folder:
        build(source, Path(folder), Calibration.load(artefact), lambda _: None)
        _, cut = load_dense_model(folder, jnp.bfloat16)
    rows: list[tuple[str, int, float, float]] = []
    for group, texts in sorted(read_groups(paths).items()):
        tokens = held_out(tokenizer, texts)
        if len(tokens):
            rows.append((group, tokens.size, mean_loss(dense, tokens), mean_loss(cut, tokens)))
    if not rows:
        raise UserError(f"the texts have no group of {BATCH * SEQUENCE} tokens or more")
    total = sum(row[1] for row in rows)
    before = sum(row[1] * row[2] for row in rows) / total
    after = sum(row[1] * row[3] for row in rows) / total
    rows.append(("all", total, before, after))
    print(f"perplexity   {'tokens':>7} {'dense':>8} {'MoE':>8} {'ratio':>7}")
    for group, count, before, after in rows:
        ratio = np.exp(after - before)
        print(f"{group:12} {count:7} {np.exp(before):8.3f} {np.exp(after):8.3f} {ratio:7.4f}")


def held_out(tokenizer: Any, texts: list[str]) -> Tokens:
    """The texts end to end, cut into sequences in whole batches, at most `HELD_OUT` of them."""
    ids = [token for text in texts for token in tokenizer.encode(text).ids]
    rows = min(HELD_OUT, len(ids) // SEQUENCE) // BATCH * BATCH
    return np.asarray(ids[: rows * SEQUENCE], np.int32).reshape(rows, SEQUENCE)


def calibrate(gguf: GgufLlama, flags: argparse.Namespace) -> Calibration:
    """Orders the neurons layer by layer, then trains all routers together."""
    started = time.monotonic()
    geometry = Geometry(flags.shared, flags.experts, flags.width, flags.top_k)
    if geometry.neurons != gguf.ffn or not 0 < geometry.top_k < geometry.experts:
        raise UserError(f"{geometry} does not divide the {gguf.ffn} neurons of {gguf.name}")
    tokenizer = Tokenizer.from_str(json.dumps(gguf.tokenizer()))
    groups = read_groups(flags.text)
    tokens = mixture(tokenizer, groups, flags.split_sequences, flags.seed)
    stream = mixture(tokenizer, groups, flags.steps * BATCH, flags.seed + 100)
    model = load_dense(gguf)
    frozen = freeze(model, np.tile(np.arange(gguf.ffn), (gguf.layers, 1)))
    inputs = np.concatenate(
        [ffn_inputs(frozen, tokens[i : i + BATCH], geometry) for i in range(0, len(tokens), BATCH)],
        axis=1,
    ).reshape(gguf.layers, -1, gguf.embed)
    say(started, f"inputs of {inputs.shape[1]} tokens")
    order, routers = [], []
    for layer in range(gguf.layers):
        x = jnp.asarray(inputs[layer], jnp.float32)
        found, router = split_layer(gguf.layer(layer), x, geometry, flags.seed)
        order.append(found)
        routers.append(router)
    say(started, f"{gguf.layers} layers divided")
    start = Fitted(
        router=jnp.stack(routers),
        shared_gate=jnp.zeros((gguf.layers, gguf.embed)),
        neuron_scale=jnp.ones((gguf.layers, gguf.ffn)),
        norm_scale=jnp.ones((gguf.layers, 2, gguf.embed)),
    )
    batches = (stream[i : i + BATCH] for i in range(0, len(stream), BATCH))
    losses: list[float] = []

    def report(step: int, loss: float) -> None:
        losses.append(loss)
        if step % 5 == 0:
            say(started, f"step {step}: divergence {np.mean(losses[-5:]):.4f} nats a token")

    fitted = distill(
        freeze(model, np.stack(order)), start, batches, geometry, steps=flags.steps, report=report
    )
    provenance = {
        "model": f"{gguf.name}".rsplit("/", maxsplit=1)[-1],
        "model_sha256": sha256(flags.source),
        "texts": {path.name: sha256(path) for path in flags.text},
        "shares": {name: share for name, share in SHARES.items() if name in groups},
        "split_tokens": int(tokens.size),
        "distill_tokens": int(stream.size),
        "distill_steps": flags.steps,
        "seed": flags.seed,
        "first_divergence": float(np.mean(losses[:5])) if losses else None,
        "last_divergence": float(np.mean(losses[-5:])) if losses else None,
        "seconds": round(time.monotonic() - started),
        "versions": {name: version(name) for name in ("jax", "flax", "optax", "numpy", "gguf")},
        "machine": f"{platform.machine()} {jax.default_backend()}",
    }
    return Calibration(
        geometry=geometry,
        order=np.stack(order),
        router=ROUTER_SCALE * np.asarray(fitted.router),
        shared_gate=np.asarray(fitted.shared_gate),
        neuron_scale=np.asarray(fitted.neuron_scale),
        norm_scale=np.asarray(fitted.norm_scale),
        provenance=provenance,
    )


def say(started: float, what: str) -> None:
    """Prints a line with the time that has passed."""
    print(f"{time.monotonic() - started:6.0f} s  {what}", flush=True)


def main(argv: Sequence[str] | None) -> None:
    """Reads the flags."""
    parser = argparse.ArgumentParser(description="Fits or evaluates the demo model's routers.")
    add = parser.add_argument
    add("--source", type=Path, default=WHEEL, help="dense model, .gguf or .whl")
    add("--artefact", type=Path, default=ARTEFACT, help="written, or read to evaluate")
    add("--text", type=Path, nargs="+", help="calibration text, .jsonl")
    add("--evaluate", type=Path, nargs="+", metavar="TEXT", help="only measure perplexity on it")
    add("--shared", type=int, default=384, help="neurons of the shared expert")
    add("--experts", type=int, default=6, help="routed experts")
    add("--width", type=int, default=192, help="neurons of a routed expert")
    add("--top-k", type=int, default=5, help="experts a token uses")
    add("--split-sequences", type=int, default=64, help="sequences that decide the division")
    add("--steps", type=int, default=40, help="training steps")
    add("--seed", type=int, default=0)
    flags = parser.parse_args(argv)
    if bool(flags.text) == bool(flags.evaluate):
        raise UserError("give either --text (to calibrate) or --evaluate")
    with open_gguf([flags.source]) as file:
        gguf = GgufLlama(file)
        if flags.evaluate:
            evaluate(gguf, flags.source, flags.artefact, flags.evaluate)
            return
        calibration = calibrate(gguf, flags)
    calibration.save(flags.artefact)
    print(json.dumps(calibration.provenance, indent=1))


if __name__ == "__main__":
    sys.exit(run(main))
