"""Squared gradients of the experts, one layer at a time.

A backward pass through the whole model would hold the gradients of all experts at once, as much as
the model itself. Here the forward pass keeps the input of every layer on the host, and the backward
pass goes through the layers from the last to the first: each runs forward again, and only its own
experts have a gradient, which is squared and summed at once.
"""

from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Float32, Int32

from pw_jax.models.decoder import CausalLm
from pw_jax.models.memory import SequenceMemory
from pw_jax.models.moe import DenseExperts

Statistics = dict[str, np.ndarray]


class _RecordingExperts:
    """Dense experts that also keep which experts the tokens chose."""

    def __init__(self, experts: DenseExperts, chosen: list[Array]):
        self.experts = experts
        self.chosen = chosen

    def __call__(self, x: Array, expert_ids: Array, *rest: Any) -> Array:
        self.chosen.append(expert_ids)
        return self.experts(x, expert_ids, *rest)


class _Structure(NamedTuple):
    """A module without its arrays; hashable, so that programs can be compiled for it."""

    graph: nnx.GraphDef
    tree: Any  # a PyTreeDef, which is no type for checkers

    def with_arrays(self, leaves: list[Array]) -> Any:
        return nnx.merge(self.graph, jax.tree.unflatten(self.tree, leaves))


def _split(module: nnx.Module) -> tuple[_Structure, list[Array]]:
    graph, state = nnx.split(module)
    leaves, tree = jax.tree.flatten(state)
    return _Structure(graph, tree), leaves


class LayeredGradients:
    """Runs sequences through a model with dense experts, layer by layer.

    Layers of one kind share a compiled program.

    Args:
        model: Its layers must be in ``model.model.layers``.
    """

    def __init__(self, model: CausalLm):
        config = model.config
        structure, self._leaves = _split(model)
        self._layers: list[tuple[_Structure, list[Array]]] = []
        kinds: dict[Any, _Structure] = {}
        for index, layer in enumerate(model.model.layers):
            own, leaves = _split(layer)
            shapes = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
            # Its number is all else that a layer knows, and dense experts and whole sequences
            # have no use for it.
            kind = kinds.setdefault((own.tree, shapes, config.kv_shapes[index]), own)
            self._layers.append((kind, leaves))
        self._first = jax.jit(partial(_first, structure))
        self._last = jax.jit(partial(_last, structure))
        self._forward = jax.jit(_forward, static_argnums=0)
        self._backward = jax.jit(_backward, static_argnums=0)

    def measure(
        self, tokens: Int32[Array, " T"], mask: Bool[Array, " T"]
    ) -> tuple[float, Statistics]:
        """Loss of one sequence, and what calibration sums over sequences.

        Args:
            tokens: Token ids.
            mask: True for real tokens.

        Returns:
            The summed loss in nats; and for the MoE layers, in order, marginals of the squared
            gradient, routing mass and tokens seen, named as in `pw_jax.calibration.Calibration`.
        """
        x, ropes = self._first(self._leaves, tokens)
        inputs = []
        for (kind, leaves), rope in zip(self._layers, ropes, strict=True):
            inputs.append(jax.device_get(x))
            x = self._forward(kind, leaves, x, rope, mask)
        loss, cotangent = self._last(self._leaves, x, tokens, mask)
        found = []
        for (kind, leaves), rope in zip(self._layers[::-1], ropes[::-1], strict=True):
            x = jnp.asarray(inputs.pop())
            cotangent, statistics = self._backward(kind, leaves, x, rope, mask, cotangent)
            if statistics:
                found.append(jax.device_get(statistics))
        stacked = {name: np.stack([one[name] for one in found[::-1]]) for name in found[0]}
        return float(loss), stacked

    def temporary_bytes(self, tokens: int) -> int:
        """Bytes that the backward pass of one layer needs besides its arguments: the largest."""
        x, ropes = jax.eval_shape(self._first, self._leaves, jnp.zeros(tokens, jnp.int32))
        mask = jnp.ones(tokens, bool)
        most = 0
        for (kind, leaves), rope in zip(self._layers, ropes, strict=True):
            compiled = self._backward.lower(kind, leaves, x, rope, mask, x).compile()
            analysis = compiled.memory_analysis()
            most = max(most, analysis.temp_size_in_bytes if analysis is not None else 0)
        return most


def held_experts(layer: Any) -> tuple[Any, DenseExperts] | None:
    """What holds a layer's dense experts as `experts`, and these; None if it has none.

    It is the layer's MLP, or the layer itself where experts run beside the MLP (Gemma 4).
    """
    for block in (layer, getattr(layer, "mlp", None)):
        experts = getattr(block, "experts", None)
        if isinstance(experts, DenseExperts):
            return block, experts
    return None


def next_token_loss(
    logits: Float32[Array, "T V"], tokens: Int32[Array, "T"], mask: Bool[Array, "T"]
) -> Float32[Array, ""]:
    """Cross entropy of every real token that follows a real one, in nats, summed."""
    scores = jax.nn.log_softmax(logits[:-1], axis=-1)
    picked = jnp.take_along_axis(scores, tokens[1:, None], axis=1)[:, 0]
    return -jnp.sum(jnp.where(mask[1:] & mask[:-1], picked, 0.0))


def _first(model: _Structure, leaves: list[Array], tokens: Array) -> tuple[Array, Any]:
    running = model.with_arrays(leaves)
    x = running.embed(tokens[None])
    positions = jnp.arange(tokens.shape[0], dtype=jnp.int32)[None]
    return x, running.ropes(running.config, positions, x.dtype)


def _last(
    model: _Structure, leaves: list[Array], x: Array, tokens: Array, mask: Array
) -> tuple[Array, Array]:
    """The loss, and its gradient for the output of the last layer."""

    def loss(x: Float[Array, "1 T D"]) -> Array:
        running = model.with_arrays(leaves)
        return next_token_loss(running.logits(running.model.norm(x))[0], tokens, mask)

    return jax.value_and_grad(loss)(x)


def _forward(layer: _Structure, leaves: list[Array], x: Array, rope: Any, mask: Array) -> Array:
    return layer.with_arrays(leaves)(x, rope, SequenceMemory(mask[None]))[0]


def _backward(
    layer: _Structure, leaves: list[Array], x: Array, rope: Any, mask: Array, cotangent: Array
) -> tuple[Array, dict[str, Array]]:
    """The gradient for the layer's input, and the layer's statistics; none without experts."""
    held = held_experts(layer.with_arrays(leaves))
    if held is None:
        _, back = jax.vjp(lambda x: _forward(layer, leaves, x, rope, mask), x)
        return back(cotangent)[0], {}
    arrays = (held[1].gate_up_proj[...], held[1].down_proj[...])

    def run(arrays: tuple[Array, Array], x: Array) -> tuple[Array, tuple[Array, Array]]:
        running = layer.with_arrays(leaves)
        chosen: list[Array] = []
        found = held_experts(running)
        assert found is not None
        block, experts = found
        experts.gate_up_proj.set_value(arrays[0])
        experts.down_proj.set_value(arrays[1])
        block.experts = cast(Any, _RecordingExperts(experts, chosen))
        out, _, mass = running(x, rope, SequenceMemory(mask[None]))
        return out, (mass, chosen[0])

    _, back, (mass, chosen) = jax.vjp(run, arrays, x, has_aux=True)
    gradients, cotangent = back(cotangent)
    hits = jax.nn.one_hot(chosen, mass.shape[0], dtype=jnp.int32)
    statistics = {
        "routing_mass": mass,
        "tokens_seen": jnp.sum(jnp.where(mask[:, None, None], hits, 0), axis=(0, 1)),
    }
    for module, gradient in zip(("gate_up", "down"), gradients, strict=True):
        square = jnp.square(gradient.astype(jnp.float32))
        statistics[f"{module}_row"] = square.sum(axis=2)
        statistics[f"{module}_column"] = square.sum(axis=1)
    return cotangent, statistics
