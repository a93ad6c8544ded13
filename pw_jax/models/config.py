"""What a model is made of, read from a Hugging Face ``config.json`` dictionary."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

from pw_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class KvShape:
    """Keys and values that one layer keeps for each token.

    Attributes:
        kv_heads: Key/value heads.
        head_dim: Width of one head.
        window: How many tokens back a query sees, itself included; None means all of them.
    """

    kv_heads: int
    head_dim: int
    window: int | None = None


@dataclasses.dataclass(frozen=True)
class ExpertShape:
    """The routed experts of a model; the same in all of its MoE layers.

    Attributes:
        experts: Experts in a layer.
        top_k: Experts that each token uses.
        embed: Width of an expert's input and output.
        ffn: Hidden width of one expert.
        activation: Key of `pw_jax.models.layers.ACTIVATIONS`.
    """

    experts: int
    top_k: int
    embed: int
    ffn: int
    activation: str


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding.

    Attributes:
        theta: Base of the wavelengths.
        kind: ``default``; ``linear`` divides every frequency by `factor`; ``llama3`` divides only
            the long wavelengths (the rule of Llama 3.1); ``yarn`` blends by the number of a pair;
            ``proportional`` turns only the first pairs; ``none`` where positions are learned.
        factor: How far the context is stretched.
        low_freq_factor: llama3: wavelengths above ``original_positions / low_freq_factor`` are
            stretched in full.
        high_freq_factor: llama3: wavelengths below ``original_positions / high_freq_factor`` stay.
        original_positions: llama3, yarn: context length before stretching.
        beta_fast: yarn: pairs that turn more often than this in the old context stay.
        beta_slow: yarn: pairs that turn less often than this are stretched in full.
        attention_factor: yarn: cosines and sines are multiplied by it.
        rotated: proportional: share of the pairs that turn; the others have frequency zero.
    """

    theta: float
    kind: Literal["default", "linear", "llama3", "yarn", "proportional", "none"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_positions: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    rotated: float = 1.0


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """One model, whichever family; hashable, so that modules can hold it as static data.

    Attributes:
        model_type: Family name, a key of `pw_jax.models.registry.FAMILIES`.
        vocab_size: Rows of the embedding (V).
        hidden_size: Width of the residual stream (D).
        intermediate_size: Hidden width of a dense MLP.
        num_heads: Query heads (N).
        kv_shapes: Keys and values of each layer; its length is the number of layers.
        activation: Key of `pw_jax.models.layers.ACTIVATIONS`.
        norm_eps: Added to the mean square in every norm.
        max_positions: Longest sequence the model was made for.
        rope: Rotary embedding.
        tie_word_embeddings: The output head is the embedding matrix.
        qkv_bias: q, k and v projections have a bias.
        output_bias: The attention's output projection has a bias.
        mlp_bias: Dense MLP projections have a bias.
        expert_shape: Routed experts; None for a dense model.
        moe_layers: Layers that have routed experts, ascending.
        shared_expert_ffn: Hidden width of the expert that every token uses; None if there is none.
        renormalize: Weights of the chosen experts are divided by their sum.
        sliding_rope: Rotary embedding of layers with a window; None: the same as of the others.
        embedding_scale: Multiplies the rows of the embedding.
        final_soft_cap: Logits become ``cap * tanh(logits / cap)``; None leaves them.
        bos_token_id: Token that starts a text, if the file names one.
        pad_token_id: Padding token, if the file names one.
        eos_token_ids: Any of these ends a text.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    kv_shapes: tuple[KvShape, ...]
    activation: str
    norm_eps: float
    max_positions: int
    rope: RopeConfig
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    expert_shape: ExpertShape | None = None
    moe_layers: tuple[int, ...] = ()
    shared_expert_ffn: int | None = None
    renormalize: bool = False
    sliding_rope: RopeConfig | None = None
    embedding_scale: float = 1.0
    final_soft_cap: float | None = None
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return len(self.kv_shapes)


class Fields:
    """Reads typed fields of one ``config.json`` and complains by name.

    Args:
        raw: The parsed file.
        source: How errors call the file.
    """

    def __init__(self, raw: Mapping[str, Any], source: str = "config.json"):
        self.raw = raw
        self.source = source

    def integer(self, name: str, default: int | None = None) -> int:
        """A positive integer; null counts as absent."""
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(f"field {name!r} must be a positive integer, got {value!r}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A positive number; null counts as absent."""
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise self.error(f"field {name!r} must be a positive number, got {value!r}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """A boolean; null counts as absent."""
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self.error(f"field {name!r} must be true or false, got {value!r}")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        """A string; null counts as absent."""
        value = self._value(name, default)
        if not isinstance(value, str):
            raise self.error(f"field {name!r} must be a string, got {value!r}")
        return value

    def token_ids(self, name: str) -> tuple[int, ...]:
        """One token id, a list of them, or none at all."""
        value = self.raw.get(name)
        ids = () if value is None else tuple(value) if isinstance(value, list) else (value,)
        if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
            raise self.error(f"field {name!r} must be a token id or a list of them, got {value!r}")
        return ids

    def token_id(self, name: str) -> int | None:
        """One token id or none; old files write a negative number for none."""
        value = self.raw.get(name)
        if isinstance(value, int) and value < 0:
            return None
        return next(iter(self.token_ids(name)), None)

    def integers(self, name: str) -> tuple[int, ...]:
        """A list of integers; null and absence give none."""
        value = self.raw.get(name)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(i, int) for i in value):
            raise self.error(f"field {name!r} must be a list of integers, got {value!r}")
        return tuple(value)

    def error(self, problem: str) -> UserError:
        """The error to raise about this file."""
        return UserError(f"{self.source}: {problem}")

    def _value(self, name: str, default: Any) -> Any:
        value = self.raw.get(name)
        if value is None:
            value = default
        if value is None:
            raise self.error(f"required field {name!r} is missing")
        return value


def read_rope(fields: Fields, default_theta: float = 10000.0) -> RopeConfig:
    """Reads the rotary embedding of a version 4 or version 5 file.

    Version 4 files have ``rope_theta`` beside ``rope_scaling``; version 5 files put everything into
    ``rope_parameters``. The oldest spell ``rope_type`` as ``type``.
    """
    spelling = "rope_parameters" if fields.raw.get("rope_parameters") else "rope_scaling"
    nested = fields.raw.get(spelling) or {}
    if not isinstance(nested, Mapping):
        raise fields.error(f"field {spelling!r} must be an object, got {nested!r}")
    inner = Fields({"rope_theta": fields.raw.get("rope_theta"), **nested}, fields.source)
    kind = inner.text("rope_type", inner.text("type", "default"))
    theta = inner.number("rope_theta", default_theta)
    rotated = inner.number("partial_rotary_factor", 1.0)
    if rotated > 1 or (rotated != 1 and kind != "proportional"):
        raise fields.error(f"partial_rotary_factor in {spelling!r} is not supported here")
    match kind:
        case "default":
            return RopeConfig(theta)
        case "linear":
            return RopeConfig(theta, "linear", factor=inner.number("factor"))
        case "llama3":
            return RopeConfig(
                theta,
                "llama3",
                factor=inner.number("factor"),
                low_freq_factor=inner.number("low_freq_factor"),
                high_freq_factor=inner.number("high_freq_factor"),
                original_positions=inner.integer("original_max_position_embeddings"),
            )
        case "yarn":
            return _read_yarn(inner, theta, fields.integer("max_position_embeddings", 2048))
        case "proportional":
            return RopeConfig(theta, kind, factor=inner.number("factor", 1.0), rotated=rotated)
    known = "default, linear, llama3, yarn or proportional"
    raise fields.error(f"rope type {kind!r} is not supported; use {known}")


def _read_yarn(inner: Fields, theta: float, max_positions: int) -> RopeConfig:
    original = inner.integer("original_max_position_embeddings")
    factor = inner.number("factor", max_positions / original)
    if not inner.flag("truncate", True):
        raise inner.error("a yarn rope with truncate false is not supported")
    numerator, denominator = (inner.raw.get(name) for name in ("mscale", "mscale_all_dim"))
    if numerator and denominator:
        attention_factor = yarn_magnitude(factor, numerator) / yarn_magnitude(factor, denominator)
    else:
        attention_factor = yarn_magnitude(factor)
    return RopeConfig(
        theta,
        "yarn",
        factor=factor,
        original_positions=original,
        beta_fast=inner.number("beta_fast", 32.0),
        beta_slow=inner.number("beta_slow", 1.0),
        attention_factor=inner.number("attention_factor", attention_factor),
    )


def yarn_magnitude(factor: float, weight: float = 1.0) -> float:
    """How much larger yarn wants attention scores to be in a context stretched by `factor`."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def read_attention_heads(fields: Fields) -> tuple[int, int, int]:
    """Reads query heads, kv heads and head width; checks that they fit each other."""
    heads = fields.integer("num_attention_heads")
    kv_heads = fields.integer("num_key_value_heads", heads)
    hidden = fields.integer("hidden_size")
    if fields.raw.get("head_dim") is None and hidden % heads:
        raise fields.error(f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
    if heads % kv_heads:
        raise fields.error(
            f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
        )
    head_dim = fields.integer("head_dim", hidden // heads)
    if head_dim % 2:
        raise fields.error(f"head_dim {head_dim} must be even for a rotary embedding")
    return heads, kv_heads, head_dim
