"""How much more, or less, the running prompts suffer than calibration's text did.

Both forms predict the same ratio for a block: the damage a routed token of the prompt takes, over
what a routed token of calibration's text takes. Routing itself is not in it; the multiplier is.

* direct: ``mean_t sum_j x_tj^2 c_j / (sum_j E[x_j^2] c_j)`` over the prompt's tokens that chose the
  expert, where ``c_j = sum_r r_r (w_rj - w_rj(b))^2`` is the stored column error. Prefill computes
  it, for gate_up; the input of down is inside a fused kernel, and its ratio stays 1.
* heads: a ridge regression for each layer and module on the logarithms of the mean, RMS and
  greatest norm of the layer's MoE inputs, the form of the PagedWeight paper.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np
from jaxtyping import Bool, Float

from pw_jax.planner.config import PlannerConfig

FEATURES = 3
"""Mean, RMS and greatest norm."""

TINY = 1e-12


@dataclasses.dataclass(frozen=True)
class PromptSums:
    """What prefill saw of one prompt, summed over its chunks.

    Attributes:
        tokens: Real tokens.
        norms: Sum, sum of squares and maximum of the norms of each layer's MoE inputs, [L, 3].
        routed: Tokens that chose each expert, [L, E].
        ratio: Sum over these tokens of the direct ratio, [L, E]; None in the mode "heads".
    """

    tokens: int
    norms: Float[np.ndarray, "L 3"]
    routed: Float[np.ndarray, "L E"]
    ratio: Float[np.ndarray, "L E"] | None = None

    def __add__(self, other: "PromptSums") -> "PromptSums":
        """Both together."""
        norms = self.norms + other.norms
        norms[:, 2] = np.maximum(self.norms[:, 2], other.norms[:, 2])
        both = self.ratio is not None and other.ratio is not None
        return PromptSums(
            self.tokens + other.tokens,
            norms,
            self.routed + other.routed,
            self.ratio + other.ratio if both else None,  # pyright: ignore[reportOptionalOperand]
        )

    def features(self) -> Float[np.ndarray, "L 3"]:
        """Logarithms of the mean, RMS and greatest norm of each layer."""
        mean, square, largest = np.asarray(self.norms, np.float64).T
        count = max(self.tokens, 1)
        columns = (mean / count, np.sqrt(square / count), largest)
        return np.log(np.maximum(np.stack(columns, axis=1), TINY))


@dataclasses.dataclass(frozen=True)
class Heads:
    """A linear head for each layer and module.

    Attributes:
        center: Means of the features, [L, 3].
        scale: Their standard deviations, [L, 3].
        weights: Of the scaled features, then the bias, [L, 2, 4].
        r_squared: On prompts that the fit had not seen, [L, 2].
        kept: False for heads that do not predict such prompts: their ratio is 1, [L, 2].
    """

    center: Float[np.ndarray, "L 3"]
    scale: Float[np.ndarray, "L 3"]
    weights: Float[np.ndarray, "L 2 4"]
    r_squared: Float[np.ndarray, "L 2"]
    kept: Bool[np.ndarray, "L 2"]

    def log_ratio(self, features: Float[np.ndarray, "L 3"]) -> Float[np.ndarray, "L 2"]:
        """Predicted logarithm of the ratio; 0 from heads that were dropped."""
        scaled = (features - self.center) / self.scale
        design = np.concatenate([scaled, np.ones((len(scaled), 1))], axis=1)
        return np.where(self.kept, np.einsum("lf,lmf->lm", design, self.weights), 0.0)


def direct_ratio(sums: PromptSums, prior_tokens: float) -> Float[np.ndarray, "L E"]:
    """Mean direct ratio of each expert, drawn towards 1 by `prior_tokens` tokens."""
    assert sums.ratio is not None
    return (sums.ratio + prior_tokens) / (sums.routed + prior_tokens)


def prompt_factor(
    prompts: Mapping[int, PromptSums], heads: Heads | None, config: PlannerConfig, experts: int
) -> Float[np.ndarray, "L E 2"] | None:
    """The correction for all running prompts: their mean, weighted by tokens.

    Args:
        prompts: Sums of each running sequence.
        heads: For the mode "heads".
        config: The constants.
        experts: Experts a layer.

    Returns:
        A factor on the damage of each block; None if there is nothing to go by.
    """
    known = [sums for sums in prompts.values() if sums.tokens > 0]
    if not known or config.prompt_residual == "off":
        return None
    total, tokens = 0.0, 0
    for sums in known:
        if config.prompt_residual == "heads":
            assert heads is not None
            ratio = np.exp(heads.log_ratio(sums.features()))[:, None, :]
            ratio = np.repeat(ratio, experts, axis=1)
        else:
            gate_up = direct_ratio(sums, config.residual_tokens)
            ratio = np.stack([gate_up, np.ones_like(gate_up)], axis=-1)
        limit = config.residual_limit
        clipped = np.clip(ratio**config.residual_strength, 1 / limit, limit)
        total, tokens = total + sums.tokens * clipped, tokens + sums.tokens
    return np.asarray(total / tokens)


def oracle_damage(
    prompts: Mapping[int, PromptSums], damage: Float[np.ndarray, "L E 2 W"]
) -> Float[np.ndarray, "L E 2 W"] | None:
    """Damage that the prompts themselves showed: their own routing and inputs, nothing shrunk."""
    known = [sums for sums in prompts.values() if sums.tokens > 0]
    if not known:
        return None
    total = known[0]
    for sums in known[1:]:
        total = total + sums
    assert total.ratio is not None
    by_module = np.stack([total.ratio, total.routed], axis=-1) / total.tokens
    return damage * by_module[..., None]
