"""The paper's layout: an all-gather and an all-reduce a block, both in the rank space.

The last factor of a block is whole on every device, which is what keeps the reduction narrow.
"""

from collections.abc import Mapping

from jax import lax
from jaxtyping import Array, Float

from sharding.layouts.base import (
    COLUMNS,
    REPLICATED,
    ROWS,
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


class GatheredLayout(Layout):
    """Fused V by columns, all-gather, U by heads; V by rows, all-reduce, U whole.

    Layers that are not factored are column-parallel on the way in, at no cost, and row-parallel on
    the way out, with an all-reduce of the hidden width.
    """

    name = "gathered"

    def entry(
        self, linears: Mapping[str, Linear], spreads: Mapping[str, Spread], whole: bool = False
    ) -> Entry:
        """Pads once, behind the last rank, so that a share may straddle two layers."""
        fused = fuse(linears)
        first = {}
        if fused is not None:
            first["fused"] = Placed(pad_axis(fused, 1, self.devices), COLUMNS)
        return self._entry(first, linears, spreads)

    def latents(
        self, entry: Entry, x: Float[Array, "*batch d"], whole: bool = False
    ) -> dict[str, Array]:
        """Whole latents, by one all-gather."""
        fused = None
        if "fused" in entry.v:
            part = x @ entry.v["fused"]
            fused = lax.all_gather(part, AXIS, axis=part.ndim - 1, tiled=True, to="invarying")
        return split(fused, entry, x)

    def exit(self, linear: Linear, spread: Spread) -> Linear:
        """Divides V by its inputs."""
        if not isinstance(linear, Factors):
            return self._row_parallel(linear, spread)
        return Factors(
            Placed(spread(linear.v, 0), ROWS),
            Placed(linear.u, REPLICATED),
            None if linear.bias is None else self._columns(linear.bias),
        )

    def leave(
        self, linear: Linear, features: Float[Array, "*batch features"]
    ) -> Float[Array, "*batch d"]:
        """All-reduce of the latent, then the same product on every device."""
        if isinstance(linear, Factors):
            return add_bias(lax.psum(features @ linear.v, AXIS) @ linear.u, linear.bias)
        return add_bias(lax.psum(features @ linear.weight, AXIS), linear.bias)
