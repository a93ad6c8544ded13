"""Our own checkpoints: any-precision experts and the dense rest, as orbax items in a folder.

    OUT/pw_jax.json               the manifest: format, widths, provenance
    OUT/config.json, tokenizer    copied from the source
    OUT/dense/                    one item: every weight that is not a routed expert
    OUT/experts/layer_003.down/   one item a module: planes, tables, scales, damage of all experts
    OUT/calibration/              one item, if calibrated: routing mass, tokens seen, marginals;
                                  after scripts/calibrate.py also damage, in place of the experts'
    OUT/prompts/                  one item of scripts/calibrate.py: column errors, mean squares of
                                  inputs and heads for the prompt correction

Nothing in it depends on the devices that wrote it. Every load says where each array goes, since
orbax would otherwise rebuild the mesh that saved it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Float32, Int, UInt32
from orbax.checkpoint import v1 as ocp

from checkpoints.huggingface import (
    MODULES,
    Module,
    expert_name,
    read_config,
    read_model_config,
)
from checkpoints.tensor_files import read_json
from pw_jax.errors import UserError
from pw_jax.models import registry
from pw_jax.models.config import ModelConfig
from pw_jax.models.decoder import CausalLm
from pw_jax.quantizer.format import QuantizedMatrix, dequantize

FORMAT = 1
MANIFEST = "pw_jax.json"
Placement = jax.sharding.Sharding | Callable[[str, tuple[int, ...]], jax.sharding.Sharding]


@dataclass(frozen=True)
class ExpertArrays:
    """All experts of one module of one layer, stacked.

    Attributes:
        planes: uint32 [E, P, N, K // 32], most significant bit first.
        tables: for each width b int8 or int16 [E, N // G, 2**b].
        scales: for each width float32 [E, N].
        damage: float32 [E, widths], the weighted squared error of each width, seed first.
    """

    planes: UInt32[np.ndarray, "E P N words"]
    tables: dict[int, np.ndarray]
    scales: dict[int, np.ndarray]
    damage: Float32[np.ndarray, "E widths"]

    @classmethod
    def stack(cls, matrices: list[QuantizedMatrix], damage: list[np.ndarray]) -> "ExpertArrays":
        """Stacks the matrices of a module's experts, in order."""
        widths = sorted(matrices[0].tables)
        return cls(
            np.stack([np.asarray(matrix.planes) for matrix in matrices]),
            {b: np.stack([np.asarray(matrix.tables[b]) for matrix in matrices]) for b in widths},
            {b: np.stack([np.asarray(matrix.scales[b]) for matrix in matrices]) for b in widths},
            np.stack([np.asarray(row, np.float32) for row in damage]),
        )

    @property
    def experts(self) -> int:
        """The number of experts."""
        return self.planes.shape[0]

    def matrix(self, expert: int) -> QuantizedMatrix:
        """One expert's matrix."""
        return QuantizedMatrix(
            planes=self.planes[expert],
            tables={b: table[expert] for b, table in self.tables.items()},
            scales={b: scale[expert] for b, scale in self.scales.items()},
        )


@dataclass(frozen=True)
class Store:
    """A converted checkpoint, opened by ``open_store``; arrays are read when asked for.

    Attributes:
        directory: absolute path.
        manifest: pw_jax.json.
        config: config.json as a dict.
        kept: experts loaded so far, if they are to stay in memory.
    """

    directory: Path
    manifest: dict[str, Any]
    config: dict[str, Any]
    kept: dict[tuple[int, Module], ExpertArrays] | None = None

    @cached_property
    def model_config(self) -> ModelConfig:
        """config.json as our dataclass, with the end tokens of generation_config.json."""
        return read_model_config(self.directory, self.config)

    @property
    def widths(self) -> range:
        """The widths that every expert can take."""
        return range(self.manifest["seed_bits"], self.manifest["parent_bits"] + 1)

    def load_dense(
        self, dtype: DTypeLike, sharding: Placement | None = None, *, on_host: bool = False
    ) -> dict[str, Any]:
        """Loads every weight that is not a routed expert.

        Args:
            dtype: what to cast to while loading.
            sharding: one for all, or a function of name and shape; default one device.
            on_host: as numpy arrays instead.

        Returns:
            Arrays by our names.
        """
        place = None if on_host else sharding or _first_device()
        return load_item(self.directory / "dense", place, dtype)

    def load_experts(self, layer: int, module: Module) -> ExpertArrays:
        """Loads the pages of one module of one layer into host memory."""
        if self.kept is None:
            return self._read_experts(layer, module)
        if (layer, module) not in self.kept:
            self.kept[layer, module] = self._read_experts(layer, module)
        return self.kept[layer, module]

    def _read_experts(self, layer: int, module: Module) -> ExpertArrays:
        tree = load_item(item_path(self.directory, layer, module), None)
        damage = tree["damage"]
        if self.calibration is not None and "damage" in self.calibration:  # calibrated again since
            index = self.model_config.moe_layers.index(layer)
            damage = self.calibration["damage"][index, :, MODULES.index(module)]
        return ExpertArrays(
            tree["planes"],
            {int(bits): table for bits, table in tree["tables"].items()},
            {int(bits): scale for bits, scale in tree["scales"].items()},
            damage,
        )

    @cached_property
    def calibration(self) -> dict[str, np.ndarray] | None:
        """``routing_mass`` and ``tokens_seen`` float32 [L_moe, E] and the Fisher marginals.

        None if the conversion had no calibration text.
        """
        path = self.directory / "calibration"
        return load_item(path, None) if path.exists() else None

    @cached_property
    def prompts(self) -> dict[str, np.ndarray] | None:
        """What scripts/calibrate.py measured for the prompt correction; None if it was not run."""
        path = self.directory / "prompts"
        return load_item(path, None) if path.exists() else None


def open_store(directory: str | Path, *, keep: bool = False) -> Store:
    """Opens a converted checkpoint.

    Args:
        directory: the folder.
        keep: experts stay in memory once they are loaded, for those who load them many times.

    Raises:
        UserError: no such folder, not one of ours, or of another format.
    """
    path = Path(directory).absolute()
    if not path.is_dir():
        raise UserError(f"{directory} is not a folder; make it with scripts/convert.py")
    if path.name.endswith(".partial"):
        raise UserError(f"{directory} is an unfinished conversion; run scripts/convert.py again")
    if not (path / MANIFEST).exists():
        raise UserError(f"{directory} has no {MANIFEST}; convert it with scripts/convert.py first")
    manifest = read_json(path / MANIFEST)
    if "kind" in manifest:
        raise UserError(f"{directory} is a decomposed model, not a converted one")
    if manifest.get("format") != FORMAT:
        found = manifest.get("format")
        raise UserError(f"{path / MANIFEST} has format {found}, this version reads {FORMAT}")
    return Store(path, manifest, read_config(path), {} if keep else None)


def item_path(directory: Path, layer: int, module: Module) -> Path:
    """Where the experts of a module are kept."""
    return directory / "experts" / f"layer_{layer:03d}.{module}"


def save_experts(path: Path, arrays: ExpertArrays) -> None:
    """Saves one module's experts as an orbax item."""
    tree = {
        "planes": arrays.planes,
        "tables": {str(bits): table for bits, table in arrays.tables.items()},
        "scales": {str(bits): scale for bits, scale in arrays.scales.items()},
        "damage": arrays.damage,
    }
    save_item(path, tree)


def save_item(path: Path, tree: Mapping[str, Any]) -> None:
    """Saves a tree of arrays; ``path`` appears only once all of it is written."""
    try:
        ocp.save(str(path.absolute()), dict(tree))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot write {path}: {_brief(error)}") from None


@dataclass(frozen=True)
class _HostArray:
    """An abstract leaf without a sharding: orbax then loads into numpy."""

    shape: tuple[int, ...]
    dtype: np.dtype


def load_item(path: Path, sharding: Placement | None, dtype: DTypeLike | None = None) -> Any:
    """Loads an orbax item.

    Args:
        path: the item.
        sharding: where each leaf goes, by its dotted name and shape; None for numpy arrays.
        dtype: what every leaf is cast to; default as saved.

    Returns:
        The tree that was saved.
    """

    def abstract(key: Any, leaf: Any) -> Any:
        kind = np.dtype(dtype or leaf.dtype)
        if sharding is None:
            return _HostArray(tuple(leaf.shape), kind)
        name = ".".join(str(part.key) for part in key)
        place = sharding(name, tuple(leaf.shape)) if callable(sharding) else sharding
        return jax.ShapeDtypeStruct(leaf.shape, kind, sharding=place)

    if not path.is_dir():
        raise UserError(f"{path} does not exist; the checkpoint is incomplete, convert it again")
    try:
        absolute = str(path.absolute())
        tree = ocp.metadata(absolute).metadata
        if tree is None:
            raise ValueError("its metadata is unreadable")
        return ocp.load(absolute, jax.tree_util.tree_map_with_path(abstract, tree))
    except (ocp.errors.InvalidLayoutError, OSError, ValueError, KeyError) as error:
        raise UserError(f"{path} is damaged, convert again: {_brief(error)}") from None


def _brief(error: Exception) -> str:
    """The start of a message; tensorstore appends pages of its settings."""
    return str(error).splitlines()[0][:200]


def _first_device() -> jax.sharding.Sharding:
    return jax.sharding.SingleDeviceSharding(jax.devices()[0])


def dequantized_model(
    store: Store, bits: int | Int[np.ndarray, "L E 2"], dtype: DTypeLike
) -> tuple[ModelConfig, CausalLm]:
    """The model with its experts at given widths, multiplied densely.

    It is what paged experts at these widths must equal, and takes as much memory as the source.

    Args:
        store: a converted checkpoint.
        bits: width within ``store.widths``, one for all or of each module of each expert.
        dtype: float32 or bfloat16, of all weights.

    Returns:
        The config and the model.
    """
    config = store.model_config
    experts = config.expert_shape.experts if config.expert_shape else 0
    widths = np.broadcast_to(np.asarray(bits), (len(config.moe_layers), experts, len(MODULES)))
    if not np.isin(widths, store.widths).all():
        low, high = store.widths[0], store.widths[-1]
        raise UserError(f"{store.directory} holds {low} to {high} bits, not {bits}")
    model = registry.build_model(config, experts="dense", dtype=dtype)
    shapes = registry.parameter_shapes(model)
    weights: dict[str, Any] = dict(store.load_dense(dtype))
    for layer, of_layer in zip(config.moe_layers, widths, strict=True):
        for index, module in enumerate(MODULES):
            arrays = store.load_experts(layer, module)
            name = expert_name(store.config, layer, module)
            weights[name] = np.empty(shapes[name].shape, dtype)
            for expert in range(arrays.experts):
                matrix = dequantize(arrays.matrix(expert), int(of_layer[expert, index]))
                weights[name][expert] = np.asarray(matrix).astype(dtype)
    return config, registry.set_weights(model, weights)
