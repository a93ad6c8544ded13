"""What a decomposition was asked for, and the manifests that let it be resumed."""

import dataclasses
from pathlib import Path
from typing import Any, Literal

from checkpoints.huggingface import Checkpoint
from checkpoints.manifest import DTYPES, hash_source, library_versions
from checkpoints.store import FORMAT
from checkpoints.text import sha256
from pw_jax.errors import UserError
from pw_jax.low_rank.ranks import check_ratio
from pw_jax.low_rank.whitening import DAMPING, METHODS, Method

KIND = "low_rank"
Allotment = Literal["loss", "uniform"]
ALLOTMENTS: tuple[Allotment, ...] = ("loss", "uniform")


@dataclasses.dataclass(frozen=True)
class DecomposeOptions:
    """How to decompose.

    Attributes:
        ratio: fraction of the linear layers' parameters that is kept.
        method: ``whitened`` and ``asvd`` need a calibration text, ``svd`` uses none.
        allotment: how ranks share the budget: by truncation loss, or the same fraction everywhere.
        ranks: rank by name instead of a ratio; what it leaves out stays whole.
        calibration: text whose outputs are to be preserved.
        calibration_tokens: how much of it to use.
        dtype: of all weights stored.
    """

    ratio: float = 1.0
    method: Method = "whitened"
    allotment: Allotment = "loss"
    ranks: dict[str, int] | None = None
    calibration: Path | None = None
    calibration_tokens: int = 16384
    dtype: str = "bfloat16"

    def __post_init__(self):
        """Checks what can be checked without the model."""
        check_ratio(self.ratio)
        if self.method not in METHODS:
            raise UserError(f"method must be one of {', '.join(METHODS)}, not {self.method}")
        if self.allotment not in ALLOTMENTS:
            raise UserError(f"allotment must be {' or '.join(ALLOTMENTS)}, not {self.allotment}")
        if self.dtype not in DTYPES:
            raise UserError(f"dtype must be one of {', '.join(DTYPES)}, not {self.dtype}")
        if self.method != "svd" and self.calibration is None:
            raise UserError(f"method {self.method} needs --calibration TEXT; svd needs none")
        if self.calibration_tokens < 1:
            raise UserError(f"calibration tokens must be positive, not {self.calibration_tokens}")


def make_manifest(checkpoint: Checkpoint, options: DecomposeOptions) -> dict[str, Any]:
    """The manifest of a decomposition, hashes of its inputs included."""
    given = options.ranks is not None
    return {
        **spectra_manifest(checkpoint, options, hash_source(checkpoint)),
        "kind": KIND,
        "dtype": options.dtype,
        "kept_ratio": None if given else options.ratio,
        "allotment": "given" if given else options.allotment,
        "given_ranks": options.ranks,
    }


def spectra_manifest(
    checkpoint: Checkpoint, options: DecomposeOptions, source: dict[str, Any]
) -> dict[str, Any]:
    """The part of a manifest that singular vectors depend on."""
    calibration = None
    if options.method != "svd" and options.calibration is not None:
        calibration = {
            "name": options.calibration.name,
            "sha256": sha256(options.calibration),
            "tokens_wanted": options.calibration_tokens,
        }
    return {
        "format": FORMAT,
        "kind": f"{KIND}_spectra",
        "model_type": checkpoint.model_config.model_type,
        "method": options.method,
        "damping": DAMPING,
        "calibration": calibration,
        "source": source,
        "versions": library_versions(),
    }
