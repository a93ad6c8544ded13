"""How axes that do not divide are padded, when weights are loaded and never in a checkpoint."""

import dataclasses
from functools import cached_property
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from sharding.weights import Leaf


def library_of(x: Leaf) -> Any:
    """NumPy for arrays of the host, which are padded where they are; else jax.numpy."""
    return np if isinstance(x, np.ndarray) else jnp


def round_up(size: int, multiple: int) -> int:
    """The smallest multiple that is not below `size`."""
    return -(-size // multiple) * multiple


def pad_axis(x: Leaf, axis: int, multiple: int) -> Leaf:
    """Appends zeros to one axis until its length divides."""
    missing = round_up(x.shape[axis], multiple) - x.shape[axis]
    if missing == 0:
        return x
    widths = [(0, missing if i == axis % x.ndim else 0) for i in range(x.ndim)]
    return library_of(x).pad(x, widths)


@dataclasses.dataclass(frozen=True)
class HeadPlan:
    """Which heads each device has.

    The query heads of one kv head are cut into groups of at most `group`. A device has `groups`
    of them, each with its own copy of its kv head, so that local query head i uses local kv head
    ``i // group`` on every device, as kernels expect. Empty places hold zeros.

    Attributes:
        heads: Query heads.
        kv_heads: Key and value heads; query head i uses kv head ``i // (heads / kv_heads)``.
        devices: Devices.
        group: Query heads of a group.
        groups: Groups of a device, which is also its kv heads.
    """

    heads: int
    kv_heads: int
    devices: int
    group: int
    groups: int

    @property
    def local_heads(self) -> int:
        """Query heads of a device, padding included."""
        return self.group * self.groups

    @cached_property
    def query_places(self) -> Int[np.ndarray, " places"]:
        """The query head at each place, all devices in turn; -1 is padding."""
        return self._places[0].reshape(-1)

    @cached_property
    def kv_places(self) -> Int[np.ndarray, " places"]:
        """The kv head at each place, all devices in turn; -1 is padding."""
        return self._places[1]

    @cached_property
    def _places(self) -> tuple[Int[np.ndarray, "places group"], Int[np.ndarray, " places"]]:
        queries = np.full((self.devices * self.groups, self.group), -1)
        kv = np.full(self.devices * self.groups, -1)
        share = self.heads // self.kv_heads
        starts = [(k, first) for k in range(self.kv_heads) for first in range(0, share, self.group)]
        for place, (head, first) in enumerate(starts):
            members = range(first, min(first + self.group, share))
            queries[place, : len(members)] = [head * share + i for i in members]
            kv[place] = head
        return queries, kv

    def spread_queries(self, x: Leaf, axis: int) -> Leaf:
        """Reorders, copies and pads an axis of ``heads * width`` to all places."""
        return _spread(x, axis, self.heads, self.query_places)

    def spread_kv(self, x: Leaf, axis: int) -> Leaf:
        """Reorders, copies and pads an axis of ``kv_heads * width`` to all places."""
        return _spread(x, axis, self.kv_heads, self.kv_places)


def plan_heads(heads: int, kv_heads: int, devices: int) -> HeadPlan:
    """Divides heads so that a device keeps as few kv heads as possible, then few query heads.

    Kv heads come first because a decode step is as long as the cache that it reads.

    Raises:
        ValueError: kv heads do not divide the query heads.
    """
    if heads % kv_heads:
        raise ValueError(f"{kv_heads} kv heads do not divide {heads} query heads")
    share = heads // kv_heads

    def groups(group: int) -> int:
        return -(-kv_heads * -(-share // group) // devices)

    best = min(range(1, share + 1), key=lambda group: (groups(group), groups(group) * group))
    return HeadPlan(heads, kv_heads, devices, best, groups(best))


def _spread(x: Leaf, axis: int, heads: int, places: np.ndarray) -> Leaf:
    if np.array_equal(places, np.arange(heads)):
        return x
    axis = axis % x.ndim
    before, after = x.shape[:axis], x.shape[axis + 1 :]
    x = x.reshape(*before, heads, x.shape[axis] // heads, *after)
    library = library_of(x)
    zeros = library.zeros((*before, 1, *x.shape[axis + 1 :]), x.dtype)
    source = np.where(places < 0, heads, places)
    x = library.take(library.concatenate((x, zeros), axis=axis), source, axis=axis)
    return x.reshape(*before, -1, *after)
