"""Divides the neurons of one dense FFN into a shared expert and balanced routed experts."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

Table = np.ndarray[tuple[int, ...], np.dtype[np.floating]]
Labels = np.ndarray[tuple[int, ...], np.dtype[np.integer]]


@dataclasses.dataclass(frozen=True)
class Geometry:
    """How the F neurons of every layer are divided: ``F = shared + experts * width``.

    Attributes:
        shared: neurons that every token uses.
        experts: routed experts.
        width: neurons of one routed expert.
        top_k: experts that each token uses.
    """

    shared: int
    experts: int
    width: int
    top_k: int

    @property
    def neurons(self) -> int:
        """Neurons of one layer."""
        return self.shared + self.experts * self.width


def order_neurons(
    energy: Float[Table, "T F"], geometry: Geometry, *, rounds: int = 8, seed: int = 0
) -> Labels:
    """Decides which neuron goes where.

    The neurons with the largest mean energy are shared. The others are divided so that the energy
    of the experts that each token leaves out, if it chooses well, is least: given the experts, it
    is known which tokens leave each of them out, hence what a neuron would lose in each; given
    that, neurons are assigned anew. (k-means of the neurons' profiles is only the beginning.)

    Args:
        energy: squared contribution of every neuron to the output, as a share of each token's.
        geometry: the division.
        rounds: of assignment.
        seed: of the first centres.

    Returns:
        Neuron indices, shared first, then expert by expert.
    """
    by_use = np.argsort(-energy.mean(axis=0), kind="stable")
    shared, routed = np.sort(by_use[: geometry.shared]), np.sort(by_use[geometry.shared :])
    energy = energy[:, routed]
    labels = _similar_profiles(energy, geometry, seed)
    best, best_loss = labels, np.inf
    for _ in range(rounds):
        per_expert = energy @ np.eye(geometry.experts, dtype=energy.dtype)[labels]
        rank = np.argsort(np.argsort(-per_expert, axis=1), axis=1)
        left_out = (rank >= geometry.top_k).astype(energy.dtype)
        loss = float((per_expert * left_out).sum(axis=1).mean())
        if loss < best_loss:
            best, best_loss = labels, loss
        labels = assign_balanced(energy.T @ left_out, geometry.width)
    by_expert = np.argsort(best, kind="stable")
    return np.concatenate([shared, routed[by_expert]])


def _similar_profiles(energy: Float[Table, "T R"], geometry: Geometry, seed: int) -> Labels:
    """Balanced k-means of unit profiles over tokens."""
    profile = energy / np.maximum(np.linalg.norm(energy, axis=0), 1e-12)
    chosen = [int(np.random.default_rng(seed).integers(profile.shape[1]))]
    for _ in range(geometry.experts - 1):  # the profile least like those chosen
        chosen.append(int(np.argmin((profile[:, chosen].T @ profile).max(axis=0))))
    centres = profile[:, chosen]
    labels = np.zeros(profile.shape[1], np.int64)
    for _ in range(5):
        labels = assign_balanced(-(profile.T @ centres), geometry.width)
        centres = profile @ np.eye(geometry.experts, dtype=profile.dtype)[labels]
        centres = centres / np.linalg.norm(centres, axis=0)
    return labels


def assign_balanced(cost: Float[Table, "R E"], width: int) -> Labels:
    """Assigns rows to columns, `width` rows each, the rows with most to lose first.

    Args:
        cost: of putting each row into each column.
        width: rows a column takes; ``R = E * width``.

    Returns:
        The column of every row.
    """
    two_best = np.partition(cost, 1, axis=1)
    room = np.full(cost.shape[1], width)
    labels = np.zeros(cost.shape[0], np.int64)
    for row in np.argsort(two_best[:, 0] - two_best[:, 1], kind="stable"):
        labels[row] = np.argmin(np.where(room > 0, cost[row], np.inf))
        room[labels[row]] -= 1
    return labels


@jax.jit
def fit_router(x: Float[Array, "T D"], log_energy: Float[Array, "T E"]) -> Float[Array, "E D"]:
    """Ridge regression of each expert's log energy, less the token's mean, on the FFN's input.

    Qwen2-MoE's router has no bias, so there is no intercept either.
    """
    target = log_energy - log_energy.mean(axis=1, keepdims=True)
    gram = x.T @ x
    penalty = 0.01 * jnp.trace(gram) / gram.shape[0]
    return jnp.linalg.solve(gram + penalty * jnp.eye(gram.shape[0]), x.T @ target).T
