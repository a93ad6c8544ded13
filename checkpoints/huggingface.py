"""Hugging Face checkpoints in: config.json and safetensors, read lazily by our names."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Float
from ml_dtypes import bfloat16

from checkpoints.names import FAMILY_NAMES, HEAD, FamilyNames, Piece, match_names
from checkpoints.tensor_files import Tensor, list_tensors, read_json, read_tensor
from pw_jax.errors import UserError
from pw_jax.models import registry
from pw_jax.models.config import Fields, ModelConfig
from pw_jax.models.decoder import CausalLm

Module = Literal["gate_up", "down"]
NUMPY_DTYPES = {
    "BF16": np.dtype(bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
}
MODULES: tuple[Module, ...] = ("gate_up", "down")


class Checkpoint:
    """A folder as Hugging Face lays it out, with its tensors matched to our names.

    Opening reads config.json and the headers of the weight files, not the weights. It fails if
    any tensor of the model is missing, doubled, misshapen or left over.

    A tied model may still hold ``lm_head.weight``: it is not loaded, and must equal the
    embedding, since a different one would mean that ``tie_word_embeddings`` is wrong.

    Attributes:
        directory: the folder.
        config: config.json as a dict.
        model_config: the same as our dataclass (see ``read_model_config``).
    """

    def __init__(self, directory: str | Path):
        """Opens ``directory``.

        Raises:
            UserError: anything about the folder that is not as it should be.
        """
        self.directory = Path(directory)
        self.config = read_config(self.directory)
        self.model_config: ModelConfig = read_model_config(self.directory, self.config)
        self.family: FamilyNames = FAMILY_NAMES.get(self.config["model_type"], FamilyNames())
        self._tensors, duplicates = list_tensors(self.directory)
        self._pieces = match_names(
            str(self.directory), self._tensors, self.shapes, self.family, duplicates
        )
        self._check_tied_head()

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every weight of the model by our name, with its shape."""
        model = registry.build_model(self.model_config, experts="dense")
        return {name: leaf.shape for name, leaf in registry.parameter_shapes(model).items()}

    def files(self) -> tuple[Path, ...]:
        """The weight files."""
        return tuple(sorted({tensor.file for tensor in self._tensors.values()}))

    def names(self) -> tuple[str, ...]:
        """Our names of all weights."""
        return tuple(sorted(self._pieces))

    def dense_names(self) -> tuple[str, ...]:
        """Our names of all weights but the routed experts."""
        routed = {
            self.expert_name(layer, module)
            for layer in self.model_config.moe_layers
            for module in MODULES
        }
        return tuple(name for name in self.names() if name not in routed)

    def expert_name(self, layer: int, module: Module) -> str:
        """Our name of the fused experts of one layer."""
        return expert_name(self.config, layer, module)

    def read(self, name: str) -> np.ndarray:
        """Reads one weight whole, in the dtype of the file.

        Args:
            name: one of ``names()``.

        Returns:
            An array of shape ``shapes[name]``, float32 where experts differ in dtype.
        """
        pieces = self._pieces[name]
        if pieces[0].expert is None:
            return self._read(pieces[0])
        dtypes = {NUMPY_DTYPES[self._tensors[piece.source].dtype] for piece in pieces}
        out = np.empty(self.shapes[name], dtypes.pop() if len(dtypes) == 1 else np.float32)
        for piece in pieces:
            out[_place(piece, out.shape)] = self._read(piece).astype(out.dtype, copy=False)
        return out

    def expert_matrix(self, layer: int, module: Module, expert: int) -> Float[np.ndarray, "N K"]:
        """Reads the matrix of one expert and nothing else.

        Args:
            layer: index of the layer in the model.
            module: ``gate_up`` [2F, D] or ``down`` [D, F].
            expert: index of the expert.

        Returns:
            The matrix in float32.
        """
        name = self.expert_name(layer, module)
        pieces = self._pieces[name]
        if pieces[0].expert is None:
            return self._read(pieces[0], expert).astype(np.float32)
        own = sorted((p for p in pieces if p.expert == expert), key=lambda p: p.part == "up")
        return np.concatenate([self._read(piece).astype(np.float32) for piece in own])

    def read_all(self, dtype: DTypeLike) -> Iterator[tuple[str, np.ndarray]]:
        """Yields every weight in ``dtype``, one at a time."""
        for name in self.names():
            yield name, self.read(name).astype(np.dtype(dtype), copy=False)

    def read_dense(self, dtype: DTypeLike) -> dict[str, np.ndarray]:
        """Reads every weight but the routed experts, in ``dtype``."""
        return {
            name: self.read(name).astype(np.dtype(dtype), copy=False) for name in self.dense_names()
        }

    def _read(self, piece: Piece, index: int | None = None) -> np.ndarray:
        return read_tensor(piece.source, self._tensors[piece.source], index)

    def _check_tied_head(self) -> None:
        if HEAD not in self._tensors or HEAD in self.shapes:
            return
        tensors: Mapping[str, Tensor] = self._tensors
        embedding = self._pieces[self.family.embedding][0].source
        first = read_tensor(HEAD, tensors[HEAD])
        second = read_tensor(embedding, tensors[embedding])
        if not np.array_equal(first, second):
            raise UserError(
                f"{self.directory}: config.json ties the head to the embedding, but {HEAD} "
                f"differs from {embedding}; set tie_word_embeddings to false or drop {HEAD}"
            )


def _place(piece: Piece, shape: tuple[int, ...]) -> tuple[Any, ...]:
    half = shape[1] // 2
    rows = {"all": slice(None), "gate": slice(0, half), "up": slice(half, None)}
    return piece.expert, rows[piece.part]


def expert_name(config: Mapping[str, Any], layer: int, module: Module) -> str:
    """Our name of the fused experts of one layer, by the ``model_type`` of the config."""
    experts = FAMILY_NAMES[config["model_type"]].experts
    if experts is None:
        raise ValueError(f"{config['model_type']} has no routed experts")
    return f"{experts.format(layer=layer)}.{module}_proj"


def read_config(directory: Path) -> dict[str, Any]:
    """Reads config.json of a model folder as a dict with a ``model_type``."""
    if not directory.is_dir():
        hint = "give a local folder, nothing is downloaded"
        raise UserError(f"{directory} is not a folder ({hint})")
    config = read_json(directory / "config.json")
    if not isinstance(config.get("model_type"), str):
        raise UserError(f'{directory / "config.json"} has no "model_type"')
    return config


def read_model_config(directory: Path, config: Mapping[str, Any]) -> ModelConfig:
    """Reads the config of a model folder as our dataclass.

    The end tokens are those of generation_config.json if it names any, as in transformers: chat
    models list more there than in config.json.

    Args:
        directory: the folder.
        config: its config.json.
    """
    model_config = registry.read_config(config, str(directory / "config.json"))
    path = directory / "generation_config.json"
    if not path.exists():
        return model_config
    ends = Fields(read_json(path), str(path)).token_ids("eos_token_id")
    return replace(model_config, eos_token_ids=ends or model_config.eos_token_ids)


def load_weights(checkpoint: Checkpoint, dtype: DTypeLike) -> dict[str, np.ndarray]:
    """Reads all weights, for ``registry.set_weights``.

    Args:
        checkpoint: an open checkpoint.
        dtype: float32 or bfloat16; numbers of a wider type are rounded to nearest even.

    Returns:
        Arrays by our names; takes as much host memory as the model.
    """
    return dict(checkpoint.read_all(dtype))


def load_dense_model(
    directory: str | Path, dtype: DTypeLike, *, on_host: bool = False
) -> tuple[ModelConfig, CausalLm]:
    """Loads a Hugging Face checkpoint as it is, experts unquantised.

    Args:
        directory: folder with config.json and safetensors.
        dtype: float32 or bfloat16.
        on_host: leave the weights in host memory.

    Returns:
        The config and the model, its weights on the default device unless `on_host`.
    """
    checkpoint = Checkpoint(directory)
    config = checkpoint.model_config
    model = registry.build_model(config, experts="dense", dtype=dtype)
    weights = load_weights(checkpoint, dtype)
    return config, registry.set_weights(model, weights, on_host=on_host)
