"""Reading a folder of weight files: what is in it, and one tensor at a time."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from checkpoints import torch_files
from pw_jax.errors import UserError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SINGLE_BIN = "pytorch_model.bin"
INDEX_BIN = "pytorch_model.bin.index.json"


@dataclass(frozen=True)
class Tensor:
    """A tensor in a file, not read yet.

    Attributes:
        file: the safetensors or .bin file.
        dtype: as safetensors calls it, such as ``"BF16"``.
        shape: its dimensions.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file, or a UserError that names the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} does not exist") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is not readable JSON: {error}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} must hold a JSON object, not a {type(value).__name__}")
    return value


def list_tensors(directory: Path) -> tuple[dict[str, Tensor], list[str]]:
    """Reads the headers of all weight files of a folder.

    Returns:
        The tensors by name, and a note on every name that two files hold.

    Raises:
        UserError: no weights, a missing or damaged file, an index that does not fit the files.
    """
    for single, index in ((SINGLE, INDEX), (SINGLE_BIN, INDEX_BIN)):
        if (directory / single).exists():
            return _read_header(directory / single), []
        if (directory / index).exists():
            return _read_shards(directory / index)
    raise UserError(f"{directory} has neither {SINGLE} nor {INDEX}, nor {SINGLE_BIN}")


def read_tensor(name: str, tensor: Tensor, index: int | None = None) -> np.ndarray:
    """Reads one tensor, or only its slice ``index`` along the first axis.

    The file is opened for each read, so no memory map grows with the tensors already seen.
    """
    if tensor.file.suffix == ".bin":
        return torch_files.read_tensor(tensor.file, name, index)
    try:
        with safe_open(tensor.file, framework="np") as file:
            return file.get_tensor(name) if index is None else file.get_slice(name)[index]
    except (SafetensorError, OSError) as error:
        raise UserError(f"{tensor.file}: cannot read {name}: {error}") from None


def _read_header(path: Path) -> dict[str, Tensor]:
    if path.suffix == ".bin":
        return {name: Tensor(path, *entry) for name, entry in torch_files.read_header(path).items()}
    tensors = {}
    try:
        with safe_open(path, framework="np") as file:
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                entry = file.get_slice(name)
                tensors[name] = Tensor(path, entry.get_dtype(), tuple(entry.get_shape()))
    except FileNotFoundError:
        raise UserError(f"{path} does not exist") from None
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is damaged or cut short, copy it again: {error}") from None
    return tensors


def _read_shards(index: Path) -> tuple[dict[str, Tensor], list[str]]:
    directory = index.parent
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f'{index} has no "weight_map"')
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise UserError(f"{index}: {name} must name a file of the same folder, not {shard!r}")
    shards = sorted(set(weight_map.values()))
    absent = [shard for shard in shards if not (directory / shard).is_file()]
    if absent:
        raise UserError(f"{index} names files that do not exist: {', '.join(absent)}")
    headers = {shard: _read_header(directory / shard) for shard in shards}
    lacking = [f"{name} ({s})" for name, s in sorted(weight_map.items()) if name not in headers[s]]
    if lacking:
        raise UserError(f"{index} names tensors that their file lacks: {', '.join(lacking[:8])}")
    tensors: dict[str, Tensor] = {}
    notes = []
    for header in headers.values():
        for name, tensor in header.items():
            if name in tensors:
                notes.append(f"{name} (in {tensors[name].file.name} and {tensor.file.name})")
            tensors.setdefault(name, tensor)
    return tensors, notes
