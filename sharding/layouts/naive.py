"""Every factored layer by itself, reduced at its full output width: the paper's baseline.

Each device then has all heads, so attention and its cache are duplicated on all of them.
"""

from collections.abc import Mapping

from jax import lax
from jaxtyping import Array, Float

from sharding.layouts.base import (
    COLUMNS,
    REPLICATED,
    ROWS,
    WHOLE_HINT,
    Entry,
    Layout,
    Spread,
    add_bias,
    latent_widths,
)
from sharding.mesh import AXIS, Placed
from sharding.padding import pad_axis
from sharding.weights import Factors, Linear


class NaiveLayout(Layout):
    """V by columns, U by rows, all-reduce."""

    name = "naive"
    splits_features = False
    whole_latents = False

    def entry(
        self, linears: Mapping[str, Linear], spreads: Mapping[str, Spread], whole: bool = False
    ) -> Entry:
        """Divides the rank of each layer."""
        factors = {name: _factors(name, layer) for name, layer in linears.items()}
        return Entry(
            {
                name: Placed(layer.v, REPLICATED)
                if whole
                else Placed(pad_axis(layer.v, 1, self.devices), COLUMNS)
                for name, layer in factors.items()
            },
            {name: Placed(pad_axis(f.u, 0, self.devices), ROWS) for name, f in factors.items()},
            {name: Placed(f.bias, REPLICATED) for name, f in factors.items() if f.bias is not None},
            latent_widths(linears),
        )

    def latents(
        self, entry: Entry, x: Float[Array, "*batch d"], whole: bool = False
    ) -> dict[str, Array]:
        """A device's part of each latent, padding included; all of it if `whole`."""
        return {name: x @ entry.v[name] for name, _ in entry.ranks}

    def expand(
        self, entry: Entry, name: str, latent: Float[Array, "*batch rank"], whole: bool = False
    ) -> Float[Array, "*batch features"]:
        """All features, by an all-reduce."""
        u = entry.u[name]
        if whole:
            latent = pad_axis(latent, -1, u.shape[0] * self.devices)
            start = lax.axis_index(AXIS) * u.shape[0]
            latent = lax.dynamic_slice_in_dim(latent, start, u.shape[0], axis=-1)
        return add_bias(lax.psum(latent @ u, AXIS), entry.bias.get(name))

    def exit(self, linear: Linear, spread: Spread) -> Linear:
        """Divides the rank."""
        factors = _factors("the way out", linear)
        return Factors(
            Placed(pad_axis(factors.v, 1, self.devices), COLUMNS),
            Placed(pad_axis(factors.u, 0, self.devices), ROWS),
            None if factors.bias is None else self._columns(factors.bias),
        )

    def leave(
        self, linear: Linear, features: Float[Array, "*batch features"]
    ) -> Float[Array, "*batch d"]:
        """All-reduce at the hidden width."""
        assert isinstance(linear, Factors)
        return add_bias(lax.psum(features @ linear.v @ linear.u, AXIS), linear.bias)


def _factors(name: str, layer: Linear) -> Factors:
    if not isinstance(layer, Factors):
        raise ValueError(f"the naive layout needs factors, but {name} is whole; {WHOLE_HINT}")
    return layer
