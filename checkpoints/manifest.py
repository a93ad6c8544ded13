"""What a conversion was asked for and made from: written first, so that it can be resumed."""

import dataclasses
import importlib.metadata
import json
import re
import shutil
from pathlib import Path
from typing import Any

from checkpoints.huggingface import Checkpoint
from checkpoints.store import FORMAT, MANIFEST
from checkpoints.tensor_files import read_json
from checkpoints.text import sha256
from pallas_kernels.bitplanes import WORD_BITS
from pw_jax.errors import UserError
from pw_jax.models.config import ExpertShape
from pw_jax.quantizer.format import MAX_BITS, rows_per_table

DTYPES = ("bfloat16", "float32")
MIN_BITS = 2
INNERMOST_LIST = re.compile(r"\[\n\s+([^\[\]{}]*?)\n\s*\]")
NEXT_ENTRY = re.compile(r",\n\s+")
UNFINISHED = ".orbax-checkpoint-tmp"  # in the names of items that orbax has not committed
# beside the weights: what a tokenizer, a chat and a lawyer need
COPIED = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "*token*.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
    "LICENSE*",
    "NOTICE*",
)


@dataclasses.dataclass(frozen=True)
class ConvertOptions:
    """How to convert.

    Attributes:
        parent_bits: the widest width, and the number of planes.
        seed_bits: the narrowest width.
        dtype: of everything that is not quantised.
        calibration: text for the sensitivities; None weighs all weights alike.
        calibration_tokens: how much of it to use.
    """

    parent_bits: int = 8
    seed_bits: int = 3
    dtype: str = "bfloat16"
    calibration: Path | None = None
    calibration_tokens: int = 8192

    def __post_init__(self):
        """Checks the numbers."""
        if not MIN_BITS <= self.seed_bits <= 3:
            raise UserError(f"seed bits must be 2 or 3, not {self.seed_bits}")
        if not self.seed_bits <= self.parent_bits <= MAX_BITS:
            raise UserError(
                f"parent bits must be {self.seed_bits} to {MAX_BITS}, not {self.parent_bits}"
            )
        if self.dtype not in DTYPES:
            raise UserError(f"dtype must be one of {', '.join(DTYPES)}, not {self.dtype}")
        if self.calibration is not None and self.calibration_tokens < 1:
            raise UserError(f"calibration tokens must be positive, not {self.calibration_tokens}")


def shared_tables(where: str, shape: ExpertShape, parent_bits: int) -> dict[str, int]:
    """How many rows share a table, for each module of an expert.

    Args:
        where: the folder or file, for the message.
        shape: the experts.
        parent_bits: the widest width.

    Raises:
        UserError: the experts' rows do not fill whole words of a bitplane.
    """
    embed, ffn = shape.embed, shape.ffn
    if embed % WORD_BITS or ffn % WORD_BITS:
        raise UserError(
            f"{where}: experts of width {embed} and hidden width {ffn} cannot be stored in "
            f"bitplanes; both must be multiples of {WORD_BITS}"
        )
    return {
        "gate_up": rows_per_table(2 * ffn, embed, parent_bits),
        "down": rows_per_table(embed, ffn, parent_bits),
    }


def make_manifest(checkpoint: Checkpoint, options: ConvertOptions) -> dict[str, Any]:
    """The manifest of a conversion, hashes of its inputs included; reads every file once."""
    config = checkpoint.model_config
    shared = {}
    if config.expert_shape is not None:
        shared = shared_tables(str(checkpoint.directory), config.expert_shape, options.parent_bits)
    calibration = None
    if options.calibration is not None:
        calibration = {
            "name": options.calibration.name,
            "sha256": sha256(options.calibration),
            "tokens_wanted": options.calibration_tokens,
        }
    return {
        "format": FORMAT,
        "model_type": config.model_type,
        "dtype": options.dtype,
        "seed_bits": options.seed_bits,
        "parent_bits": options.parent_bits,
        "rows_per_table": shared,
        "moe_layers": list(config.moe_layers),
        "damage": "squared error" if calibration is None else "Fisher-weighted squared error",
        "calibration": calibration,
        "source": hash_source(checkpoint),
        "versions": library_versions(),
    }


def hash_source(checkpoint: Checkpoint) -> dict[str, Any]:
    """Name and hashes of a checkpoint's files; reads every file once."""
    sources = [checkpoint.directory / "config.json", *checkpoint.files()]
    return {
        "name": checkpoint.directory.resolve().name,
        "sha256": {path.name: sha256(path) for path in sources},
    }


def library_versions() -> dict[str, str]:
    """Versions of what computes and writes."""
    names = ("jax", "flax", "orbax-checkpoint", "numpy", "safetensors")
    return {name: importlib.metadata.version(name) for name in names}


def start_or_resume(partial: Path, manifest: dict[str, Any], restart: bool) -> None:
    """Makes the folder of a conversion, or finds one that the same conversion left.

    Args:
        partial: where the conversion is written until it is whole.
        manifest: of this conversion.
        restart: throw away what is there.

    Raises:
        UserError: another conversion left the folder, or it cannot be written.
    """
    try:
        ours = (partial / MANIFEST).exists() or not any(partial.glob("[!.]*"))
        if partial.exists() and not ours:
            raise UserError(f"{partial} is not an unfinished conversion; move it out of the way")
        if restart and partial.exists():
            shutil.rmtree(partial)
        partial.mkdir(parents=True, exist_ok=True)
        for unfinished in [*partial.glob(f"*{UNFINISHED}*"), *partial.glob(f"*/*{UNFINISHED}*")]:
            shutil.rmtree(unfinished)
    except OSError as error:
        raise UserError(f"cannot write {partial}: {error}") from None
    if (partial / MANIFEST).exists():
        different = _differences(read_json(partial / MANIFEST), manifest)
        if different:
            raise UserError(
                f"{partial} is left from a conversion with another {', '.join(different)}; "
                "remove it or pass --restart"
            )
    write_json(partial / MANIFEST, manifest)


def _differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    keys = (set(old) | set(new)) - {"versions"}  # it may go on under newer libraries
    return sorted(key for key in keys if old.get(key) != new.get(key))


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Writes a JSON file in one step, so that a kill leaves the old one or the new one."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(readable(value), encoding="utf-8")
    temporary.replace(path)


def readable(value: Any) -> str:
    """JSON with a line for each entry, but one line for a list of numbers or words."""
    # Line breaks inside strings are escaped, so those that are matched stand between entries.
    return INNERMOST_LIST.sub(
        lambda found: f"[{NEXT_ENTRY.sub(', ', found[1])}]", json.dumps(value, indent=2) + "\n"
    )


def copy_side_files(source: Path, target: Path) -> None:
    """Copies config, tokenizer, chat template and licence."""
    for pattern in COPIED:
        for path in source.glob(pattern):
            if path.is_file():
                shutil.copyfile(path, target / path.name)
