"""What a device does between the projections of attention: rotate, and ask the memory."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from pw_jax.models.config import ModelConfig
from pw_jax.models.deepseek_v2 import DeepseekV2Config, rotate_neighbours
from pw_jax.models.gemma3 import Gemma3Config
from pw_jax.models.gemma4 import Gemma4Config
from pw_jax.models.layers import pad_last, rotate
from pw_jax.models.memory import Memory

State = tuple[Any, dict[str, Any], Memory]  # rotary tables, norms of heads by name, memory


def attend(config: ModelConfig, layer: int) -> Callable[..., tuple[Array, State]]:
    """For one layer, a function of a device's heads and a `State` to heads and the state."""
    return _latent(config, layer) if isinstance(config, DeepseekV2Config) else _heads(config, layer)


def _heads(config: ModelConfig, layer: int) -> Callable[..., tuple[Array, State]]:
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


def _latent(config: DeepseekV2Config, layer: int) -> Callable[..., tuple[Array, State]]:
    latent, kv = config.latent, config.kv_shapes[layer]

    def run(q: Array, plain: Array, shared: Array, v: Array, state: State) -> tuple[Array, State]:
        rope, norms, memory = state
        first, turning = jnp.split(q, (latent.plain_dim,), axis=-1)
        q = jnp.concatenate((first, rotate_neighbours(turning, rope)), axis=-1)
        shared = rotate_neighbours(shared, rope)
        shared = jnp.broadcast_to(shared, (*plain.shape[:3], shared.shape[-1]))
        k = jnp.concatenate((plain, shared), axis=-1)
        q, k, v = (pad_last(part, kv.head_dim) for part in (q, k, v))
        out, memory = memory.attend(
            layer, q, k, v, scale=latent.scale, window=kv.window, soft_cap=None
        )
        return out[..., : latent.value_dim], (rope, norms, memory)

    return run
