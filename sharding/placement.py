"""Which memory an array lives in."""

import math
from dataclasses import dataclass

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
    """

    devices: int
    pool: Sharding
    whole: Sharding

    @classmethod
    def on_one_device(cls) -> "Placement":
        """On the first local device."""
        sharding = device_memory()
        return cls(1, sharding, sharding)

    @classmethod
    def over(cls, mesh: Mesh) -> "Placement":
        """Over a mesh from `sharding.mesh.tensor_mesh`."""
        return cls(
            mesh.shape[AXIS],
            NamedSharding(mesh, PartitionSpec(AXIS)),
            NamedSharding(mesh, PartitionSpec()),
        )

    def columns(self, width: int) -> Sharding:
        """Of an array whose last of two axes is divided, if it can be."""
        if not isinstance(self.pool, NamedSharding) or width % self.devices:
            return self.whole
        return NamedSharding(self.pool.mesh, PartitionSpec(None, AXIS))


def device_memory(index: int = 0) -> SingleDeviceSharding:
    """The own memory of the index-th local device."""
    device = jax.local_devices()[index]
    return SingleDeviceSharding(device, memory_kind=device.default_memory().kind)


def host_memory(index: int = 0) -> SingleDeviceSharding:
    """Host memory that the device copies from without stalling: pinned, where there is such."""
    device = jax.local_devices()[index]
    kinds = [memory.kind for memory in device.addressable_memories()]
    kind = "pinned_host" if "pinned_host" in kinds else device.default_memory().kind
    return SingleDeviceSharding(device, memory_kind=kind)


def bytes_on_a_device(array: jax.Array) -> int:
    """Bytes that an array takes on each of its devices."""
    shape = array.sharding.shard_shape(array.shape)
    return math.prod(shape) * array.dtype.itemsize
