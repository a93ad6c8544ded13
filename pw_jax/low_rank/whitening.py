"""What calibration text says about the inputs of a linear layer, in float64 on the host.

No Gram matrix and no Cholesky factor: both square the condition number, and the latter fails on
inputs with a dead channel or fewer tokens than dimensions. A triangle R with R.T @ R = X.T @ X
comes from QR factorisations of the inputs themselves, and nothing is ever inverted.
"""

import dataclasses
from typing import Literal

import numpy as np
from jaxtyping import Float64

Method = Literal["svd", "asvd", "whitened"]
METHODS: tuple[Method, ...] = ("svd", "asvd", "whitened")
DAMPING = 1e-6
ASVD_EXPONENT = 0.5  # the published method's
CHUNK = 4096  # rows that are gathered for one QR factorisation


@dataclasses.dataclass
class InputStatistics:
    """Sums over the tokens that a layer was given.

    Attributes:
        method: What the sums are for; only ``whitened`` pays for the triangle.
        features: Width of the inputs.
        absolute: float64 [features], sum of absolute values.
        tokens: How many tokens were counted.
    """

    method: Method
    features: int
    absolute: Float64[np.ndarray, " D"] = dataclasses.field(init=False)
    tokens: int = dataclasses.field(init=False, default=0)
    _triangle: Float64[np.ndarray, "D D"] = dataclasses.field(init=False)
    _waiting: list[np.ndarray] = dataclasses.field(init=False, default_factory=list)

    def __post_init__(self):
        """Starts with no tokens."""
        self._triangle = np.zeros((self.features, self.features))
        self.absolute = np.zeros(self.features)

    def add(self, inputs: np.ndarray) -> None:
        """Counts inputs [tokens, features] of any float type; padding must be left out."""
        if not np.isfinite(inputs).all():
            raise ValueError("inputs of a linear layer are not finite")
        rows = inputs.astype(np.float64)
        self.tokens += len(rows)
        self.absolute += np.abs(rows).sum(axis=0)
        if self.method == "whitened":
            self._waiting.append(equal_tokens(rows))
            if sum(map(len, self._waiting)) >= CHUNK:
                self._factorise()

    @property
    def triangle(self) -> Float64[np.ndarray, "D D"]:
        """R with R.T @ R = X.T @ X, only for ``whitened``; zero if there was no token."""
        if self._waiting:
            self._factorise()
        return self._triangle

    def _factorise(self) -> None:
        rows = np.concatenate([self._triangle, *self._waiting])
        self._triangle = np.linalg.qr(rows, mode="r")
        self._waiting.clear()

    def scaling(self) -> Float64[np.ndarray, "D K"] | None:
        """S for which ``|| (W - W') S ||`` is the error that a method minimises.

        ``whitened``: the transposed triangle of the inputs with ``sqrt(mu) I`` below them, where mu
        is `DAMPING` times the mean energy of a channel. It decides what the text leaves open (dead
        channels, fewer tokens than dimensions) by the weights alone, and is negligible elsewhere.
        ``asvd``: the root of the mean absolute value of each channel. ``svd``: None, the identity.
        Inputs that are all zero say nothing: also None.
        """
        if self.method == "svd" or not self.absolute.any():
            return None
        if self.method == "asvd":
            mean = self.absolute / self.tokens
            return np.diag(np.maximum(mean, DAMPING * mean.mean()) ** ASVD_EXPONENT)
        triangle = self.triangle
        mean_square = np.square(triangle).sum() / self.features
        below = np.sqrt(DAMPING * mean_square) * np.eye(self.features)
        return np.linalg.qr(np.concatenate([triangle, below]), mode="r").T


def equal_tokens(inputs: Float64[np.ndarray, "T D"]) -> Float64[np.ndarray, "T D"]:
    """Inputs with rows of length one: every token's relative error then counts alike.

    The first token of a text has activations a thousand times as large as the others'. In a plain
    sum of squares it is all that counts: a rank or two satisfy it, and every other token is lost.
    """
    length = np.linalg.norm(inputs, axis=1, keepdims=True)
    return inputs / np.where(length > 0, length, 1.0)
