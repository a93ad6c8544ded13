"""What turns a latent into keys and values."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

from pallas_kernels.page_layout import LatentLayout
from pallas_kernels.page_write.reference import unpack_latents


class UpProjections(NamedTuple):
    """The second factors of the key and value projections; arrays, or shapes of such.

    Attributes:
        k: ``[K, H, Rk]``, from the keys' latent to K heads.
        v: ``[K, Hv, Rv]``, from the values' latent; from the keys' where the layout has no other.
        k_bias: ``[K, H]``, added to keys before they rotate, or None.
        v_bias: ``[K, Hv]``, added to values, or None.
    """

    k: Any
    v: Any
    k_bias: Any = None
    v_bias: Any = None


@dataclass(frozen=True)
class Rotation:
    """A rotary embedding of the pairs (d, d + H / 2); hashable, a static argument.

    Attributes:
        frequencies: Angle a position of each of the H / 2 pairs, never rising.
        factor: Multiplies cosines and sines.
    """

    frequencies: tuple[float, ...]
    factor: float = 1.0

    def __post_init__(self):
        if any(a < b for a, b in pairwise(self.frequencies)):
            raise ValueError("the frequencies of a rotation must not rise")

    def tables(
        self, positions: Int[Array, "*batch"]
    ) -> tuple[Float[Array, "*batch half"], Float[Array, "*batch half"]]:
        """Cosines and sines in float32."""
        frequency = jnp.asarray(np.array(self.frequencies, np.float32))
        frequency = frequency.reshape((1,) * positions.ndim + (-1,))
        angle = positions[..., None].astype(jnp.float32) * frequency
        factor = jnp.float32(self.factor)
        return jnp.cos(angle) * factor, jnp.sin(angle) * factor

    def __call__(
        self, x: Float[Array, "*batch K H"], positions: Int[Array, "*batch"]
    ) -> Float[Array, "*batch K H"]:
        """Rotates all heads of each position, in float32; the result has x's dtype."""
        cosine, sine = (table[..., None, :] for table in self.tables(positions))
        return turn(x.astype(jnp.float32), cosine, sine).astype(x.dtype)


def turn(
    x: Float[Array, "*batch H"],
    cosine: Float[Array, "*angle half"],
    sine: Float[Array, "*angle half"],
) -> Float[Array, "*out H"]:
    """Rotates the pairs (d, d + H / 2) by angles."""
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate(
        (first * cosine - second * sine, second * cosine + first * sine), axis=-1
    )


def compute_dtype(up: UpProjections, layout: LatentLayout) -> jnp.dtype:
    """The dtype of products: the wider of the pages' and the projections'."""
    same = up.k.dtype == layout.dtype
    return jnp.dtype(layout.dtype if same else jnp.float32)


def add_bias(
    x: Float[Array, "*batch K H"], bias: Float[Array, "K H"] | None
) -> Float[Array, "*batch K H"]:
    """Adds a bias of heads, if there is one."""
    if bias is None:
        return x
    return x + bias.astype(x.dtype).reshape((1,) * (x.ndim - 2) + bias.shape)


def expand(
    latent: Float[Array, "*batch R"],
    up: Float[Array, "K H rank"],
    bias: Float[Array, "K H"] | None,
    dtype: jnp.dtype,
) -> Float[Array, "*batch K H"]:
    """Multiplies latents, zero behind their rank, into heads of a dtype."""
    product = jnp.einsum("...r,khr->...kh", latent.astype(dtype), widen(up, latent).astype(dtype))
    return add_bias(product, bias)


def widen(up: Float[Array, "K H R"], latent: Float[Array, "*batch W"]) -> Float[Array, "K H W"]:
    """Puts zeros behind the rank, up to a latent's width as it lies in pages.

    A rank of 2457 in bfloat16 makes rows that begin at odd multiples of 2 bytes, for which a GPU
    has only slow products.
    """
    return jnp.pad(up, ((0, 0), (0, 0), (0, latent.shape[-1] - up.shape[-1])))


def read_latents(
    rows: UInt32[Array, "*dims words"], layout: LatentLayout
) -> tuple[Float[Array, "*dims Wk"], Float[Array, "*dims Wv"], Float[Array, "*dims Hs"]]:
    """Latent of keys, latent of values (the keys' where there is no other) and shared key.

    The latents keep the zeros behind their rank; see :func:`widen`.
    """
    k, v, shared = unpack_latents(rows, layout)
    return k, (v if layout.v_rank else k), shared[..., : layout.shared_dim]


def join_shared(
    k: Float[Array, "*batch K H"], shared: Float[Array, "*batch Hs"]
) -> Float[Array, "*batch K Hq"]:
    """Appends the shared key, if it has dimensions, to every head's."""
    if not shared.shape[-1]:
        return k
    shape = (*k.shape[:-1], shared.shape[-1])
    wide = jnp.broadcast_to(shared[..., None, :], shape).astype(k.dtype)
    return jnp.concatenate((k, wide), axis=-1)


def group_heads(q: jax.Array, kv_heads: int) -> jax.Array:
    """``[B, N, H]`` as ``[B, K, N / K, H]``."""
    return q.reshape(q.shape[0], kv_heads, -1, q.shape[-1])
