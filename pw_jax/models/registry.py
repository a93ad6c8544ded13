"""The families by name, and the ways to build one of their models."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from pw_jax.errors import UserError
from pw_jax.low_rank.layers import use_low_rank
from pw_jax.models import (
    deepseek_v2,
    deepseek_v2_config,
    gemma3,
    gemma4,
    gemma4_config,
    llama,
    mixtral,
    opt,
    qwen2_moe,
)
from pw_jax.models.config import ModelConfig
from pw_jax.models.decoder import CausalLm
from pw_jax.models.layers import ACTIVATIONS
from pw_jax.models.moe import ExpertStore

LISTED_NAMES = 8


@dataclasses.dataclass(frozen=True)
class Family:
    """One architecture.

    Attributes:
        read_config: Turns a parsed ``config.json`` and its name into a `ModelConfig`.
        module: The model class.
    """

    read_config: Callable[[Mapping[str, Any], str], ModelConfig]
    module: type[CausalLm]


FAMILIES: Mapping[str, Family] = {
    "deepseek_v2": Family(deepseek_v2_config.read_config, deepseek_v2.DeepseekV2),
    "gemma3_text": Family(gemma3.read_config, gemma3.Gemma3),
    "gemma4": Family(gemma4_config.read_config, gemma4.Gemma4),
    "gemma4_text": Family(gemma4_config.read_config, gemma4.Gemma4),
    "llama": Family(llama.read_config, llama.Llama),
    "mixtral": Family(mixtral.read_config, mixtral.Mixtral),
    "opt": Family(opt.read_config, opt.Opt),
    "qwen2_moe": Family(qwen2_moe.read_config, qwen2_moe.Qwen2Moe),
}


def family(model_type: str | None, source: str = "config.json") -> Family:
    """Finds a family.

    Raises:
        UserError: No such family; lists those that exist.
    """
    found = FAMILIES.get(model_type or "")
    if found is None:
        known = ", ".join(sorted(FAMILIES))
        raise UserError(f"{source}: model_type {model_type!r} is not supported; known: {known}")
    return found


def read_config(raw: Mapping[str, Any], source: str = "config.json") -> ModelConfig:
    """Reads the ``config.json`` of any family.

    Args:
        raw: The parsed file, written by version 4 or 5 of transformers.
        source: How errors call the file.

    Raises:
        UserError: Unknown family, or a field that is missing, wrong or not supported.
    """
    config = family(raw.get("model_type"), source).read_config(raw, source)
    if config.activation not in ACTIVATIONS:
        known = ", ".join(sorted(ACTIVATIONS))
        raise UserError(f"{source}: activation {config.activation!r} is not supported; use {known}")
    return config


def build_model(
    config: ModelConfig,
    experts: ExpertStore = "dense",
    dtype: DTypeLike = jnp.float32,
    ranks: Mapping[str, int] | None = None,
) -> CausalLm:
    """Builds a model whose parameters are shapes only, so that size costs nothing.

    Args:
        config: The model.
        experts: ``dense`` arrays, or ``paged`` in the memory (then they are no parameters).
        dtype: float32 or bfloat16.
        ranks: Rank of every linear layer that is factored, by dotted name; the others are whole.

    Raises:
        UserError: A rank that the model has no place for.
    """
    module = family(config.model_type).module

    def make() -> CausalLm:
        model = module(config, experts=experts, dtype=dtype)
        use_low_rank(model, ranks or {}, dtype)
        return model

    return nnx.eval_shape(make)


def parameter_shapes(model: nnx.Module) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape and dtype of every parameter under its dotted Hugging Face name."""
    return {
        ".".join(map(str, path)): jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        for path, leaf in _parameters(model)
    }


def set_weights[ModuleT: nnx.Module](
    model: ModuleT, weights: Mapping[str, Any], *, on_host: bool = False
) -> ModuleT:
    """Gives a model its weights.

    Args:
        model: As from `build_model`, or a part of one; not changed.
        weights: Arrays (numpy or JAX) under dotted names; cast to the parameters' dtype.
        on_host: Keep them numpy arrays, for `tensor_parallel` to distribute.

    Returns:
        A model with arrays.

    Raises:
        UserError: Lists all names that are missing, not expected, of the wrong shape or integers.
    """
    shapes = parameter_shapes(model)
    problems = [
        _listing("missing", [name for name in shapes if name not in weights]),
        _listing("not expected", [name for name in weights if name not in shapes]),
        _listing(
            "wrong shape",
            [
                f"{name} {tuple(weights[name].shape)} instead of {shapes[name].shape}"
                for name in shapes
                if name in weights and tuple(weights[name].shape) != shapes[name].shape
            ],
        ),
        _listing(
            "not floating point",
            [name for name in weights if not jnp.issubdtype(weights[name].dtype, jnp.floating)],
        ),
    ]
    if any(problems):
        raise UserError("weights do not fit the model: " + "; ".join(filter(None, problems)))
    library: Any = np if on_host else jnp
    graph, state = nnx.split(model)
    flat = [
        (path, leaf.replace(library.asarray(weights[".".join(map(str, path))], dtype=leaf.dtype)))
        for path, leaf in nnx.to_flat_state(state)
    ]
    return nnx.merge(graph, nnx.from_flat_state(flat))


def random_model(
    config: ModelConfig,
    experts: ExpertStore = "dense",
    dtype: DTypeLike = jnp.float32,
    seed: int = 0,
    ranks: Mapping[str, int] | None = None,
) -> CausalLm:
    """Builds a model with random weights of a scale that keeps activations alive."""
    model = build_model(config, experts, dtype, ranks)
    weights = {}
    for number, (name, shape) in enumerate(parameter_shapes(model).items()):
        draw = np.random.default_rng((seed, number)).standard_normal(shape.shape, np.float32)
        mean, spread = random_scale(config, name, shape.shape)
        weights[name] = np.float32(mean) + np.float32(spread) * draw
    return set_weights(model, weights)


def random_scale(config: ModelConfig, name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """Mean and standard deviation of a parameter's random values that keep activations alive."""
    if ("norm" in name or "scal" in name) and not name.endswith(".bias"):
        return 1.0, 0.1
    if len(shape) == 1:
        return 0.0, 0.1
    if "embed" in name and not config.tie_word_embeddings:
        return 0.0, 1.0
    return 0.0, shape[-1] ** -0.5


def parameter_count(model: nnx.Module) -> int:
    """Number of weights; paged experts do not count."""
    return sum(int(np.prod(leaf.shape)) for leaf in parameter_shapes(model).values())


def _parameters(model: nnx.Module) -> list[tuple[tuple[Any, ...], Any]]:
    return list(nnx.to_flat_state(nnx.state(model, nnx.Param)))


def _listing(problem: str, names: list[str]) -> str:
    """``problem: a, b, ... and 5 more``, or nothing."""
    if not names:
        return ""
    more = f" and {len(names) - LISTED_NAMES} more" if len(names) > LISTED_NAMES else ""
    return f"{problem} ({len(names)}): {', '.join(sorted(names)[:LISTED_NAMES])}{more}"
