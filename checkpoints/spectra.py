"""Singular vectors of every linear layer, one orbax item a layer, found layer by layer.

DIR/pw_jax.json               the manifest: source, method, calibration
DIR/vectors/layer_003/        left singular vectors and energies of the layer's matrices, float32
DIR/hidden/layer_003/         hidden states that the layer is given; only of the layer to come
"""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from checkpoints.huggingface import Checkpoint
from checkpoints.low_rank_options import DecomposeOptions, spectra_manifest
from checkpoints.manifest import start_or_resume
from checkpoints.sensitivity import calibration_tokens
from checkpoints.store import load_item, save_item
from pw_jax.errors import UserError
from pw_jax.low_rank.activations import LayerRunner
from pw_jax.low_rank.svd import spectrum
from pw_jax.low_rank.whitening import InputStatistics


@dataclass(frozen=True)
class Spectra:
    """The folder, and what it takes to fill it.

    Attributes:
        directory: the folder.
        checkpoint: the source.
        runner: of the source's model.
        options: method and calibration.
    """

    directory: Path
    checkpoint: Checkpoint
    runner: LayerRunner
    options: DecomposeOptions

    @classmethod
    def open(
        cls,
        directory: Path,
        checkpoint: Checkpoint,
        runner: LayerRunner,
        options: DecomposeOptions,
        manifest: dict[str, Any],
        restart: bool,
    ) -> "Spectra":
        """Makes the folder, or goes on with one of the same source, method and text.

        Args:
            directory: the folder.
            checkpoint: the source.
            runner: of the source's model.
            options: method and calibration.
            manifest: of the decomposition; saves hashing the source again.
            restart: throw away what is there.

        Raises:
            UserError: it is of another source, method or text.
        """
        own = spectra_manifest(checkpoint, options, manifest["source"])
        start_or_resume(directory, own, restart)
        return cls(directory, checkpoint, runner, options)

    def analyse(self, layer: int) -> None:
        """Finds a layer's singular vectors, if they are not there; layers must come in order."""
        if self._vectors(layer).exists():
            return
        prefix = self.runner.layer_prefix(layer)
        weights = {
            name: self.checkpoint.read(name).astype(np.float32)
            for name in self.runner.weight_names(layer)
        }
        statistics = self._statistics(layer, weights)
        tree = {}
        scalings = {id(seen): seen.scaling() for seen in statistics.values()}
        for name in self.runner.linears(layer):
            scaling = scalings[id(statistics[name])] if name in statistics else None
            found = spectrum(weights[f"{name}.weight"].astype(np.float64), scaling)
            short = name.removeprefix(prefix)
            tree[short] = {"left": _narrow(found.left), "energy": _narrow(found.energy)}
        save_item(self._vectors(layer), tree)
        if self._hidden(layer).exists():
            shutil.rmtree(self._hidden(layer))

    def left(self, layer: int) -> dict[str, np.ndarray]:
        """Left singular vectors float32 [N, min(N, K)] of a layer's matrices, by full name."""
        return self._load(layer, "left")

    def energies(self) -> dict[str, np.ndarray]:
        """Energies float32 [min(N, K)] of all matrices, by full name."""
        out = {}
        for layer in range(self.checkpoint.model_config.num_layers):
            out |= self._load(layer, "energy")
        return out

    def _statistics(self, layer: int, weights: dict[str, np.ndarray]) -> dict[str, InputStatistics]:
        """Runs the layer on the text; saves what it gives and sums what its linears are given."""
        if self.options.method == "svd":
            return {}
        if layer == 0 and not self._hidden(layer).exists():
            save_item(self._hidden(layer), self._embedded())
        state = load_item(self._hidden(layer), None)
        hidden, mask = state["hidden"], state["mask"]
        statistics: dict[str, InputStatistics] = {}
        parts = []
        for out, inputs in self.runner.run(layer, hidden, mask, weights):
            parts.append(out)
            for names, rows in inputs.items():
                if names[0] not in statistics:
                    shared = InputStatistics(self.options.method, rows.shape[1])
                    statistics |= dict.fromkeys(names, shared)
                statistics[names[0]].add(rows)
        if layer + 1 < self.checkpoint.model_config.num_layers:
            following = self._hidden(layer + 1)
            if following.exists():  # left by a run that was killed before it saved the vectors
                shutil.rmtree(following)
            save_item(following, {"hidden": np.concatenate(parts), "mask": mask})
        return statistics

    def _embedded(self) -> dict[str, np.ndarray]:
        """What the first layer is given."""
        options = self.options
        assert options.calibration is not None
        tokens = calibration_tokens(
            self.checkpoint, options.calibration, options.calibration_tokens
        )
        if tokens.max() >= self.checkpoint.model_config.vocab_size:
            raise UserError(f"token {tokens.max()} of the tokenizer is beyond vocab_size")
        mask = np.ones(tokens.shape, bool)  # sequences are cut to one length: no padding
        return {"hidden": self.runner.embed(tokens), "mask": mask}

    def _load(self, layer: int, field: str) -> dict[str, np.ndarray]:
        prefix = self.runner.layer_prefix(layer)
        tree = load_item(self._vectors(layer), None)
        return {prefix + name: arrays[field] for name, arrays in tree.items()}

    def _vectors(self, layer: int) -> Path:
        return self.directory / "vectors" / f"layer_{layer:03d}"

    def _hidden(self, layer: int) -> Path:
        return self.directory / "hidden" / f"layer_{layer:03d}"


def _narrow(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array.astype(np.float32))
