"""Layers that every family shares. Attribute names and [out, in] weights are Hugging Face's."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pw_jax.models.config import RopeConfig

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_pytorch_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
}


class Linear(nnx.Module):
    """``x @ weight.T + bias`` in the dtype of x.

    Args:
        inputs: Columns of the weight.
        outputs: Rows of the weight.
        bias: Whether there is a bias.
        dtype: Of weight and bias.
    """

    def __init__(self, inputs: int, outputs: int, *, bias: bool = False, dtype: DTypeLike):
        self.weight = nnx.Param(jnp.zeros((outputs, inputs), dtype))
        if bias:
            self.bias = nnx.Param(jnp.zeros((outputs,), dtype))
        self.has_bias = bias

    def __call__(self, x: Float[Array, "*batch inputs"]) -> Float[Array, "*batch outputs"]:
        """Multiplies."""
        out = jnp.einsum("...i,oi->...o", x, self.weight[...])
        return add_last(out, self.bias[...]) if self.has_bias else out


class Embedding(nnx.Module):
    """A table of one row a token."""

    def __init__(self, rows: int, features: int, *, dtype: DTypeLike):
        self.weight = nnx.Param(jnp.zeros((rows, features), dtype))

    def __call__(self, tokens: Int[Array, "*batch"]) -> Float[Array, "*batch D"]:
        """Looks rows up; an id outside the table is clamped into it."""
        return self.weight[...].at[tokens].get(mode="clip")


class RmsNorm(nnx.Module):
    """Division by the root mean square in float32, cast back, then times the weight."""

    def __init__(self, features: int, eps: float, *, dtype: DTypeLike):
        self.weight = nnx.Param(jnp.zeros((features,), dtype))
        self.eps = eps

    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        """Normalises the last axis."""
        wide = x.astype(jnp.float32)
        mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
        normal = (wide * jax.lax.rsqrt(mean_square + jnp.float32(self.eps))).astype(x.dtype)
        return normal * expand_to(self.weight[...], x.ndim)


class LayerNorm(nnx.Module):
    """Mean and variance normalised in float32, weight and bias applied there, then cast back."""

    def __init__(self, features: int, eps: float, *, dtype: DTypeLike):
        self.weight = nnx.Param(jnp.zeros((features,), dtype))
        self.bias = nnx.Param(jnp.zeros((features,), dtype))
        self.eps = eps

    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        """Normalises the last axis."""
        wide = x.astype(jnp.float32)
        centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
        variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
        normal = centred * jax.lax.rsqrt(variance + jnp.float32(self.eps))
        weight, bias = (p[...].astype(jnp.float32) for p in (self.weight, self.bias))
        return add_last(normal * expand_to(weight, x.ndim), bias).astype(x.dtype)


class GatedMlp(nnx.Module):
    """``down(activation(gate(x)) * up(x))``."""

    def __init__(
        self, features: int, hidden: int, activation: str, *, bias: bool = False, dtype: DTypeLike
    ):
        self.gate_proj = Linear(features, hidden, bias=bias, dtype=dtype)
        self.up_proj = Linear(features, hidden, bias=bias, dtype=dtype)
        self.down_proj = Linear(hidden, features, bias=bias, dtype=dtype)
        self.activation = activation

    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        """Applies the three projections."""
        return self.down_proj(ACTIVATIONS[self.activation](self.gate_proj(x)) * self.up_proj(x))


def rope_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Angles per position of the rotated pairs, float32 [head_dim / 2], highest first."""
    exponent = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    frequency = rope.theta**-exponent
    if rope.kind == "linear":
        frequency = frequency / rope.factor
    elif rope.kind == "llama3":
        # 1 keeps the frequency, 0 stretches it in full, between the two a linear blend.
        turns = rope.original_positions * frequency / (2 * np.pi)
        span = rope.high_freq_factor - rope.low_freq_factor
        keep = np.clip((turns - rope.low_freq_factor) / span, 0.0, 1.0)
        frequency = keep * frequency + (1 - keep) * frequency / rope.factor
    elif rope.kind == "yarn":
        keep = _yarn_share(rope, head_dim)
        frequency = keep * frequency + (1 - keep) * frequency / rope.factor
    elif rope.kind == "proportional":
        turning = np.arange(head_dim // 2) < int(rope.rotated * head_dim // 2)
        frequency = np.where(turning, frequency / rope.factor, 0.0)
    return frequency.astype(np.float32)


def _yarn_share(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """How far each pair keeps its frequency: a ramp from 1 to 0 over the pairs, not the turns."""

    def pair(turns: float) -> float:
        """Which pair turns that often in the original context."""
        ratio = rope.original_positions / (turns * 2 * np.pi)
        return head_dim * np.log(ratio) / (2 * np.log(rope.theta))

    first = max(np.floor(pair(rope.beta_fast)), 0.0)
    last = min(np.ceil(pair(rope.beta_slow)), head_dim - 1.0)
    span = last - first if last != first else 0.001
    return 1 - np.clip((np.arange(head_dim // 2) - first) / span, 0.0, 1.0)


def rope_tables(
    rope: RopeConfig, head_dim: int, positions: Int[Array, "B T"], dtype: DTypeLike
) -> tuple[Float[Array, "B T 1 half"], Float[Array, "B T 1 half"]]:
    """Cosines and sines of every position: computed in float32, given in the activations' dtype."""
    frequency = jnp.asarray(rope_frequencies(rope, head_dim))
    angle = positions[..., None, None].astype(jnp.float32) * expand_to(frequency, 4)
    cosine, sine = jnp.cos(angle), jnp.sin(angle)
    if rope.attention_factor != 1:
        factor = jnp.float32(rope.attention_factor)
        cosine, sine = cosine * factor, sine * factor
    return cosine.astype(dtype), sine.astype(dtype)


def rotate(
    x: Float[Array, "B T N H"],
    tables: tuple[Float[Array, "B T 1 half"], Float[Array, "B T 1 half"]],
) -> Float[Array, "B T N H"]:
    """Rotates the pairs (d, d + H/2) of every head, the layout of Hugging Face weights."""
    cosine, sine = tables
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate(
        (first * cosine - second * sine, second * cosine + first * sine), axis=-1
    )


def expand_to(vector: Array, ndim: int) -> Array:
    """Puts axes of length one before the axes of `vector`, since ranks are never promoted."""
    return vector.reshape((1,) * (ndim - vector.ndim) + vector.shape)


def add_last(x: Float[Array, "*batch D"], vector: Float[Array, " D"]) -> Float[Array, "*batch D"]:
    """Adds a vector along the last axis."""
    return x + expand_to(vector, x.ndim)


def pad_last(x: Float[Array, "*batch H"], size: int) -> Float[Array, "*batch S"]:
    """Appends zeros along the last axis."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, size - x.shape[-1])])
