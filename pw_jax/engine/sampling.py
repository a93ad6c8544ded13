"""Choosing the next token: greedy, temperature, top-k and top-p, all as data of one program."""

from dataclasses import dataclass
from typing import no_type_check

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32, UInt32


@dataclass(frozen=True)
class Sampling:
    """How one prompt's tokens are chosen.

    Attributes:
        temperature: Divides the logits; 0 takes the most likely token.
        top_k: Only the k most likely tokens; 0 means all.
        top_p: Only the most likely tokens whose probabilities first reach this sum; 1 means all.

    Raises:
        ValueError: A value out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self):
        if not self.temperature >= 0:
            raise ValueError(f"temperature must be 0 or more, got {self.temperature}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (all) or more, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}")

    @property
    def filters(self) -> bool:
        """Whether some tokens are ruled out, which takes a look at all of them in order."""
        return self.top_k > 0 or self.top_p < 1


GREEDY = Sampling()

HostOrDevice = Array | np.ndarray
"""A step's small arguments are numpy arrays on the way in and traced arrays inside."""


@jax.tree_util.register_dataclass
@no_type_check  # also built of shapes, when compiling
@dataclass(frozen=True)
class SamplingArrays:
    """The sampling of B slots, and what their randomness comes from.

    A token's key is made of its sequence's seed and its position, so that a sequence draws the same
    tokens alone, in any batch, and after a preemption.
    """

    temperature: Float32[HostOrDevice, " B"]
    top_k: Int32[HostOrDevice, " B"]
    top_p: Float32[HostOrDevice, " B"]
    seeds: UInt32[HostOrDevice, " B"]


def _filter(logits: Float32[Array, " V"], top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    """Sets logits outside top-k and top-p to minus infinity; changes none where both are off."""
    ordered = jnp.sort(logits, descending=True)
    kth = ordered[jnp.where(top_k > 0, jnp.minimum(top_k, logits.shape[0]), logits.shape[0]) - 1]
    allowed = ordered >= kth
    probabilities = jax.nn.softmax(jnp.where(allowed, ordered, -jnp.inf))
    before = jnp.cumsum(probabilities) - probabilities
    last = jnp.sum((before < top_p) & allowed) - 1
    filters = (top_k > 0) | (top_p < 1)
    return jnp.where(~filters | (logits >= ordered[last]), logits, -jnp.inf)


def sample(
    logits: Float32[Array, "B V"],
    sampling: SamplingArrays,
    positions: Int32[Array, " B"],
    *,
    filters: bool = True,
) -> Int32[Array, " B"]:
    """Draws one token a slot; the most likely one where the temperature is 0.

    A draw is the largest of the logits with Gumbel noise added, and a token's noise depends on the
    key and the token alone. So it does not matter how logits are divided over devices: each takes
    the largest of its own, and only those are compared. Filters sort, and so gather, all logits.

    Args:
        logits: Scores of the next token.
        sampling: The slots' sampling.
        positions: Position whose logits these are; makes the key.
        filters: Static; False if no slot has a top-k or top-p, and draws the same.
    """

    def draw(logits, temperature, top_k, top_p, seed, position):
        key = jax.random.fold_in(jax.random.key(seed), position)
        scaled = logits / jnp.where(temperature > 0, temperature, jnp.float32(1))
        allowed = _filter(scaled, top_k, top_p) if filters else scaled
        return jax.random.categorical(key, allowed).astype(jnp.int32)

    s = sampling
    drawn = jax.vmap(draw)(logits, s.temperature, s.top_k, s.top_p, s.seeds, positions)
    return jnp.where(s.temperature > 0, drawn, most_likely(logits))


def most_likely(logits: Float32[Array, "B V"]) -> Int32[Array, " B"]:
    """The greedy choice of each slot."""
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)
