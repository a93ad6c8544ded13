"""Splits against brute force, and clusterings against the exact optimum, in plain numpy."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pw_jax.quantizer import kmeans

SIZE = 48


def interval_errors(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Squared error of every interval [start, end), shape [M + 1, M + 1]."""
    size = len(values)
    errors = np.zeros((size + 1, size + 1))
    for start in range(size):
        weight = np.cumsum(weights[start:])
        mean = np.cumsum(weights[start:] * values[start:]) / weight
        square = np.cumsum(weights[start:] * values[start:] ** 2)
        errors[start, start + 1 :] = np.maximum(square - weight * mean**2, 0)
    return errors


def optimal_error(values: np.ndarray, weights: np.ndarray, clusters: int) -> float:
    """The least squared error that any clustering reaches, by dynamic programming."""
    order = np.argsort(values)
    errors = interval_errors(values[order].astype(np.float64), weights[order].astype(np.float64))
    infinite = np.where(np.tri(len(errors), k=-1, dtype=bool), np.inf, errors)
    best = infinite[0]
    for _ in range(clusters - 1):
        best = np.min(best[:, None] + infinite, axis=0)
    return float(best[-1])


def sample(kind: str, rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    values = rng.standard_t(6, (rows, SIZE))
    weights = np.exp(1.5 * rng.standard_normal((rows, SIZE)))
    if kind == "uniform weights":
        weights[:] = 1
    elif kind == "few values":
        values = rng.integers(-2, 3, (rows, SIZE))
    elif kind == "constant":
        values[:] = values[:, :1]
    elif kind == "far from zero":
        values = 1000 + values / 100
    elif kind == "one outlier":
        values[:, 5] = 1e4
    return values.astype(np.float32), weights.astype(np.float32)


KINDS = ("skewed", "uniform weights", "few values", "constant", "far from zero", "one outlier")


@jax.jit
def clustered(values, weights):
    groups = kmeans.sort_groups(values, weights)
    seed = kmeans.nested_borders(groups, 3, 3)
    return groups, seed, kmeans.nested_borders(groups, 3, 6), kmeans.nested_borders(groups, 2, 3)


def run(values: np.ndarray, weights: np.ndarray):
    with jax.enable_x64(True):
        return jax.tree.map(np.asarray, clustered(values, weights))


@settings(max_examples=40, deadline=None)
@given(kind=st.sampled_from(KINDS), seed=st.integers(0, 2**31))
def test_every_split_is_the_best_one(kind: str, seed: int):
    values, weights = sample(kind, 4, seed)
    groups, _, borders, _ = run(values, weights)
    for row in range(4):
        order = np.lexsort((weights[row], values[row]))
        ascending = values[row][order].astype(np.float64)
        errors = interval_errors(ascending - ascending.mean(), weights[row][order].astype(float))
        np.testing.assert_allclose(groups.values[row] + groups.offset[row], ascending, rtol=1e-12)
        total = errors[0, -1]
        for bits in (4, 5, 6):
            parents = borders[row, :: 2 ** (7 - bits)]
            children = borders[row, :: 2 ** (6 - bits)]
            assert (np.diff(children) >= 0).all()
            for start, middle, end in zip(parents, children[1::2], parents[1:], strict=False):
                best = min(errors[start, i] + errors[i, end] for i in range(start, end + 1))
                assert errors[start, middle] + errors[middle, end] <= best + 1e-9 * total


@settings(max_examples=40, deadline=None)
@given(kind=st.sampled_from(KINDS), seed=st.integers(0, 2**31))
def test_equal_values_share_a_cluster(kind: str, seed: int):
    values, weights = sample(kind, 4, seed)
    groups, _, borders, _ = run(values, weights)
    for row in range(4):
        cluster = np.searchsorted(borders[row, 1:-1], np.arange(SIZE), side="right")
        same = np.diff(groups.values[row]) == 0
        np.testing.assert_array_equal(cluster[1:][same], cluster[:-1][same])
        distinct = len(np.unique(values[row]))
        assert len(np.unique(cluster)) <= min(distinct, 64)
        if distinct <= 5:  # three exact splits on the way to 8 clusters part all of them
            assert len(np.unique(cluster)) == distinct


@pytest.mark.parametrize("kind", ["skewed", "uniform weights", "one outlier"])
def test_eight_clusters_are_near_the_optimum(kind: str):
    values, weights = sample(kind, 64, 0)
    _, seed, _, from_two_bits = run(values, weights)
    optimum, found, nested = 0.0, 0.0, 0.0
    for row in range(64):
        order = np.argsort(values[row])
        errors = interval_errors(values[row][order].astype(float), weights[row][order])
        optimum += optimal_error(values[row], weights[row], 8)
        found += errors[seed[row, :-1], seed[row, 1:]].sum()
        nested += errors[from_two_bits[row, :-1], from_two_bits[row, 1:]].sum()
    assert optimum <= found <= 1.05 * optimum
    assert nested >= optimum
    if kind != "one outlier":  # of four clusters it takes one, and with it two of the eight
        assert nested <= 1.6 * optimum


def lloyd_error(values: np.ndarray, clusters: int) -> float:
    """Squared error of textbook unweighted Lloyd from quantiles."""
    means = np.quantile(values, (np.arange(clusters) + 0.5) / clusters)
    for _ in range(200):
        nearest = np.argmin(np.abs(values[:, None] - means[None, :]), axis=1)
        updated = [values[nearest == k].mean() if (nearest == k).any() else means[k]
                   for k in range(clusters)]  # fmt: skip
        means = np.array(updated)
    return float(np.sum(np.min(np.abs(values[:, None] - means[None, :]), axis=1) ** 2))


def test_it_is_no_worse_than_lloyd_from_quantiles():
    values, weights = sample("uniform weights", 64, 3)
    groups, seed, _, _ = run(values, weights)
    found = 0.0
    for row in range(64):
        errors = interval_errors(groups.values[row], np.ones(SIZE))
        found += errors[seed[row, :-1], seed[row, 1:]].sum()
    assert found <= sum(lloyd_error(row.astype(np.float64), 8) for row in values)
