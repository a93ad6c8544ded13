"""What a device does between the projections of attention: rotate, and ask the memory."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from pw_jax.models.config import ModelConfig
from pw_jax.models.deepseek_v2 import DeepseekV2Config, rotate_neighbours
from pw_jax.models.gemma3 import Gemma3Config
from pw_jax.models.gemma4 import Gemma4Config
from pw_jax.models.latent import LatentLayer, Latents, up_projections
from pw_jax.models.layers import pad_last, rotate
from pw_jax.models.memory import Memory

State = tuple[Any, dict[str, Any], Memory]  # rotary tables, norms of heads by name, memory
Attend = Callable[..., tuple[Array, State]]


def attend(config: ModelConfig, layer: int, latent: LatentLayer | None) -> Attend:
    """For one layer, a function of what `enter` gives a device and a `State` to heads and state.

    Args:
        config: The model.
        layer: Index of the layer.
        latent: Its latents, where the memory is given those and not heads.
    """
    if isinstance(config, DeepseekV2Config):
        return _native_latents(config, layer) if latent else _expanded_latents(config, layer)
    return _factored(config, layer, latent) if latent else _heads(config, layer)


def _heads(config: ModelConfig, layer: int) -> Attend:
    kv = config.kv_shapes[layer]
    scale = kv.head_dim**-0.5
    if isinstance(config, Gemma4Config):
        scale = 1.0
    elif isinstance(config, Gemma3Config):
        scale = config.query_scale

    def run(q: Array, k: Array, v: Array, state: State) -> tuple[Array, State]:
        rope, norms, memory = state
        heads = {"q": q, "k": k, "v": v}
        heads |= {name: norm(heads[name]) for name, norm in norms.items()}
        q, k, v = heads.values()
        if rope is not None:
            q, k = rotate(q, rope), rotate(k, rope)
        out, memory = memory.attend(layer, q, k, v, scale=scale, window=kv.window, soft_cap=None)
        return out, (rope, norms, memory)

    return run


def _factored(config: ModelConfig, layer: int, latent: LatentLayer) -> Attend:
    """Latents of k and v, each from a projection of its own."""
    width = config.kv_shapes[layer].head_dim

    def run(
        q: Array, k: Array, v: Array, u: dict[str, Array], bias: dict[str, Array], state: State
    ) -> tuple[Array, State]:
        rope, norms, memory = state
        if rope is not None:
            q = rotate(q, rope)
        up = up_projections(u["k"].T, u["v"].T, bias.get("k"), bias.get("v"), width)
        latents = Latents(k, v, None, up, rope, latent.rotation)
        out, memory = memory.attend_latents(layer, q, latents, scale=width**-0.5, window=None)
        return out, (rope, norms, memory)

    return run


def _native_latents(config: DeepseekV2Config, layer: int) -> Attend:
    """MLA's latent, which keys and values have in common."""
    shape = config.latent

    def run(q: Array, shared: Array, latent: Array, u: Array, state: State) -> tuple[Array, State]:
        rope, norms, memory = state
        q, shared = _turned(config, q, rope), rotate_neighbours(shared, rope)[:, :, 0]
        latents = Latents(latent, None, shared, shape.up_projections(u.T), None, None)
        out, memory = memory.attend_latents(layer, q, latents, scale=shape.scale, window=None)
        return out, (rope, norms, memory)

    return run


def _expanded_latents(config: DeepseekV2Config, layer: int) -> Attend:
    """MLA's keys and values."""
    latent, kv = config.latent, config.kv_shapes[layer]

    def run(q: Array, plain: Array, shared: Array, v: Array, state: State) -> tuple[Array, State]:
        rope, norms, memory = state
        q, shared = _turned(config, q, rope), rotate_neighbours(shared, rope)
        shared = jnp.broadcast_to(shared, (*plain.shape[:3], shared.shape[-1]))
        k = jnp.concatenate((plain, shared), axis=-1)
        q, k, v = (pad_last(part, kv.head_dim) for part in (q, k, v))
        out, memory = memory.attend(
            layer, q, k, v, scale=latent.scale, window=kv.window, soft_cap=None
        )
        return out[..., : latent.value_dim], (rope, norms, memory)

    return run


def _turned(
    config: DeepseekV2Config, q: Float[Array, "B T N H"], rope: tuple[Array, Array]
) -> Float[Array, "B T N H"]:
    """Queries, the last dimensions of each rotated."""
    plain, turning = jnp.split(q, (config.latent.plain_dim,), axis=-1)
    return jnp.concatenate((plain, rotate_neighbours(turning, rope)), axis=-1)
