"""The pre-norm decoder that Llama, Qwen2-MoE and their like share."""

from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pw_jax.models.attention import SelfAttention
from pw_jax.models.config import KvShape, ModelConfig
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

    Attributes:
        attention_type: What attends; a family may have its own.
        moe_type: What routes, a `SparseMoe`.

    Args:
        config: The model.
        layer: Index of the layer; whether it has routed experts is in ``config.moe_layers``.
        experts: Where routed experts' weights are.
        dtype: Of the weights.
    """

    attention_type: type = SelfAttention
    moe_type: type = SparseMoe

    def __init__(self, config: ModelConfig, layer: int, *, experts: ExpertStore, dtype: DTypeLike):
        width, eps = config.hidden_size, config.norm_eps
        self.input_layernorm = RmsNorm(width, eps, dtype=dtype)
        self.self_attn = self.attention_type(config, layer, dtype=dtype)
        self.post_attention_layernorm = RmsNorm(width, eps, dtype=dtype)
        if layer in config.moe_layers:
            self.mlp = self.moe_type(config, layer, experts=experts, dtype=dtype)
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

    def __init__(
        self,
        config: ModelConfig,
        *,
        experts: ExpertStore,
        dtype: DTypeLike,
        layer_type: type = DecoderLayer,
        norm_type: type = RmsNorm,
    ):
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype=dtype)
        self.layers = nnx.List(
            [
                layer_type(config, layer, experts=experts, dtype=dtype)
                for layer in range(config.num_layers)
            ]
        )
        self.norm = norm_type(config.hidden_size, config.norm_eps, dtype=dtype)


class CausalLm(nnx.Module):
    """A decoder with a head that predicts the next token.

    Attributes:
        layer_type: One layer; called and made like `DecoderLayer`.
        norm_type: The last norm; made like `RmsNorm`.

    Args:
        config: The model.
        experts: ``dense`` arrays, or ``paged`` in the memory.
        dtype: Of all weights.
    """

    layer_type: type = DecoderLayer
    norm_type: type = RmsNorm

    def __init__(
        self, config: ModelConfig, *, experts: ExpertStore = "dense", dtype: DTypeLike = jnp.float32
    ):
        self.config = config
        self.model = Decoder(
            config,
            experts=experts,
            dtype=dtype,
            layer_type=self.layer_type,
            norm_type=self.norm_type,
        )
        if not config.tie_word_embeddings:
            self.lm_head = Linear(config.hidden_size, config.vocab_size, dtype=dtype)

    @property
    def kv_shapes(self) -> tuple[KvShape, ...]:
        """What a token leaves in each layer."""
        return self.config.kv_shapes

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
        x = self.embed(tokens)
        masses = []
        ropes = self.ropes(config, positions, x.dtype)
        for layer, rope in zip(self.model.layers, ropes, strict=True):
            x, memory, mass = layer(x, rope, memory)
            masses += [] if mass is None else [mass]
        experts = config.expert_shape.experts if config.expert_shape else 0
        mass = jnp.stack(masses) if masses else jnp.zeros((0, experts), jnp.float32)
        return Output(self.model.norm(x), memory, mass)

    def embed(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """What the first layer sees."""
        return scale_rows(self.config, self.model.embed_tokens(tokens))

    @staticmethod
    def ropes(
        config: ModelConfig, positions: Int[Array, "B T"], dtype: DTypeLike
    ) -> tuple[tuple[Array, Array] | None, ...]:
        """Cosines and sines of the positions, a pair for each layer."""

        def table(kv: KvShape) -> tuple[Array, Array]:
            own = config.sliding_rope if kv.window is not None else None
            return rope_tables(own or config.rope, kv.head_dim, positions, dtype)

        tables = {kv: table(kv) for kv in set(config.kv_shapes)}
        return tuple(tables[kv] for kv in config.kv_shapes)

    def logits(self, hidden: Float[Array, "*batch D"]) -> Float[Array, "*batch V"]:
        """Scores of the next token; float32 also for bf16 weights, where rounding makes ties."""
        tied = self.config.tie_word_embeddings
        weight = (self.model.embed_tokens if tied else self.lm_head).weight[...]
        scores = jnp.einsum("...d,vd->...v", hidden, weight, preferred_element_type=jnp.float32)
        return cap_scores(self.config, scores)


def scale_rows(config: ModelConfig, rows: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
    """Rows of the embedding as the first layer sees them; the factor is rounded to their dtype."""
    scale = config.embedding_scale
    return rows if scale == 1 else rows * jnp.asarray(scale, rows.dtype)


def cap_scores(config: ModelConfig, scores: Float[Array, "*batch V"]) -> Float[Array, "*batch V"]:
    """Logits within the model's soft cap, if it has one."""
    cap = config.final_soft_cap
    return scores if cap is None else jnp.float32(cap) * jnp.tanh(scores / jnp.float32(cap))
