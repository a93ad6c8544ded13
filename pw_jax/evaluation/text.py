"""Perplexity of a text, and the divergence of a model from a reference on it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32

from pw_jax.evaluation.forward import Forward
from pw_jax.evaluation.scoring import BatchShapes

Report = Callable[[int, int], None]
POSITIONS = 256
"""Positions compared at once: V floats each, of either model."""


@dataclass(frozen=True)
class TextQuality:
    """A model on a text, one number a sequence.

    Attributes:
        loss: Mean negative log-likelihood of the tokens but the first, in nats.
        kl: Mean of KL(reference || model) over the same predictions, in nats; None without a
            reference.
        same_best: Share of predictions whose likeliest token is the reference's, or None.
    """

    loss: Float[np.ndarray, " S"]
    kl: Float[np.ndarray, " S"] | None = None
    same_best: Float[np.ndarray, " S"] | None = None

    @property
    def perplexity(self) -> float:
        """Of the whole text."""
        return float(np.exp(min(float(self.loss.mean()), 700.0)))


class Reference:
    """The unquantised model's hidden states of a text.

    They are kept on the host (D values a token; logits would be V) and its head makes
    probabilities of them again when they are compared.

    Args:
        forward: The model.
        tokens: The text, in sequences of equal length.
        shapes: How many tokens are run at once.
    """

    def __init__(self, forward: Forward, tokens: Int32[np.ndarray, "S T"], shapes: BatchShapes):
        self._forward = forward
        self.tokens = tokens
        self._hidden = np.concatenate([np.asarray(h) for _, h in _run(forward, tokens, shapes)])

    def log_probabilities(self, rows: slice, columns: slice) -> Float32[Array, "rows P V"]:
        """Of the predictions at some positions."""
        return self._forward.log_probabilities(jnp.asarray(self._hidden[rows, columns]))


def measure_text(
    forward: Forward,
    tokens: Int32[np.ndarray, "S T"],
    reference: Reference | None = None,
    shapes: BatchShapes | None = None,
    report: Report = lambda done, of: None,
) -> TextQuality:
    """Runs a model over a text.

    Args:
        forward: The model.
        tokens: Sequences of equal length; each starts afresh.
        reference: The same text by the reference.
        shapes: How many tokens are run at once.
        report: Called with the sequences done, and all.

    Raises:
        ValueError: The reference saw another text.
    """
    if reference is not None and not np.array_equal(reference.tokens, tokens):
        raise ValueError("the reference was made of another text")
    last = tokens.shape[1] - 1
    sums = np.zeros((3, len(tokens)))
    for start, hidden in _run(forward, tokens, shapes or BatchShapes()):
        rows = slice(start, start + len(hidden))
        step = max(1, POSITIONS // len(hidden))
        for first in range(0, last, step):
            columns = slice(first, min(first + step, last))
            ours = forward.log_probabilities(hidden[:, columns])
            theirs = None if reference is None else reference.log_probabilities(rows, columns)
            targets = tokens[rows, first + 1 : columns.stop + 1]
            sums[:, rows] += np.asarray(_compare(ours, theirs, jnp.asarray(targets)), np.float64)
        report(min(rows.stop, len(tokens)), len(tokens))
    loss, kl, same = sums / last
    return TextQuality(loss) if reference is None else TextQuality(loss, kl, same)


def _run(
    forward: Forward, tokens: Int32[np.ndarray, "S T"], shapes: BatchShapes
) -> Iterator[tuple[int, Float[Array, "B T D"]]]:
    """Batches of sequences: the index of the first, and their hidden states."""
    rows = max(1, min(len(tokens), shapes.tokens // tokens.shape[1]))
    for start in range(0, len(tokens), rows):
        batch = tokens[start : start + rows]
        filled = np.resize(batch, (rows, tokens.shape[1]))  # one shape; repeats are dropped
        hidden = forward.hidden(filled, np.ones(filled.shape, bool))
        yield start, hidden[: len(batch)]


@jax.jit
def _compare(
    ours: Float32[Array, "B P V"], theirs: Float32[Array, "B P V"] | None, targets: Array
) -> Float32[Array, "3 B"]:
    """Sums over positions of loss, KL and equal best tokens."""
    loss = -jnp.take_along_axis(ours, targets[..., None], axis=-1)[..., 0].sum(axis=1)
    if theirs is None:
        return jnp.stack([loss, jnp.zeros_like(loss), jnp.zeros_like(loss)])
    kl = jnp.sum(jnp.exp(theirs) * (theirs - ours), axis=(1, 2))
    same = jnp.argmax(theirs, axis=-1) == jnp.argmax(ours, axis=-1)
    return jnp.stack([loss, kl, same.sum(axis=1).astype(jnp.float32)])
