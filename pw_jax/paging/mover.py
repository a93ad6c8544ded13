"""Copies page images from the host into the pool."""

from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.page_write import write_pages
from pw_jax.paging.host_pages import Block, Transfer
from pw_jax.paging.layout import PagingLayout
from sharding.placement import Placement

BATCH = 8
"""Transfers of one compiled write; shorter batches are padded with writes to page 0."""


def _write(pool: jax.Array, *images_and_ids: jax.Array) -> jax.Array:
    *images, ids = images_and_ids
    return write_pages(pool, ids, jnp.concatenate(images))


class Mover:
    """Sends transfers to the pool in batches of a few fixed shapes, compiled beforehand.

    A copy that must be there for the next step is written at once (:meth:`write`). One that can
    wait is staged (:meth:`start`): the copy runs beside the decode steps, and only when it has
    landed is it scattered into the pool, so that no step waits for the link.

    Args:
        layout: The layouts of a device.
        pool: The pool, for its shape.
        placement: Where it is, and copies go.
    """

    def __init__(self, layout: PagingLayout, pool: jax.Array, placement: Placement):
        self._target = placement.pool
        self._staged: dict[Block, list[Transfer]] = {}
        self._padding: dict[int, jax.Array] = {}
        self._writers = {}
        self.bytes_moved = 0
        """Bytes written into the pool so far."""
        sizes = set()
        for matrix in layout.matrices or ():
            sizes |= {matrix.plane_pages, *(matrix.table_pages(bits) for bits in matrix.widths)}
        write = placement.on_each_device(_write, whole_arguments=1)
        compiled = jax.jit(write, donate_argnums=0, out_shardings=self._target)
        for size in sorted(sizes):
            zeros = np.zeros((placement.devices * size, layout.page_words), np.uint32)
            self._padding[size] = jax.device_put(zeros, self._target)
            image = jax.ShapeDtypeStruct(zeros.shape, zeros.dtype, sharding=self._target)
            ids = jax.ShapeDtypeStruct((BATCH * size,), np.int32, sharding=placement.whole)
            self._writers[size] = compiled.lower(pool, *(image,) * BATCH, ids).compile()

    def write(self, pool: jax.Array, transfers: Iterable[Transfer]) -> jax.Array:
        """Writes transfers into the pool, before anything that uses the returned pool.

        Returns:
            The pool; the one given is donated.
        """
        by_size: dict[int, list[Transfer]] = {}
        for transfer in transfers:
            by_size.setdefault(len(transfer.ids), []).append(transfer)
            self.bytes_moved += transfer.nbytes
        for size, group in by_size.items():
            for first in range(0, len(group), BATCH):
                batch = group[first : first + BATCH]
                spare = BATCH - len(batch)
                ids = np.zeros(BATCH * size, np.int32)
                ids[: len(batch) * size] = np.concatenate([transfer.ids for transfer in batch])
                images = self.send(transfer.image for transfer in batch)
                pool = self._writers[size](pool, *images, *[self._padding[size]] * spare, ids)
        return pool

    def send(self, images: Iterable[jax.Array]) -> list[jax.Array]:
        """Copies images to the device, in one call; those that are there stay."""
        return jax.device_put(list(images), self._target)

    def start(self, block: Block, transfers: Iterable[Transfer]) -> None:
        """Starts copies that run beside the steps; if one cannot be started, none is."""
        transfers = list(transfers)
        images = self.send(transfer.image for transfer in transfers)
        self._staged[block] = [
            Transfer(image, transfer.ids) for image, transfer in zip(images, transfers, strict=True)
        ]

    def settled(self) -> tuple[list[Block], list[Block]]:
        """Blocks all of whose copies have arrived on the device, and those with a failed one.

        Does not wait.
        """
        landed, failed = [], []
        for block, transfers in self._staged.items():
            try:
                if all(transfer.image.is_ready() for transfer in transfers):  # pyright: ignore
                    landed.append(block)
            except RuntimeError:  # what JAX raises for a copy that went wrong
                failed.append(block)
        return landed, failed

    def take(self, block: Block) -> list[Transfer]:
        """Hands over a block's staged copies (to be written, or dropped after a cancel)."""
        return self._staged.pop(block)

    @property
    def staged_bytes(self) -> int:
        """Bytes in flight or waiting on the device outside the pool."""
        return sum(transfer.nbytes for transfers in self._staged.values() for transfer in transfers)
