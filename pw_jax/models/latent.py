"""Latents of keys and values: what a factored attention can leave in the cache instead of heads."""

import dataclasses
from typing import Any, no_type_check

import jax
from flax import nnx
from jaxtyping import Array, Float

from pallas_kernels.kv_reconstruct import Rotation, UpProjections
from pallas_kernels.kv_reconstruct.expansion import expand, join_shared
from pw_jax.low_rank.layers import LowRankLinear
from pw_jax.models.config import KvShape, RopeConfig
from pw_jax.models.layers import rope_frequencies, rotate


@dataclasses.dataclass(frozen=True)
class LatentKvShape:
    """Latents that one layer keeps for each token.

    Attributes:
        k_rank: Rank of the keys' latent.
        v_rank: Rank of the values' latent; 0 where values come from the keys' (MLA).
        shared_dim: Dimensions of a rotated key that all heads share, or 0.
    """

    k_rank: int
    v_rank: int
    shared_dim: int = 0


@jax.tree_util.register_dataclass
@no_type_check  # also built of shapes
@dataclasses.dataclass(frozen=True)
class Latents:
    """What new tokens leave in a cache of latents, and what turns it into heads.

    Attributes:
        k: Latents of the keys, before RoPE.
        v: Latents of the values; None where they are the keys'.
        shared: Rotated key that all heads share, or None.
        up: From latents to heads.
        rope: Cosines and sines of the new tokens, in the model's dtype; None if keys do not rotate.
        rotation: The same for any position.
    """

    k: Float[Array, "B T Rk"]
    v: Float[Array, "B T Rv"] | None
    shared: Float[Array, "B T Hs"] | None
    up: UpProjections
    rope: tuple[Array, Array] | None
    rotation: Rotation | None = dataclasses.field(metadata={"static": True})

    def heads(self) -> tuple[Float[Array, "B T K H"], Float[Array, "B T K Hv"]]:
        """Keys, rotated, and values of the new tokens."""
        values = self.k if self.v is None else self.v
        k = expand(self.k, self.up.k, self.up.k_bias, self.k.dtype)
        if self.rope is not None:
            k = rotate(k, self.rope)
        if self.shared is not None:
            k = join_shared(k, self.shared)
        return k, expand(values, self.up.v, self.up.v_bias, values.dtype)


def rotation_of(rope: RopeConfig, head_dim: int) -> Rotation | None:
    """The rotation of a model's keys; None where positions are learned."""
    if rope.kind == "none":
        return None
    frequencies = rope_frequencies(rope, head_dim)
    return Rotation(tuple(float(angle) for angle in frequencies), rope.attention_factor)


@dataclasses.dataclass(frozen=True)
class LatentLayer:
    """One layer that can keep latents.

    Attributes:
        kept: What it would keep.
        heads: Query heads.
        kv_heads: Heads that latents become.
        k_dim: Dimensions of a key that are rebuilt.
        v_dim: Dimensions of a value.
        rotation: Of the rebuilt keys.
    """

    kept: LatentKvShape
    heads: int
    kv_heads: int
    k_dim: int
    v_dim: int
    rotation: Rotation | None


def factored_layer(
    k_proj: nnx.Module, v_proj: nnx.Module, heads: int, kv: KvShape, rotation: Rotation | None
) -> LatentLayer | None:
    """The latents of two projections; None unless both are factored, or where a window ends."""
    if not isinstance(k_proj, LowRankLinear) or not isinstance(v_proj, LowRankLinear):
        return None
    if kv.window is not None:
        return None
    kept = LatentKvShape(k_proj.v.shape[0], v_proj.v.shape[0])
    return LatentLayer(kept, heads, kv.kv_heads, kv.head_dim, kv.head_dim, rotation)


def up_projections(
    k: Float[Array, "KH Rk"],
    v: Float[Array, "KH Rv"],
    k_bias: Float[Array, " KH"] | None,
    v_bias: Float[Array, " KH"] | None,
    head_dim: int,
) -> UpProjections:
    """Second factors and biases by head."""

    def heads(array: Any) -> Any:
        return None if array is None else array.reshape(-1, head_dim, *array.shape[1:])

    return UpProjections(heads(k), heads(v), heads(k_bias), heads(v_bias))


def factored_latents(
    k_proj: Any,
    v_proj: Any,
    x: Float[Array, "B T D"],
    head_dim: int,
    rope: tuple[Array, Array] | None,
    rotation: Rotation | None,
) -> Latents:
    """Latents of new tokens from two factored projections."""
    up = up_projections(
        k_proj.u[...],
        v_proj.u[...],
        k_proj.bias[...] if k_proj.has_bias else None,
        v_proj.bias[...] if v_proj.has_bias else None,
        head_dim,
    )
    return Latents(k_proj.latent(x), v_proj.latent(x), None, up, rope, rotation)


def latent_layers(model: nnx.Module) -> dict[int, LatentLayer]:
    """The layers of a model, of arrays or of shapes, that can keep latents."""
    modules: dict[Any, Any] = dict(nnx.iter_modules(model))
    found = {module.layer: module.latent_layer for module in modules.values() if _attends(module)}
    return {layer: latent for layer, latent in sorted(found.items()) if latent is not None}


def _attends(module: Any) -> bool:
    return hasattr(module, "latent_layer")
