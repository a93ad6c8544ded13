"""Nothing twice: the residual is divided too, and still only the rank space is communicated."""

from collections.abc import Mapping

from jax import lax
from jaxtyping import Array, Float

from sharding.layouts.base import (
    COLUMNS,
    ROWS,
    WHOLE_HINT,
    Entry,
    Layout,
    Spread,
    add_bias,
    fuse,
    split,
)
from sharding.mesh import AXIS, Placed
from sharding.padding import pad_axis
from sharding.weights import Factors, Linear


class ShardedLayout(Layout):
    """V by rows, all-reduce, U by columns, on the way in and out.

    The hidden width is padded where it does not divide; norms know the true width. A layer that is
    not factored is possible on the way out only, with a reduce-scatter of the hidden width.
    """

    name = "sharded"
    splits_residual = True

    def entry(
        self, linears: Mapping[str, Linear], spreads: Mapping[str, Spread], whole: bool = False
    ) -> Entry:
        """Divides the fused V by its inputs."""
        for name, layer in linears.items():
            if not isinstance(layer, Factors):
                raise ValueError(
                    f"the sharded layout needs factors, but {name} is whole; {WHOLE_HINT}"
                )
        fused = fuse(linears)
        assert fused is not None
        first = {"fused": Placed(pad_axis(fused, 0, self.devices), ROWS)}
        return self._entry(first, linears, spreads)

    def latents(
        self, entry: Entry, x: Float[Array, "*batch d"], whole: bool = False
    ) -> dict[str, Array]:
        """Whole latents, by one all-reduce."""
        return split(lax.psum(x @ entry.v["fused"], AXIS), entry, x)

    def exit(self, linear: Linear, spread: Spread) -> Linear:
        """Divides V by its inputs and U by its outputs."""
        bias = None if linear.bias is None else self._columns(linear.bias)
        if isinstance(linear, Factors):
            first = Placed(spread(linear.v, 0), ROWS)
            second = Placed(pad_axis(linear.u, 1, self.devices), COLUMNS)
            return Factors(first, second, bias)
        padded = linear._replace(weight=pad_axis(linear.weight, 1, self.devices))
        return self._row_parallel(padded, spread)

    def leave(
        self, linear: Linear, features: Float[Array, "*batch features"]
    ) -> Float[Array, "*batch d"]:
        """All-reduce of the latent, then a device's columns."""
        if isinstance(linear, Factors):
            return add_bias(lax.psum(features @ linear.v, AXIS) @ linear.u, linear.bias)
        partial = features @ linear.weight
        part = lax.psum_scatter(partial, AXIS, scatter_dimension=partial.ndim - 1, tiled=True)
        return add_bias(part, linear.bias)
