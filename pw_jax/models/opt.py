"""OPT: learned positions, LayerNorm, biases everywhere and a plain MLP."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pw_jax.models.config import Fields, KvShape, ModelConfig, RopeConfig, read_attention_heads
from pw_jax.models.decoder import CausalLm, Output
from pw_jax.models.latent import LatentLayer, factored_latents, factored_layer
from pw_jax.models.layers import ACTIVATIONS, Embedding, LayerNorm, Linear
from pw_jax.models.memory import Memory
from pw_jax.models.moe import ExpertStore

POSITION_OFFSET = 2  # the first rows of the position table belong to no position


class OptAttention(nnx.Module):
    """Attention whose queries are scaled after the bias; positions come with the embedding."""

    def __init__(self, config: ModelConfig, layer: int, *, dtype: DTypeLike):
        width, bias = config.hidden_size, config.qkv_bias
        self.layer = layer
        self.kv = config.kv_shapes[layer]
        self.q_proj = Linear(width, width, bias=bias, dtype=dtype)
        self.k_proj = Linear(width, width, bias=bias, dtype=dtype)
        self.v_proj = Linear(width, width, bias=bias, dtype=dtype)
        self.out_proj = Linear(width, width, bias=config.output_bias, dtype=dtype)

    @property
    def latent_layer(self) -> LatentLayer | None:
        """What a cache of latents could keep; None unless keys and values are factored."""
        return factored_layer(self.k_proj, self.v_proj, self.kv.kv_heads, self.kv, None)

    def __call__(
        self, x: Float[Array, "B T D"], memory: Memory
    ) -> tuple[Float[Array, "B T D"], Memory]:
        """Returns what to add to the residual, and the memory with the new keys and values."""
        heads = (*x.shape[:2], -1, self.kv.head_dim)
        q = (self.q_proj(x) * self.kv.head_dim**-0.5).reshape(heads)
        options = {"scale": 1.0, "window": self.kv.window}
        if self.latent_layer is None:
            k, v = self.k_proj(x).reshape(heads), self.v_proj(x).reshape(heads)
            out, memory = memory.attend(self.layer, q, k, v, soft_cap=None, **options)
        else:
            latents = factored_latents(self.k_proj, self.v_proj, x, self.kv.head_dim, None, None)
            out, memory = memory.attend_latents(self.layer, q, latents, **options)
        return self.out_proj(out.reshape(x.shape)), memory


class OptLayer(nnx.Module):
    """Attention and MLP, each behind a norm; ``final_layer_norm`` is the one before the MLP."""

    def __init__(self, config: ModelConfig, layer: int, *, dtype: DTypeLike):
        width, hidden, eps = config.hidden_size, config.intermediate_size, config.norm_eps
        self.self_attn_layer_norm = LayerNorm(width, eps, dtype=dtype)
        self.self_attn = OptAttention(config, layer, dtype=dtype)
        self.final_layer_norm = LayerNorm(width, eps, dtype=dtype)
        self.fc1 = Linear(width, hidden, bias=config.mlp_bias, dtype=dtype)
        self.fc2 = Linear(hidden, width, bias=config.mlp_bias, dtype=dtype)
        self.activation = config.activation

    def __call__(
        self, x: Float[Array, "B T D"], memory: Memory
    ) -> tuple[Float[Array, "B T D"], Memory]:
        """Returns hidden states and memory."""
        attended, memory = self.self_attn(self.self_attn_layer_norm(x), memory)
        x = x + attended
        hidden = ACTIVATIONS[self.activation](self.fc1(self.final_layer_norm(x)))
        return x + self.fc2(hidden), memory


class OptDecoder(nnx.Module):
    """What the files call ``model.decoder``."""

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike):
        width = config.hidden_size
        self.embed_tokens = Embedding(config.vocab_size, width, dtype=dtype)
        self.embed_positions = Embedding(config.max_positions + POSITION_OFFSET, width, dtype=dtype)
        self.final_layer_norm = LayerNorm(width, config.norm_eps, dtype=dtype)
        self.layers = nnx.List(
            [OptLayer(config, layer, dtype=dtype) for layer in range(config.num_layers)]
        )

    def __call__(
        self, tokens: Int[Array, "B T"], positions: Int[Array, "B T"], memory: Memory
    ) -> tuple[Float[Array, "B T D"], Memory]:
        """Returns hidden states after the last norm, and memory."""
        x = self.embed_tokens(tokens) + self.embed_positions(positions + POSITION_OFFSET)
        for layer in self.layers:
            x, memory = layer(x, memory)
        return self.final_layer_norm(x), memory


class OptModel(nnx.Module):
    """What the files call ``model``: a decoder and nothing else."""

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike):
        self.decoder = OptDecoder(config, dtype=dtype)


class Opt(CausalLm):
    """A decoder of its own, and a head.

    Args:
        config: The model.
        experts: OPT has none; both kinds build the same model.
        dtype: Of all weights.
    """

    def __init__(
        self, config: ModelConfig, *, experts: ExpertStore = "dense", dtype: DTypeLike = jnp.float32
    ):
        del experts
        self.config = config
        self.model = OptModel(config, dtype=dtype)
        if not config.tie_word_embeddings:
            self.lm_head = Linear(config.hidden_size, config.vocab_size, dtype=dtype)

    def __call__(
        self, tokens: Int[Array, "B T"], positions: Int[Array, "B T"], memory: Memory
    ) -> Output:
        """Runs all layers; positions must be below ``config.max_positions``."""
        hidden, memory = self.model.decoder(tokens, positions, memory)
        return Output(hidden, memory, jnp.zeros((0, 0), jnp.float32))

    @staticmethod
    def ropes(
        config: ModelConfig, positions: Int[Array, "B T"], dtype: DTypeLike
    ) -> tuple[None, ...]:
        """None for each layer: positions come with the embedding."""
        del positions, dtype
        return (None,) * config.num_layers

    def logits(self, hidden: Float[Array, "*batch D"]) -> Float[Array, "*batch V"]:
        """Scores of the next token, float32."""
        tied = self.config.tie_word_embeddings
        weight = (self.model.decoder.embed_tokens if tied else self.lm_head).weight[...]
        return jnp.einsum("...d,vd->...v", hidden, weight, preferred_element_type=jnp.float32)


def read_config(raw: Mapping[str, Any], source: str = "config.json") -> ModelConfig:
    """Reads an OPT ``config.json``.

    Args:
        raw: The parsed file.
        source: How errors call the file.

    Raises:
        UserError: A field is missing, wrong or not supported.
    """
    fields = Fields(raw, source)
    heads, kv_heads, head_dim = read_attention_heads(fields)
    hidden = fields.integer("hidden_size")
    # opt-350m alone differs: it normalises after each block and projects its embedding.
    for name, expected in {
        "do_layer_norm_before": True,
        "layer_norm_elementwise_affine": True,
        "_remove_final_layer_norm": False,
        "word_embed_proj_dim": hidden,
    }.items():
        if raw.get(name, expected) not in (expected, None):
            raise fields.error(f"{name} must be {expected!r}, {raw[name]!r} is not supported")
    bias = fields.flag("enable_bias", True)
    return ModelConfig(
        model_type="opt",
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.integer("ffn_dim"),
        num_heads=heads,
        kv_shapes=(KvShape(kv_heads, head_dim),) * fields.integer("num_hidden_layers"),
        activation=fields.text("activation_function", "relu"),
        norm_eps=1e-5,  # not in the file: PyTorch's own
        max_positions=fields.integer("max_position_embeddings", 2048),
        rope=RopeConfig(theta=0.0, kind="none"),
        tie_word_embeddings=fields.flag("tie_word_embeddings", True),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
        bos_token_id=fields.token_id("bos_token_id"),
        pad_token_id=fields.token_id("pad_token_id"),
        eos_token_ids=fields.token_ids("eos_token_id"),
    )
