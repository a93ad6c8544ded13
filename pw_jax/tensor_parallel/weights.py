"""The layers of a model as `sharding` takes them."""

from typing import Any, NamedTuple

from flax import nnx

from pw_jax.errors import UserError
from pw_jax.low_rank.layers import LowRankLinear
from pw_jax.models import layers
from pw_jax.models.decoder import CausalLm
from pw_jax.models.deepseek_v2 import LATENT_EPS, DeepseekV2Config
from pw_jax.models.layers import ACTIVATIONS, GatedMlp, RmsNorm
from pw_jax.models.opt import Opt
from sharding.blocks import AttentionBlock, LatentBlock, MlpBlock
from sharding.layouts import Layout
from sharding.weights import (
    AttentionWeights,
    Dense,
    Factors,
    LatentWeights,
    Linear,
    MlpWeights,
    Norm,
)


class Outside(NamedTuple):
    """What is not in a layer.

    Attributes:
        embedding: [V, D].
        positions: Learned positions [P, D], or None.
        norm: The last one.
        head: [V, D]; the embedding where they are tied.
    """

    embedding: Any
    positions: Any
    norm: Norm
    head: Any


def outside(model: CausalLm | Opt) -> Outside:
    """Embeddings, last norm and head."""
    is_opt = isinstance(model, Opt)
    decoder: Any = model.model.decoder if is_opt else model.model
    last = decoder.final_layer_norm if is_opt else decoder.norm
    embedding = decoder.embed_tokens.weight[...]
    tied = model.config.tie_word_embeddings
    return Outside(
        embedding,
        decoder.embed_positions.weight[...] if is_opt else None,
        _norm(last),
        embedding if tied else model.lm_head.weight[...],
    )


def layers_of(model: CausalLm | Opt) -> list[Any]:
    """The modules of the layers."""
    return list(model.model.decoder.layers if isinstance(model, Opt) else model.model.layers)


def blocks_of(
    model: CausalLm | Opt, layout: Layout, layer: int
) -> tuple[AttentionBlock | LatentBlock, MlpBlock]:
    """Shapes of one layer's blocks in a layout."""
    config = model.config
    width, eps, heads = config.hidden_size, config.norm_eps, config.num_heads
    mlp = MlpBlock(layout, width, eps, activation=ACTIVATIONS[config.activation])
    if isinstance(config, DeepseekV2Config):
        latent = config.latent
        attention = LatentBlock(
            layout,
            width,
            eps,
            heads=heads,
            rank=latent.rank,
            plain_dim=latent.plain_dim,
            rope_dim=latent.rope_dim,
            value_dim=latent.value_dim,
            latent_eps=LATENT_EPS,
        )
        return attention, mlp
    kv = config.kv_shapes[layer]
    attention = AttentionBlock(
        layout,
        width,
        eps,
        heads=heads,
        kv_heads=kv.kv_heads,
        head_dim=kv.head_dim,
        value_dim=kv.head_dim,
    )
    return attention, mlp


def attention_weights(layer: Any, name: str) -> AttentionWeights | LatentWeights:
    """Of one layer.

    Args:
        layer: Its module.
        name: How errors call it.
    """
    own = layer.self_attn
    if hasattr(own, "kv_a_proj_with_mqa"):
        return _latent_weights(layer, name)
    is_opt = hasattr(own, "out_proj")
    norm = layer.self_attn_layer_norm if is_opt else layer.input_layernorm
    last = own.out_proj if is_opt else own.o_proj
    q, k, v, o = (_linear(one) for one in (own.q_proj, own.k_proj, own.v_proj, last))
    return AttentionWeights(q, k, v, o, _norm(norm))


def mlp_weights(layer: Any, name: str) -> MlpWeights:
    """Of one layer; arguments as in `attention_weights`.

    Raises:
        UserError: The layer has routed experts.
    """
    if hasattr(layer, "fc1"):
        return MlpWeights(
            None, _linear(layer.fc1), _linear(layer.fc2), _norm(layer.final_layer_norm)
        )
    own = layer.mlp
    if not isinstance(own, GatedMlp):
        raise UserError(f"{name} has routed experts, which tensor parallelism does not divide yet")
    gate, up, down = (_linear(one) for one in (own.gate_proj, own.up_proj, own.down_proj))
    return MlpWeights(gate, up, down, _norm(layer.post_attention_layernorm))


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
    bias = None if isinstance(module, RmsNorm) else module.bias[...]
    return Norm(module.weight[...], bias)
