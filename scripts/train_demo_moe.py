"""Trains all weights of the demo model on text, so that they leave the grid they were stored on.

    python scripts/train_demo_moe.py --prepare --model .cache/demo_moe --text train.jsonl \
        --tokens .cache/train.u16
    python scripts/train_demo_moe.py --model .cache/demo_moe --tokens .cache/train.u16 \
        --out .cache/demo_moe_trained --steps 3000

The first command needs no GPU, the second one no network. A run that was stopped goes on when the
same command is given again; --minutes ends it early, wherever the learning rate is then. Beside
the model OUT holds training.json (losses, grid errors before and after) and training.png.
"""

import argparse
import dataclasses
import json
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import matplotlib

matplotlib.use("Agg")  # before pyplot: no screen is needed

import matplotlib.pyplot as plt
import ml_dtypes
import numpy as np
from _command import progress_console, run
from _moe_training import Losses, TokenFile, Trainer, TrainOptions, grid_errors
from flax import nnx
from rich.progress import Progress
from safetensors.numpy import save_file

from checkpoints.huggingface import load_dense_model
from checkpoints.manifest import copy_side_files, library_versions, write_json
from checkpoints.text import load_tokenizer, read_documents, sha256
from pw_jax.errors import UserError
from pw_jax.models.decoder import CausalLm


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the flags."""
    parser = argparse.ArgumentParser(description="Training of the demo model, all weights.")
    add = parser.add_argument
    add("--model", type=Path, required=True, help="Hugging Face folder to start from")
    add("--tokens", type=Path, required=True, help="token file, NAME.u16 with NAME.json beside it")
    add("--prepare", action="store_true", help="write the token file from --text, and stop")
    add("--text", type=Path, nargs="+", default=[], help='.txt, or .jsonl with "text" in lines')
    add("--most-tokens", type=int, default=100_000_000, help="to prepare (default %(default)s)")
    add("--out", type=Path, help="folder to make")
    for field in dataclasses.fields(TrainOptions):
        name = "--" + field.name.replace("_", "-")
        add(name, type=type(field.default), default=field.default, help="default %(default)s")
    add("--save-every", type=int, default=500, help="steps between checkpoints (%(default)s)")
    add("--minutes", type=float, help="finish after the first step past this time")
    flags = parser.parse_args(argv)
    if flags.prepare != bool(flags.text) or (flags.out is None) != flags.prepare:
        raise UserError("give --prepare and --text, or --out")
    return flags


def prepare(model: Path, texts: Sequence[Path], out: Path, most: int) -> int:
    """Writes texts as tokens, documents shuffled and an end token behind each.

    Returns:
        How many there are.

    Raises:
        UserError: A tokenizer without an end token, or with ids beyond 16 bits.
    """
    tokenizer = load_tokenizer(model)
    if tokenizer.eos_token_id is None or len(tokenizer) > 1 << 16:
        raise UserError(f"{model}: token files need an end token and at most {1 << 16} ids")
    documents = [text for path in texts for text in read_documents(path)]
    order = np.random.default_rng(0).permutation(len(documents))
    count, partial = 0, out.with_name(f".{out.name}.tmp")
    out.parent.mkdir(parents=True, exist_ok=True)
    with partial.open("wb") as file, Progress(console=progress_console()) as bar:
        for index in bar.track(order, description="documents"):
            ids = tokenizer(documents[index], add_special_tokens=False)["input_ids"]
            ids = [*ids, tokenizer.eos_token_id][: most - count]
            file.write(np.asarray(ids, "<u2").tobytes())
            count += len(ids)
            if count >= most:
                break
    about = {
        "tokens": count,
        "vocab_size": len(tokenizer),
        "texts": {path.name: sha256(path) for path in texts},
        "sha256": sha256(partial),
    }
    write_json(out.with_suffix(".json"), about)
    partial.replace(out)
    return count


def weights_of(model: CausalLm) -> dict[str, np.ndarray]:
    """All weights on the host, by our names."""
    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {".".join(map(str, path)): np.asarray(leaf[...]) for path, leaf in flat}


def as_hugging_face(weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """bfloat16 tensors under the names of Qwen2-MoE's files: one matrix an expert."""
    out = {}
    for name, array in weights.items():
        block, _, last = name.rpartition(".")
        array = array.astype(ml_dtypes.bfloat16)
        if not block.endswith(".experts"):
            out[name] = array
            continue
        for expert, matrix in enumerate(array):
            parts = {"down_proj": matrix}
            if last == "gate_up_proj":
                gate, up = np.split(matrix, 2)
                parts = {"gate_proj": gate, "up_proj": up}
            for part, piece in parts.items():
                out[f"{block}.{expert}.{part}.weight"] = np.ascontiguousarray(piece)
    return out


def plot(losses: Sequence[Sequence[float]], path: Path) -> None:
    """Draws the loss curve, single steps and a running mean."""
    text, even = np.array(losses).T
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4))
    width = max(1, len(text) // 50)
    mean = np.convolve(text, np.ones(width) / width, mode="valid")
    left.plot(np.arange(1, len(text) + 1), text, color="#bbccee", label="step")
    left.plot(np.arange(width, len(text) + 1), mean, color="#4477aa", label=f"mean of {width}")
    left.set(xlabel="step", ylabel="cross entropy, nats a token")
    left.legend()
    right.plot(np.arange(1, len(even) + 1), even, color="#ee6677")
    right.set(xlabel="step", ylabel="load balance (1 is even)")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def late(started: float, minutes: float | None) -> bool:
    """Whether a run has had its time."""
    return minutes is not None and time.monotonic() - started > 60 * minutes


def train(flags: argparse.Namespace) -> None:
    """Trains, and writes the folder beside its place first."""
    fields = [field.name for field in dataclasses.fields(TrainOptions)]
    options = TrainOptions(**{name: getattr(flags, name) for name in fields})
    if flags.out.exists():
        raise UserError(f"{flags.out} exists; remove it or give another --out")
    partial = flags.out.with_name(f"{flags.out.name}.partial")
    tokens = TokenFile(flags.tokens, options.sequence)
    _, model = load_dense_model(flags.model, np.float32)
    if tokens.about["vocab_size"] > model.config.vocab_size:
        raise UserError(f"{flags.tokens} was prepared with another tokenizer than {flags.model}'s")
    before = grid_errors(weights_of(model))
    trainer = Trainer(model, options)
    del model
    trainer.resume(partial)
    first, started = trainer.step, time.monotonic()
    with Progress(console=progress_console()) as bar:
        task = bar.add_task("", total=options.steps, completed=first)

        def show(step: int, losses: Losses) -> None:
            shown = f"loss {losses.text:.3f}, balance {losses.balance:.3f}"
            bar.update(task, completed=step, description=shown)

        while trainer.step < options.steps and not late(started, flags.minutes):
            until = min(options.steps, (trainer.step // flags.save_every + 1) * flags.save_every)
            trainer.train(tokens, until, show, lambda: late(started, flags.minutes))
            trainer.save(partial)
    seconds = time.monotonic() - started
    weights = weights_of(trainer.model)
    after = grid_errors(weights)
    save_file(as_hugging_face(weights), partial / "model.safetensors", metadata={"format": "pt"})
    (partial / "model.safetensors").chmod(0o644)  # safetensors keeps others from reading it
    copy_side_files(flags.model, partial)
    batch = options.sequences * options.sequence
    report: dict[str, Any] = {
        "command": "python scripts/train_demo_moe.py",
        "options": dataclasses.asdict(options),
        "steps_done": trainer.step,
        "tokens_seen": trainer.step * batch,
        "token_file": tokens.about,
        "device": jax.devices()[0].device_kind,
        "seconds": round(seconds, 1),
        "tokens_per_second": round((trainer.step - first) * batch / max(seconds, 1e-9), 1),
        "affine_4_bit_group_32_error": {"before": before, "after": after},
        "losses": [[float(f"{value:.5g}") for value in pair] for pair in trainer.losses],
        "versions": library_versions(),
    }
    (partial / "training.json").write_text(json.dumps(report) + "\n", encoding="utf-8")
    plot(trainer.losses, partial / "training.png")
    for rest in [*partial.glob("state_*"), partial / "curve.json", partial / "settings.json"]:
        shutil.rmtree(rest) if rest.is_dir() else rest.unlink()
    partial.rename(flags.out)
    print(f"{flags.out}: {trainer.step} steps, {seconds:.0f} s, affine 4-bit error:")
    for kind, error in after.items():
        print(f"  {kind:32} {before[kind]:.4f} -> {error:.4f}")


def main(argv: Sequence[str] | None) -> None:
    """Prepares or trains."""
    flags = parse(argv)
    if not flags.prepare:
        train(flags)
        return
    count = prepare(flags.model, flags.text, flags.tokens, flags.most_tokens)
    print(f"{flags.tokens}: {count} tokens")


if __name__ == "__main__":
    sys.exit(run(main))
