"""Norms over an axis that may be divided over devices and padded with zeros."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from sharding.mesh import AXIS
from sharding.weights import Norm


def normalize(
    x: Float[Array, "*batch d"], norm: Norm, eps: float, width: int, *, divided: bool
) -> Float[Array, "*batch d"]:
    """RMSNorm or LayerNorm in float32, with the casts of the models' own norms.

    A float32 weight of an RMSNorm multiplies before the cast, another one behind it.

    Args:
        x: All columns, or a device's.
        norm: Weight and bias of these columns.
        eps: Added to the mean square.
        width: How many columns there are, padding not counted.
        divided: The columns are divided over `AXIS`; costs an all-reduce of one float32 a token
            for RMSNorm, of two for LayerNorm.
    """
    total = (lambda sums: lax.psum(sums, AXIS)) if divided else (lambda sums: sums)
    wide = x.astype(jnp.float32)
    if norm.bias is not None:
        # Twice through the data: sums of squares that are not centred cancel badly.
        mean = total(jnp.sum(wide, axis=-1, keepdims=True)) / jnp.float32(width)
        wide = _without_padding(wide - mean, width) if divided else wide - mean
    mean_square = total(jnp.sum(jnp.square(wide), axis=-1, keepdims=True)) / jnp.float32(width)
    normal = wide * lax.rsqrt(mean_square + jnp.float32(eps))
    shape = (1,) * (x.ndim - 1) + x.shape[-1:]
    if norm.bias is None and norm.weight.dtype != jnp.float32:
        return normal.astype(x.dtype) * norm.weight.reshape(shape)
    if norm.bias is None:
        return (normal * norm.weight.reshape(shape)).astype(x.dtype)
    weight, bias = (part.astype(jnp.float32).reshape(shape) for part in (norm.weight, norm.bias))
    return (normal * weight + bias).astype(x.dtype)


def _without_padding(x: Float[Array, "*batch part"], width: int) -> Float[Array, "*batch part"]:
    """Zeros behind the true width, where subtracting the mean has left something."""
    part = x.shape[-1]
    column = lax.axis_index(AXIS) * part + jnp.arange(part)
    return jnp.where((column < width).reshape((1,) * (x.ndim - 1) + (part,)), x, jnp.float32(0))
