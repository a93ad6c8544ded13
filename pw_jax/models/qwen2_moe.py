"""Qwen2-MoE: Qwen1.5-MoE-A2.7B and its like; routed experts beside a gated shared expert."""

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


class Qwen2Moe(CausalLm):
    """The shared decoder with sparse layers."""


def read_config(raw: Mapping[str, Any], source: str = "config.json") -> ModelConfig:
    """Reads a Qwen2-MoE ``config.json``.

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
    hidden = fields.integer("hidden_size")
    shape = ExpertShape(
        experts=fields.integer("num_experts"),
        top_k=fields.integer("num_experts_per_tok"),
        embed=hidden,
        ffn=fields.integer("moe_intermediate_size"),
        activation=activation,
    )
    if shape.top_k > shape.experts:
        raise fields.error(f"num_experts_per_tok {shape.top_k} exceeds num_experts {shape.experts}")
    return ModelConfig(
        model_type="qwen2_moe",
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size"),
        num_heads=heads,
        kv_shapes=tuple(KvShape(kv_heads, head_dim, window) for window in _windows(fields, layers)),
        activation=activation,
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        max_positions=fields.integer("max_position_embeddings", 32768),
        rope=read_rope(fields),
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        qkv_bias=fields.flag("qkv_bias", True),
        expert_shape=shape,
        moe_layers=_moe_layers(fields, layers),
        shared_expert_ffn=fields.integer("shared_expert_intermediate_size"),
        renormalize=fields.flag("norm_topk_prob", False),
        bos_token_id=fields.token_id("bos_token_id"),
        pad_token_id=fields.token_id("pad_token_id"),
        eos_token_ids=fields.token_ids("eos_token_id"),
    )


def _moe_layers(fields: Fields, layers: int) -> tuple[int, ...]:
    """Every `decoder_sparse_step`-th layer is sparse, but for those named as dense."""
    step = fields.integer("decoder_sparse_step", 1)
    dense = fields.integers("mlp_only_layers")
    return tuple(i for i in range(layers) if i not in dense and (i + 1) % step == 0)


def _windows(fields: Fields, layers: int) -> list[int | None]:
    """Sliding windows: explicit in `layer_types`, else even layers below `max_window_layers`."""
    if not fields.flag("use_sliding_window", False):
        return [None] * layers
    window = fields.integer("sliding_window", 4096)
    kinds = fields.raw.get("layer_types")
    if kinds is None:
        below = fields.integer("max_window_layers", 28)
        kinds = [
            "sliding_attention" if i % 2 == 0 and i < below else "full_attention"
            for i in range(layers)
        ]
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise fields.error(f"field 'layer_types' must list all {layers} layers")
    return [window if kind == "sliding_attention" else None for kind in kinds]
