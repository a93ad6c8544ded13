"""Mixtral: routed experts in every layer, the chosen weights renormalised."""

from collections.abc import Mapping
from typing import Any

from pw_jax.models.config import (
    ExpertShape,
    Fields,
    KvShape,
    ModelConfig,
    read_attention_heads,
    read_rope,
)
from pw_jax.models.decoder import CausalLm


class Mixtral(CausalLm):
    """The shared decoder with sparse layers only."""


def read_config(raw: Mapping[str, Any], source: str = "config.json") -> ModelConfig:
    """Reads a Mixtral ``config.json``.

    Args:
        raw: The parsed file.
        source: How errors call the file.

    Raises:
        UserError: A field is missing, wrong or not supported.
    """
    fields = Fields(raw, source)
    heads, kv_heads, head_dim = read_attention_heads(fields)
    layers = fields.integer("num_hidden_layers")
    activation = fields.text("hidden_act", "silu")
    hidden, ffn = fields.integer("hidden_size"), fields.integer("intermediate_size")
    shape = ExpertShape(
        experts=fields.integer("num_local_experts"),
        top_k=fields.integer("num_experts_per_tok", 2),
        embed=hidden,
        ffn=ffn,
        activation=activation,
    )
    if shape.top_k > shape.experts:
        raise fields.error(
            f"num_experts_per_tok {shape.top_k} exceeds num_local_experts {shape.experts}"
        )
    sliding = raw.get("sliding_window") is not None
    window = fields.integer("sliding_window") if sliding else None
    return ModelConfig(
        model_type="mixtral",
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=ffn,
        num_heads=heads,
        kv_shapes=(KvShape(kv_heads, head_dim, window),) * layers,
        activation=activation,
        norm_eps=fields.number("rms_norm_eps", 1e-5),
        max_positions=fields.integer("max_position_embeddings", 131072),
        rope=read_rope(fields, default_theta=1e6),
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        expert_shape=shape,
        moe_layers=tuple(range(layers)),
        renormalize=True,
        bos_token_id=fields.token_id("bos_token_id"),
        pad_token_id=fields.token_id("pad_token_id"),
        eos_token_ids=fields.token_ids("eos_token_id"),
    )
