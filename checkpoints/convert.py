"""Conversion of a Hugging Face checkpoint to any-precision form, a matrix at a time.

Everything is written to ``OUT.partial``, which becomes ``OUT`` once it is whole. The items in it
are each written whole or not at all, so a conversion that was killed goes on after the last one.
"""

import resource
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from checkpoints.huggingface import MODULES, Checkpoint, Module, load_weights
from checkpoints.manifest import (
    ConvertOptions,
    copy_side_files,
    make_manifest,
    start_or_resume,
    write_json,
)
from checkpoints.store import (
    MANIFEST,
    ExpertArrays,
    item_path,
    load_item,
    save_experts,
    save_item,
)
from checkpoints.text import load_tokenizer, read_documents, token_sequences
from pw_jax.errors import UserError
from pw_jax.models import registry
from pw_jax.quantizer.damage import damage
from pw_jax.quantizer.nested import quantize_matrix


@dataclass(frozen=True)
class Progress:
    """How far a conversion is.

    Attributes:
        stage: what it is doing, in words.
        matrices: expert matrices done, those of an earlier run included.
        total: expert matrices in the model.
        read_bytes: bytes of expert matrices quantised in this run, as float32.
    """

    stage: str
    matrices: int = 0
    total: int = 0
    read_bytes: int = 0


Report = Callable[[Progress], None]


def convert(
    source: str | Path,
    out: str | Path,
    options: ConvertOptions | None = None,
    *,
    restart: bool = False,
    report: Report = lambda progress: None,
) -> Path:
    """Converts a checkpoint.

    Holds one expert matrix in float32 and the result for one module of one layer. What is not
    quantised is held whole while it is saved; with a calibration text the whole model is.

    Args:
        source: folder with config.json and safetensors.
        out: folder to make; must not exist.
        options: widths, dtype, calibration.
        restart: start again even if an earlier run can be resumed.
        report: called whenever there is something to show.

    Returns:
        The absolute path of ``out``.

    Raises:
        UserError: anything wrong with the input or the place of the output.
    """
    options = options or ConvertOptions()
    out = Path(out).absolute()
    if out.exists():
        raise UserError(f"{out} exists; remove it or give another --out")
    report(Progress("checking the source"))
    checkpoint = Checkpoint(source)
    shape = checkpoint.model_config.expert_shape
    layers = checkpoint.model_config.moe_layers
    progress = Progress("", total=len(layers) * len(MODULES) * (shape.experts if shape else 0))
    report(replace(progress, stage="hashing the source"))
    partial = out.with_name(out.name + ".partial")
    manifest = make_manifest(checkpoint, options)
    start_or_resume(partial, manifest, restart)
    statistics = _calibration(checkpoint, options, partial, manifest, progress, report)
    if not (partial / "dense").exists():
        report(replace(progress, stage="saving what is not quantised"))
        dtype = np.dtype(options.dtype)
        dense = {n: checkpoint.read(n).astype(dtype, copy=False) for n in checkpoint.dense_names()}
        save_item(partial / "dense", dense)
        del dense
    for index, layer in enumerate(layers):
        for module in MODULES:
            progress = replace(progress, stage=f"layer {layer} {module}")
            path = item_path(partial, layer, module)
            if path.exists():
                assert shape is not None
                progress = replace(progress, matrices=progress.matrices + shape.experts)
                report(progress)
                continue
            weights = None if statistics is None else _marginals(statistics, index, module)
            arrays, progress = _quantize_module(
                checkpoint, options, layer, module, weights, progress, report
            )
            save_experts(path, arrays)
    copy_side_files(checkpoint.directory, partial)
    _finish(partial, out)
    report(replace(progress, stage="done"))
    return out


def _quantize_module(
    checkpoint: Checkpoint,
    options: ConvertOptions,
    layer: int,
    module: Module,
    marginals: tuple[np.ndarray, np.ndarray] | None,
    progress: Progress,
    report: Report,
) -> tuple[ExpertArrays, Progress]:
    """Quantises the experts of one module; ``marginals`` are row [E, N] and column [E, K]."""
    assert checkpoint.model_config.expert_shape is not None
    name = checkpoint.expert_name(layer, module)
    matrices, damages = [], []
    for expert in range(checkpoint.model_config.expert_shape.experts):
        weight = checkpoint.expert_matrix(layer, module, expert)
        rows, columns = weight.shape
        if marginals is None:  # a Fisher matrix of ones
            row = np.full(rows, columns, np.float32)
            column = np.ones(columns, np.float32)
        else:
            row, column = marginals[0][expert], marginals[1][expert]
        matrix = quantize_matrix(
            weight,
            name=f"{name}[{expert}]",
            column_weight=None if marginals is None else column,
            row_weight=None if marginals is None else row,
            seed_bits=options.seed_bits,
            parent_bits=options.parent_bits,
        )
        matrices.append(matrix)
        damages.append(np.asarray(damage(weight, matrix, row, column)))
        progress = replace(
            progress,
            matrices=progress.matrices + 1,
            read_bytes=progress.read_bytes + weight.nbytes,
        )
        report(progress)
    return ExpertArrays.stack(matrices, damages), progress


def _calibration(
    checkpoint: Checkpoint,
    options: ConvertOptions,
    partial: Path,
    manifest: dict[str, Any],
    progress: Progress,
    report: Report,
) -> dict[str, np.ndarray] | None:
    """Measures the sensitivities, or loads what an earlier run measured."""
    if options.calibration is None or not checkpoint.model_config.moe_layers:
        return None
    from pw_jax import calibration

    path = partial / "calibration"
    if not path.exists():
        report(replace(progress, stage="calibrating"))
        tokenizer = load_tokenizer(checkpoint.directory)
        documents = read_documents(options.calibration)
        tokens = token_sequences(tokenizer, documents, options.calibration_tokens)
        model = registry.build_model(checkpoint.model_config, experts="dense", dtype=np.float32)
        model = registry.set_weights(model, load_weights(checkpoint, np.float32))
        measured = calibration.calibrate(model, tokens)
        save_item(path, {**measured.as_arrays(), "tokens": np.asarray(tokens.size)})
    statistics = load_item(path, None)
    write_json(partial / MANIFEST, manifest | {"calibration_tokens": int(statistics["tokens"])})
    return statistics


def _marginals(
    statistics: dict[str, np.ndarray], index: int, module: Module
) -> tuple[np.ndarray, np.ndarray]:
    return statistics[f"{module}_row"][index], statistics[f"{module}_column"][index]


def _finish(partial: Path, out: Path) -> None:
    """Sweeps what a killed run left half-written, and gives the folder its name."""
    for leftover in [*partial.glob("*.orbax-checkpoint-tmp*"), *partial.glob("*/*-tmp*")]:
        shutil.rmtree(leftover)
    if out.exists():
        raise UserError(f"{out} appeared during the conversion; the result is in {partial}")
    partial.rename(out)


def peak_memory_gib() -> float:
    """The most memory this process has held so far, in GiB: resident on the host, plus GPU."""
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peak = resident * (1 if sys.platform == "darwin" else 1024)
    for device in jax.local_devices():
        peak += (device.memory_stats() or {}).get("peak_bytes_in_use", 0)
    return peak / 2**30
