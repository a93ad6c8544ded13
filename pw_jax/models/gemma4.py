"""Gemma 4 text models: experts beside the MLP, and two kinds of attention layers.

Sliding layers have small heads; full layers have fewer and wider heads whose values are their keys
before norm and rotation, and rotate only a quarter of the pairs.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int

from pw_jax.models.config import ExpertShape, ModelConfig
from pw_jax.models.decoder import CausalLm
from pw_jax.models.layers import GatedMlp, Linear, expand_to, rotate
from pw_jax.models.memory import Memory
from pw_jax.models.moe import ExpertStore, make_experts, routing_mass


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma4Config(ModelConfig):
    """What only Gemma 4 has; `rope` is that of the full layers.

    Attributes:
        keys_are_values: Full layers have no v_proj; k_proj gives their values as well.
    """

    keys_are_values: bool


class Gemma4Norm(nnx.Module):
    """Division by the root mean square, times the weight if there is one, all in float32."""

    def __init__(self, features: int, eps: float, *, dtype: DTypeLike, weighted: bool = True):
        if weighted:
            self.weight = nnx.Param(jnp.zeros((features,), dtype))
        self.weighted = weighted
        self.eps = eps

    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        """Normalises the last axis."""
        wide = x.astype(jnp.float32)
        mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
        normal = wide * jax.lax.rsqrt(mean_square + jnp.float32(self.eps))
        if self.weighted:
            normal = normal * expand_to(jnp.asarray(self.scale()), x.ndim)
        return normal.astype(x.dtype)

    def scale(self) -> Float32[Array | np.ndarray, " D"]:
        """What normalised numbers are multiplied by."""
        return self.weight[...].astype(jnp.float32)


class Gemma4Attention(nnx.Module):
    """Queries, keys and values are normalised per head, so scores are not scaled."""

    def __init__(self, config: Gemma4Config, layer: int, *, dtype: DTypeLike):
        kv = config.kv_shapes[layer]
        width, eps = config.hidden_size, config.norm_eps
        query, key = config.num_heads * kv.head_dim, kv.kv_heads * kv.head_dim
        self.layer = layer
        self.kv = kv
        self.has_values = kv.window is not None or not config.keys_are_values
        self.q_proj = Linear(width, query, bias=config.qkv_bias, dtype=dtype)
        self.k_proj = Linear(width, key, bias=config.qkv_bias, dtype=dtype)
        if self.has_values:
            self.v_proj = Linear(width, key, bias=config.qkv_bias, dtype=dtype)
        self.o_proj = Linear(query, width, bias=config.output_bias, dtype=dtype)
        self.q_norm = Gemma4Norm(kv.head_dim, eps, dtype=dtype)
        self.k_norm = Gemma4Norm(kv.head_dim, eps, dtype=dtype)
        self.v_norm = Gemma4Norm(kv.head_dim, eps, dtype=dtype, weighted=False)

    def __call__(
        self, x: Float[Array, "B T D"], rope: tuple[Array, Array], memory: Memory
    ) -> tuple[Float[Array, "B T D"], Memory]:
        """Returns what to add to the residual, and the memory with the new keys and values."""
        heads = (*x.shape[:2], -1, self.kv.head_dim)
        q = self.q_proj(x).reshape(heads)
        k = self.k_proj(x).reshape(heads)
        v = self.v_proj(x).reshape(heads) if self.has_values else k
        out, memory = memory.attend(
            self.layer,
            rotate(self.q_norm(q), rope),
            rotate(self.k_norm(k), rope),
            self.v_norm(v),
            scale=1.0,
            window=self.kv.window,
            soft_cap=None,
        )
        return self.o_proj(out.reshape(*x.shape[:2], -1)), memory


class Gemma4Router(nnx.Module):
    """Chooses experts from the raw residual, all of it in float32.

    A constant or a score rounded to bfloat16 moves logits by up to 0.4 %, which changes the choice.
    """

    def __init__(self, shape: ExpertShape, eps: float, *, dtype: DTypeLike):
        self.norm = Gemma4Norm(shape.embed, eps, dtype=dtype, weighted=False)
        self.proj = Linear(shape.embed, shape.experts, dtype=dtype)
        self.scale = nnx.Param(jnp.zeros((shape.embed,), dtype))
        self.per_expert_scale = nnx.Param(jnp.zeros((shape.experts,), dtype))
        self.top_k = shape.top_k

    def __call__(self, x: Float[Array, "M D"]) -> tuple[Int[Array, "M k"], Float[Array, "M k"]]:
        """Returns expert ids int32, the most probable first, and their weights float32."""
        scale, weight, expert_scale = (
            parameter[...].astype(jnp.float32)
            for parameter in (self.scale, self.proj.weight, self.per_expert_scale)
        )
        normal = self.norm(x.astype(jnp.float32)) * scale[None] * jnp.float32(x.shape[-1] ** -0.5)
        # A GPU would round float32 factors to 10 bits.
        exact = jax.lax.Precision.HIGHEST
        logits = jnp.einsum("md,ed->me", normal, weight, precision=exact)
        weights, expert_ids = jax.lax.top_k(jax.nn.softmax(logits, axis=-1), self.top_k)
        weights = weights / weights.sum(axis=-1, keepdims=True)
        return expert_ids, weights * expert_scale[expert_ids]


class Gemma4Layer(nnx.Module):
    """Attention, then MLP and experts side by side; every part is normalised before and after."""

    def __init__(self, config: Gemma4Config, layer: int, *, experts: ExpertStore, dtype: DTypeLike):
        width, eps, shape = config.hidden_size, config.norm_eps, config.expert_shape
        self.self_attn = Gemma4Attention(config, layer, dtype=dtype)
        self.input_layernorm = Gemma4Norm(width, eps, dtype=dtype)
        self.post_attention_layernorm = Gemma4Norm(width, eps, dtype=dtype)
        self.pre_feedforward_layernorm = Gemma4Norm(width, eps, dtype=dtype)
        self.post_feedforward_layernorm = Gemma4Norm(width, eps, dtype=dtype)
        self.mlp = GatedMlp(width, config.intermediate_size, config.activation, dtype=dtype)
        self.layer_scalar = nnx.Param(jnp.zeros((1,), dtype))
        self.has_experts = shape is not None
        if shape is not None:
            self.moe_index = config.moe_layers.index(layer)
            self.num_experts = shape.experts
            self.router = Gemma4Router(shape, eps, dtype=dtype)
            self.experts = make_experts(shape, experts, dtype=dtype)
            self.post_feedforward_layernorm_1 = Gemma4Norm(width, eps, dtype=dtype)
            self.pre_feedforward_layernorm_2 = Gemma4Norm(width, eps, dtype=dtype)
            self.post_feedforward_layernorm_2 = Gemma4Norm(width, eps, dtype=dtype)

    def __call__(
        self, x: Float[Array, "B T D"], rope: tuple[Array, Array], memory: Memory
    ) -> tuple[Float[Array, "B T D"], Memory, Float[Array, " E"] | None]:
        """Returns hidden states, memory and, from a MoE layer, its routing mass."""
        attended, memory = self.self_attn(self.input_layernorm(x), rope, memory)
        x = x + self.post_attention_layernorm(attended)
        out, mass = self.mlp(self.pre_feedforward_layernorm(x)), None
        if self.has_experts:
            routed, mass = self._route(x, memory)
            out = self.post_feedforward_layernorm_1(out) + self.post_feedforward_layernorm_2(routed)
        x = x + self.post_feedforward_layernorm(out)
        return x * expand_to(self.layer_scalar[...], x.ndim), memory, mass

    def _route(
        self, x: Float[Array, "B T D"], memory: Memory
    ) -> tuple[Float[Array, "B T D"], Float[Array, " E"]]:
        """The experts' sum, and their routing mass; the router sees x, experts its norm."""
        expert_ids, weights = self.router(x.reshape(-1, x.shape[-1]))
        flat = self.pre_feedforward_layernorm_2(x).reshape(-1, x.shape[-1])
        out = self.experts(flat, expert_ids, weights, memory, self.moe_index).astype(x.dtype)
        mass = routing_mass(expert_ids, weights, memory.token_mask.reshape(-1), self.num_experts)
        return out.reshape(x.shape), mass


class Gemma4(CausalLm):
    """The shared decoder with its own layers and norms."""

    config: Gemma4Config
    layer_type: type = Gemma4Layer
    norm_type: type = Gemma4Norm
