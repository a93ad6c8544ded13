"""Fits the routers of a cut-up model, end to end, to the dense model's predictions."""

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _moe_split import Geometry
from flax import nnx
from jaxtyping import Array, Float, Int

from pw_jax.models.decoder import CausalLm, DecoderLayer
from pw_jax.models.layers import ACTIVATIONS, rope_tables
from pw_jax.models.memory import SequenceMemory

ROUTER_SCALE = 0.1  # of the logits: keeps the weights of the chosen experts within a few percent
SOFTNESS = 0.25  # of the choice, in the unit of the logits before scaling; see `expert_weights`
LOGIT_STRIDE = 4  # predictions are compared at every fourth token, since the head is a third of it


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Fitted:
    """What training changes, for L layers; float32 throughout.

    Attributes:
        router: [L, E, D], before `ROUTER_SCALE`.
        shared_gate: [L, D].
        neuron_scale: [L, F], in the new order.
        norm_scale: [L, 2, D].
    """

    router: Any
    shared_gate: Any
    neuron_scale: Any
    norm_scale: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Frozen:
    """The dense model taken apart.

    Attributes:
        layers: weights of the layers, stacked along a leading axis L so that one is compiled for
            all, their MLP neurons in the new order.
        rest: the other weights.
        layer_graph: the structure of one layer.
        rest_graph: the structure of the model without layers.
    """

    layers: Any
    rest: Any
    layer_graph: Any = dataclasses.field(metadata={"static": True})
    rest_graph: Any = dataclasses.field(metadata={"static": True})


def freeze(model: CausalLm, order: Int[np.ndarray, "L F"]) -> Frozen:
    """Takes a dense model apart and reorders its neurons, which changes no output."""
    states = [nnx.split(layer)[1] for layer in model.model.layers]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
    for name, axis in (("gate_proj", 1), ("up_proj", 1), ("down_proj", 2)):
        weight: Any = stacked["mlp"][name]["weight"]
        index = jnp.expand_dims(jnp.asarray(order), 3 - axis)
        moved = jnp.take_along_axis(weight.get_value(), index, axis=axis)
        stacked["mlp"][name]["weight"] = weight.replace(moved)
    layer_graph, _ = nnx.split(model.model.layers[0])
    rest: Any = nnx.merge(*nnx.split(model))  # shares the arrays
    rest.model.layers = nnx.List([])
    rest_graph, rest_state = nnx.split(rest)
    return Frozen(stacked, rest_state, layer_graph, rest_graph)


def expert_weights(logits: Float[Array, "B T E"], top_k: int) -> Float[Array, "B T E"]:
    """Weights of the experts with mean one over the chosen, as Qwen2-MoE has them but for 1/k.

    Backwards, the choice is a sigmoid of the distance to the threshold between the last expert
    that is chosen and the first that is not, so that the loss can swap experts.
    """
    best = jax.lax.top_k(logits, top_k + 1)[0]
    threshold = jax.lax.stop_gradient(best[..., -2:].mean(axis=-1, keepdims=True))
    chosen = logits > threshold
    weights = top_k * jax.nn.softmax(jnp.where(chosen, ROUTER_SCALE * logits, -jnp.inf), axis=-1)
    soft = jax.nn.sigmoid((logits - threshold) / SOFTNESS)
    return weights + soft - jax.lax.stop_gradient(soft)


def cut_mlp(
    layer: DecoderLayer, fitted: Fitted, x: Float[Array, "B T D"], geometry: Geometry
) -> Float[Array, "B T D"]:
    """The MoE layer computed as the dense one with a factor for each neuron."""
    mlp: Any = layer.mlp
    hidden = ACTIVATIONS[mlp.activation](mlp.gate_proj(x)) * mlp.up_proj(x)
    wide = x.astype(jnp.float32)
    weights = expert_weights(jnp.einsum("btd,ed->bte", wide, fitted.router), geometry.top_k)
    shared = 2 * jax.nn.sigmoid(jnp.einsum("btd,d->bt", wide, fitted.shared_gate))
    factor = jnp.concatenate(
        [
            jnp.broadcast_to(shared[..., None], (*shared.shape, geometry.shared)),
            jnp.repeat(weights, geometry.width, axis=-1),
        ],
        axis=-1,
    )
    factor = factor * fitted.neuron_scale[None, None]
    return mlp.down_proj(hidden * factor.astype(hidden.dtype))


def run_layers(
    frozen: Frozen, fitted: Fitted | None, tokens: Int[Array, "B T"], geometry: Geometry
) -> tuple[Float[Array, "B T D"], Float[Array, "L B T D"] | None]:
    """Runs the cut-up model, or the dense one where nothing is fitted.

    Returns:
        Hidden states after the last norm and, from the dense model, what each FFN is given.
    """
    model: Any = nnx.merge(frozen.rest_graph, frozen.rest)
    config = model.config
    x = model.model.embed_tokens(tokens)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
    rope = rope_tables(config.rope, config.kv_shapes[0].head_dim, positions, x.dtype)
    memory = SequenceMemory(jnp.ones(tokens.shape, bool))

    def step(x: Array, weights: Any) -> tuple[Array, Array | None]:
        state, part = weights
        layer: Any = nnx.merge(frozen.layer_graph, state)
        normal = layer.input_layernorm(x)
        if part is not None:
            normal = normal * part.norm_scale[0].astype(x.dtype)[None, None]
        x = x + layer.self_attn(normal, rope, memory)[0]
        normal = layer.post_attention_layernorm(x)
        if part is None:
            return x + layer.mlp(normal), normal
        normal = normal * part.norm_scale[1].astype(x.dtype)[None, None]
        return x + cut_mlp(layer, part, normal, geometry), None

    x, inputs = jax.lax.scan(step, x, (frozen.layers, fitted))
    return model.model.norm(x), inputs


@partial(jax.jit, static_argnames="geometry")
def ffn_inputs(
    frozen: Frozen, tokens: Int[Array, "B T"], geometry: Geometry
) -> Float[Array, "L B T D"]:
    """What each FFN of the dense model is given, after the norm."""
    inputs = run_layers(frozen, None, tokens, geometry)[1]
    assert inputs is not None
    return inputs


def divergence(
    frozen: Frozen, fitted: Fitted, tokens: Int[Array, "B T"], offset: Array, geometry: Geometry
) -> Float[Array, ""]:
    """Kullback-Leibler divergence of the predictions from the dense model's, nats a token."""
    model: Any = nnx.merge(frozen.rest_graph, frozen.rest)
    taken = offset + LOGIT_STRIDE * jnp.arange(tokens.shape[1] // LOGIT_STRIDE)

    def predictions(part: Fitted | None) -> Array:
        hidden = run_layers(frozen, part, tokens, geometry)[0]
        return jax.nn.log_softmax(model.logits(jnp.take(hidden, taken, axis=1)), axis=-1)

    wanted = jax.lax.stop_gradient(predictions(None))
    return (jnp.exp(wanted) * (wanted - predictions(fitted))).sum(axis=-1).mean()


def distill(
    frozen: Frozen,
    start: Fitted,
    batches: Iterator[Int[np.ndarray, "B T"]],
    geometry: Geometry,
    *,
    steps: int,
    report: Callable[[int, float], None],
) -> Fitted:
    """Minimises `divergence` with Adam.

    Args:
        frozen: the dense model.
        start: where to begin.
        batches: token ids.
        geometry: the division.
        steps: of Adam.
        report: told the step and its loss in nats a token.

    Returns:
        The average over the last third of the steps, which is better than the last one.
    """
    # Routers differ in size from layer to layer; a step is a share of that size.
    router_size = jnp.sqrt(jnp.mean(jnp.square(start.router), axis=(1, 2), keepdims=True))
    rates = Fitted(
        router=0.06 * router_size, shared_gate=0.002, neuron_scale=0.006, norm_scale=0.004
    )
    schedule = optax.warmup_cosine_decay_schedule(0.1, 1.0, max(steps // 20, 1), steps, 0.1)
    optimizer = optax.chain(
        optax.scale_by_adam(b1=0.9, b2=0.98), optax.scale_by_learning_rate(schedule)
    )

    def moved(change: Fitted) -> Fitted:
        return jax.tree.map(lambda value, delta, rate: value + rate * delta, start, change, rates)

    @jax.jit
    def step(
        frozen: Frozen, change: Fitted, state: Any, tokens: Array, offset: Array
    ) -> tuple[Fitted, Any, Array]:
        loss, slope = jax.value_and_grad(
            lambda change: divergence(frozen, moved(change), tokens, offset, geometry)
        )(change)
        with jax.numpy_dtype_promotion("standard"):  # optax mixes its step count with floats
            update, state = optimizer.update(slope, state)
        return optax.apply_updates(change, update), state, loss  # pyright: ignore

    change = jax.tree.map(jnp.zeros_like, start)
    state, counted = optimizer.init(change), 0
    mean: Any = change
    for number in range(steps):
        tokens, offset = jnp.asarray(next(batches)), jnp.int32(number % LOGIT_STRIDE)
        change, state, loss = step(frozen, change, state, tokens, offset)
        report(number + 1, float(loss))
        if number >= steps - max(steps // 3, 1):
            counted += 1
            mean = optax.incremental_update(change, mean, 1 / counted)
    return moved(mean)
