"""Calibration by forward passes only: what the experts' inputs look like, and which are chosen.

Three uses. The Hessian sensitivity replaces the Fisher one where gradients do not fit: the error of
a layer's output to first order, ``F_rj = s_r sum_t g_t^2 x_tj^2`` over the tokens routed to the
expert, where g is the router's weight and s the squared effect of a row on the output: 1 for down,
and for gate_up the squared norm of its column of down times the mean squared slope of the
activation. That makes the two modules of a layer comparable; layers stay less so, for how the loss
depends on a layer's output is not in it. The prompt correction needs the mean squares of all
inputs, and the damage of each prompt, to fit its heads. And choices, traced, tell what a cache of
experts would miss (`pw_jax.evaluation.offload`).
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from pw_jax.calibration import Calibration, check_tokens, moe_blocks
from pw_jax.models.decoder import CausalLm
from pw_jax.models.layers import ACTIVATIONS
from pw_jax.models.memory import SequenceMemory
from pw_jax.models.moe import DenseExperts, spread_weights

Report = Callable[[int, int], None]
ColumnErrors = tuple[np.ndarray, np.ndarray]
"""Of gate_up [L, E, D] and of down [L, E, F], at one width."""


@dataclasses.dataclass(frozen=True)
class PromptDamages:
    """What each of S prompts does to the blocks, and the inputs of all prompts together.

    Attributes:
        damage: ``sum_t sum_j x_tj^2 c_j`` over the tokens routed to an expert, [S, L, E, 2].
        routed: Tokens routed to each expert, [S, L, E].
        mass: Router weight given to each expert, [S, L, E].
        norms: Sum, sum of squares and maximum of the norms of the MoE inputs, [S, L, 3].
        gate_up_square: Sum of ``x_j^2`` over all routed tokens, [L, E, D].
        down_square: Likewise of the inputs of down, [L, E, F].
    """

    damage: Float[np.ndarray, "S L E 2"]
    routed: Float[np.ndarray, "S L E"]
    mass: Float[np.ndarray, "S L E"]
    norms: Float[np.ndarray, "S L 3"]
    gate_up_square: Float[np.ndarray, "L E D"]
    down_square: Float[np.ndarray, "L E F"]

    def log_ratio(self) -> Float[np.ndarray, "S L 2"]:
        """Logarithm of a prompt's damage over what its routing makes one expect.

        The expectation takes every expert's mean damage a routed token over all prompts; so the
        ratio is about inputs, not about routing.
        """
        total, count = self.damage.sum(axis=0), self.routed.sum(axis=0)[..., None]
        mean = np.divide(total, count, out=np.zeros_like(total), where=count > 0)
        expected = np.einsum("sle,lem->slm", self.routed, mean)
        found = self.damage.sum(axis=2)
        usable = (expected > 0) & (found > 0)
        return np.log(np.divide(found, expected, out=np.ones_like(found), where=usable))


def prompt_damages(
    model: CausalLm,
    tokens: Int[np.ndarray, "S T"],
    column_errors: ColumnErrors,
    report: Report | None = None,
) -> PromptDamages:
    """Runs prompts through a model with dense experts, one at a time.

    Raises:
        UserError: The model has no dense experts, or the tokens do not fit it.
    """
    check_tokens(model, tokens, np.ones(tokens.shape, bool))
    errors = tuple(jnp.asarray(error, jnp.float32) for error in column_errors)
    rows = _run(model, tokens, partial(_prompt_of_layer, errors), report)
    stacked = {name: [row[name] for row in rows] for name in rows[0]}
    squares = {
        name: np.sum(stacked.pop(name), axis=0, dtype=np.float64)
        for name in ("gate_up_square", "down_square")
    }
    return PromptDamages(**{name: np.stack(values) for name, values in stacked.items()}, **squares)


def hessian(
    model: CausalLm, tokens: Int[np.ndarray, "S T"], report: Report | None = None
) -> Calibration:
    """Sensitivities from second moments of activations; see the head of this file.

    Raises:
        UserError: The model has no dense experts, or the tokens do not fit it.
    """
    check_tokens(model, tokens, np.ones(tokens.shape, bool))
    sums: dict[str, np.ndarray] = {}
    for row in _run(model, tokens, _hessian_of_layer, report):
        for name, value in row.items():
            sums[name] = sums.get(name, 0.0) + value.astype(np.float64)
    seen = np.maximum(sums["tokens_seen"], 1.0)[..., None]
    slopes = sums["slope"] / seen
    down_norm = np.stack([_column_norms(experts) for _, experts in moe_blocks(model)])
    effect = slopes * np.concatenate([down_norm, down_norm], axis=-1)
    x, hidden = sums["x_square"], sums["hidden_square"]
    embed = x.shape[-1]
    ones = np.ones((*hidden.shape[:2], embed))
    fields = {
        "gate_up_row": effect * x.sum(axis=-1, keepdims=True),
        "gate_up_column": x * effect.sum(axis=-1, keepdims=True),
        "down_row": ones * hidden.sum(axis=-1, keepdims=True),
        "down_column": hidden * embed,
        "routing_mass": sums["routing_mass"],
    }
    return Calibration(
        **{name: value.astype(np.float32) for name, value in fields.items()},
        tokens_seen=sums["tokens_seen"].astype(np.int32),
    )


def routing_choices(
    model: CausalLm, tokens: Int[np.ndarray, "S T"], report: Report | None = None
) -> Bool[np.ndarray, "S T L E"]:
    """Which experts each token is routed to.

    Raises:
        UserError: The model has no dense experts, or the tokens do not fit it.
    """
    check_tokens(model, tokens, np.ones(tokens.shape, bool))
    rows = _run(model, tokens, _choices_of_layer, report)
    return np.stack([row["chosen"] for row in rows]).transpose(0, 2, 1, 3)


def _choices_of_layer(
    experts: DenseExperts, index: int, x: Array, gate_up: Array, chosen: Array, spread: Array
) -> dict[str, Array]:
    del experts, index, x, gate_up, spread
    return {"chosen": chosen > 0}


def _column_norms(experts: DenseExperts) -> np.ndarray:
    """Squared norm of each column of down, [E, F]."""
    return np.asarray(jnp.square(experts.down_proj[...].astype(jnp.float32)).sum(axis=1))


class _WatchedExperts:
    """Dense experts that also keep what a function makes of their inputs."""

    def __init__(self, experts: DenseExperts, watch: Callable[..., dict[str, Array]], kept: list):
        self.experts = experts
        self.watch = watch
        self.kept = kept

    def __call__(self, x: Array, expert_ids: Array, weights: Array, memory: Any, index: int):
        spread = spread_weights(expert_ids, weights.astype(jnp.float32), self._count)
        chosen = spread_weights(expert_ids, jnp.ones_like(weights, jnp.float32), self._count)
        # What DenseExperts computes as well; XLA does it once.
        gate_up = jnp.einsum("md,efd->emf", x, self.experts.gate_up_proj[...])
        gate_up = gate_up.astype(jnp.float32)
        seen = self.watch(self.experts, index, x.astype(jnp.float32), gate_up, chosen, spread)
        self.kept.append(seen)
        return self.experts(x, expert_ids, weights, memory, index)

    @property
    def _count(self) -> int:
        return self.experts.gate_up_proj[...].shape[0]


def _hidden(experts: DenseExperts, gate_up: Array) -> Array:
    gate, up = jnp.split(gate_up, 2, axis=-1)
    return ACTIVATIONS[experts.activation](gate) * up


def _prompt_of_layer(
    errors: tuple[Array, ...],
    experts: DenseExperts,
    index: int,
    x: Array,
    gate_up: Array,
    chosen: Array,
    spread: Array,
) -> dict[str, Array]:
    x_square = jnp.einsum("me,md->ed", chosen, jnp.square(x))
    hidden_square = jnp.einsum("me,emf->ef", chosen, jnp.square(_hidden(experts, gate_up)))
    length = jnp.sqrt(jnp.square(x).sum(axis=1))
    damage = [
        (square * error[index]).sum(axis=1)
        for square, error in zip((x_square, hidden_square), errors, strict=True)
    ]
    return {
        "damage": jnp.stack(damage, axis=-1),
        "routed": chosen.sum(axis=0),
        "mass": spread.sum(axis=0),
        "norms": jnp.stack([length.sum(), jnp.square(length).sum(), length.max()]),
        "gate_up_square": x_square,
        "down_square": hidden_square,
    }


def _hessian_of_layer(
    experts: DenseExperts, index: int, x: Array, gate_up: Array, chosen: Array, spread: Array
) -> dict[str, Array]:
    del index
    gate, up = jnp.split(gate_up, 2, axis=-1)
    value, slope = jax.jvp(ACTIVATIONS[experts.activation], (gate,), (jnp.ones_like(gate),))
    both = jnp.concatenate([jnp.square(up * slope), jnp.square(value)], axis=-1)
    gain = jnp.square(spread)
    return {
        "x_square": jnp.einsum("me,md->ed", gain, jnp.square(x)),
        "hidden_square": jnp.einsum("me,emf->ef", gain, jnp.square(value * up)),
        "slope": jnp.einsum("me,emf->ef", chosen, both),
        "routing_mass": spread.sum(axis=0),
        "tokens_seen": chosen.sum(axis=0),
    }


def _run(
    model: CausalLm,
    tokens: np.ndarray,
    watch: Callable[..., dict[str, Array]],
    report: Report | None,
) -> list[dict[str, np.ndarray]]:
    """What `watch` makes of each sequence, layers stacked."""
    graph, state = nnx.split(model)
    leaves, treedef = jax.tree.flatten(state)

    @jax.jit
    def forward(leaves: list[Array], sequence: Array, mask: Bool[Array, " T"]) -> dict[str, Array]:
        running = nnx.merge(graph, jax.tree.unflatten(treedef, leaves))
        kept: list[dict[str, Array]] = []
        for block, experts in moe_blocks(running):
            block.experts = cast(Any, _WatchedExperts(experts, watch, kept))
        positions = jnp.arange(sequence.shape[0], dtype=jnp.int32)[None]
        running(sequence[None], positions, SequenceMemory(mask[None]))
        return jax.tree.map(lambda *layers: jnp.stack(layers), *kept)

    rows = []
    for number, sequence in enumerate(tokens, start=1):
        real = jnp.ones(sequence.shape, bool)
        rows.append(jax.device_get(forward(leaves, jnp.asarray(sequence, jnp.int32), real)))
        if report is not None:
            report(number, len(tokens))
    return rows
