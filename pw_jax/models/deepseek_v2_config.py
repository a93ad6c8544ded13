"""The ``config.json`` of DeepSeek-V2."""

from collections.abc import Mapping
from typing import Any

from pw_jax.models.config import ExpertShape, Fields, KvShape, read_rope, yarn_magnitude
from pw_jax.models.deepseek_v2 import DeepseekV2Config, LatentShape


def read_config(raw: Mapping[str, Any], source: str = "config.json") -> DeepseekV2Config:
    """Reads a DeepSeek-V2 ``config.json``.

    Args:
        raw: The parsed file.
        source: How errors call the file.

    Raises:
        UserError: A field is missing, wrong or not supported.
    """
    fields = Fields(raw, source)
    _refuse(fields)
    heads, layers = fields.integer("num_attention_heads"), fields.integer("num_hidden_layers")
    latent = _latent_shape(fields)
    head_dim = max(latent.plain_dim + latent.rope_dim, latent.value_dim)
    bias = fields.flag("attention_bias", False)
    activation = fields.text("hidden_act", "silu")
    first_sparse = raw.get("first_k_dense_replace") or 0
    shape = ExpertShape(
        experts=fields.integer("n_routed_experts"),
        top_k=fields.integer("num_experts_per_tok"),
        embed=fields.integer("hidden_size"),
        ffn=fields.integer("moe_intermediate_size"),
        activation=activation,
    )
    groups, top_groups = _groups(fields, shape)
    return DeepseekV2Config(
        model_type="deepseek_v2",
        vocab_size=fields.integer("vocab_size"),
        hidden_size=shape.embed,
        intermediate_size=fields.integer("intermediate_size"),
        num_heads=heads,
        kv_shapes=(KvShape(heads, head_dim + head_dim % 2),) * layers,
        activation=activation,
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        max_positions=fields.integer("max_position_embeddings", 2048),
        rope=read_rope(fields),
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=fields.flag("mlp_bias", False),
        expert_shape=shape,
        moe_layers=tuple(range(first_sparse, layers)),
        renormalize=fields.flag("norm_topk_prob", False),
        latent=latent,
        shared_experts_ffn=shape.ffn * fields.integer("n_shared_experts", 2),
        routed_scale=fields.number("routed_scaling_factor", 1.0),
        expert_groups=groups,
        top_groups=top_groups,
        bos_token_id=fields.token_id("bos_token_id"),
        pad_token_id=fields.token_id("pad_token_id"),
        eos_token_ids=fields.token_ids("eos_token_id"),
    )


def _refuse(fields: Fields) -> None:
    """Complains about what would load and compute something else."""
    heads = fields.integer("num_attention_heads")
    for name, only in {
        "scoring_func": "softmax",
        "moe_layer_freq": 1,
        "num_key_value_heads": heads,
    }.items():
        if fields.raw.get(name, only) not in (only, None):
            raise fields.error(f"{name} {fields.raw[name]!r} is not supported, only {only!r}")
    scale = fields.number("routed_scaling_factor", 1.0)
    if fields.flag("norm_topk_prob", False) and scale != 1:
        # DeepSeek's code then drops the factor, vLLM applies it, transformers ignores the flag.
        raise fields.error(
            f"norm_topk_prob with a routed_scaling_factor of {scale} has no agreed meaning"
        )


def _latent_shape(fields: Fields) -> LatentShape:
    plain, turning = fields.integer("qk_nope_head_dim"), fields.integer("qk_rope_head_dim")
    if turning % 2:
        raise fields.error(f"qk_rope_head_dim {turning} must be even for a rotary embedding")
    scaling = fields.raw.get("rope_parameters") or fields.raw.get("rope_scaling") or {}
    scale = (plain + turning) ** -0.5
    if read_rope(fields).kind != "default" and scaling.get("mscale_all_dim"):
        # Beside the magnitude of the rope tables, which touches only the dimensions that rotate.
        factor = read_rope(fields).factor
        scale *= yarn_magnitude(factor, scaling["mscale_all_dim"]) ** 2
    has_rank = fields.raw.get("q_lora_rank") is not None
    return LatentShape(
        query_rank=fields.integer("q_lora_rank") if has_rank else None,
        rank=fields.integer("kv_lora_rank"),
        plain_dim=plain,
        rope_dim=turning,
        value_dim=fields.integer("v_head_dim"),
        scale=scale,
    )


def _groups(fields: Fields, shape: ExpertShape) -> tuple[int, int]:
    """Groups of experts, and how many of them a token may use; (1, 1) without groups."""
    method = fields.text("topk_method", "greedy")
    if method == "greedy":
        groups, kept = 1, 1
    elif method == "group_limited_greedy":
        groups, kept = fields.integer("n_group"), fields.integer("topk_group")
    else:
        raise fields.error(f"topk_method {method!r}: use greedy or group_limited_greedy")
    if shape.experts % groups or kept > groups or shape.top_k > kept * (shape.experts // groups):
        raise fields.error(
            f"cannot choose {shape.top_k} of {shape.experts} experts in {kept} of {groups} groups"
        )
    return groups, kept
