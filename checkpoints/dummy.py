"""An engine with random weights at a model's real shapes, made in seconds from its config.json.

Speed and memory do not depend on the weights' values, so this is what benchmarks run on where the
checkpoint cannot be had.
"""

from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from checkpoints.manifest import ConvertOptions, shared_tables
from checkpoints.tensor_files import read_json
from checkpoints.text import TOKENIZER_FILES, load_tokenizer
from pw_jax.engine.config import EngineConfig
from pw_jax.engine.engine import Engine
from pw_jax.engine.expert_source import CalibrationCounts
from pw_jax.engine.prompts import PromptCalibration
from pw_jax.models import registry
from pw_jax.models.config import ModelConfig
from pw_jax.models.decoder import CausalLm
from pw_jax.models.moe import ExpertStore
from pw_jax.paging.layout import ExpertFormat
from pw_jax.quantizer.format import table_dtype


@partial(jax.jit, static_argnames=("shape", "dtype"))
def _uniform(key, mean, spread, shape, dtype):
    """A mean and a standard deviation; bits are cheaper to make than a normal's."""
    draw = jax.random.uniform(key, shape, dtype, -1, 1)
    return mean.astype(dtype) + (spread * np.float32(3**0.5)).astype(dtype) * draw


def random_weights(model: CausalLm, seed: int = 0) -> CausalLm:
    """Gives a model random weights, made on the device at the scales of `registry.random_model`.

    Args:
        model: As from `registry.build_model`.
        seed: Makes all draws.
    """
    weights = {}
    for number, (name, shape) in enumerate(registry.parameter_shapes(model).items()):
        mean, spread = map(jnp.float32, registry.random_scale(model.config, name, shape.shape))
        key = jax.random.fold_in(jax.random.key(seed, impl="rbg"), number)
        weights[name] = _uniform(key, mean, spread, shape.shape, shape.dtype)
    return registry.set_weights(model, weights)


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
    path: Path, config: EngineConfig, dtype: DTypeLike, experts: ExpertStore = "paged"
) -> Engine:
    """Makes an engine with random weights.

    Args:
        path: A config.json, or a folder that holds one (and a tokenizer, or bytes are tokens).
        config: Sizes and budget.
        dtype: Of weights and activations: float32 or bfloat16.
        experts: Whether routed experts are pages or plain arrays.

    Raises:
        UserError: A config that is missing or not supported, or a budget that is too small.
    """
    model_config = read_model_config(path)
    paged = experts == "paged" and bool(model_config.moe_layers)
    model = registry.build_model(model_config, "paged" if paged else "dense", dtype)
    source = RandomExperts(model_config) if paged else None
    tokenizer = ByteTokenizer(model_config.vocab_size)
    if path.is_dir() and any((path / name).exists() for name in TOKENIZER_FILES):
        tokenizer = load_tokenizer(path)
    return Engine(random_weights(model), config, source, tokenizer)


def read_model_config(path: Path) -> ModelConfig:
    """The model of a config.json, or of a folder that holds one.

    Raises:
        UserError: It is missing or not supported.
    """
    path = path / "config.json" if path.is_dir() else path
    return registry.read_config(read_json(path), str(path))
