"""The host's copy of every plane and table, in the form of pages, ready to be sent."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import jax
import numpy as np
from jaxtyping import Float, Float32, Int32, Shaped, UInt32

from pw_jax.paging.layout import PagingLayout

Block = tuple[int, int, int]
"""(MoE layer, expert, module), module 0 gate_up and 1 down."""


@dataclass(frozen=True)
class Transfer:
    """Page images in host memory and the pages that they are bound for.

    Attributes:
        image: uint32 ``[n, page_words]``.
        ids: int32 ``[n]`` page ids.
    """

    image: jax.Array
    ids: Int32[np.ndarray, " n"]

    @property
    def nbytes(self) -> int:
        """Bytes to copy."""
        return self.image.nbytes


@runtime_checkable
class ExpertArrays(Protocol):
    """All experts of one module of one layer, as a checkpoint holds them."""

    @property
    def planes(self) -> UInt32[np.ndarray, "E P N words"]:
        """Bitplanes, most significant first."""
        ...

    @property
    def tables(self) -> Mapping[int, Shaped[np.ndarray, "E groups entries"]]:
        """Table entries by width, int8 or int16."""
        ...

    @property
    def scales(self) -> Mapping[int, Float32[np.ndarray, "E N"]]:
        """Row scales by width."""
        ...

    @property
    def damage(self) -> Float[np.ndarray, "E widths"]:
        """Weighted squared error at each width, lowest first."""
        ...


class HostPages:
    """All planes and tables of all blocks, kept for good: lowering a width copies nothing back.

    Args:
        layout: The model's layouts, with paged experts.
        sharding: Where the images live: pinned host memory, so that copies run beside compute.
    """

    def __init__(self, layout: PagingLayout, sharding: jax.sharding.Sharding):
        if layout.matrices is None:
            raise ValueError("this layout has no paged experts")
        self.layout = layout
        self._sharding = sharding
        self._planes: dict[Block, list[jax.Array]] = {}
        self._tables: dict[Block, dict[int, jax.Array]] = {}

    def add(self, layer: int, module: int, arrays: ExpertArrays) -> None:
        """Takes one module of one layer from a checkpoint.

        Args:
            layer: Index among the MoE layers.
            module: 0 gate_up, 1 down.
            arrays: All experts of the module.
        """
        assert self.layout.matrices is not None
        matrix = self.layout.matrices[module]
        for expert in range(arrays.planes.shape[0]):
            block = (layer, expert, module)
            self._planes[block] = [
                jax.device_put(image, self._sharding)
                for image in matrix.plane_images(arrays.planes[expert])
            ]
            self._tables[block] = {
                bits: jax.device_put(
                    matrix.table_image(arrays.tables[bits][expert], arrays.scales[bits][expert]),
                    self._sharding,
                )
                for bits in matrix.widths
            }

    def plane(self, block: Block, plane: int) -> jax.Array:
        """Pages of one plane: uint32 ``[plane_pages, page_words]``."""
        return self._planes[block][plane]

    def table(self, block: Block, bits: int) -> jax.Array:
        """Pages of one width's table: uint32 ``[table_pages, page_words]``."""
        return self._tables[block][bits]

    @property
    def nbytes(self) -> int:
        """Bytes of host memory held."""
        planes = sum(image.nbytes for images in self._planes.values() for image in images)
        tables = sum(image.nbytes for images in self._tables.values() for image in images.values())
        return planes + tables
