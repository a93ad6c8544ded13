"""Confidence intervals by resampling."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float

RESAMPLES = 10_000
LEVEL = 0.95
CHUNK = 500  # resamples drawn at once: 10,000 of ten thousand items would be 800 MB


class Estimate(NamedTuple):
    """A mean with its interval.

    Attributes:
        mean: Of the values.
        low: Lower end.
        high: Upper end.
        count: How many values.
    """

    mean: float
    low: float
    high: float
    count: int


def interval(
    values: Float[np.ndarray, " n"], resamples: int = RESAMPLES, seed: int = 0
) -> tuple[float, float]:
    """The 95% percentile bootstrap interval of a mean (Efron and Tibshirani 1993, chapter 13).

    The same seed draws the same items whenever the count is the same, so differences of two paired
    lists and the lists themselves are resampled alike.

    Args:
        values: One number an item; items are what is resampled.
        resamples: How many means are drawn.
        seed: Of the draws.
    """
    generator = np.random.default_rng(seed)
    means = []
    for start in range(0, resamples, CHUNK):
        picks = generator.integers(0, len(values), (min(CHUNK, resamples - start), len(values)))
        means.append(values[picks].mean(axis=1))
    tail = 50 * (1 - LEVEL)
    low, high = np.percentile(np.concatenate(means), [tail, 100 - tail])
    return float(low), float(high)


def estimate(values: Float[np.ndarray, " n"]) -> Estimate:
    """Mean and interval of the values.

    Raises:
        ValueError: No values.
    """
    if not len(values):
        raise ValueError("an estimate needs at least one value")
    return Estimate(float(np.mean(values)), *interval(values), len(values))
