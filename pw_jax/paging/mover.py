"""Copies page images from the host into the pool."""

from collections.abc import Iterable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.page_write import write_pages
from pw_jax.paging.host_pages import Block, Transfer
from pw_jax.paging.layout import PagingLayout
from sharding.placement import Placement

BATCH = 8
"""Transfers of one compiled write; shorter batches are padded with writes to page 0."""

LOAD_BATCH = 64
"""Transfers that are sent at once when a model is loaded."""


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
        """Sends transfers and writes them into the pool, before anything that uses the returned.

        Returns:
            The pool; the one given is donated.
        """
        transfers = list(transfers)
        for first in range(0, len(transfers), LOAD_BATCH):
            pool = self.scatter(pool, self.send(transfers[first : first + LOAD_BATCH]))
        return pool

    def scatter(self, pool: jax.Array, sent: Iterable[Transfer]) -> jax.Array:
        """Writes transfers whose images are on the device into the pool.

        Returns:
            The pool; the one given is donated.
        """
        by_size: dict[int, list[Transfer]] = {}
        for transfer in sent:
            by_size.setdefault(len(transfer.ids), []).append(transfer)
            self.bytes_moved += transfer.nbytes
        for size, group in by_size.items():
            for first in range(0, len(group), BATCH):
                batch = group[first : first + BATCH]
                spare = BATCH - len(batch)
                ids = np.zeros(BATCH * size, np.int32)
                ids[: len(batch) * size] = np.concatenate([transfer.ids for transfer in batch])
                images = (*(t.image for t in batch), *[self._padding[size]] * spare)
                pool = self._writers[size](pool, *images, ids)
        return pool

    def send(self, transfers: Sequence[Transfer]) -> list[Transfer]:
        """Copies images to the device in one call, which is most of the cost of small ones."""
        images = jax.device_put([transfer.image for transfer in transfers], self._target)
        return [Transfer(image, t.ids) for image, t in zip(images, transfers, strict=True)]

    def start(self, moves: Mapping[Block, Sequence[Transfer]]) -> None:
        """Starts copies that run beside the steps; if one cannot be started, none is."""
        sent = iter(self.send([transfer for own in moves.values() for transfer in own]))
        for block, own in moves.items():
            self._staged[block] = [next(sent) for _ in own]

    def settled(self, due: Iterable[Block] | None = None) -> tuple[list[Block], list[Block]]:
        """Blocks all of whose copies have arrived on the device, and those with a failed one.

        Args:
            due: Looks at these only, and waits for their copies; None looks at all and does not
                wait.
        """
        landed, failed = [], []
        for block in self._staged if due is None else due:
            images = [transfer.image for transfer in self._staged[block]]
            try:
                if due is not None:
                    jax.block_until_ready(images)
                if all(image.is_ready() for image in images):  # pyright: ignore
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
