"""What each expert's weights are worth: measured on a text, or all alike."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
from jaxtyping import Int32

from checkpoints.huggingface import Checkpoint, Module, load_weights
from checkpoints.store import load_item, save_item
from checkpoints.text import load_tokenizer, read_documents, token_sequences
from pw_jax.calibration import Calibration, calibrate
from pw_jax.models import registry

Marginals = tuple[np.ndarray, np.ndarray]  # of the rows [N] and of the columns [K]


@dataclasses.dataclass(frozen=True)
class Sensitivity:
    """Fisher marginals of every expert matrix.

    Attributes:
        sums: as calibration summed them, for damages; None if there was no text.
        conditional: per unit of routing mass, for the quantizer: an expert that the text never
            reached is then quantised like its layer.
    """

    sums: Calibration | None = None
    conditional: Calibration | None = None

    def for_quantizer(self, index: int, module: Module, expert: int) -> Marginals | None:
        """The weights to quantise by; None means uniform. ``index`` counts MoE layers."""
        return self.conditional and _marginals(self.conditional, index, module, expert)

    def for_damage(
        self, index: int, module: Module, expert: int, shape: tuple[int, int]
    ) -> Marginals:
        """The marginals of the damage; without calibration those of a Fisher matrix of ones."""
        if self.sums is not None:
            return _marginals(self.sums, index, module, expert)
        rows, columns = shape
        return np.full(rows, columns, np.float32), np.ones(columns, np.float32)


def _marginals(calibration: Calibration, index: int, module: Module, expert: int) -> Marginals:
    rows = getattr(calibration, f"{module}_row")[index, expert]
    return rows, getattr(calibration, f"{module}_column")[index, expert]


def calibration_tokens(checkpoint: Checkpoint, text: Path, tokens: int) -> Int32[np.ndarray, "S T"]:
    """Reads the calibration text with the tokenizer of the checkpoint."""
    return token_sequences(load_tokenizer(checkpoint.directory), read_documents(text), tokens)


def measure(
    checkpoint: Checkpoint,
    tokens: Int32[np.ndarray, "S T"],
    path: Path,
    report: Callable[[int, int], None],
) -> Sensitivity:
    """Calibrates, or loads what an earlier run left at ``path``.

    Args:
        checkpoint: the source; its whole model is built in float32.
        tokens: from ``calibration_tokens``.
        path: the orbax item that keeps the sums.
        report: called with the sequences done and their number.
    """
    if not path.exists():
        model = registry.build_model(checkpoint.model_config, experts="dense", dtype=np.float32)
        model = registry.set_weights(model, load_weights(checkpoint, np.float32))
        arrays = calibrate(model, tokens, report=report).as_arrays()
        save_item(path, {**arrays, "tokens": np.asarray(tokens.size)})
    stored = load_item(path, None)
    names = [field.name for field in dataclasses.fields(Calibration)]
    sums = Calibration(**{name: stored[name] for name in names})
    return Sensitivity(sums, sums.conditional())
