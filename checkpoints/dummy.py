"""An engine with random weights at a model's real shapes, made in seconds from its config.json.

Speed and memory do not depend on the weights' values, so this is what benchmarks run on where the
checkpoint cannot be had.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike
from jaxtyping import Array

from checkpoints.engine import TensorParallel
from checkpoints.manifest import ConvertOptions, shared_tables
from checkpoints.tensor_files import read_json
from checkpoints.text import TOKENIZER_FILES, load_tokenizer
from pw_jax.engine.config import EngineConfig
from pw_jax.engine.engine import Engine
from pw_jax.engine.expert_source import CalibrationCounts
from pw_jax.engine.prompts import PromptCalibration
from pw_jax.low_rank.layers import factorable_shapes
from pw_jax.low_rank.ranks import uniform_ranks
from pw_jax.models import registry
from pw_jax.models.config import ModelConfig
from pw_jax.models.decoder import CausalLm
from pw_jax.models.moe import ExpertStore
from pw_jax.paging.layout import ExpertFormat
from pw_jax.quantizer.format import table_dtype
from pw_jax.tensor_parallel.model import ParallelModel, parallelize
from sharding.mesh import place, restore_sharding


@dataclass(frozen=True)
class Draw:
    """A random weight before it is made; stands in a model as a shape would.

    Attributes:
        shape: Of the weight.
        dtype: Of the weight.
        mean: Of its values.
        spread: Their standard deviation.
        seed: Of the model.
        number: Of the weight in the model.
    """

    shape: tuple[int, ...]
    dtype: DTypeLike
    mean: float
    spread: float
    seed: int
    number: int

    def make(self, sharding: NamedSharding | None = None) -> Array:
        """The weight; over a mesh each device makes its share of the same values."""
        numbers = (np.float32(self.mean), np.float32(self.spread), self.seed, self.number)
        return _uniform(*numbers, self.shape, self.dtype, sharding)


@partial(jax.jit, static_argnames=("shape", "dtype", "sharding"))
def _uniform(mean, spread, seed, number, shape, dtype, sharding):
    """A mean and a standard deviation; bits are cheaper to make than a normal's."""
    key = jax.random.fold_in(jax.random.key(seed, impl="rbg"), number)
    draw = jax.random.uniform(key, shape, dtype, -1, 1)
    out = mean.astype(dtype) + (spread * np.float32(3**0.5)).astype(dtype) * draw
    return out if sharding is None else jax.lax.with_sharding_constraint(out, sharding)


def _draws(model: CausalLm, seed: int) -> CausalLm:
    """A model of `Draw` in the place of shapes, at the scales of `registry.random_model`."""
    graph, state = nnx.split(model)
    flat = []
    for number, (path, leaf) in enumerate(nnx.to_flat_state(state)):
        name = ".".join(map(str, path))
        scale = registry.random_scale(model.config, name, leaf.shape)
        flat.append((path, leaf.replace(Draw(leaf.shape, leaf.dtype, *scale, seed, number))))
    return nnx.merge(graph, nnx.from_flat_state(flat))


def random_weights(model: CausalLm, seed: int = 0) -> CausalLm:
    """Gives a model random weights, made on the device.

    Args:
        model: As from `registry.build_model`.
        seed: Makes all draws.
    """
    return jax.tree.map(lambda draw: draw.make(), _draws(model, seed))


def random_parallel_model(
    model: CausalLm, parallel: TensorParallel, seed: int = 0
) -> ParallelModel:
    """The same weights over a mesh: made there, layer by layer, each device its share.

    Args:
        model: As from `registry.build_model`.
        parallel: The mesh and the layout.
        seed: Makes all draws.

    Raises:
        UserError: The model does not lie in the layout.
    """

    def place_drawn(mesh: Mesh, prepare: Callable[[Any], Any], draws: Any) -> Any:
        def make(draw: Draw) -> Array:
            return draw.make(restore_sharding(mesh, draw.shape))

        return place(mesh, prepare, jax.tree.map(make, draws))

    return parallelize(_draws(model, seed), parallel.mesh, parallel.layout, place_drawn)


class RandomArrays(NamedTuple):
    """All experts of one module: see `pw_jax.paging.host_pages.ExpertArrays`."""

    planes: np.ndarray
    tables: dict[int, np.ndarray]
    scales: dict[int, np.ndarray]
    damage: np.ndarray


@dataclass(frozen=True)
class RandomExperts:
    """Random codes; tables as a Gaussian's would be, and scales that keep activations alive.

    An `ExpertSource`. All layers have the same planes and tables, so the host holds those of one
    layer only; damage differs, and a move copies its own pages as with a real checkpoint.

    Attributes:
        config: The model.
        seed_bits: Lowest width.
        parent_bits: Highest width.
    """

    config: ModelConfig
    seed_bits: int = ConvertOptions.seed_bits
    parent_bits: int = ConvertOptions.parent_bits

    calibration: CalibrationCounts | None = None
    prompt_calibration: PromptCalibration | None = None

    @property
    def expert_format(self) -> ExpertFormat:
        """Widths, and rows a table as a conversion would choose."""
        shape = self.config.expert_shape
        if shape is None:
            raise ValueError("a model without routed experts has no paged experts")
        shared = shared_tables(self.config.model_type, shape, self.parent_bits)
        return ExpertFormat(self.seed_bits, self.parent_bits, (shared["gate_up"], shared["down"]))

    @cached_property
    def _modules(self) -> tuple[RandomArrays, RandomArrays]:
        return self._make(0), self._make(1)

    def _make(self, module: int) -> RandomArrays:
        shape = self.config.expert_shape
        assert shape is not None
        generator = np.random.default_rng(module)
        rows, columns = ((2 * shape.ffn, shape.embed), (shape.embed, shape.ffn))[module]
        groups = rows // self.expert_format.rows_per_table[module]
        tables, scales = {}, {}
        for bits in range(self.seed_bits, self.parent_bits + 1):
            most = np.iinfo(table_dtype(bits)).max
            entries = np.clip(np.sort(generator.standard_normal(1 << bits)) / 4, -1, 1) * most
            tables[bits] = np.broadcast_to(
                entries.astype(table_dtype(bits)), (shape.experts, groups, 1 << bits)
            )
            scales[bits] = np.full((shape.experts, rows), 4 / most / columns**0.5, np.float32)
        words = (shape.experts, self.parent_bits, rows, columns // 32)
        planes = generator.integers(0, 1 << 32, words, np.uint32)
        return RandomArrays(planes, tables, scales, np.zeros(0))

    def load_experts(self, layer: int, module: int) -> RandomArrays:
        """The module's arrays, with a damage that falls fourfold a bit."""
        widths, arrays = self.parent_bits - self.seed_bits + 1, self._modules[module]
        generator = np.random.default_rng((layer, module))
        of_expert = generator.uniform(0.5, 2, (arrays.planes.shape[0], 1))
        return arrays._replace(damage=4.0 ** -np.arange(widths) * of_expert)


class ByteTokenizer:
    """Stands in where there is no tokenizer: bytes are tokens, and tokens are shown as numbers."""

    def __init__(self, vocab_size: int):
        self._vocab_size = vocab_size

    def encode(self, text: str) -> list[int]:
        """The bytes of a text."""
        return [byte % self._vocab_size for byte in text.encode()]

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        """The numbers of the tokens."""
        del skip_special_tokens
        return " ".join(map(str, token_ids))


def dummy_engine(
    path: Path,
    config: EngineConfig,
    dtype: DTypeLike,
    experts: ExpertStore = "paged",
    *,
    ratio: float | None = None,
    parallel: TensorParallel | None = None,
) -> Engine:
    """Makes an engine with random weights.

    Args:
        path: A config.json, or a folder that holds one (and a tokenizer, or bytes are tokens).
        config: Sizes and budget.
        dtype: Of weights and activations: float32 or bfloat16.
        experts: Whether routed experts are pages or plain arrays.
        ratio: Makes the model a factored one that keeps this fraction of every linear layer.
        parallel: Over which devices and how; default one device.

    Raises:
        UserError: A config that is missing or not supported, a budget that is too small, or a
            model that does not lie in the layout.
    """
    model_config = read_model_config(path)
    paged = experts == "paged" and bool(model_config.moe_layers)
    store: ExpertStore = "paged" if paged else "dense"
    model = registry.build_model(model_config, store, dtype)
    if ratio is not None:
        ranks = uniform_ranks(factorable_shapes(model), ratio)
        model = registry.build_model(model_config, store, dtype, ranks)
    source = RandomExperts(model_config) if paged else None
    tokenizer = ByteTokenizer(model_config.vocab_size)
    if path.is_dir() and any((path / name).exists() for name in TOKENIZER_FILES):
        tokenizer = load_tokenizer(path)
    if parallel is None:
        return Engine(random_weights(model), config, source, tokenizer)
    return Engine(random_parallel_model(model, parallel), config, source, tokenizer)


def read_model_config(path: Path) -> ModelConfig:
    """The model of a config.json, or of a folder that holds one.

    Raises:
        UserError: It is missing or not supported.
    """
    path = path / "config.json" if path.is_dir() else path
    return registry.read_config(read_json(path), str(path))
