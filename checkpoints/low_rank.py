"""Decomposed checkpoints: the linear layers of a model as thin factors.

    OUT/pw_jax.json               the manifest, with "kind": "low_rank"
    OUT/ranks.json                rank of every factored layer by name; what is not in it is whole
    OUT/config.json, tokenizer    copied from the source
    OUT/layers/layer_003/         one orbax item a layer: u, v, biases, norms, whole matrices
    OUT/rest/                     one item: embedding, last norm, head

Factors are stored unpadded and know nothing of devices. Everything is written to OUT.partial, which
becomes OUT once it is whole; a decomposition that was killed goes on after the last whole item.
"""

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from jax.typing import DTypeLike

from checkpoints.huggingface import Checkpoint, read_config, read_model_config
from checkpoints.low_rank_options import KIND, DecomposeOptions, make_manifest
from checkpoints.manifest import copy_side_files, start_or_resume, write_json
from checkpoints.spectra import Spectra
from checkpoints.store import MANIFEST, load_item, save_item
from checkpoints.tensor_files import read_json
from pw_jax.errors import UserError
from pw_jax.low_rank import ranks as budgets
from pw_jax.low_rank.activations import LayerRunner
from pw_jax.low_rank.layers import check_ranks
from pw_jax.low_rank.svd import factors
from pw_jax.models import registry
from pw_jax.models.config import ModelConfig
from pw_jax.models.decoder import CausalLm
from sharding.placement import device_memory

RANKS = "ranks.json"


@dataclass(frozen=True)
class Progress:
    """How far a decomposition is.

    Attributes:
        stage: what it is doing, in words.
        done: layers analysed plus layers written.
        total: twice the layers of the model.
    """

    stage: str
    done: int = 0
    total: int = 0


@dataclass(frozen=True)
class Decomposition:
    """What came out.

    Attributes:
        directory: the absolute path of the checkpoint.
        ranks: of every factored layer.
        kept: fraction of the linear layers' parameters that is left.
        wasteful: layers whose factors are no smaller than their matrix.
    """

    directory: Path
    ranks: dict[str, int]
    kept: float
    wasteful: list[str]


def decompose(
    source: str | Path,
    out: str | Path,
    options: DecomposeOptions,
    *,
    spectra: str | Path | None = None,
    restart: bool = False,
    report: Callable[[Progress], None] = lambda progress: None,
) -> Decomposition:
    """Decomposes a dense checkpoint.

    Holds the weights and singular vectors of one layer, and the hidden states of the text.

    Args:
        source: folder with config.json and safetensors.
        out: folder to make; must not exist.
        options: ratio or ranks, method, calibration.
        spectra: folder to keep singular vectors in, for other ratios; default none is kept.
        restart: start again even if an earlier run can be resumed.
        report: called whenever there is something to show.

    Raises:
        UserError: anything wrong with the input or the place of the output.
    """
    out = Path(out).absolute()
    if out.exists():
        raise UserError(f"{out} exists; remove it or give another --out")
    report(Progress("checking the source"))
    checkpoint = Checkpoint(source)
    runner = LayerRunner(checkpoint.model_config, checkpoint.read)
    layers = checkpoint.model_config.num_layers
    if options.ranks is not None:
        check_ranks(options.ranks, runner.shapes)
    progress = Progress("hashing the source", total=2 * layers)
    report(progress)
    manifest = make_manifest(checkpoint, options)
    partial = out.with_name(out.name + ".partial")
    start_or_resume(partial, manifest, restart)
    kept_elsewhere = spectra is not None
    folder = Path(spectra).absolute() if spectra is not None else partial / "spectra"
    found = Spectra.open(folder, checkpoint, runner, options, manifest, restart)
    for layer in range(layers):
        report(replace(progress, stage=f"analysing layer {layer}"))
        found.analyse(layer)
        progress = replace(progress, done=layer + 1)
    ranks = options.ranks
    if ranks is None and options.allotment == "uniform":
        ranks = budgets.uniform_ranks(runner.shapes, options.ratio)
    elif ranks is None:
        ranks = budgets.allot(found.energies(), runner.shapes, options.ratio)
    write_json(partial / RANKS, ranks)
    for layer in range(layers):
        report(replace(progress, stage=f"writing layer {layer}", done=layers + layer))
        path = layer_path(partial, layer)
        if not path.exists():
            save_item(path, _factored(checkpoint, runner, found, layer, ranks, options.dtype))
    if not (partial / "rest").exists():
        names = runner.weight_names(None)
        save_item(partial / "rest", _cast({n: checkpoint.read(n) for n in names}, options.dtype))
    copy_side_files(checkpoint.directory, partial)
    if not kept_elsewhere:
        shutil.rmtree(folder)
    if out.exists():
        raise UserError(f"{out} appeared during the decomposition; the result is in {partial}")
    partial.rename(out)
    report(replace(progress, stage="done", done=2 * layers))
    whole = budgets.kept_parameters({}, runner.shapes)
    return Decomposition(
        out,
        ranks,
        budgets.kept_parameters(ranks, runner.shapes) / whole,
        budgets.wasteful(ranks, runner.shapes),
    )


def _factored(
    checkpoint: Checkpoint,
    runner: LayerRunner,
    spectra: Spectra,
    layer: int,
    ranks: dict[str, int],
    dtype: str,
) -> dict[str, np.ndarray]:
    """All weights of a layer, the matrices that have a rank as u and v."""
    left = spectra.left(layer)
    weights = {}
    for name in runner.weight_names(layer):
        linear = name.removesuffix(".weight")
        weight = checkpoint.read(name)
        if linear not in ranks or linear == name:
            weights[name] = weight
            continue
        vectors = left[linear].astype(np.float64)
        u, v = factors(weight.astype(np.float64), vectors, ranks[linear])
        weights |= {f"{linear}.u": u, f"{linear}.v": v}
    return _cast(weights, dtype)


def _cast(weights: dict[str, np.ndarray], dtype: str) -> dict[str, np.ndarray]:
    return {name: np.ascontiguousarray(w.astype(np.dtype(dtype))) for name, w in weights.items()}


def layer_path(directory: Path, layer: int) -> Path:
    """Where the weights of a layer are kept."""
    return directory / "layers" / f"layer_{layer:03d}"


def is_low_rank(directory: Path) -> bool:
    """Whether a folder is a decomposed checkpoint."""
    path = directory / MANIFEST
    return path.exists() and read_json(path).get("kind") == KIND


def read_model_ranks(directory: Path) -> tuple[ModelConfig, dict[str, int]]:
    """The config and the ranks of a decomposed checkpoint.

    Raises:
        UserError: not one, or not finished.
    """
    if not is_low_rank(directory):
        raise UserError(f"{directory} is not a decomposed model; make one with decompose.py")
    if directory.name.endswith(".partial"):
        raise UserError(f"{directory} is an unfinished decomposition; run decompose.py again")
    config = read_model_config(directory, read_config(directory))
    path = directory / RANKS
    return config, budgets.read_ranks(read_json(path), str(path))


def load_low_rank_weights(
    directory: Path, dtype: DTypeLike, sharding: Any = None
) -> dict[str, Any]:
    """All weights of a decomposed checkpoint by name, as stored: unpadded.

    Args:
        directory: the folder.
        dtype: what to cast to while loading.
        sharding: where each goes, see `store.load_item`; None for numpy arrays on the host.
    """
    config, _ = read_model_ranks(directory)
    weights = load_item(directory / "rest", sharding, dtype)
    for layer in range(config.num_layers):
        weights |= load_item(layer_path(directory, layer), sharding, dtype)
    return weights


def load_low_rank_model(
    directory: str | Path, dtype: DTypeLike, *, on_host: bool = False
) -> tuple[ModelConfig, CausalLm]:
    """Loads a decomposed checkpoint onto the first device.

    Args:
        directory: made by scripts/decompose.py.
        dtype: float32 or bfloat16.
        on_host: leave the weights in host memory.
    """
    path = Path(directory).absolute()
    config, ranks = read_model_ranks(path)
    place = None if on_host else device_memory()
    weights = load_low_rank_weights(path, dtype, place)
    model = registry.build_model(config, dtype=dtype, ranks=ranks)
    return config, registry.set_weights(model, weights, on_host=on_host)
