"""Best low-rank factors of one weight matrix."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float64


class Spectrum(NamedTuple):
    """A weight's left singular vectors in the geometry of its inputs.

    Attributes:
        left: float64 [N, min(N, K)], orthonormal columns, most important first.
        energy: float64 [min(N, K)], what the squared error grows by without each of them.
    """

    left: Float64[np.ndarray, "N R"]
    energy: Float64[np.ndarray, " R"]


def spectrum(
    weight: Float64[np.ndarray, "N K"], scaling: Float64[np.ndarray, "K K"] | None
) -> Spectrum:
    """Singular vectors of ``weight @ scaling``.

    Args:
        weight: [outputs, inputs].
        scaling: See `InputStatistics.scaling`; None for plain SVD.
    """
    scaled = weight if scaling is None else weight @ scaling
    left, singular, _ = np.linalg.svd(scaled, full_matrices=False)
    return Spectrum(left, np.square(singular))


def factors(
    weight: Float64[np.ndarray, "N K"], left: Float64[np.ndarray, "N R"], rank: int
) -> tuple[Float64[np.ndarray, "N r"], Float64[np.ndarray, "r K"]]:
    """Factors u and v of a rank, from the spectrum of any method.

    The best W' of rank r under ``|| (W - W') S ||`` is U U.T W with U the first r left singular
    vectors of W S: the scaling cancels, so nothing has to be inverted.

    Returns:
        u [N, rank] with orthonormal columns, v [rank, K].
    """
    u = left[:, :rank]
    return u, u.T @ weight


def truncation_loss(energy: Float64[np.ndarray, " R"]) -> Float64[np.ndarray, " losses"]:
    """Squared error of every rank from 0 to R, by the energies alone; R + 1 numbers."""
    return np.append(np.cumsum(energy[::-1])[::-1], 0.0)
