"""The pre-norm decoder that Llama, Qwen2-MoE and their like share."""

from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pw_jax.models.attention import SelfAttention
from pw_jax.models.config import ModelConfig
from pw_jax.models.layers import Embedding, GatedMlp, Linear, RmsNorm, rope_tables
from pw_jax.models.memory import Memory
from pw_jax.models.moe import ExpertStore, SparseMoe


class Output(NamedTuple):
    """What a forward pass gives.

    Attributes:
        hidden: [B, T, D] after the last norm; `CausalLm.logits` takes any part of it.
        memory: The memory with the new keys and values.
        routing_mass: float32 [MoE layers, E]: the weight each expert was given by real tokens.
    """

    hidden: Array
    memory: Memory
    routing_mass: Array


class DecoderLayer(nnx.Module):
    """Attention and MLP, each behind a norm and beside a residual.

    Args:
        config: The model.
        layer: Index of the layer; whether it has routed experts is in ``config.moe_layers``.
        experts: Where routed experts' weights are.
        dtype: Of the weights.
    """

    def __init__(self, config: ModelConfig, layer: int, *, experts: ExpertStore, dtype: DTypeLike):
        width, eps = config.hidden_size, config.norm_eps
        self.input_layernorm = RmsNorm(width, eps, dtype=dtype)
        self.self_attn = SelfAttention(config, layer, dtype=dtype)
        self.post_attention_layernorm = RmsNorm(width, eps, dtype=dtype)
        if layer in config.moe_layers:
            self.mlp = SparseMoe(config, layer, experts=experts, dtype=dtype)
        else:
            self.mlp = GatedMlp(
                width,
                config.intermediate_size,
                config.activation,
                bias=config.mlp_bias,
                dtype=dtype,
            )

    def __call__(
        self, x: Float[Array, "B T D"], rope: tuple[Array, Array], memory: Memory
    ) -> tuple[Float[Array, "B T D"], Memory, Float[Array, " E"] | None]:
        """Returns hidden states, memory and, from a MoE layer, its routing mass."""
        attended, memory = self.self_attn(self.input_layernorm(x), rope, memory)
        x = x + attended
        normal = self.post_attention_layernorm(x)
        if isinstance(self.mlp, SparseMoe):
            out, mass = self.mlp(normal, memory)
            return x + out, memory, mass
        return x + self.mlp(normal), memory, None


class Decoder(nnx.Module):
    """Embedding, layers and last norm: what Hugging Face files call ``model``."""

    def __init__(self, config: ModelConfig, *, experts: ExpertStore, dtype: DTypeLike):
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype=dtype)
        self.layers = nnx.List(
            [
                DecoderLayer(config, layer, experts=experts, dtype=dtype)
                for layer in range(config.num_layers)
            ]
        )
        self.norm = RmsNorm(config.hidden_size, config.norm_eps, dtype=dtype)


class CausalLm(nnx.Module):
    """A decoder with a head that predicts the next token.

    Args:
        config: The model.
        experts: ``dense`` arrays, or ``paged`` in the memory.
        dtype: Of all weights.
    """

    def __init__(
        self, config: ModelConfig, *, experts: ExpertStore = "dense", dtype: DTypeLike = jnp.float32
    ):
        self.config = config
        self.model = Decoder(config, experts=experts, dtype=dtype)
        if not config.tie_word_embeddings:
            self.lm_head = Linear(config.hidden_size, config.vocab_size, dtype=dtype)

    def __call__(
        self, tokens: Int[Array, "B T"], positions: Int[Array, "B T"], memory: Memory
    ) -> Output:
        """Runs all layers.

        Args:
            tokens: int32 token ids; padding may be any id.
            positions: int32 place of each token in its own text, from 0.
            memory: See `pw_jax.models.memory`.
        """
        config = self.config
        x = self.model.embed_tokens(tokens)
        rope = rope_tables(config.rope, config.kv_shapes[0].head_dim, positions, x.dtype)
        masses = []
        for layer in self.model.layers:
            x, memory, mass = layer(x, rope, memory)
            masses += [] if mass is None else [mass]
        experts = config.expert_shape.experts if config.expert_shape else 0
        mass = jnp.stack(masses) if masses else jnp.zeros((0, experts), jnp.float32)
        return Output(self.model.norm(x), memory, mass)

    def logits(self, hidden: Float[Array, "*batch D"]) -> Float[Array, "*batch V"]:
        """Scores of the next token; float32 also for bf16 weights, where rounding makes ties."""
        tied = self.config.tie_word_embeddings
        weight = (self.model.embed_tokens if tied else self.lm_head).weight[...]
        return jnp.einsum("...d,vd->...v", hidden, weight, preferred_element_type=jnp.float32)
