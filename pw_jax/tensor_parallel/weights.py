"""The layers of a model as `sharding` takes them."""

from typing import Any, NamedTuple

from flax import nnx

from pw_jax.errors import UserError
from pw_jax.low_rank.layers import LowRankLinear
from pw_jax.models import layers
from pw_jax.models.config import ModelConfig
from pw_jax.models.decoder import CausalLm
from pw_jax.models.deepseek_v2 import LATENT_EPS, DeepseekV2Config
from pw_jax.models.gemma4 import Gemma4Config, Gemma4Norm
from pw_jax.models.layers import ACTIVATIONS, GatedMlp, LayerNorm
from pw_jax.models.moe import DenseExperts
from pw_jax.models.opt import Opt
from sharding.blocks import AttentionBlock, LatentBlock, MlpBlock
from sharding.experts import ExpertBlock
from sharding.layouts import Layout
from sharding.layouts.base import COLUMNS, REPLICATED, ROWS
from sharding.mesh import Placed, replicated
from sharding.padding import pad_axis
from sharding.weights import (
    AttentionWeights,
    Dense,
    ExpertWeights,
    Factors,
    LatentWeights,
    Linear,
    MlpWeights,
    Norm,
)

HEAD_NORMS = ("q_norm", "k_norm", "v_norm")


class LayerBlocks(NamedTuple):
    """Shapes of a layer's blocks.

    Attributes:
        attention: Of the attention.
        mlp: Of the MLP that every token uses, or None.
        experts: Of the routed experts, or None.
    """

    attention: AttentionBlock | LatentBlock
    mlp: MlpBlock | None
    experts: ExpertBlock | None


class LayerParts(NamedTuple):
    """Weights of a layer, or the same placed.

    Attributes:
        attention: Of the attention.
        mlp: Of the MLP that every token uses, or None.
        experts: Of the routed experts, or None.
        heads: Norms of q, k and v, those of them that the model has; modules.
        after: Norms behind ``attention``, ``mlp``, ``experts`` and the ``sum`` of the last two.
        scalar: [1], multiplies the residual behind the layer, or None.
    """

    attention: Any
    mlp: Any
    experts: Any
    heads: dict[str, Any]
    after: dict[str, Norm]
    scalar: Any


class Outside(NamedTuple):
    """What is not in a layer: modules, or the same placed.

    Attributes:
        embedding: [V, D].
        positions: Learned positions [P, D], or None.
        norm: The last one.
        head: [V, D]; the embedding where they are tied.
    """

    embedding: Any
    positions: Any
    norm: Any
    head: Any


def outside(model: CausalLm) -> Outside:
    """The modules of embeddings, last norm and head."""
    is_opt = isinstance(model, Opt)
    decoder: Any = model.model.decoder if is_opt else model.model
    return Outside(
        decoder.embed_tokens,
        decoder.embed_positions if is_opt else None,
        decoder.final_layer_norm if is_opt else decoder.norm,
        decoder.embed_tokens if model.config.tie_word_embeddings else model.lm_head,
    )


def prepare_outside(layout: Layout, modules: Outside) -> Outside:
    """Pads and divides; the result is a tree of `Placed`."""

    def columns(module: Any) -> Any:
        if module is None:
            return None
        table = module.weight[...]
        if not layout.splits_residual:
            return Placed(table, REPLICATED)
        return Placed(pad_axis(table, 1, layout.devices), COLUMNS)

    return Outside(
        columns(modules.embedding),
        columns(modules.positions),
        layout.norm(_norm(modules.norm)),
        Placed(pad_axis(modules.head.weight[...], 0, layout.devices), ROWS),
    )


def prepare_layer(layout: Layout, blocks: LayerBlocks, name: str, layer: Any) -> LayerParts:
    """Pads and divides the weights of a layer; the result is a tree of `Placed`.

    Args:
        layout: The layout.
        blocks: Of the layer.
        name: How errors call it.
        layer: Its module.
    """
    parts = layer_parts(layer, name)

    def block(name: str) -> Any:
        own = getattr(blocks, name)
        return None if own is None else own.prepare(getattr(parts, name))

    return LayerParts(
        block("attention"),
        block("mlp"),
        block("experts"),
        replicated(parts.heads),
        {name: layout.norm(norm) for name, norm in parts.after.items()},
        replicated(parts.scalar),
    )


def layers_of(model: CausalLm) -> list[Any]:
    """The modules of the layers."""
    return list(model.model.decoder.layers if isinstance(model, Opt) else model.model.layers)


def attention_block(
    config: ModelConfig, layout: Layout, layer: int, *, gives_latents: bool = False
) -> AttentionBlock | LatentBlock:
    """Shapes of one layer's attention in a layout.

    Args:
        config: The model.
        layout: The layout.
        layer: Index of the layer.
        gives_latents: It gives the memory latents, to be kept as they are or as heads.
    """
    width, eps, heads = config.hidden_size, config.norm_eps, config.num_heads
    if isinstance(config, DeepseekV2Config):
        latent = config.latent
        return LatentBlock(
            layout,
            width,
            eps,
            heads=heads,
            rank=latent.rank,
            plain_dim=latent.plain_dim,
            rope_dim=latent.rope_dim,
            value_dim=latent.value_dim,
            latent_eps=LATENT_EPS,
            gives_latents=gives_latents,
        )
    kv = config.kv_shapes[layer]
    return AttentionBlock(
        layout,
        width,
        eps,
        heads=heads,
        kv_heads=kv.kv_heads,
        head_dim=kv.head_dim,
        value_dim=kv.head_dim,
        gives_latents=gives_latents,
    )


def blocks_of(
    model: CausalLm, layout: Layout, layer: int, *, gives_latents: bool = False
) -> LayerBlocks:
    """Shapes of one layer's blocks in a layout.

    Args:
        model: The model.
        layout: The layout.
        layer: Index of the layer.
        gives_latents: Its attention gives the memory latents, to be kept as they are or as heads.
    """
    config = model.config
    width, eps = config.hidden_size, config.norm_eps
    routed = layer in config.moe_layers
    beside = isinstance(config, Gemma4Config)  # has an MLP of its own beside the experts
    has_mlp = not routed or beside or _shared_mlp(layers_of(model)[layer].mlp) is not None
    mlp = MlpBlock(layout, width, eps, activation=ACTIVATIONS[config.activation])
    experts = ExpertBlock(layout, width, eps, routes_residual=beside)
    attention = attention_block(config, layout, layer, gives_latents=gives_latents)
    return LayerBlocks(attention, mlp if has_mlp else None, experts if routed else None)


def layer_parts(layer: Any, name: str) -> LayerParts:
    """Weights of one layer.

    Args:
        layer: Its module.
        name: How errors call it.
    """
    own = layer.self_attn
    heads = {key[0]: getattr(own, key) for key in HEAD_NORMS if hasattr(own, key)}
    attention = _latent_weights(layer, name) if hasattr(own, "kv_a_proj_with_mqa") else (
        _attention_weights(layer)
    )  # fmt: skip
    if hasattr(layer, "fc1"):
        last = _norm(layer.final_layer_norm)
        mlp = MlpWeights(None, _linear(layer.fc1), _linear(layer.fc2), last)
        return LayerParts(attention, mlp, None, heads, {}, None)
    if not hasattr(layer, "pre_feedforward_layernorm"):
        norm = _norm(layer.post_attention_layernorm)
        shared = layer.mlp if isinstance(layer.mlp, GatedMlp) else _shared_mlp(layer.mlp)
        mlp = None if shared is None else _mlp_weights(shared, norm)
        experts = None
        if not isinstance(layer.mlp, GatedMlp):
            gate = getattr(layer.mlp, "shared_expert_gate", None)
            experts = _expert_weights(layer.mlp.gate, gate, layer.mlp.experts, norm)
        return LayerParts(attention, mlp, experts, heads, {}, None)
    # Norms on both sides.
    mlp = _mlp_weights(layer.mlp, _norm(layer.pre_feedforward_layernorm))
    after = {
        "attention": _norm(layer.post_attention_layernorm),
        "sum": _norm(layer.post_feedforward_layernorm),
    }
    experts = None
    if getattr(layer, "has_experts", False):
        norm = _norm(layer.pre_feedforward_layernorm_2)
        experts = _expert_weights(layer.router, None, layer.experts, norm)
        after["mlp"] = _norm(layer.post_feedforward_layernorm_1)
        after["experts"] = _norm(layer.post_feedforward_layernorm_2)
    scalar = layer.layer_scalar[...] if hasattr(layer, "layer_scalar") else None
    return LayerParts(attention, mlp, experts, heads, after, scalar)


def _shared_mlp(moe: Any) -> GatedMlp | None:
    """The expert that every token uses; the two families call it differently."""
    return getattr(moe, "shared_experts", None) or getattr(moe, "shared_expert", None)


def _attention_weights(layer: Any) -> AttentionWeights:
    own = layer.self_attn
    is_opt = hasattr(own, "out_proj")
    norm = layer.self_attn_layer_norm if is_opt else layer.input_layernorm
    last = own.out_proj if is_opt else own.o_proj
    v = _linear(own.v_proj) if hasattr(own, "v_proj") else None
    return AttentionWeights(_linear(own.q_proj), _linear(own.k_proj), v, _linear(last), _norm(norm))


def _mlp_weights(own: GatedMlp, norm: Norm) -> MlpWeights:
    gate, up, down = (_linear(one) for one in (own.gate_proj, own.up_proj, own.down_proj))
    return MlpWeights(gate, up, down, norm)


def _expert_weights(router: Any, shared_gate: Any, experts: Any, norm: Norm) -> ExpertWeights:
    arrays = (None, None)
    if isinstance(experts, DenseExperts):
        arrays = (experts.gate_up_proj[...], experts.down_proj[...])
    gate = None if shared_gate is None else shared_gate.weight[...]
    return ExpertWeights(router, gate, *arrays, norm)


def _latent_weights(layer: Any, name: str) -> LatentWeights:
    own = layer.self_attn
    for part in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"):
        if isinstance(getattr(own, part, None), LowRankLinear):
            raise UserError(f"{name}.self_attn.{part} is factored twice; leave it whole")
    kv_down, kv_up = own.kv_a_proj_with_mqa, own.kv_b_proj
    has_latent = hasattr(own, "q_a_proj")
    q = _linear(own.q_proj) if not has_latent else (
        Factors(own.q_a_proj.weight[...].T, own.q_b_proj.weight[...].T)
    )  # fmt: skip
    return LatentWeights(
        q,
        Factors(kv_down.weight[...].T, kv_up.weight[...].T),
        _linear(own.o_proj),
        _norm(own.kv_a_layernorm),
        _norm(own.q_a_layernorm) if has_latent else None,
        own.q_a_proj.bias[...] if has_latent and own.q_a_proj.has_bias else None,
        kv_down.bias[...] if kv_down.has_bias else None,
        _norm(layer.input_layernorm),
    )


def _linear(module: nnx.Module) -> Linear:
    assert isinstance(module, layers.Linear | LowRankLinear)
    bias = module.bias[...] if module.has_bias else None
    if isinstance(module, LowRankLinear):
        return Factors(module.v[...].T, module.u[...].T, bias)
    return Dense(module.weight[...].T, bias)


def _norm(module: Any) -> Norm:
    if isinstance(module, Gemma4Norm):  # float32, which multiplies before the cast
        return Norm(module.scale())
    return Norm(module.weight[...], module.bias[...] if isinstance(module, LayerNorm) else None)
