"""Reading .bin files, the zip archives of ``torch.save``; needs the optional torch extra."""

import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from ml_dtypes import bfloat16

from pw_jax.errors import UserError

DTYPES = {"torch.bfloat16": "BF16", "torch.float16": "F16", "torch.float32": "F32"}


def read_header(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Dtype, as safetensors calls it, and shape of every tensor of a file."""
    return {
        name: (DTYPES.get(str(tensor.dtype), str(tensor.dtype)), tuple(tensor.shape))
        for name, tensor in _load(path).items()
    }


def read_tensor(path: Path, name: str, index: int | None = None) -> np.ndarray:
    """Reads one tensor, or only its slice ``index`` along the first axis."""
    tensor = _load(path)[name]
    tensor = (tensor if index is None else tensor[index]).contiguous()
    if str(tensor.dtype) == "torch.bfloat16":  # numpy has none: the bits go through int16
        return tensor.view(_torch(path).int16).numpy().view(bfloat16).copy()
    return tensor.numpy().copy()  # the memory map must not outlive this call


def _torch(path: Path) -> Any:
    try:
        import torch  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise UserError(
            f"{path}: .bin weights are read by torch, which is not installed: install the extra "
            f"with pip install 'pw-jax[torch]', or save the weights as safetensors"
        ) from None
    return torch


def _load(path: Path) -> dict[str, Any]:
    """Maps a file; tensors are read when they are used."""
    torch = _torch(path)
    if not path.exists():
        raise UserError(f"{path} does not exist")
    if not zipfile.is_zipfile(path):
        raise UserError(
            f"{path} is damaged or cut short, or was saved by a torch older than 1.6: copy it "
            f"again, or save it as safetensors"
        )
    try:
        # weights_only: a pickle may otherwise run any code.
        tensors = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, OSError, EOFError, KeyError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise UserError(f"{path}: torch cannot load it as plain weights: {reason}") from None
    if not isinstance(tensors, dict) or not all(map(torch.is_tensor, tensors.values())):
        raise UserError(f"{path} must hold tensors by name and nothing else")
    return tensors
