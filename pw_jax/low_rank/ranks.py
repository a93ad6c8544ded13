"""How many parameters a rank costs, and how a budget of parameters is shared out.

A ratio is always the fraction of parameters that is KEPT, counted over the linear layers of the
decoder layers. Biases, norms, embeddings and the head are not counted: they stay as they are.
"""

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np

from pw_jax.errors import UserError
from pw_jax.low_rank.svd import truncation_loss

Shapes = Mapping[str, tuple[int, int]]


def break_even(shape: tuple[int, int]) -> int:
    """The largest rank whose factors have fewer parameters than the matrix; may be 0."""
    rows, columns = shape
    return (rows * columns - 1) // (rows + columns)


def kept_parameters(ranks: Mapping[str, int], shapes: Shapes) -> int:
    """Parameters of all linear layers: factors where there is a rank, else the whole matrix."""
    return sum(
        ranks[name] * sum(shape) if name in ranks else shape[0] * shape[1]
        for name, shape in shapes.items()
    )


def wasteful(ranks: Mapping[str, int], shapes: Shapes) -> list[str]:
    """Names whose factors have no fewer parameters than the matrix they stand for."""
    return [name for name, rank in ranks.items() if rank > break_even(shapes[name])]


def uniform_ranks(shapes: Shapes, ratio: float) -> dict[str, int]:
    """The same fraction of every matrix: floor(ratio m n / (m + n)), at least 1."""
    check_ratio(ratio)
    if ratio == 1:
        return {}
    return {
        name: max(int(ratio * rows * columns / (rows + columns)), 1)
        for name, (rows, columns) in shapes.items()
    }


def allot(energies: Mapping[str, np.ndarray], shapes: Shapes, ratio: float) -> dict[str, int]:
    """Shares one budget by truncation loss.

    The loss of a matrix is the share of its output's energy on the calibration text that its
    truncation takes away, and the sum over matrices is made small: each step buys where a parameter
    saves the most. A matrix whose last ranks would cost as much as the matrix is kept whole, and
    then has no rank. Steps are those of the lower convex hull of loss over parameters, so that the
    jump to the whole matrix competes fairly with single ranks; a budget that runs out within a
    hull's step is filled up with single ranks.

    Args:
        energies: `svd.Spectrum.energy` of every matrix.
        shapes: (outputs, inputs) of every matrix.
        ratio: Fraction of parameters kept, above 0 and up to 1.

    Returns:
        Ranks of the matrices that are factored; at least 1 each.
    """
    check_ratio(ratio)
    budget = int(ratio * kept_parameters({}, shapes))
    curves = {name: _curve(energies[name], shape) for name, shape in shapes.items()}
    chosen = dict.fromkeys(shapes, 0)  # index into the curve
    spent = sum(int(curves[name][0][0]) for name in shapes)
    if spent > budget:
        raise UserError(f"a ratio of {ratio} is too small: rank 1 everywhere takes {spent} of it")
    steps = sorted(
        (-(loss[start] - loss[end]) / (cost[end] - cost[start]), name, start, end)
        for name, (cost, loss) in curves.items()
        for start, end in _hull(cost, loss)
    )
    stuck = set()
    for _, name, start, end in steps:
        if name in stuck:
            continue
        cost, _ = curves[name]
        if spent + cost[end] - cost[start] > budget:
            stuck.add(name)  # its later steps build on this one
            continue
        chosen[name] = end
        spent += int(cost[end] - cost[start])
    _fill(curves, chosen, stuck, budget - spent)
    return {
        name: index + 1 for name, index in chosen.items() if index + 1 <= break_even(shapes[name])
    }


def _curve(energy: np.ndarray, shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Parameters and relative loss of rank 1, 2, ... up to the break-even, and of the whole."""
    last = break_even(shape)
    loss = truncation_loss(np.asarray(energy, np.float64))
    relative = loss / loss[0] if loss[0] > 0 else np.zeros_like(loss)
    cost = np.append(np.arange(1, last + 1) * sum(shape), shape[0] * shape[1])
    return cost, np.append(relative[1 : last + 1], 0.0)


def _hull(cost: np.ndarray, loss: np.ndarray) -> list[tuple[int, int]]:
    """Steps along the lower convex hull, as pairs of indices."""
    corners: list[int] = []
    for index in range(len(cost)):
        while len(corners) > 1:
            first, second = corners[-2:]
            rise = (loss[second] - loss[first]) * (cost[index] - cost[first])
            if rise < (loss[index] - loss[first]) * (cost[second] - cost[first]):
                break
            corners.pop()
        corners.append(index)
    return list(itertools.pairwise(corners))


def _fill(
    curves: Mapping[str, tuple[np.ndarray, np.ndarray]],
    chosen: dict[str, int],
    stuck: set[str],
    left: int,
) -> None:
    """Spends what is left a rank at a time, where a parameter saves the most."""
    while True:
        best = None
        for name in sorted(stuck):
            cost, loss = curves[name]
            index = chosen[name]
            if index + 1 == len(cost) or cost[index + 1] - cost[index] > left:
                continue
            step = int(cost[index + 1] - cost[index])
            gain = (loss[index] - loss[index + 1]) / step
            if best is None or gain > best[0]:
                best = (gain, name, step)
        if best is None:
            return
        chosen[best[1]] += 1
        left -= best[2]


def check_ratio(ratio: float) -> None:
    """Raises a UserError unless the ratio is a fraction to keep."""
    if not 0 < ratio <= 1:
        raise UserError(
            f"the ratio is the fraction of parameters kept, above 0 and up to 1, not {ratio}"
        )


def read_ranks(raw: Mapping[str, Any], source: str) -> dict[str, int]:
    """Reads a file of ranks: ``{"model.layers.0.mlp.up_proj": 96, ...}``; null keeps it whole."""
    for name, rank in raw.items():
        if rank is not None and (isinstance(rank, bool) or not isinstance(rank, int)):
            raise UserError(f"{source}: the rank of {name} must be a whole number, not {rank!r}")
    return {name: rank for name, rank in raw.items() if rank is not None}
