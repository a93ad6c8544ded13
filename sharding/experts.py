"""Routed experts in any layout: all devices choose alike, and each has a part of every expert."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from sharding.blocks import Block
from sharding.mesh import AXIS, Placed, replicated
from sharding.norms import normalize
from sharding.padding import library_of, pad_axis
from sharding.weights import ExpertWeights, Leaf

HIDDEN_ROWS = PartitionSpec(None, AXIS, None)
HIDDEN_COLUMNS = PartitionSpec(None, None, AXIS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertBlock(Block):
    """Routed experts, whose hidden units are divided over the devices.

    Experts are not factored, so this is the one block that communicates the hidden width: an
    all-reduce, or an all-gather before and a reduce-scatter behind where the residual is divided.

    Attributes:
        routes_residual: The router sees the residual itself rather than its norm.
    """

    routes_residual: bool = False

    def prepare(self, weights: ExpertWeights) -> dict[str, Any]:
        """Pads and divides weights; the result is a tree of `Placed`."""
        whole = replicated(weights._replace(gate_up=None, down=None)._asdict())
        if weights.gate_up is None or weights.down is None:
            return whole
        devices = self.layout.devices
        down = pad_axis(weights.down, 2, devices)
        gate_up = interleave(weights.gate_up, devices)
        return whole | {
            "gate_up": Placed(gate_up, HIDDEN_ROWS),
            "down": Placed(down, HIDDEN_COLUMNS),
        }

    def enter(
        self, params: dict[str, Any], x: Float[Array, "*batch d"]
    ) -> tuple[Array, Array, Array, Array | None]:
        """On every device alike: what the experts are given, and which of them.

        Returns:
            Normalised tokens [M, D], expert ids and weights [M, k], and the share [*batch, 1] of
            the expert that every token uses, or None if it has no gate.
        """
        if self.layout.splits_residual:
            x = lax.all_gather(x, AXIS, axis=x.ndim - 1, tiled=True, to="invarying")
            x = x[..., : self.hidden]
        normal = normalize(x, params["norm"], self.eps, self.hidden, divided=False)
        tokens = normal.reshape(-1, self.hidden)
        seen = x.reshape(-1, self.hidden) if self.routes_residual else tokens
        expert_ids, weights = params["router"](seen)
        share = None
        if params["shared_gate"] is not None:
            share = jax.nn.sigmoid(jnp.einsum("...d,od->...o", normal, params["shared_gate"]))
        return tokens, expert_ids, weights, share

    def leave(self, partial: Float[Array, "1 *batch d"]) -> Float[Array, "*batch columns"]:
        """Adds up what the experts' parts gave."""
        own = partial[0]
        if not self.layout.splits_residual:
            return lax.psum(own, AXIS)
        own = pad_axis(own, -1, self.layout.devices)
        return lax.psum_scatter(own, AXIS, scatter_dimension=own.ndim - 1, tiled=True)


def interleave(gate_up: Leaf, devices: int) -> Leaf:
    """Reorders rows so that a device's are its gate rows and then its up rows.

    Args:
        gate_up: [E, 2F, D], gate rows first.
        devices: Parts to make; F is padded with zeros.
    """
    experts, rows, width = gate_up.shape
    halves = pad_axis(gate_up.reshape(experts, 2, rows // 2, width), 2, devices)
    parts = halves.reshape(experts, 2, devices, -1, width)
    return library_of(parts).swapaxes(parts, 1, 2).reshape(experts, -1, width)
