"""Blocks over a mesh: projections and collectives in checked maps, attention in an unchecked one.

JAX checks in the outer maps that what is said to be replicated is. Kernels cannot be checked, so
attention runs in a map of its own, in which no head of one device meets another's.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float

from sharding.blocks import AttentionBlock, Block, LatentBlock, MlpBlock, head_spec
from sharding.experts import ExpertBlock
from sharding.mesh import AXIS, arrays_of, specs_of
from sharding.norms import normalize
from sharding.weights import Norm

Attend = Callable[..., Array]  # what a block's `enter` gives on a device, to heads
AttendWithState = Callable[..., tuple[Array, Any]]  # the same, the state before and behind
ExpertFfn = Callable[..., Array]  # a device's (gate_up, down, tokens, ids, weights, state)


def attention(
    mesh: Mesh,
    block: AttentionBlock | LatentBlock,
    params: dict[str, Any],
    x: Float[Array, "*batch d"],
    attend: Attend,
) -> Float[Array, "*batch d"]:
    """Attention of one layer.

    Args:
        mesh: From `mesh.tensor_mesh`.
        block: Shapes and layout.
        params: What ``block.prepare`` gave, placed.
        x: The residual, padded by ``layout.residual`` if the layout divides it.
        attend: Called on a device with what ``block.enter`` gives; rotates and attends, and
            returns [*batch, heads of the device, value_dim]. Heads may be padding: zeros.

    Returns:
        What to add to the residual.
    """

    def without_state(*arguments: Any) -> tuple[Array, None]:
        return attend(*arguments[:-1]), None

    return attention_with_state(mesh, block, params, x, without_state, None, None)[0]


def attention_with_state(
    mesh: Mesh,
    block: AttentionBlock | LatentBlock,
    params: dict[str, Any],
    x: Float[Array, "*batch d"],
    attend: AttendWithState,
    state: Any,
    state_specs: Any,
) -> tuple[Float[Array, "*batch d"], Any]:
    """Attention that reads and writes a state, such as a cache of the heads of each device.

    Args:
        mesh: As in `attention`.
        block: As in `attention`.
        params: As in `attention`.
        x: As in `attention`.
        attend: Takes a device's part of the state behind its heads; returns heads and state.
        state: A pytree.
        state_specs: Partitions of the state, before and after.

    Returns:
        What to add to the residual, and the new state.
    """
    between = block.between(x.ndim)
    heads = head_spec(block.layout, x.ndim)
    arrays, specs = arrays_of(params), specs_of(params)
    residual = residual_spec(block, x.ndim)
    enter = jax.shard_map(block.enter, mesh=mesh, in_specs=(specs, residual), out_specs=between)
    inner = jax.shard_map(
        attend,
        mesh=mesh,
        in_specs=(*between, state_specs),
        out_specs=(heads, state_specs),
        check_vma=False,
    )
    leave = jax.shard_map(
        lambda params, out: block.leave(params, out.reshape(*out.shape[:-2], -1)),
        mesh=mesh,
        in_specs=(specs, heads),
        out_specs=residual,
    )
    out, state = inner(*enter(arrays, x), state)
    return leave(arrays, out), state


def mlp(
    mesh: Mesh, block: MlpBlock, params: dict[str, Any], x: Float[Array, "*batch d"]
) -> Float[Array, "*batch d"]:
    """The MLP of one layer; arguments and result as in `attention`."""
    residual = residual_spec(block, x.ndim)
    mapped = jax.shard_map(
        block, mesh=mesh, in_specs=(specs_of(params), residual), out_specs=residual
    )
    return mapped(arrays_of(params), x)


def experts(
    mesh: Mesh,
    block: ExpertBlock,
    params: dict[str, Any],
    x: Float[Array, "*batch d"],
    ffn: ExpertFfn,
    state: Any,
    state_specs: Any,
) -> tuple[Float[Array, "*batch d"], Array, Array, Array | None]:
    """Routed experts of one layer.

    Args:
        mesh: As in `attention`.
        block: As in `attention`.
        params: As in `attention`.
        x: As in `attention`.
        ffn: Called on a device with its gate_up and down (or None), tokens, expert ids, weights and
            its part of the state; gives the weighted sum over experts of its hidden units.
        state: A pytree, such as a memory that holds experts; it is only read.
        state_specs: Its partitions.

    Returns:
        What to add to the residual; expert ids and weights [M, k]; the share of the expert that
        every token uses, see `ExpertBlock.enter`.
    """
    arrays, specs, residual = arrays_of(params), specs_of(params), residual_spec(block, x.ndim)
    whole, by_device = PartitionSpec(), PartitionSpec(AXIS)
    enter = jax.shard_map(block.enter, mesh=mesh, in_specs=(specs, residual), out_specs=whole)
    tokens, expert_ids, weights, share = enter(arrays, x)

    def inner(gate_up: Any, down: Any, *arguments: Any) -> Array:
        return ffn(gate_up, down, *arguments).reshape(1, *x.shape[:-1], -1)

    partial = jax.shard_map(
        inner,
        mesh=mesh,
        in_specs=(specs["gate_up"], specs["down"], whole, whole, whole, state_specs),
        out_specs=by_device,
        check_vma=False,
    )(arrays["gate_up"], arrays["down"], tokens, expert_ids, weights, state)
    leave = jax.shard_map(block.leave, mesh=mesh, in_specs=by_device, out_specs=residual)
    return leave(partial), expert_ids, weights, share


def norm(
    mesh: Mesh, block: Block, params: Norm, x: Float[Array, "*batch d"]
) -> Float[Array, "*batch d"]:
    """A norm of something that lies as the residual does.

    Args:
        mesh: As in `attention`.
        block: Any block of the model: its layout, width and constant.
        params: What ``layout.norm`` gave, placed.
        x: As in `attention`.
    """
    residual = residual_spec(block, x.ndim)
    divided = block.layout.splits_residual

    def normal(params: Norm, x: Array) -> Array:
        return normalize(x, params, block.eps, block.hidden, divided=divided)

    mapped = jax.shard_map(
        normal, mesh=mesh, in_specs=(specs_of(params), residual), out_specs=residual
    )
    return mapped(arrays_of(params), x)


def residual_spec(block: Block, ndim: int) -> PartitionSpec:
    """Partition of a residual with that many axes."""
    if block.layout.splits_residual:
        return PartitionSpec(*(None,) * (ndim - 1), AXIS)
    return PartitionSpec()
