"""Weighted one-dimensional k-means on many groups of values at once, without randomness.

A group is one sorted row of values. A cluster is an interval of it, so a clustering is a list of
borders, and the weight, mean and squared error of any interval come from prefix sums. Three steps
are enough: split every cluster in two at the best of all its places, choose the best of given
borders, and Lloyd's iteration.
Prefix sums need float64: call everything here with 64-bit types enabled.

Values that are equal are never parted, so codes are a function of the value.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Float64, Int, Int32

MAX_LLOYD_ITERATIONS = 50
CANDIDATE_BITS = 6  # the seed chooses its borders among those of 64 clusters


class SortedGroups(NamedTuple):
    """T groups of M values, each ascending and centred on its weighted mean.

    Attributes:
        values: the centred values.
        weight: prefix sums of the weights, from 0; strictly increasing.
        moment: prefix sums of weight times centred value, from 0.
        offset: what was taken off to centre the values.
    """

    values: Float64[Array, "T M"]
    weight: Float64[Array, "T M+1"]
    moment: Float64[Array, "T M+1"]
    offset: Float64[Array, "T"]


class Clusters(NamedTuple):
    """C clusters in each group: cluster ``k`` is positions ``borders[k]`` to ``borders[k + 1]``.

    Attributes:
        borders: from 0 to M, non-decreasing; two that are equal enclose an empty cluster.
        member: the cluster of each position.
    """

    borders: Int32[Array, "T C+1"]
    member: Int32[Array, "T M"]


def _gather(table: Array, index: Int[Array, "T L"]) -> Array:
    return jnp.take_along_axis(table, index, axis=1)


def sort_groups(values: Float32[Array, "T M"], weights: Float32[Array, "T M"]) -> SortedGroups:
    """Sort each group and build its prefix sums. Weights must be positive."""
    # One 64-bit key that holds value and weight sorts several times faster than a pair does.
    bits = jax.lax.bitcast_convert_type(values + 0.0, jnp.int32)  # adding 0 turns -0 into 0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # two's complement order is now float order
    payload = jax.lax.bitcast_convert_type(weights, jnp.int32).astype(jnp.int64)
    key = jnp.sort((ordered.astype(jnp.int64) << 32) | payload, axis=1)
    ordered = (key >> 32).astype(jnp.int32)
    bits = ordered ^ ((ordered >> 31) & 0x7FFFFFFF)
    ascending = jax.lax.bitcast_convert_type(bits, jnp.float32).astype(jnp.float64)
    weight = jax.lax.bitcast_convert_type(key.astype(jnp.int32), jnp.float32).astype(jnp.float64)

    offset = jnp.sum(weight * ascending, axis=1) / jnp.sum(weight, axis=1)
    centred = ascending - offset[:, None]

    def prefix(terms: Float64[Array, "T M"]) -> Float64[Array, "T M+1"]:
        return jnp.pad(jnp.cumsum(terms, axis=1), ((0, 0), (1, 0)))

    return SortedGroups(centred, prefix(weight), prefix(weight * centred), offset)


def nested_borders(
    groups: SortedGroups, seed_bits: int, parent_bits: int
) -> Int32[Array, "T borders"]:
    """Borders of the clusters of width ``parent_bits``; every ``2**n``-th is one ``n`` bits up.

    The seed is the best choice among the borders that exact splits find, then Lloyd's iteration.
    Splits alone make a poor seed: an outlier is cut off first, and keeps half of all codes.
    """
    count, size = groups.values.shape
    everything = jnp.broadcast_to(jnp.array([0, size], jnp.int32), (count, 2))
    candidates = split_repeatedly(groups, everything, CANDIDATE_BITS)
    seed = lloyd(groups, best_borders(groups, candidates, 2**seed_bits))
    return split_repeatedly(groups, seed, parent_bits - seed_bits)


def split_repeatedly(
    groups: SortedGroups, borders: Int32[Array, "T borders"], times: int
) -> Int32[Array, "T more"]:
    """Split every cluster in two, and so on."""
    size = groups.values.shape[1]
    count = (borders.shape[1] - 1) * 2**times
    empty = ((0, 0), (0, count + 1 - borders.shape[1]))  # fills up a fixed shape
    clusters = Clusters(jnp.pad(borders, empty, constant_values=size), _member(borders, size))
    # A loop, so that the body is compiled once.
    return jax.lax.fori_loop(0, times, lambda _, so_far: split(groups, so_far), clusters).borders


def _member(borders: Int32[Array, "T borders"], size: int) -> Int32[Array, "T M"]:
    position = jnp.arange(size, dtype=jnp.int32)[None, :, None]
    return jnp.sum(position >= borders[:, None, 1:-1], axis=2, dtype=jnp.int32)


def split(groups: SortedGroups, clusters: Clusters) -> Clusters:
    """Split the first half of the clusters in two, where their squared error becomes smallest.

    The second half must be empty, and falls away to keep the shape.

    With weight L on the left, R on the right and D the left side's moment about the cluster's mean,
    a split lowers the error by ``D**2 (L + R) / (L R)``: all places of all clusters are tried. A
    cluster with a single distinct value keeps it, and its right half is empty.
    """
    borders, member = clusters
    size = groups.values.shape[1]
    start, end = borders[:, :-1], borders[:, 1:]
    weight_before, moment_before = _gather(groups.weight, start), _gather(groups.moment, start)
    weight = _gather(groups.weight, end) - weight_before
    moment = _gather(groups.moment, end) - moment_before
    mean = moment / jnp.where(weight > 0, weight, 1.0)
    last = jnp.maximum(end - 1, 0)
    span = _gather(groups.values, last) - _gather(groups.values, jnp.minimum(start, size - 1))
    span = jnp.where(span > 0, span, 1.0)

    # A border after position i: what lies left and right of it inside the cluster of i.
    left = groups.weight[:, 1:] - _gather(weight_before, member)
    right = _gather(weight, member) - left
    about_mean = groups.moment[:, 1:] - _gather(moment_before, member)
    about_mean -= _gather(mean, member) * left
    # The error is at most weight * span**2 / 4, so this share of it lies in [0, 1/2].
    share = 2 * jnp.square(about_mean / _gather(span, member)) / (left * right)
    position = jnp.arange(size, dtype=jnp.int32)[None, :]
    following = jnp.pad(groups.values[:, 1:], ((0, 0), (0, 1)))
    allowed = (position + 1 < _gather(end, member)) & (following > groups.values)
    share = jnp.where(allowed, jnp.clip(share, 0.0, 0.5), 0.0)

    # Segmented first argmax: cluster + share only grows from cluster to cluster, so the running
    # maximum at a cluster's end is its own maximum, and bisection finds where it was reached.
    running = jax.lax.cummax(member.astype(jnp.float64) + share, axis=1)
    best = _gather(running, last)
    reached = jax.vmap(jnp.searchsorted)(running, best).astype(jnp.int32)
    clusters_before = jnp.arange(start.shape[1], dtype=jnp.float64)[None, :]
    found = (end > start) & (best > clusters_before)
    middle = jnp.where(found, reached + 1, end)

    halves = jnp.stack([start, middle], axis=2).reshape(end.shape[0], -1)
    member = 2 * member + (position >= _gather(middle, member)).astype(jnp.int32)
    return Clusters(halves[:, : borders.shape[1]], member)


def centroids(
    groups: SortedGroups, borders: Int32[Array, "T borders"]
) -> tuple[Float64[Array, "T C"], Int32[Array, "T C"]]:
    """Weighted mean (centred) and size of each cluster.

    An empty cluster copies its left neighbour. After a split that is the parent's own centroid.
    """
    size = borders[:, 1:] - borders[:, :-1]
    weight = jnp.diff(_gather(groups.weight, borders), axis=1)
    moment = jnp.diff(_gather(groups.moment, borders), axis=1)
    mean = jnp.where(size > 0, moment / jnp.where(size > 0, weight, 1.0), -jnp.inf)
    return jax.lax.cummax(mean, axis=1), size


def best_borders(
    groups: SortedGroups, candidates: Int32[Array, "T borders"], clusters: int
) -> Int32[Array, "T chosen"]:
    """The clustering of least squared error whose borders are all candidates.

    Dynamic programming over (number of clusters, candidate where they end). The error of a cluster
    is its sum of squares, which adds up to a constant, less ``moment**2 / weight``.
    """
    weight, moment = _gather(groups.weight, candidates), _gather(groups.moment, candidates)
    weight = weight[:, None, :] - weight[:, :, None]
    moment = moment[:, None, :] - moment[:, :, None]
    error = jnp.where(weight > 0, -jnp.square(moment) / jnp.where(weight > 0, weight, 1.0), 0.0)
    last = candidates.shape[1] - 1
    backwards = jnp.tri(last + 1, k=-1, dtype=bool)
    error = jnp.where(backwards[None], jnp.inf, error)

    def add_cluster(least: Array, _: None) -> tuple[Array, Array]:
        total = least[:, :, None] + error
        # Of equals the last, so that clusters to spare are empty ones at the end.
        return jnp.min(total, axis=1), last - jnp.argmin(total[:, ::-1], axis=1)

    _, origins = jax.lax.scan(add_cluster, error[:, 0], None, clusters - 1)

    def step_back(end: Array, origin: Array) -> tuple[Array, Array]:
        start = _gather(origin, end)
        return start, start

    end = jnp.full((candidates.shape[0], 1), last, origins.dtype)
    _, chosen = jax.lax.scan(step_back, end, origins, reverse=True)
    inner = _gather(candidates, jnp.moveaxis(chosen[:, :, 0], 0, 1))
    return jnp.concatenate([candidates[:, :1], inner, candidates[:, -1:]], axis=1)


def lloyd(groups: SortedGroups, borders: Int32[Array, "T borders"]) -> Int32[Array, "T borders"]:
    """Move borders to the midpoints between centroids until none moves, or 50 times."""

    def step(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        borders, _, iteration = state
        mean, count = centroids(groups, borders)
        midpoint = (mean[:, :-1] + mean[:, 1:]) / 2
        # Empty clusters stay empty at the right end of the cluster whose centroid they copy.
        midpoint = jnp.where(count[:, 1:] > 0, midpoint, jnp.inf)
        midpoint = jax.lax.cummin(midpoint, axis=1, reverse=True)
        inner = jax.vmap(partial(jnp.searchsorted, side="right"))(groups.values, midpoint)
        moved = jnp.concatenate([borders[:, :1], inner.astype(jnp.int32), borders[:, -1:]], axis=1)
        return moved, jnp.any(moved != borders), iteration + 1

    def unfinished(state: tuple[Array, Array, Array]) -> Array:
        return state[1] & (state[2] < MAX_LLOYD_ITERATIONS)

    start = (borders, jnp.array(True), jnp.array(0, jnp.int32))
    return jax.lax.while_loop(unfinished, step, start)[0]
