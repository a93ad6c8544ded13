"""The host's copy of every plane and table, in the form of pages, ready to be sent."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

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
        image: uint32 ``[devices * n, page_words]``.
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


class _Images(NamedTuple):
    """The images of all experts of one module of one layer.

    Attributes:
        planes: By expert, then by plane.
        tables: By expert, then by width.
    """

    planes: list[list[jax.Array]]
    tables: list[dict[int, jax.Array]]


class HostPages:
    """All planes and tables of all blocks, kept for good: lowering a width copies nothing back.

    Each plane and each table is an array of its own, because only whole arrays are copied to the
    device beside a running step.

    Over several devices an image holds the pages of all of them, one behind the other.

    Args:
        layout: The layouts of a device, with paged experts.
        sharding: Where the images live: pinned host memory, so that copies run beside compute.
    """

    def __init__(self, layout: PagingLayout, sharding: jax.sharding.Sharding):
        if layout.matrices is None:
            raise ValueError("this layout has no paged experts")
        self._matrices = layout.matrices
        self._sharding = sharding
        self._images: dict[tuple[int, int], _Images] = {}

    def add(self, layer: int, module: int, parts: Sequence[ExpertArrays]) -> None:
        """Takes one module of one layer from a checkpoint.

        Args:
            layer: Index among the MoE layers.
            module: 0 gate_up, 1 down.
            parts: All experts of the module, each device's part of them.
        """
        matrix = self._matrices[module]
        experts = range(parts[0].planes.shape[0])
        planes = [
            list(np.concatenate([matrix.plane_images(own.planes[expert]) for own in parts], axis=1))
            for expert in experts
        ]
        tables = [
            {
                bits: np.concatenate(
                    [
                        matrix.table_image(own.tables[bits][expert], own.scales[bits][expert])
                        for own in parts
                    ]
                )
                for bits in matrix.widths
            }
            for expert in experts
        ]
        # One call for all: it takes a third of the time of a call each.
        self._images[layer, module] = _Images(*jax.device_put((planes, tables), self._sharding))

    def share(self, layer: int, module: int, of_layer: int) -> None:
        """Gives a module of one layer the images of another's, where both have the same planes."""
        self._images[layer, module] = self._images[of_layer, module]

    def plane(self, block: Block, plane: int) -> jax.Array:
        """Pages of one plane: uint32 ``[devices * plane_pages, page_words]``."""
        layer, expert, module = block
        return self._images[layer, module].planes[expert][plane]

    def table(self, block: Block, bits: int) -> jax.Array:
        """Pages of one width's table: uint32 ``[devices * table_pages, page_words]``."""
        layer, expert, module = block
        return self._images[layer, module].tables[expert][bits]

    @property
    def nbytes(self) -> int:
        """Bytes of host memory held; images that blocks share count once."""
        images = {id(image): image for image in jax.tree.leaves(list(self._images.values()))}
        return sum(image.nbytes for image in images.values())
