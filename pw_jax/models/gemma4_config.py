"""The ``config.json`` of Gemma 4: text models, and the text part of those that also see or hear."""

from collections.abc import Mapping
from typing import Any

from pw_jax.models.config import ExpertShape, Fields, KvShape, RopeConfig, read_rope
from pw_jax.models.gemma4 import Gemma4Config

SLIDING, FULL = "sliding_attention", "full_attention"
DEFAULT_ROPES = {
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
}


def read_config(raw: Mapping[str, Any], source: str = "config.json") -> Gemma4Config:
    """Reads a Gemma 4 ``config.json``.

    Args:
        raw: The parsed file; its ``text_config`` if there is one, where the end tokens and the tied
            head of the whole file come first.
        source: How errors call the file.

    Raises:
        UserError: A field is missing, wrong or not supported.
    """
    model_type = raw["model_type"]
    text = raw.get("text_config")
    if text is not None:
        if not isinstance(text, Mapping):
            raise Fields(raw, source).error(f"field 'text_config' must be an object, got {text!r}")
        whole = ("eos_token_id", "bos_token_id", "pad_token_id", "tie_word_embeddings")
        raw = {**text, **{key: raw[key] for key in whole if raw.get(key) is not None}}
    fields = Fields(raw, source)
    _refuse(fields)
    keys_are_values = fields.flag("attention_k_eq_v", False)
    kv_shapes = _kv_shapes(fields, keys_are_values)
    bias = fields.flag("attention_bias", False)
    experts = _expert_shape(fields)
    has_cap = raw.get("final_logit_softcapping") is not None
    return Gemma4Config(
        model_type=model_type,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        intermediate_size=fields.integer("intermediate_size"),
        num_heads=fields.integer("num_attention_heads"),
        kv_shapes=kv_shapes,
        activation=fields.text("hidden_activation", "gelu_pytorch_tanh"),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        max_positions=fields.integer("max_position_embeddings", 131072),
        rope=_rope(fields, FULL),
        sliding_rope=_rope(fields, SLIDING),
        keys_are_values=keys_are_values,
        final_soft_cap=fields.number("final_logit_softcapping") if has_cap else None,
        embedding_scale=fields.integer("hidden_size") ** 0.5,
        tie_word_embeddings=fields.flag("tie_word_embeddings", True),
        qkv_bias=bias,
        output_bias=bias,
        expert_shape=experts,
        moe_layers=tuple(range(len(kv_shapes))) if experts else (),
        renormalize=experts is not None,
        bos_token_id=fields.token_id("bos_token_id"),
        pad_token_id=fields.token_id("pad_token_id"),
        eos_token_ids=fields.token_ids("eos_token_id"),
    )


def _refuse(fields: Fields) -> None:
    """Complains about what other sizes have: it would load, and compute something else."""
    for name in ("num_kv_shared_layers", "hidden_size_per_layer_input"):
        if fields.raw.get(name):
            raise fields.error(f"{name} {fields.raw[name]} is not supported (only 0, as 26B-A4B)")
    if fields.raw.get("use_bidirectional_attention") == "all":
        raise fields.error("use_bidirectional_attention 'all' is not supported")


def _expert_shape(fields: Fields) -> ExpertShape | None:
    if not fields.flag("enable_moe_block", False):
        return None
    old = fields.raw.get("expert_intermediate_size")  # what the first files called it
    name = "moe_intermediate_size" if old is None else "expert_intermediate_size"
    shape = ExpertShape(
        experts=fields.integer("num_experts"),
        top_k=fields.integer("top_k_experts"),
        embed=fields.integer("hidden_size"),
        ffn=fields.integer(name),
        activation=fields.text("hidden_activation", "gelu_pytorch_tanh"),
    )
    if shape.top_k > shape.experts:
        raise fields.error(f"top_k_experts {shape.top_k} exceeds num_experts {shape.experts}")
    return shape


def _kv_shapes(fields: Fields, keys_are_values: bool) -> tuple[KvShape, ...]:
    """Heads of each layer.

    Files name those of full layers by ``global_head_dim`` and ``num_global_key_value_heads``, or,
    as written by transformers 5.24, layer by layer in ``per_layer_config``.
    """
    heads, kv_heads = fields.integer("num_attention_heads"), fields.integer("num_key_value_heads")
    head_dim, window = fields.integer("head_dim", 256), fields.integer("sliding_window", 512)
    by_layer = fields.raw.get("per_layer_config")
    whole = {"head_dim": fields.integer("global_head_dim", 512)}
    if keys_are_values:
        whole["num_key_value_heads"] = fields.integer("num_global_key_value_heads", kv_heads)
    shapes = []
    for layer, kind in enumerate([*layer_kinds(fields)[:-1], FULL]):  # the last one always is
        own = whole if kind == FULL else {}
        if by_layer is not None:
            own = {int(key): value for key, value in by_layer.items()}.get(layer, {})
        defaults = {"head_dim": head_dim, "num_key_value_heads": kv_heads}
        layer_fields = Fields({**defaults, **own}, fields.source)
        unknown = set(own) - set(defaults)
        shape = KvShape(
            layer_fields.integer("num_key_value_heads"),
            layer_fields.integer("head_dim"),
            window if kind == SLIDING else None,
        )
        if unknown or heads % shape.kv_heads or shape.head_dim % 2:
            raise fields.error(f"layer {layer} cannot have {own} beside {heads} query heads")
        shapes.append(shape)
    return tuple(shapes)


def layer_kinds(fields: Fields, period: int = 6) -> list[str]:
    """Every sixth layer is full unless the file says otherwise."""
    layers = fields.integer("num_hidden_layers")
    kinds = fields.raw.get("layer_types") or [
        FULL if (layer + 1) % period == 0 else SLIDING for layer in range(layers)
    ]
    if len(kinds) != layers or not set(kinds) <= {SLIDING, FULL}:
        raise fields.error(f"field 'layer_types' must give {layers} times {SLIDING} or {FULL}")
    return list(kinds)


def _rope(fields: Fields, kind: str) -> RopeConfig:
    given = fields.raw.get("rope_parameters") or DEFAULT_ROPES
    if not isinstance(given, Mapping) or not isinstance(given.get(kind), Mapping):
        raise fields.error(f"field 'rope_parameters' must have an object {kind!r}")
    return read_rope(Fields({"rope_parameters": given[kind]}, fields.source))
