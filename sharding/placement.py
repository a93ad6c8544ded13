"""Which memory an array lives in."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from sharding.mesh import AXIS


@dataclass(frozen=True)
class Placement:
    """Where an engine keeps its arrays: on one device, or over the devices of a mesh.

    Every device has a pool of its own, and a page id means the same on all of them. One array holds
    the pools one behind the other: ``uint32[devices * pages, words]``.

    Attributes:
        devices: How many.
        pool: Of the pool, divided by its first axis.
        whole: Of what every device has all of: tables, tokens, step arguments.
        host: Of what is copied into the pool later, divided in the same way.
    """

    devices: int
    pool: Sharding
    whole: Sharding
    host: Sharding

    @classmethod
    def on_one_device(cls) -> "Placement":
        """On the first local device."""
        sharding = device_memory()
        return cls(1, sharding, sharding, host_memory())

    @classmethod
    def over(cls, mesh: Mesh) -> "Placement":
        """Over a mesh from `sharding.mesh.tensor_mesh`."""
        pool = NamedSharding(mesh, PartitionSpec(AXIS))
        return cls(
            mesh.shape[AXIS],
            pool,
            NamedSharding(mesh, PartitionSpec()),
            pool.with_memory_kind(_host_kind(mesh.local_devices[0])),
        )

    def columns(self, width: int) -> Sharding:
        """Of an array whose last of two axes is divided, if it can be."""
        if not isinstance(self.pool, NamedSharding) or width % self.devices:
            return self.whole
        return NamedSharding(self.pool.mesh, PartitionSpec(None, AXIS))

    def on_each_device(
        self, write: Callable[..., jax.Array], whole_arguments: int
    ) -> Callable[..., jax.Array]:
        """A function of each device's pages: of its pool and, behind it, other arguments.

        Args:
            write: Takes and gives a device's pool; of the other arguments, its part of each.
            whole_arguments: How many of the last arguments every device has whole.
        """
        pool, whole = self.pool, PartitionSpec()
        if not isinstance(pool, NamedSharding):
            return write

        def mapped(*arguments: Any) -> jax.Array:
            divided = len(arguments) - whole_arguments
            specs = (pool.spec,) * divided + (whole,) * whole_arguments
            return jax.shard_map(
                write, mesh=pool.mesh, in_specs=specs, out_specs=pool.spec, check_vma=False
            )(*arguments)

        return mapped


def device_memory(index: int = 0) -> SingleDeviceSharding:
    """The own memory of the index-th local device."""
    device = jax.local_devices()[index]
    return SingleDeviceSharding(device, memory_kind=device.default_memory().kind)


def host_memory(index: int = 0) -> SingleDeviceSharding:
    """Host memory that the device copies from without stalling: pinned, where there is such."""
    device = jax.local_devices()[index]
    return SingleDeviceSharding(device, memory_kind=_host_kind(device))


def _host_kind(device: Any) -> str:
    kinds = [memory.kind for memory in device.addressable_memories()]
    return "pinned_host" if "pinned_host" in kinds else device.default_memory().kind


def bytes_on_a_device(array: jax.Array) -> int:
    """Bytes that an array takes on each of its devices."""
    shape = array.sharding.shard_shape(array.shape)
    return math.prod(shape) * array.dtype.itemsize
