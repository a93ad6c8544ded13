"""The page table of one layer's experts, as the kernels see it."""

from dataclasses import dataclass
from typing import Literal, no_type_check

import jax
from jaxtyping import Array, Int32

Activation = Literal["silu", "gelu_tanh"]


@jax.tree_util.register_dataclass
@no_type_check  # also built of shapes, when compiling
@dataclass(frozen=True)
class ModulePages:
    """Committed widths and page ids of one module (gate_up or down) of every expert of a layer.

    A leading layer axis may stand in front of E; :meth:`layer` takes one layer.

    Attributes:
        bits: Committed width of each expert.
        planes: Page ids of each plane; planes at or above ``bits`` are 0 and never read.
        tables: Page ids of the committed width's table, padded with 0.
    """

    bits: Int32[Array, "*L E"]
    planes: Int32[Array, "*L E P plane_pages"]
    tables: Int32[Array, "*L E table_pages"]

    def layer(self, index: int) -> "ModulePages":
        """The pages of one layer."""
        return ModulePages(self.bits[index], self.planes[index], self.tables[index])
