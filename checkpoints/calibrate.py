"""Calibrates a converted checkpoint again: sensitivities, column errors and prompt heads.

The source is not needed. The model at parent bits stands in for it: a nested code's centroid is the
mean of its children, so ``sum h (w - w_b)^2 = sum h (w - w_P)^2 + sum h (w_P - w_b)^2`` for the
weights h that the code was made with, and the planner only compares differences between widths.
"""

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Int32

from checkpoints.huggingface import MODULES
from checkpoints.manifest import write_json
from checkpoints.sensitivity import Sensitivity
from checkpoints.store import MANIFEST, Store, dequantized_model, open_store, save_item
from checkpoints.text import load_tokenizer, read_documents, sha256, token_sequences
from pw_jax.activations import PromptDamages, hessian, prompt_damages
from pw_jax.calibration import SHRINK_TOKENS, Calibration, calibrate
from pw_jax.errors import UserError
from pw_jax.models.decoder import CausalLm
from pw_jax.planner.residual import Heads, PromptSums
from pw_jax.planner.ridge import FOLDS, fit_heads
from pw_jax.quantizer.damage import column_errors, damage
from pw_jax.quantizer.format import dequantize

VERSION = 2
"""Of what is stored under ``calibration`` and ``prompts``; conversions write version 1."""

Kind = Literal["fisher", "hessian"]
Report = Callable[[str, int, int], None]


@dataclass(frozen=True)
class CalibrateOptions:
    """How to calibrate.

    Attributes:
        sensitivity: ``fisher`` takes gradients of the loss, ``hessian`` only activations: for
            models whose gradients do not fit.
        tokens: Tokens for the sensitivities, from all files alike.
        prompts: Prompts for the heads.
        prompt_tokens: Length of each.
        seed: Deals prompts out for cross-validation.
        bits: Width at which prompts are compared.
        dtype: Of the model that is run; bfloat16 halves its memory.
    """

    sensitivity: Kind = "fisher"
    tokens: int = 8192
    prompts: int = 256
    prompt_tokens: int = 128
    seed: int = 0
    bits: int = 4
    dtype: Literal["float32", "bfloat16"] = "float32"

    def __post_init__(self):
        """Checks the numbers."""
        if self.tokens < 2 or self.prompt_tokens < 2:
            raise UserError("calibration needs at least 2 tokens, and prompts of at least 2")
        if self.prompts < 2 * FOLDS:
            raise UserError(f"the heads need at least {2 * FOLDS} prompts, not {self.prompts}")


@dataclass(frozen=True)
class Calibrated:
    """What came of it.

    Attributes:
        path: The new checkpoint.
        tokens_seen: Calibration tokens that chose each expert, [L, E].
        heads: Prompt heads, dropped ones included.
        tokens: Tokens for the sensitivities.
        prompts: Prompts for the heads.
    """

    path: Path
    tokens_seen: Int32[np.ndarray, "L E"]
    heads: Heads
    tokens: int
    prompts: int


def recalibrate(
    checkpoint: str | Path,
    texts: list[Path],
    out: str | Path,
    options: CalibrateOptions | None = None,
    report: Report = lambda stage, done, of: None,
) -> Calibrated:
    """Writes ``out``: the checkpoint with a new calibration, everything else linked or copied.

    Args:
        checkpoint: Made by scripts/convert.py.
        texts: Calibration texts; each gives an equal share of the tokens.
        out: Folder to make; must not exist.
        options: How.
        report: Called with a stage, and how much of it is done.

    Raises:
        UserError: Anything wrong with the inputs or the place of the output.
    """
    options = options or CalibrateOptions()
    store, out = open_store(checkpoint), Path(out).absolute()
    if out.exists():
        raise UserError(f"{out} exists; remove it or give another --out")
    if not store.model_config.moe_layers:
        raise UserError(f"{checkpoint} has no routed experts to calibrate")
    if options.bits not in store.widths or options.bits == store.widths[-1]:
        raise UserError(f"prompts cannot be compared at {options.bits} bits in {checkpoint}")
    tokens = _tokens(store, texts, options.tokens)
    prompts = _tokens(store, texts, options.prompts * options.prompt_tokens, options.prompt_tokens)
    _, model = dequantized_model(store, store.widths[-1], jnp.dtype(options.dtype))
    measure = calibrate if options.sensitivity == "fisher" else hessian
    sums = measure(
        model, tokens, report=lambda done, of: report(f"{options.sensitivity} sequences", done, of)
    )
    damages, errors = _block_errors(store, sums, report)
    item, heads = _prompts(store, model, prompts, errors, options, report)

    partial = out.with_name(out.name + ".partial")
    if partial.exists():
        shutil.rmtree(partial)
    try:
        shutil.copytree(
            store.directory,
            partial,
            copy_function=_link_or_copy,
            ignore=lambda folder, names: (
                {"calibration", "prompts", MANIFEST} if Path(folder) == store.directory else set()
            ),
        )
    except OSError as error:
        raise UserError(f"cannot write {partial}: {error}") from None
    saved = {**sums.as_arrays(), "tokens": np.asarray(tokens.size), "damage": damages}
    save_item(partial / "calibration", saved)
    save_item(partial / "prompts", item)
    write_json(partial / MANIFEST, _manifest(store, texts, options, tokens.size, len(prompts)))
    partial.rename(out)
    return Calibrated(out, sums.tokens_seen, heads, tokens.size, len(prompts))


def _tokens(
    store: Store, texts: list[Path], count: int, length: int | None = None
) -> Int32[np.ndarray, "S T"]:
    tokenizer = load_tokenizer(store.directory)
    share = -(-count // len(texts))
    parts = [token_sequences(tokenizer, read_documents(text), share) for text in texts]
    size = length or min(part.shape[1] for part in parts)
    whole = [part.reshape(-1)[: part.size // size * size].reshape(-1, size) for part in parts]
    sequences = np.concatenate(whole)
    if len(sequences) == 0:
        raise UserError(f"the texts hold no sequence of {size} tokens")
    return sequences


def _block_errors(
    store: Store, sums: Calibration, report: Report
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Damage [L, E, 2, W] of each block, and column errors [L, E, W, K] by module."""
    sensitivity = Sensitivity(sums, sums.conditional())
    layers = store.model_config.moe_layers
    by_module: dict[str, list[np.ndarray]] = {module: [] for module in MODULES}
    errors: dict[str, list[np.ndarray]] = {module: [] for module in MODULES}
    for index, layer in enumerate(layers):
        report("column errors of layers", index, len(layers))
        for module in MODULES:
            arrays = store.load_experts(layer, module)
            found, columns = [], []
            for expert in range(arrays.experts):
                matrix = arrays.matrix(expert)
                parent = dequantize(matrix, matrix.parent_bits)
                row, column = sensitivity.for_damage(index, module, expert, matrix.shape)
                found.append(damage(parent, matrix, row, column))
                weights = sensitivity.for_quantizer(index, module, expert)
                assert weights is not None
                columns.append(column_errors(matrix, weights[0]))
            by_module[module].append(np.stack(found))
            errors[module].append(np.stack(columns))
    report("column errors of layers", len(layers), len(layers))
    damages = np.stack([np.stack(by_module[module]) for module in MODULES], axis=2)
    return damages, {module: np.stack(parts) for module, parts in errors.items()}


def _prompts(
    store: Store,
    model: CausalLm,
    prompts: np.ndarray,
    errors: dict[str, np.ndarray],
    options: CalibrateOptions,
    report: Report,
) -> tuple[dict[str, Any], Heads]:
    """The item that is stored for the prompt correction, and its heads."""
    width = store.widths.index(options.bits)
    at_width = (errors["gate_up"][:, :, width], errors["down"][:, :, width])
    seen = prompt_damages(model, prompts, at_width, lambda done, of: report("prompts", done, of))
    features = [
        PromptSums(prompts.shape[1], norms, routed).features()
        for norms, routed in zip(seen.norms, seen.routed, strict=True)
    ]
    heads = fit_heads(np.stack(features), seen.log_ratio(), options.seed)
    item = {
        "bits": np.asarray(options.bits),
        "gate_up_error": errors["gate_up"],
        "down_error": errors["down"],
        "gate_up_mean_square": _mean_square(seen.gate_up_square, seen),
        "down_mean_square": _mean_square(seen.down_square, seen),
        "routed": seen.routed.sum(axis=0),
        "head_center": heads.center,
        "head_scale": heads.scale,
        "head_weights": heads.weights,
        "head_r_squared": heads.r_squared,
        "head_kept": heads.kept.astype(np.uint8),
    }
    return {name: np.asarray(value) for name, value in item.items()}, heads


def _mean_square(square: np.ndarray, seen: PromptDamages) -> np.ndarray:
    """Mean of x_j^2 over routed tokens, drawn towards the layer's for rarely routed experts."""
    count = seen.routed.sum(axis=0)[..., None].astype(np.float64)
    layer = square.sum(axis=1, keepdims=True) / np.maximum(count.sum(axis=1, keepdims=True), 1)
    mean = (square + SHRINK_TOKENS * layer) / (count + SHRINK_TOKENS)
    return mean.astype(np.float32)


def _manifest(
    store: Store, texts: list[Path], options: CalibrateOptions, tokens: int, prompts: int
) -> dict[str, Any]:
    names = {"fisher": "Fisher-weighted", "hessian": "activation-weighted"}
    return {
        **store.manifest,
        "damage": f"{names[options.sensitivity]} squared error against parent bits",
        "calibration": {
            "version": VERSION,
            "sensitivity": options.sensitivity,
            "files": [{"name": text.name, "sha256": sha256(text)} for text in texts],
            "tokens": tokens,
            "prompts": prompts,
            "prompt_tokens": options.prompt_tokens,
            "prompt_bits": options.bits,
            "seed": options.seed,
            "dtype": options.dtype,
        },
    }


def _link_or_copy(source: str, target: str) -> None:
    """The files of a checkpoint are never written again, so two may share them."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
