"""Reads golden files and runs our models on them."""

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from checkpoints.huggingface import Checkpoint, load_weights
from pw_jax.low_rank.layers import factorable_shapes
from pw_jax.models import registry
from pw_jax.models.config import ModelConfig
from pw_jax.models.decoder import CausalLm
from pw_jax.models.memory import SequenceMemory

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
TINY = sorted(
    f"{file.parent.name}/{file.stem}"
    for file in GOLDEN.glob("*/reference*.npz")
    if (file.parent / "model.safetensors").exists()
)


@dataclasses.dataclass(frozen=True)
class Golden:
    """One tiny checkpoint and what transformers computes with it (see scripts/make_golden.py)."""

    raw: dict
    config: ModelConfig
    directory: pathlib.Path
    tokens: np.ndarray
    lengths: np.ndarray
    logits: np.ndarray
    generated: np.ndarray

    @property
    def mask(self) -> np.ndarray:
        return np.arange(self.tokens.shape[1])[None] < self.lengths[:, None]

    def model(self, dtype: DTypeLike = jnp.float32) -> CausalLm:
        weights = load_weights(Checkpoint(self.directory), dtype)
        return registry.set_weights(registry.build_model(self.config, dtype=dtype), weights)


def read(name: str) -> Golden:
    """Reads ``family/reference`` or ``family/reference_variant``."""
    directory, stem = GOLDEN / name.split("/")[0], name.split("/")[1]
    with np.load(directory / f"{stem}.npz") as arrays:
        raw = json.loads((directory / "config.json").read_text())
        raw |= json.loads(str(arrays["overrides"]))
        wanted = ("tokens", "lengths", "logits", "generated")
        return Golden(
            raw, registry.read_config(raw), directory, **{key: arrays[key] for key in wanted}
        )


def full_ranks(config: ModelConfig) -> dict[str, int]:
    """Ranks at which factors of every matrix that decompose.py factors lose nothing."""
    shapes = factorable_shapes(registry.build_model(config))
    return {name: min(shape) for name, shape in shapes.items()}


def factored(weights: dict[str, np.ndarray], ranks: dict[str, int]) -> dict[str, np.ndarray]:
    """Weights with plain SVD factors in the place of the matrices named."""
    out = dict(weights)
    for name, rank in ranks.items():
        left, singular, right = np.linalg.svd(out.pop(f"{name}.weight"), full_matrices=False)
        out[f"{name}.u"] = left[:, :rank] * singular[None, :rank]
        out[f"{name}.v"] = right[:rank]
    return out


class Forward:
    """A jitted whole-sequence forward pass: tokens and lengths in, logits and routing mass out."""

    def __init__(self, model: CausalLm):
        graph, state = nnx.split(model)
        self.leaves, tree = jax.tree.flatten(state)

        def run(leaves, tokens, mask):
            merged = nnx.merge(graph, jax.tree.unflatten(tree, leaves))
            index = jnp.arange(tokens.shape[1], dtype=jnp.int32)
            positions = jnp.broadcast_to(index[None], tokens.shape)
            out = merged(tokens, positions, SequenceMemory(mask))
            return merged.logits(out.hidden), out.routing_mass

        self.run = jax.jit(run)

    def __call__(self, tokens: np.ndarray, mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        logits, mass = self.run(self.leaves, jnp.asarray(tokens, jnp.int32), jnp.asarray(mask))
        return np.asarray(logits), np.asarray(mass)
