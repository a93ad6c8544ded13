"""How sensitive the loss is to each routed expert: a rank-one Fisher matrix from real text.

The sensitivity of PagedWeight, ``G(b) = sum_rj F_rj (w_rj - w_rj(b))**2``, and the quantizer's
weights need the diagonal of the Fisher matrix F of each expert matrix. Its empirical estimate is
the sum over sequences of the squared gradient of the summed next-token loss (Any-Precision LLM
does the same). Only the marginals are kept: ``F_rj ~ row_r column_j / sum(column)``.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int

from pw_jax.errors import UserError
from pw_jax.layered_gradients import LayeredGradients, held_experts
from pw_jax.models.decoder import CausalLm
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

    One sequence at a time, and the gradients of one layer at a time: it needs the memory of one
    layer's gradients beside the model, and of one sequence's activations in that layer.

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
    gradients = LayeredGradients(model)
    sums: dict[str, np.ndarray] = {}
    for done, (sequence, real) in enumerate(zip(tokens, mask, strict=True), start=1):
        loss, statistics = gradients.measure(jnp.asarray(sequence, jnp.int32), jnp.asarray(real))
        if not np.isfinite(loss):
            raise UserError(
                f"the model's loss on calibration sequence {done - 1} is {loss}: "
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
    """What holds dense experts as `experts`, in order, each with these; see `held_experts`."""
    held = [held_experts(layer) for layer in getattr(model.model, "layers", ())]
    return [one for one in held if one is not None]
