"""Conversion of a Hugging Face checkpoint to any-precision form, a matrix at a time.

Everything is written to ``OUT.partial``, which becomes ``OUT`` once it is whole. The items in it
are each written whole or not at all, so a conversion that was killed goes on after the last one.
"""

import resource
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import jax

from checkpoints.huggingface import MODULES, Checkpoint, Module
from checkpoints.manifest import (
    ConvertOptions,
    copy_side_files,
    make_manifest,
    start_or_resume,
)
from checkpoints.sensitivity import Sensitivity, calibration_tokens, measure
from checkpoints.store import ExpertArrays, item_path, save_experts, save_item
from pw_jax.errors import UserError
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
    config = checkpoint.model_config
    experts = config.expert_shape.experts if config.expert_shape else 0
    progress = Progress("hashing the source", total=len(config.moe_layers) * len(MODULES) * experts)
    report(progress)
    manifest = make_manifest(checkpoint, options)
    tokens = None
    if options.calibration is not None and config.moe_layers:
        tokens = calibration_tokens(checkpoint, options.calibration, options.calibration_tokens)
        manifest["calibration"]["tokens"] = int(tokens.size)

    partial = out.with_name(out.name + ".partial")  # nothing is written before this line
    start_or_resume(partial, manifest, restart)
    sensitivity = Sensitivity()
    if tokens is not None:
        report(replace(progress, stage="calibrating"))
        sensitivity = measure(
            checkpoint,
            tokens,
            partial / "calibration",
            lambda done, of: report(replace(progress, stage=f"calibrating {done}/{of}")),
        )
    if not (partial / "dense").exists():
        report(replace(progress, stage="saving what is not quantised"))
        save_item(partial / "dense", checkpoint.read_dense(options.dtype))
    for index, layer in enumerate(config.moe_layers):
        for module in MODULES:
            progress = replace(progress, stage=f"layer {layer} {module}")
            path = item_path(partial, layer, module)
            if path.exists():
                progress = replace(progress, matrices=progress.matrices + experts)
                report(progress)
                continue

            def count(nbytes: int) -> None:
                nonlocal progress
                matrices, read = progress.matrices + 1, progress.read_bytes + nbytes
                progress = replace(progress, matrices=matrices, read_bytes=read)
                report(progress)

            save_experts(
                path, _quantize_module(checkpoint, options, sensitivity, index, module, count)
            )
    copy_side_files(checkpoint.directory, partial)
    if out.exists():
        raise UserError(f"{out} appeared during the conversion; the result is in {partial}")
    partial.rename(out)
    report(replace(progress, stage="done"))
    return out


def _quantize_module(
    checkpoint: Checkpoint,
    options: ConvertOptions,
    sensitivity: Sensitivity,
    index: int,
    module: Module,
    report: Callable[[int], None],
) -> ExpertArrays:
    """Quantises the experts of one module of the index-th MoE layer, one at a time."""
    config = checkpoint.model_config
    assert config.expert_shape is not None
    layer = config.moe_layers[index]
    name = checkpoint.expert_name(layer, module)
    matrices, damages = [], []
    for expert in range(config.expert_shape.experts):
        weight = checkpoint.expert_matrix(layer, module, expert)
        row, column = sensitivity.for_quantizer(index, module, expert) or (None, None)
        matrix = quantize_matrix(
            weight,
            name=f"{name}[{expert}]",
            row_weight=row,
            column_weight=column,
            seed_bits=options.seed_bits,
            parent_bits=options.parent_bits,
        )
        row, column = sensitivity.for_damage(index, module, expert, weight.shape)
        matrices.append(matrix)
        damages.append(damage(weight, matrix, row, column))
        report(weight.nbytes)
    return ExpertArrays.stack(matrices, damages)


def peak_memory_gib() -> float:
    """The most memory this process has held so far, in GiB: resident on the host, plus GPU."""
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peak = resident * (1 if sys.platform == "darwin" else 1024)
    for device in jax.local_devices():
        peak += (device.memory_stats() or {}).get("peak_bytes_in_use", 0)
    return peak / 2**30
