"""Shapes of the factored blocks of a model, from its config.json alone."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pw_jax.errors import UserError
from pw_jax.models.config import ModelConfig
from pw_jax.models.deepseek_v2 import DeepseekV2Config
from pw_jax.models.layers import ACTIVATIONS
from pw_jax.tensor_parallel.weights import attention_block
from sharding import formulas, parallel
from sharding.blocks import MlpBlock
from sharding.formulas import BlockShape, Matrix
from sharding.layouts import make_layout
from sharding.weights import AttentionWeights, Dense, Factors, LatentWeights, MlpWeights, Norm

DTYPE = jnp.bfloat16
FAMILIES = ("llama", "opt", "mixtral", "qwen2_moe", "deepseek_v2")


RankOf = Callable[[str, int, int], int | None]


class Work(NamedTuple):
    """A block, and how to run it.

    Attributes:
        block: Shapes and layout.
        weights: Shapes of its weights, for ``block.prepare``.
        call: Takes a mesh, the block, placed parameters and x.
    """

    block: Any
    weights: Any
    call: Any


def check_family(config: ModelConfig, where: str) -> None:
    """Raises a UserError for models whose shapes `block_shapes` does not know."""
    if config.model_type not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise UserError(
            f"{where}: shapes of {config.model_type} are not known here; of {known} they are"
        )


def ranks_by_ratio(ratio: float) -> RankOf:
    """Ranks that keep a share of the parameters of every matrix."""
    return lambda name, inputs, outputs: formulas.rank_for_ratio(inputs, outputs, ratio)


def ranks_of_layer(config: ModelConfig, ranks: Mapping[str, int], layer: int) -> RankOf:
    """Ranks of one layer out of a file for decompose.py; what it leaves out is whole.

    Args:
        config: The model.
        ranks: By full name of the matrix.
        layer: Index of the layer.

    Raises:
        UserError: The file names no matrix of the layer.
    """
    is_opt = config.model_type == "opt"
    prefix = f"model.{'decoder.' if is_opt else ''}layers.{layer}."
    own = {
        name.removeprefix(prefix): rank for name, rank in ranks.items() if name.startswith(prefix)
    }
    if not own:
        raise UserError(f"the ranks name no matrix of layer {layer} ({prefix}...)")
    names = {name: f"self_attn.{name}_proj" for name in "qkvo"}
    names |= {name: f"mlp.{name}_proj" for name in ("gate", "up", "down")}
    if is_opt:
        names |= {"o": "self_attn.out_proj", "up": "fc1", "down": "fc2"}
    return lambda name, inputs, outputs: own.get(names[name])


def block_shapes(config: ModelConfig, rank: RankOf) -> dict[str, BlockShape]:
    """Attention, and the MLP of the layers that have one without routed experts.

    Args:
        config: The model.
        rank: Gives the rank of a matrix by its short name, inputs and outputs; None if it is whole.
    """
    width, heads, kv = config.hidden_size, config.num_heads, config.kv_shapes[0]
    if isinstance(config, DeepseekV2Config):
        latent = config.latent
        query = heads * (latent.plain_dim + latent.rope_dim)
        ranks = (latent.query_rank or rank("q", width, query), latent.rank)
        attention = formulas.latent_attention_shape(
            width,
            heads,
            (latent.plain_dim, latent.rope_dim, latent.value_dim),
            (*ranks, rank("o", heads * latent.value_dim, width)),
            q_is_latent=latent.query_rank is not None,
        )
    else:
        query, key = heads * kv.head_dim, kv.kv_heads * kv.head_dim
        sizes = {"q": (width, query), "k": (width, key), "v": (width, key), "o": (query, width)}
        attention = formulas.attention_shape(
            width,
            heads,
            kv.kv_heads,
            kv.head_dim,
            [rank(name, *size) for name, size in sizes.items()],
        )
    if len(config.moe_layers) == config.num_layers:
        return {"attention": attention}
    gated = config.model_type != "opt"
    ffn = config.intermediate_size
    ways = ["gate"] * gated + ["up"]
    ranks = [*(rank(name, width, ffn) for name in ways), rank("down", ffn, width)]
    return {"attention": attention, "mlp": formulas.mlp_shape(width, ffn, gated, ranks)}


def make_work(
    config: ModelConfig, layout: str, devices: int, which: str, shape: BlockShape, attend: Any
) -> Work:
    """One block in one layout.

    Args:
        config: The model.
        layout: A name of `sharding.layouts.LAYOUTS`.
        devices: Of the mesh.
        which: ``attention`` or ``mlp``.
        shape: Of `block_shapes`.
        attend: What a device does with its heads.
    """
    made = make_layout(layout, devices)
    if which == "mlp":
        block = MlpBlock(made, config.hidden_size, activation=ACTIVATIONS[config.activation])
        return Work(block, _mlp_weights(config, layout, shape), parallel.mlp)
    block = attention_block(config, made, 0)
    if isinstance(config, DeepseekV2Config):
        weights = _latent_weights(config, layout, shape)
    else:
        weights = _attention_weights(config, layout, shape)
    return Work(block, weights, partial(parallel.attention, attend=attend))


def _array(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, DTYPE)


def _linear(matrix: Matrix, layout: str, bias: bool) -> Factors | Dense:
    """The shape of a layer: factors, but for the layout that takes none."""
    added = _array(matrix.outputs) if bias else None
    if layout == "dense" or matrix.rank is None:
        return Dense(_array(matrix.inputs, matrix.outputs), added)
    return _factors(matrix)._replace(bias=added)


def _factors(matrix: Matrix, extra: int = 0) -> Factors:
    """Factors, whatever the layout; `extra` columns of the first have no second."""
    rank = matrix.rank
    assert rank is not None
    return Factors(_array(matrix.inputs, rank + extra), _array(rank, matrix.outputs))


def _norm(config: ModelConfig) -> Norm:
    width = config.hidden_size
    return Norm(_array(width), _array(width) if config.model_type == "opt" else None)


def _attention_weights(config: ModelConfig, layout: str, shape: BlockShape) -> AttentionWeights:
    q, k, v = (_linear(matrix, layout, config.qkv_bias) for matrix in shape.entries)
    return AttentionWeights(q, k, v, _linear(shape.last, layout, config.output_bias), _norm(config))


def _mlp_weights(config: ModelConfig, layout: str, shape: BlockShape) -> MlpWeights:
    *gate, up = (_linear(matrix, layout, config.mlp_bias) for matrix in shape.entries)
    down = _linear(shape.last, layout, config.mlp_bias)
    return MlpWeights(gate[0] if gate else None, up, down, _norm(config))


def _latent_weights(config: DeepseekV2Config, layout: str, shape: BlockShape) -> LatentWeights:
    q, kv = shape.entries
    normed = config.latent.query_rank
    return LatentWeights(
        _factors(q) if normed else _linear(q, layout, False),
        _factors(kv, shape.shared_key),
        _linear(shape.last, layout, config.output_bias),
        Norm(_array(config.latent.rank)),
        Norm(_array(normed)) if normed else None,
        norm=_norm(config),
    )
