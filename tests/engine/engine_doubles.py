"""A tiny MoE model, quantised in memory: what the engine's tests run on."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from flax import nnx

from checkpoints.huggingface import expert_name
from pw_jax.engine.compilations import compilations
from pw_jax.engine.prompts import PromptCalibration
from pw_jax.models import registry
from pw_jax.models.config import ModelConfig
from pw_jax.models.decoder import CausalLm
from pw_jax.paging.layout import ExpertFormat
from pw_jax.quantizer.damage import damage
from pw_jax.quantizer.format import QuantizedMatrix, dequantize
from pw_jax.quantizer.nested import quantize_matrix

TINY_MOE = {
    "model_type": "qwen2_moe",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
    "norm_topk_prob": True,
    "mlp_only_layers": [1],
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "eos_token_id": 95,
}

TINY_DENSE = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
}


class StackedExperts(NamedTuple):
    planes: np.ndarray
    tables: dict[int, np.ndarray]
    scales: dict[int, np.ndarray]
    damage: np.ndarray


@dataclass(frozen=True)
class MemoryExperts:
    """An ExpertSource made from the DenseExperts of a model."""

    model: CausalLm
    seed_bits: int = 3
    parent_bits: int = 8

    @cached_property
    def matrices(self) -> dict[tuple[int, int, int], QuantizedMatrix]:
        quantized = {}
        for block, weight in self.weights.items():
            quantized[block] = quantize_matrix(
                weight, seed_bits=self.seed_bits, parent_bits=self.parent_bits, name=str(block)
            )
        return quantized

    @cached_property
    def weights(self) -> dict[tuple[int, int, int], np.ndarray]:
        named = _named_weights(self.model)
        found = {}
        for index, module, key in self.names():
            for expert, matrix in enumerate(named[key]):
                found[index, expert, module] = matrix
        return found

    def names(self) -> Iterator[tuple[int, int, str]]:
        """Index of the MoE layer, index of the module, and our name of its fused experts."""
        family = {"model_type": self.model.config.model_type}
        for index, layer in enumerate(self.model.config.moe_layers):
            yield index, 0, expert_name(family, layer, "gate_up")
            yield index, 1, expert_name(family, layer, "down")

    @property
    def expert_format(self) -> ExpertFormat:
        gate_up, down = (self.matrices[0, 0, module].rows_per_table for module in (0, 1))
        return ExpertFormat(self.seed_bits, self.parent_bits, (gate_up, down))

    calibration = None
    prompt_calibration: PromptCalibration | None = None

    def load_experts(self, layer: int, module: int) -> "StackedExperts":
        shape = self.model.config.expert_shape
        assert shape is not None
        blocks = [(layer, expert, module) for expert in range(shape.experts)]
        own = [self.matrices[block] for block in blocks]
        return StackedExperts(
            planes=np.stack([np.asarray(m.planes) for m in own]),
            tables={b: np.stack([np.asarray(m.tables[b]) for m in own]) for b in own[0].widths},
            scales={b: np.stack([np.asarray(m.scales[b]) for m in own]) for b in own[0].widths},
            damage=np.stack([plain_damage(self.weights[b], self.matrices[b]) for b in blocks]),
        )

    def dequantized(self, bits: int) -> CausalLm:
        """The model with experts multiplied densely at one width."""
        weights = dict(_named_weights(self.model))
        for index, module, key in self.names():
            own = [
                m for (row, _, kind), m in self.matrices.items() if (row, kind) == (index, module)
            ]
            weights[key] = np.stack([np.asarray(dequantize(m, bits)) for m in own])
        return registry.set_weights(registry.build_model(self.model.config), weights)

    def paged(self) -> CausalLm:
        """The model without the experts' arrays."""
        weights = {k: v for k, v in _named_weights(self.model).items() if ".experts." not in k}
        return registry.set_weights(registry.build_model(self.model.config, "paged"), weights)


def _named_weights(model: CausalLm) -> dict[str, np.ndarray]:
    return {
        ".".join(map(str, path)): np.asarray(leaf[...])
        for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param))
    }


def tiny_config(raw: dict | None = None) -> ModelConfig:
    return registry.read_config(raw or TINY_MOE)


def tiny_experts(seed: int = 0, **options: Any) -> MemoryExperts:
    """A random tiny MoE model with its quantised experts."""
    return MemoryExperts(registry.random_model(tiny_config(), seed=seed), **options)


def plain_damage(weight: np.ndarray, matrix: QuantizedMatrix) -> np.ndarray:
    """Squared error at each width, all weights alike."""
    return damage(weight, matrix, *(np.ones(size, np.float32) for size in weight.shape))


@contextmanager
def no_compilation() -> Iterator[None]:
    """Fails if XLA compiles anything inside."""
    with compilations() as compiled:
        yield
    assert not compiled
