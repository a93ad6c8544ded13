"""Llama: dense decoders of LLaMA-65B, LLaMA-3 and 3.1, SmolLM and their like."""

from collections.abc import Mapping
from typing import Any

from pw_jax.models.config import Fields, KvShape, ModelConfig, read_attention_heads, read_rope
from pw_jax.models.decoder import CausalLm


class Llama(CausalLm):
    """The shared decoder as it is."""


def read_config(raw: Mapping[str, Any], source: str = "config.json") -> ModelConfig:
    """Reads a Llama ``config.json``.

    Args:
        raw: The parsed file.
        source: How errors call the file.

    Raises:
        UserError: A field is missing, wrong or not supported.
    """
    fields = Fields(raw, source)
    heads, kv_heads, head_dim = read_attention_heads(fields)
    bias = fields.flag("attention_bias", False)
    return ModelConfig(
        model_type="llama",
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        intermediate_size=fields.integer("intermediate_size"),
        num_heads=heads,
        kv_shapes=(KvShape(kv_heads, head_dim),) * fields.integer("num_hidden_layers"),
        activation=fields.text("hidden_act", "silu"),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        max_positions=fields.integer("max_position_embeddings", 2048),
        rope=read_rope(fields),
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=fields.flag("mlp_bias", False),
        bos_token_id=fields.token_id("bos_token_id"),
        pad_token_id=fields.token_id("pad_token_id"),
        eos_token_ids=fields.token_ids("eos_token_id"),
    )
