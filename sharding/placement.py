"""Which memory an array lives in."""

import jax
from jax.sharding import SingleDeviceSharding


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
