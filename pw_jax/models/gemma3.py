"""Gemma 3 text models: five layers with a sliding window to each full one, norms on both sides."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32

from pw_jax.models.attention import SelfAttention
from pw_jax.models.config import Fields, KvShape, ModelConfig, RopeConfig, read_rope
from pw_jax.models.decoder import CausalLm
from pw_jax.models.gemma4 import Gemma4Norm
from pw_jax.models.gemma4_config import FULL, SLIDING, layer_kinds
from pw_jax.models.layers import GatedMlp, rotate
from pw_jax.models.memory import Memory
from pw_jax.models.moe import ExpertStore


@dataclass(frozen=True, kw_only=True)
class Gemma3Config(ModelConfig):
    """What only Gemma 3 has; `rope` is that of the full layers.

    Attributes:
        query_scale: Multiplies the scores.
    """

    query_scale: float


class Gemma3Norm(Gemma4Norm):
    """Multiplies by one plus the weight."""

    def scale(self) -> Float32[Array | np.ndarray, " D"]:
        """What normalised numbers are multiplied by."""
        return super().scale() + np.float32(1)


class Gemma3Attention(SelfAttention):
    """Queries and keys are normalised per head before they rotate."""

    def __init__(self, config: Gemma3Config, layer: int, *, dtype: DTypeLike):
        super().__init__(config, layer, dtype=dtype)
        self.scale = config.query_scale
        self.q_norm = Gemma3Norm(self.kv.head_dim, config.norm_eps, dtype=dtype)
        self.k_norm = Gemma3Norm(self.kv.head_dim, config.norm_eps, dtype=dtype)

    @property
    def latent_layer(self) -> None:
        """None: keys are normalised, so that U and a latent are not all that makes them."""
        return None

    def __call__(
        self, x: Float[Array, "B T D"], rope: tuple[Array, Array], memory: Memory
    ) -> tuple[Float[Array, "B T D"], Memory]:
        """Returns what to add to the residual, and the memory with the new keys and values."""
        heads = (*x.shape[:2], -1, self.kv.head_dim)
        q = rotate(self.q_norm(self.q_proj(x).reshape(heads)), rope)
        k = rotate(self.k_norm(self.k_proj(x).reshape(heads)), rope)
        v = self.v_proj(x).reshape(heads)
        out, memory = memory.attend(
            self.layer, q, k, v, scale=self.scale, window=self.kv.window, soft_cap=None
        )
        return self.o_proj(out.reshape(*x.shape[:2], -1)), memory


class Gemma3Layer(nnx.Module):
    """Attention, then MLP; both are normalised before and after."""

    def __init__(self, config: Gemma3Config, layer: int, *, experts: ExpertStore, dtype: DTypeLike):
        del experts
        width, eps = config.hidden_size, config.norm_eps
        self.self_attn = Gemma3Attention(config, layer, dtype=dtype)
        self.input_layernorm = Gemma3Norm(width, eps, dtype=dtype)
        self.post_attention_layernorm = Gemma3Norm(width, eps, dtype=dtype)
        self.pre_feedforward_layernorm = Gemma3Norm(width, eps, dtype=dtype)
        self.post_feedforward_layernorm = Gemma3Norm(width, eps, dtype=dtype)
        self.mlp = GatedMlp(width, config.intermediate_size, config.activation, dtype=dtype)

    def __call__(
        self, x: Float[Array, "B T D"], rope: tuple[Array, Array], memory: Memory
    ) -> tuple[Float[Array, "B T D"], Memory, None]:
        """Returns hidden states and memory; there are no routed experts."""
        attended, memory = self.self_attn(self.input_layernorm(x), rope, memory)
        x = x + self.post_attention_layernorm(attended)
        out = self.mlp(self.pre_feedforward_layernorm(x))
        return x + self.post_feedforward_layernorm(out), memory, None


class Gemma3(CausalLm):
    """The shared decoder with its own layers and norms."""

    layer_type: type = Gemma3Layer
    norm_type: type = Gemma3Norm


def read_config(raw: Mapping[str, Any], source: str = "config.json") -> Gemma3Config:
    """Reads the ``config.json`` of a Gemma 3 text model.

    Args:
        raw: The parsed file.
        source: How errors call the file.

    Raises:
        UserError: A field is missing, wrong or not supported.
    """
    fields = Fields(raw, source)
    if raw.get("attn_logit_softcapping") is not None or raw.get("use_bidirectional_attention"):
        raise fields.error("attn_logit_softcapping and use_bidirectional_attention must be off")
    heads, kv_heads = fields.integer("num_attention_heads"), fields.integer("num_key_value_heads")
    head_dim, window = fields.integer("head_dim", 256), fields.integer("sliding_window", 4096)
    if heads % kv_heads or head_dim % 2:
        raise fields.error(f"{kv_heads} kv heads of {head_dim} do not suit {heads} query heads")
    kinds = layer_kinds(fields, fields.integer("sliding_window_pattern", 6))
    bias = fields.flag("attention_bias", False)
    has_cap = raw.get("final_logit_softcapping") is not None
    return Gemma3Config(
        model_type="gemma3_text",
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        intermediate_size=fields.integer("intermediate_size"),
        num_heads=heads,
        kv_shapes=tuple(
            KvShape(kv_heads, head_dim, window if kind == SLIDING else None) for kind in kinds
        ),
        activation=fields.text("hidden_activation", "gelu_pytorch_tanh"),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        max_positions=fields.integer("max_position_embeddings", 131072),
        rope=_rope(fields, FULL),
        sliding_rope=_rope(fields, SLIDING),
        embedding_scale=fields.integer("hidden_size") ** 0.5,
        query_scale=fields.number("query_pre_attn_scalar", 256.0) ** -0.5,
        final_soft_cap=fields.number("final_logit_softcapping") if has_cap else None,
        tie_word_embeddings=fields.flag("tie_word_embeddings", True),
        qkv_bias=bias,
        output_bias=bias,
        bos_token_id=fields.token_id("bos_token_id"),
        pad_token_id=fields.token_id("pad_token_id"),
        eos_token_ids=fields.token_ids("eos_token_id"),
    )


def _rope(fields: Fields, kind: str) -> RopeConfig:
    """Of one kind of layer, in the words of version 5 of transformers or of version 4."""
    both = fields.raw.get("rope_parameters")
    if isinstance(both, Mapping) and isinstance(both.get(kind), Mapping):
        return read_rope(Fields({"rope_parameters": both[kind]}, fields.source))
    if kind == SLIDING:  # never stretched
        return RopeConfig(theta=fields.number("rope_local_base_freq", 1e4))
    return read_rope(fields, default_theta=1e6)
