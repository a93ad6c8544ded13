"""Ordinary tensor parallelism of whole weights: one all-reduce of the hidden width a block."""

from collections.abc import Mapping

from jax import lax
from jaxtyping import Array, Float

from sharding.layouts.base import REPLICATED, Entry, Layout, Spread, add_bias
from sharding.mesh import AXIS, Placed
from sharding.weights import Dense, Factors, Linear


class DenseLayout(Layout):
    """Column-parallel, then row-parallel.

    Factors on the way in are allowed, for latent attention: every device computes the latents, as
    is customary, since they are narrow and cost no communication that way.
    """

    name = "dense"
    factored = False

    def entry(
        self, linears: Mapping[str, Linear], spreads: Mapping[str, Spread], whole: bool = False
    ) -> Entry:
        """Divides weights by columns."""
        first = {
            name: Placed(layer.v, REPLICATED)
            for name, layer in linears.items()
            if isinstance(layer, Factors)
        }
        return self._entry(first, linears, spreads)

    def latents(
        self, entry: Entry, x: Float[Array, "*batch d"], whole: bool = False
    ) -> dict[str, Array]:
        """The input, or latents that every device computes."""
        return {name: x if rank is None else x @ entry.v[name] for name, rank in entry.ranks}

    def exit(self, linear: Linear, spread: Spread) -> Linear:
        """Divides a weight by rows."""
        if isinstance(linear, Factors):
            raise ValueError("the dense layout takes whole weights: multiply the factors first")
        return self._row_parallel(linear, spread)

    def leave(
        self, linear: Linear, features: Float[Array, "*batch features"]
    ) -> Float[Array, "*batch d"]:
        """All-reduce at the hidden width."""
        assert isinstance(linear, Dense)
        return add_bias(lax.psum(features @ linear.weight, AXIS), linear.bias)
