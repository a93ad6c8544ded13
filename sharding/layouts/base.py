"""What every layout of a block offers, and what most of them share.

A block is a way in (q, k and v, or gate and up), something done to the features of a device, and a
way out (o or down). `entry` and `exit` pad and divide weights when they are loaded; `latents`,
`expand` and `leave` run on a device's part of the arrays, inside `jax.shard_map`.
"""

import abc
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from sharding.mesh import AXIS, Placed
from sharding.padding import library_of, pad_axis
from sharding.weights import Dense, Factors, Leaf, Linear, Norm

Spread = Callable[[Leaf, int], Leaf]  # (array, axis): pads and reorders an axis of features
REPLICATED = PartitionSpec()
COLUMNS = PartitionSpec(None, AXIS)
ROWS = PartitionSpec(AXIS, None)
PARTS = PartitionSpec(AXIS)
WHOLE_HINT = "the gathered layout takes both, decompose.py --allotment uniform leaves none whole"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Entry:
    """The linear layers that a block begins with.

    Attributes:
        v: First factors, ``fused`` or by name.
        u: Second factors by name, or whole weights of layers that are not factored.
        bias: Biases by name, of those that have one.
        ranks: Name and width of each latent, in the order they are fused in; None is a layer that
            is not factored, whose latent is the input itself.
    """

    v: dict[str, Any]
    u: dict[str, Any]
    bias: dict[str, Any]
    ranks: tuple[tuple[str, int | None], ...] = dataclasses.field(metadata={"static": True})


@dataclasses.dataclass(frozen=True)
class Layout(abc.ABC):
    """How a block lies on the devices.

    Attributes:
        devices: Length of the mesh axis.
        name: What flags call it.
        factored: It is made for factors; `dense` is not.
        splits_features: A device has its own heads and hidden units, rather than all of them.
        splits_residual: A device has its own columns of the residual stream.
        whole_latents: On the way in, a device has whole latents, and can make its features of
            them alone.
    """

    devices: int
    name: ClassVar[str]
    factored: ClassVar[bool] = True
    splits_features: ClassVar[bool] = True
    splits_residual: ClassVar[bool] = False
    whole_latents: ClassVar[bool] = True

    @property
    def residual_spec(self) -> PartitionSpec:
        """Partition of the residual's last axis."""
        return PARTS if self.splits_residual else REPLICATED

    @abc.abstractmethod
    def entry(
        self, linears: Mapping[str, Linear], spreads: Mapping[str, Spread], whole: bool = False
    ) -> Entry:
        """Prepares the layers of a way in.

        Args:
            linears: By name.
            spreads: How the outputs of each are padded and reordered.
            whole: Every device needs whole latents (to normalise them).
        """

    @abc.abstractmethod
    def latents(
        self, entry: Entry, x: Float[Array, "*batch d"], whole: bool = False
    ) -> dict[str, Array]:
        """Latents by name, [*batch, rank]; no padding in them."""

    def expand(
        self, entry: Entry, name: str, latent: Float[Array, "*batch rank"], whole: bool = False
    ) -> Float[Array, "*batch features"]:
        """A device's features of one layer."""
        del whole
        return add_bias(latent @ entry.u[name], entry.bias.get(name))

    @abc.abstractmethod
    def exit(self, linear: Linear, spread: Spread) -> Linear:
        """Prepares the layer of a way out, whose inputs are padded and reordered."""

    @abc.abstractmethod
    def leave(
        self, linear: Linear, features: Float[Array, "*batch features"]
    ) -> Float[Array, "*batch d"]:
        """From a device's features to (its columns of) the residual."""

    def norm(self, norm: Norm) -> Norm:
        """Prepares a norm of the residual."""
        return Norm(*(None if part is None else self._columns(part) for part in norm))

    def residual(self, x: Float[Array, "*batch d"]) -> Float[Array, "*batch padded"]:
        """Pads hidden states as the layout keeps them; outside of `jax.shard_map`."""
        return pad_axis(x, -1, self.devices) if self.splits_residual else x

    def _columns(self, vector: Leaf) -> Placed:
        """A vector along the residual."""
        if self.splits_residual:
            return Placed(pad_axis(vector, 0, self.devices), PARTS)
        return Placed(vector, REPLICATED)

    def _entry(
        self, v: dict[str, Placed], linears: Mapping[str, Linear], spreads: Mapping[str, Spread]
    ) -> Entry:
        """An entry whose outputs are divided by columns."""
        second = {n: layer.u if isinstance(layer, Factors) else layer.weight for n, layer in
                  linears.items()}  # fmt: skip
        return Entry(
            v,
            {name: Placed(spreads[name](u, 1), COLUMNS) for name, u in second.items()},
            {
                name: Placed(spreads[name](layer.bias, 0), PARTS)
                for name, layer in linears.items()
                if layer.bias is not None
            },
            latent_widths(linears),
        )

    def _row_parallel(self, linear: Dense, spread: Spread) -> Dense:
        """A whole weight whose inputs are divided."""
        bias = None if linear.bias is None else self._columns(linear.bias)
        return Dense(Placed(spread(linear.weight, 0), ROWS), bias)


def latent_widths(linears: Mapping[str, Linear]) -> tuple[tuple[str, int | None], ...]:
    """Name and width of each latent."""
    return tuple(
        (name, layer.v.shape[1] if isinstance(layer, Factors) else None)
        for name, layer in linears.items()
    )


def fuse(linears: Mapping[str, Linear]) -> Leaf | None:
    """The first factors side by side, [in, sum of ranks]; None if no layer is factored."""
    first = [layer.v for layer in linears.values() if isinstance(layer, Factors)]
    return library_of(first[0]).concatenate(first, axis=1) if first else None


def split(
    fused: Float[Array, "*batch ranks"] | None, entry: Entry, x: Float[Array, "*batch d"]
) -> dict[str, Array]:
    """Latents by name out of the fused one, without its padding."""
    latents, first = {}, 0
    for name, rank in entry.ranks:
        if rank is None or fused is None:
            latents[name] = x
        else:
            latents[name] = lax.slice_in_dim(fused, first, first + rank, axis=-1)
            first += rank
    return latents


def add_bias(
    x: Float[Array, "*batch d"], bias: Float[Array, " d"] | None
) -> Float[Array, "*batch d"]:
    """Adds a bias along the last axis; always after a reduction, or it is added once a device."""
    return x if bias is None else x + bias.reshape((1,) * (x.ndim - 1) + bias.shape)
