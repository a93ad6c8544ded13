"""How sensitive the loss is to each routed expert: a rank-one Fisher matrix from real text.

The sensitivity of PagedWeight, ``G(b) = sum_rj F_rj (w_rj - w_rj(b))**2``, and the quantizer's
weights need the diagonal of the Fisher matrix F of each expert matrix. Its empirical estimate is
the sum over sequences of the squared gradient of the summed next-token loss (Any-Precision LLM
does the same). Only the marginals are kept: ``F_rj ~ row_r column_j / sum(column)``.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float32, Int, Int32

from pw_jax.errors import UserError
from pw_jax.models.decoder import CausalLm
from pw_jax.models.memory import SequenceMemory
from pw_jax.models.moe import DenseExperts

SHRINK_TOKENS = 128.0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Calibration:
    """Sums over all calibration tokens, as float32 numpy arrays on the host.

    L MoE layers of E experts of width D and hidden width F. A row or column marginal is the squared
    per-sequence gradient summed over the columns or rows of an expert's matrix; both marginals of
    an expert have the same sum.

    Attributes:
        gate_up_row: [L, E, 2F].
        gate_up_column: [L, E, D].
        down_row: [L, E, D].
        down_column: [L, E, F].
        routing_mass: [L, E], router weight that each expert was given.
        tokens_seen: int32 [L, E], tokens that chose each expert.
    """

    gate_up_row: Any
    gate_up_column: Any
    down_row: Any
    down_column: Any
    routing_mass: Any
    tokens_seen: Any

    def as_arrays(self) -> dict[str, np.ndarray]:
        """All arrays by name, to be stored."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def conditional(self, shrink_tokens: float = SHRINK_TOKENS) -> "Calibration":
        """Marginals per unit of routing mass, shrunk towards the mean of the layer.

        ``(n_e f_e + n0 f_layer) / (n_e + n0)``, where ``f_e`` is the marginal divided by the
        expert's routing mass, ``f_layer`` the layer's summed marginal divided by its summed mass,
        ``n_e`` the tokens that the expert saw and ``n0`` is ``shrink_tokens``. An expert that saw
        no token is as sensitive as its layer, not insensitive. These are weights for the
        quantizer; damages come from the plain sums, which the planner normalises by itself.
        """

        def shrink(marginal: np.ndarray) -> np.ndarray:
            mass = self.routing_mass.astype(np.float64)[..., None]
            seen = np.where(mass > 0, self.tokens_seen[..., None], 0).astype(np.float64)
            total = np.maximum(mass.sum(axis=1, keepdims=True), np.finfo(np.float64).tiny)
            layer = marginal.sum(axis=1, keepdims=True, dtype=np.float64) / total
            own = np.divide(marginal, mass, out=np.zeros(marginal.shape), where=mass > 0)
            share = np.divide(seen, seen + shrink_tokens, out=np.zeros_like(seen), where=seen > 0)
            return (share * own + (1 - share) * layer).astype(np.float32)

        names = ("gate_up_row", "gate_up_column", "down_row", "down_column")
        return dataclasses.replace(self, **{name: shrink(getattr(self, name)) for name in names})


def calibrate(
    model: CausalLm,
    tokens: Int[np.ndarray, "S T"],
    token_mask: Bool[np.ndarray, "S T"] | None = None,
    report: Callable[[int, int], None] | None = None,
) -> Calibration:
    """Measures sensitivities and routing on text.

    One sequence at a time, and the gradient of all experts of the model at once: it needs as much
    memory as they do, beside the activations of one sequence.

    Args:
        model: A model with dense experts.
        tokens: Token ids, one sequence a row.
        token_mask: True for real tokens; padding is excluded from everything. None: all are real.
        report: Called with the number of sequences done, and of all, after each.

    Raises:
        UserError: The model has no dense experts, the tokens do not fit it, or its loss is not
            finite.
    """
    mask = np.ones(tokens.shape, bool) if token_mask is None else token_mask
    check_tokens(model, tokens, mask)
    measure = measure_function(model)
    sums: dict[str, np.ndarray] = {}
    for done, (sequence, real) in enumerate(zip(tokens, mask, strict=True), start=1):
        loss, statistics = measure(jnp.asarray(sequence, jnp.int32), jnp.asarray(real))
        if not np.isfinite(float(loss)):
            raise UserError(
                f"the model's loss on calibration sequence {done - 1} is {float(loss)}: "
                "check its weights, or use float32"
            )
        for name, value in statistics.items():
            # float64: thousands of sequences of very different size are added up.
            sums[name] = sums.get(name, 0.0) + np.asarray(value, np.float64)
        if report is not None:
            report(done, len(tokens))
    seen = sums.pop("tokens_seen").astype(np.int32)
    return Calibration(**{k: v.astype(np.float32) for k, v in sums.items()}, tokens_seen=seen)


def check_tokens(model: CausalLm, tokens: np.ndarray, mask: np.ndarray) -> None:
    """Refuses a model without dense experts, and tokens that do not fit it.

    Raises:
        UserError: Says which.
    """
    config = model.config
    if not config.moe_layers or len(moe_blocks(model)) != len(config.moe_layers):
        raise UserError(
            f"a {config.model_type} model without dense routed experts cannot be calibrated"
        )
    if len(tokens) == 0 or tokens.shape[1] < 2:
        raise UserError(
            f"calibration needs sequences of at least 2 tokens, not {list(tokens.shape)}"
        )
    wrong = mask & ((tokens < 0) | (tokens >= config.vocab_size))
    if wrong.any():
        raise UserError(
            f"calibration text has token id {int(tokens[wrong][0])}, beyond the model's "
            f"{config.vocab_size}: the tokenizer is not the model's"
        )


def moe_blocks(model: CausalLm) -> list[tuple[Any, DenseExperts]]:
    """What holds dense experts as `experts`, in order, each with these.

    It is a layer's MLP, or the layer itself where experts run beside the MLP (Gemma 4).
    """
    layers = getattr(model.model, "layers", ())
    blocks = [block for layer in layers for block in (layer, getattr(layer, "mlp", None))]
    held = [(block, getattr(block, "experts", None)) for block in blocks]
    return [(block, experts) for block, experts in held if isinstance(experts, DenseExperts)]


class _RecordingExperts:
    """Dense experts that also keep which experts the tokens chose."""

    def __init__(self, experts: DenseExperts, chosen: list[Array]):
        self.experts = experts
        self.chosen = chosen

    def __call__(self, x: Array, expert_ids: Array, *rest: Any) -> Array:
        self.chosen.append(expert_ids)
        return self.experts(x, expert_ids, *rest)


def measure_function(model: CausalLm) -> Callable[[Array, Array], tuple[Array, dict[str, Array]]]:
    """A jitted function from one sequence to its loss and what is summed over sequences."""
    config = model.config
    assert config.expert_shape is not None
    experts_count = config.expert_shape.experts
    graph, state = nnx.split(model)
    leaves, treedef = jax.tree.flatten(state)
    expert_arrays = {
        "gate_up": [experts.gate_up_proj[...] for _, experts in moe_blocks(model)],
        "down": [experts.down_proj[...] for _, experts in moe_blocks(model)],
    }

    def loss_of(
        arrays: dict[str, list[Array]], leaves: list[Array], tokens: Array, mask: Array
    ) -> tuple[Array, dict[str, Array]]:
        model = nnx.merge(graph, jax.tree.unflatten(treedef, leaves))
        chosen: list[Array] = []
        for index, (block, experts) in enumerate(moe_blocks(model)):
            experts.gate_up_proj.set_value(arrays["gate_up"][index])
            experts.down_proj.set_value(arrays["down"][index])
            block.experts = cast(Any, _RecordingExperts(experts, chosen))
        positions = jnp.arange(tokens.shape[0], dtype=jnp.int32)[None]
        out = model(tokens[None], positions, SequenceMemory(mask[None]))
        loss = next_token_loss(model.logits(out.hidden)[0], tokens, mask)
        hits = jax.nn.one_hot(jnp.stack(chosen), experts_count, dtype=jnp.int32)
        seen = jnp.sum(jnp.where(mask[None, :, None, None], hits, 0), axis=(1, 2))
        return loss, {"routing_mass": out.routing_mass, "tokens_seen": seen}

    @jax.jit
    def measure(
        arrays: dict[str, list[Array]], leaves: list[Array], tokens: Array, mask: Array
    ) -> tuple[Array, dict[str, Array]]:
        (loss, statistics), gradients = jax.value_and_grad(loss_of, has_aux=True)(
            arrays, leaves, tokens, mask
        )
        for module, layers in gradients.items():
            squares = [jnp.square(gradient.astype(jnp.float32)) for gradient in layers]
            statistics[f"{module}_row"] = jnp.stack([square.sum(axis=2) for square in squares])
            statistics[f"{module}_column"] = jnp.stack([square.sum(axis=1) for square in squares])
        return loss, statistics

    return lambda tokens, mask: measure(expert_arrays, leaves, tokens, mask)


def next_token_loss(
    logits: Float32[Array, "T V"], tokens: Int32[Array, "T"], mask: Bool[Array, "T"]
) -> Float32[Array, ""]:
    """Cross entropy of every real token that follows a real one, in nats, summed."""
    scores = jax.nn.log_softmax(logits[:-1], axis=-1)
    picked = jnp.take_along_axis(scores, tokens[1:, None], axis=1)[:, 0]
    return -jnp.sum(jnp.where(mask[1:] & mask[:-1], picked, 0.0))
