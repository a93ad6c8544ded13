"""A linear layer as two thin ones, and models whose linear layers are such."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pw_jax.errors import UserError
from pw_jax.models.layers import Linear, add_last

WHOLE = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "shared_expert_gate")
"""Linear layers that are not factored, see `factorable_shapes`."""


class LowRankLinear(nnx.Module):
    """``(x @ v.T) @ u.T + bias`` in the dtype of x: a `Linear` whose weight is ``u @ v``.

    Args:
        inputs: Columns of v.
        outputs: Rows of u.
        rank: Rows of v and columns of u.
        bias: Whether there is a bias; it is added once, behind u.
        dtype: Of u, v and bias.
    """

    def __init__(
        self, inputs: int, outputs: int, rank: int, *, bias: bool = False, dtype: DTypeLike
    ):
        self.v = nnx.Param(jnp.zeros((rank, inputs), dtype))
        self.u = nnx.Param(jnp.zeros((outputs, rank), dtype))
        if bias:
            self.bias = nnx.Param(jnp.zeros((outputs,), dtype))
        self.has_bias = bias

    def __call__(self, x: Float[Array, "*batch inputs"]) -> Float[Array, "*batch outputs"]:
        """Multiplies by v, then by u."""
        out = jnp.einsum("...r,or->...o", self.latent(x), self.u[...])
        return add_last(out, self.bias[...]) if self.has_bias else out

    def latent(self, x: Float[Array, "*batch inputs"]) -> Float[Array, "*batch R"]:
        """Multiplies by v only."""
        return jnp.einsum("...i,ri->...r", x, self.v[...])


def whole_weight(linear: Linear | LowRankLinear) -> Float[Array, "outputs inputs"]:
    """The matrix of a layer, factored or not."""
    if isinstance(linear, LowRankLinear):
        return jnp.einsum("or,ri->oi", linear.u[...], linear.v[...])
    return linear.weight[...]


def linear_shapes(model: nnx.Module) -> dict[str, tuple[int, int]]:
    """Every `Linear` in a numbered layer, by dotted name: (outputs, inputs). The head is in none.

    Args:
        model: With arrays or with shapes only.
    """
    return {
        ".".join(map(str, path)): (module.weight.shape[0], module.weight.shape[1])
        for path, module in nnx.iter_modules(model)
        if type(module) is Linear and any(isinstance(part, int) for part in path)
    }


def factorable_shapes(model: nnx.Module) -> dict[str, tuple[int, int]]:
    """Those of `linear_shapes` that a decomposition factors.

    The others are what routes, which is small and decides, and the projections of latent attention,
    which are factors already: of a matrix for keys and values and, in larger models, one for
    queries. Routed experts are no linear layers; they stay as they are, to be quantised.
    """
    return {
        name: shape
        for name, shape in linear_shapes(model).items()
        if name.rsplit(".", 1)[-1] not in WHOLE and ".router." not in name
    }


def use_low_rank(model: nnx.Module, ranks: Mapping[str, int], dtype: DTypeLike) -> None:
    """Puts a `LowRankLinear` of zeros in the place of each `Linear` that is named.

    Args:
        model: Changed in place.
        ranks: Rank by dotted name, such as ``model.layers.0.mlp.up_proj``.
        dtype: Of the factors.

    Raises:
        UserError: A name that is no linear layer, or a rank that its matrix cannot have.
    """
    modules: dict[str, Any] = {
        ".".join(map(str, path)): module for path, module in nnx.iter_modules(model)
    }
    check_ranks(ranks, linear_shapes(model))
    for name, rank in ranks.items():
        parent, _, attribute = name.rpartition(".")
        linear = modules[name]
        outputs, inputs = linear.weight.shape
        factored = LowRankLinear(inputs, outputs, rank, bias=linear.has_bias, dtype=dtype)
        setattr(modules[parent], attribute, factored)


def check_ranks(ranks: Mapping[str, int], shapes: Mapping[str, tuple[int, int]]) -> None:
    """Raises a UserError unless every rank is possible for the matrix that it names."""
    for name, rank in ranks.items():
        if name not in shapes:
            raise UserError(f"ranks name {name}, which is no linear layer of the model")
        if isinstance(rank, bool) or not isinstance(rank, int):
            raise UserError(f"the rank of {name} must be a whole number, not {rank!r}")
        if not 1 <= rank <= min(shapes[name]):
            outputs, inputs = shapes[name]
            raise UserError(
                f"the rank of {name} must be 1 to {min(shapes[name])} for a matrix of "
                f"{outputs} x {inputs}, not {rank}; leave it out to keep the matrix whole"
            )
