"""The mesh of tensor parallelism, and arrays that know how they lie on it."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

AXIS = "tp"


def tensor_mesh(devices: int | None = None) -> Mesh:
    """A mesh of one axis, `AXIS`.

    Args:
        devices: How many devices, the first ones; default all, of all processes.

    Raises:
        ValueError: There are not that many.
    """
    present = jax.devices()
    devices = len(present) if devices is None else devices
    if not 1 <= devices <= len(present):
        raise ValueError(f"tensor parallelism over {devices} devices, but there are {len(present)}")
    # Auto: the bodies are manual anyway, and Explicit would refuse contractions over the axis.
    return jax.make_mesh(
        (devices,), (AXIS,), axis_types=(AxisType.Auto,), devices=present[:devices]
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Placed:
    """An array and how it is divided; the latter is static, so that it survives jit.

    Attributes:
        array: An array, or what stands for one.
        spec: Its partition over `AXIS`.
    """

    array: Any
    spec: PartitionSpec = dataclasses.field(metadata={"static": True})


def arrays_of(tree: Any) -> Any:
    """The arrays of a tree of `Placed`."""
    return jax.tree.map(lambda leaf: leaf.array, tree, is_leaf=_is_placed)


def specs_of(tree: Any) -> Any:
    """The partitions of a tree of `Placed`, in the structure of `arrays_of`."""
    return jax.tree.map(lambda leaf: leaf.spec, tree, is_leaf=_is_placed)


def replicated(tree: Any) -> Any:
    """The arrays of a tree, each whole on every device."""
    return jax.tree.map(lambda array: Placed(array, PartitionSpec()), tree)


def place(mesh: Mesh, prepare: Callable[[Any], Any], weights: Any) -> Any:
    """Pads, fuses and distributes weights; no device ever holds them all.

    Those on the host are padded there, and nothing compiles; others in one compiled step.

    Args:
        mesh: Where to.
        prepare: From unpadded weights to a tree of `Placed`.
        weights: Arrays on any devices of the mesh, in any sharding, or on the host.

    Returns:
        What `prepare` gives, its arrays distributed.
    """
    if all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(weights)):
        return jax.tree.map(
            lambda leaf: Placed(_send(mesh, leaf), leaf.spec), prepare(weights), is_leaf=_is_placed
        )
    shardings = jax.tree.map(
        lambda leaf: Placed(NamedSharding(mesh, leaf.spec), leaf.spec),
        jax.eval_shape(prepare, weights),
        is_leaf=_is_placed,
    )
    # Whatever holds them now, the compiled step must find them on the mesh.
    on_mesh = jax.tree.map(
        lambda array: jax.device_put(array, restore_sharding(mesh, array.shape)), weights
    )
    return jax.jit(prepare, out_shardings=shardings)(on_mesh)


def _send(mesh: Mesh, leaf: Placed) -> jax.Array:
    """Sends each device of this process its share; all processes must have the same array."""
    array, sharding = leaf.array, NamedSharding(mesh, leaf.spec)
    return jax.make_array_from_callback(array.shape, sharding, lambda share: array[share])


def abstract(mesh: Mesh | AbstractMesh, prepare: Callable[[Any], Any], weights: Any) -> Any:
    """What `place` would give, as shapes: enough to compile with."""
    return jax.tree.map(
        lambda leaf: Placed(
            jax.ShapeDtypeStruct(
                leaf.array.shape, leaf.array.dtype, sharding=NamedSharding(mesh, leaf.spec)
            ),
            leaf.spec,
        ),
        jax.eval_shape(prepare, weights),
        is_leaf=_is_placed,
    )


def restore_sharding(mesh: Mesh, shape: tuple[int, ...]) -> NamedSharding:
    """How to read an unpadded array from disk: its longest axis that divides, else replicated.

    Checkpoints hold no padding, and nothing in JAX places an axis that does not divide.
    """
    size = mesh.shape[AXIS]
    even = [axis for axis, length in enumerate(shape) if length % size == 0 and length > 0]
    spec: list[str | None] = [None] * len(shape)
    if even:
        spec[max(even, key=lambda axis: shape[axis])] = AXIS
    return NamedSharding(mesh, PartitionSpec(*spec))


def _is_placed(leaf: Any) -> bool:
    return isinstance(leaf, Placed)
