"""Fits the prompt heads: ridge regression, its strength by cross-validation."""

import numpy as np
from jaxtyping import Float

from pw_jax.planner.residual import FEATURES, Heads

STRENGTHS = 10.0 ** np.arange(-3, 4)
FOLDS = 5
LEAST_R_SQUARED = 0.3
"""A head that explains less of prompts it has not seen is dropped."""


def fit_heads(
    features: Float[np.ndarray, "S L 3"],
    log_ratio: Float[np.ndarray, "S L 2"],
    seed: int = 0,
    least_r_squared: float = LEAST_R_SQUARED,
) -> Heads:
    """Fits a head for each layer and module, and drops those that do not predict.

    A fifth of the prompts is held out; on the others the strength is chosen by 5-fold
    cross-validation. R^2 compares with always predicting the mean of the prompts fitted on.

    Args:
        features: Of S prompts, see `PromptSums.features`.
        log_ratio: Logarithm of each prompt's ratio of damage.
        seed: Deals out the prompts.
        least_r_squared: Below this on the held-out prompts, a head is dropped.
    """
    prompts, layers, _ = features.shape
    if prompts < 2 * FOLDS:
        raise ValueError(f"heads need at least {2 * FOLDS} prompts, not {prompts}")
    order = np.random.default_rng(seed).permutation(prompts)
    held_out, fitted = np.split(order, [prompts // FOLDS])
    center = features[fitted].mean(axis=0)
    scale = np.maximum(features[fitted].std(axis=0), 1e-6)
    scaled = (features - center) / scale
    weights = np.zeros((layers, 2, FEATURES + 1))
    r_squared = np.zeros((layers, 2))
    for layer, module in np.ndindex(layers, 2):
        x, y = scaled[:, layer], log_ratio[:, layer, module]
        strength = min(STRENGTHS, key=lambda s: _cross_error(x[fitted], y[fitted], s))
        own = weights[layer, module] = _ridge(x[fitted], y[fitted], strength)
        error = np.square(y[held_out] - _predict(x[held_out], own)).sum()
        spread = np.square(y[held_out] - y[fitted].mean()).sum()
        r_squared[layer, module] = 1 - error / spread if spread > 0 else 0.0
    return Heads(center, scale, weights, r_squared, r_squared >= least_r_squared)


def _cross_error(x: np.ndarray, y: np.ndarray, strength: float) -> float:
    total = 0.0
    for fold in range(FOLDS):
        out = np.arange(len(y)) % FOLDS == fold
        weights = _ridge(x[~out], y[~out], strength)
        total += float(np.square(y[out] - _predict(x[out], weights)).sum())
    return total


def _ridge(x: np.ndarray, y: np.ndarray, strength: float) -> np.ndarray:
    """Weights, then a bias that is not shrunk."""
    middle, mean = x.mean(axis=0), y.mean()
    inner = (x - middle).T @ (x - middle) + strength * np.eye(x.shape[1])
    weights = np.linalg.solve(inner, (x - middle).T @ (y - mean))
    return np.append(weights, mean - middle @ weights)


def _predict(x: np.ndarray, weights: np.ndarray) -> np.ndarray:
    return x @ weights[:-1] + weights[-1]
