"""The weight page table: which width each block is committed at, and the pages that hold it.

States of a block and the moves between them; ``q`` is the committed width, the only one that a
kernel reads:

    RESIDENT(q) --lower(b)------------> RESIDENT(b)     at once, b < q
    RESIDENT(q) --begin_raise(b)------> LOADING(q -> b) pages reserved, q unchanged, b > q
    LOADING     --commit_raise--------> RESIDENT(b)     when the copies have landed
    LOADING     --cancel_raise--------> RESIDENT(q)     reserved pages returned

Order on the device comes from data flow: every write takes the pool that the last step returned,
so a page freed here cannot be overwritten before that step has read it.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jaxtyping import Int8, Int32

from pallas_kernels.page_layout import MatrixLayout
from pallas_kernels.paged_expert_ffn import ModulePages
from pw_jax.packing import Packing
from pw_jax.paging.allocator import Owner, PageAllocator
from pw_jax.paging.host_pages import Block, HostPages, Transfer
from pw_jax.paging.layout import MODULES, PagingLayout


@dataclass(frozen=True)
class _Raise:
    """A raise whose copies are on the way."""

    bits: int
    planes: Int32[np.ndarray, "planes plane_pages"]
    table: Int32[np.ndarray, " table_pages"]


class WeightPageTable:
    """Committed widths and page ids of every block.

    Args:
        layout: The model's layouts, with paged experts.
        allocator: Pages are taken from it and returned to it.
        host: The host's copy of all planes and tables.
        sharding: Where snapshots go; default the first device.
    """

    def __init__(
        self,
        layout: PagingLayout,
        allocator: PageAllocator,
        host: HostPages,
        sharding: jax.sharding.Sharding | None = None,
    ):
        if layout.matrices is None:
            raise ValueError("this layout has no paged experts")
        self._allocator = allocator
        self._host = host
        self._matrices: tuple[MatrixLayout, MatrixLayout] = layout.matrices
        shape = (layout.moe_layers, layout.experts)
        self._bits = np.zeros((*shape, len(MODULES)), np.int8)
        # One vector: sending the whole state is one copy, however many arrays steps want of it.
        self._packing = Packing(
            [
                (
                    np.zeros(shape, np.int32),
                    np.zeros((*shape, matrix.parent_bits, matrix.plane_pages), np.int32),
                    np.zeros((*shape, matrix.most_table_pages), np.int32),
                )
                for matrix in self._matrices
            ]
        )
        self._widths, self._planes, self._tables = zip(*self._packing.defaults, strict=True)
        self._sharding = sharding
        self._raises: dict[Block, _Raise] = {}
        self._snapshot: tuple[ModulePages, ModulePages] | None = None
        self._summary: tuple[dict[int, int], float] | None = None

    @property
    def bits(self) -> Int8[np.ndarray, "L E 2"]:
        """Committed widths (a copy); the last axis is gate_up, down."""
        return self._bits.copy()

    def histogram(self) -> dict[int, int]:
        """Blocks at each committed width, by width; the same object until a width changes."""
        return self._summarize()[0]

    @property
    def mean_bits(self) -> float:
        """Mean committed width of a weight."""
        return self._summarize()[1]

    @property
    def at_parent(self) -> bool:
        """Whether every block has its highest width."""
        parent = self.widths[-1]
        return self.histogram()[parent] == self._bits.size

    @property
    def loading(self) -> dict[Block, int]:
        """Blocks with a raise on the way, and the width they will have."""
        return {block: pending.bits for block, pending in self._raises.items()}

    @property
    def widths(self) -> tuple[int, ...]:
        """Widths that a block may have, lowest first."""
        return self._matrices[0].widths

    @property
    def block_weights(self) -> tuple[int, int]:
        """Weights of a gate_up and of a down block."""
        gate_up, down = self._matrices
        return gate_up.rows * gate_up.columns, down.rows * down.columns

    def pages_at(self, module: int, bits: int) -> int:
        """Pages that a block of a module holds at a width."""
        return self._matrices[module].pages(bits)

    def place(self, bits: Int8[np.ndarray, "L E 2"]) -> list[Transfer]:
        """Gives every block its pages at load time and commits its width.

        Returns:
            The copies to make before the first step.

        Raises:
            OutOfPagesError: The pool is too small for these widths.
        """
        transfers = []
        for layer, expert, module in np.ndindex(bits.shape):
            block = (layer, expert, module)
            transfers += self.begin_raise(block, int(bits[block]))
            self.commit_raise(block)
        return transfers

    def table_image(self, block: Block, bits: int) -> jax.Array:
        """The host's page image of a table, to be sent ahead of a move."""
        return self._host.table(block, bits)

    def lower(self, block: Block, bits: int) -> list[Transfer]:
        """Commits a lower width and returns the freed pages to the allocator.

        The table of the new width goes into pages just freed, so this never needs a free page; the
        caller must write the returned copies before the next step.
        """
        self._check_transition(block, bits, lowering=True)
        matrix, (layer, expert, module) = self._matrices[block[2]], block
        old = int(self._bits[block])
        planes, table = self._planes[module][layer, expert], self._tables[module][layer, expert]
        freed = np.concatenate(
            [planes[bits:old].reshape(-1), table[: matrix.table_pages(old)]]
        ).astype(np.int32)
        self._allocator.give(freed, Owner.WEIGHT)
        planes[bits:old] = 0
        transfer = self._take_table(block, bits)
        self._commit(block, bits, transfer.ids)
        return [transfer]

    def begin_raise(self, block: Block, bits: int) -> list[Transfer]:
        """Reserves pages for a higher width; the committed width stays as it is.

        Returns:
            The copies of the missing planes and of the new table.

        Raises:
            OutOfPagesError: Too few free pages; nothing changed.
        """
        self._check_transition(block, bits, lowering=False)
        matrix, old = self._matrices[block[2]], int(self._bits[block])
        count = (bits - old) * matrix.plane_pages
        ids = self._allocator.take(count + matrix.table_pages(bits), Owner.WEIGHT)
        pending = _Raise(bits, ids[:count].reshape(bits - old, matrix.plane_pages), ids[count:])
        self._raises[block] = pending
        transfers = [
            Transfer(self._host.plane(block, old + index), pages)
            for index, pages in enumerate(pending.planes)
        ]
        return [*transfers, Transfer(self._host.table(block, bits), pending.table)]

    def commit_raise(self, block: Block) -> None:
        """Commits a raise; its copies must be written before the next step."""
        pending = self._raises.pop(block)
        layer, expert, module = block
        old = int(self._bits[block])
        if old:
            table = self._tables[module][layer, expert]
            self._allocator.give(table[: self._matrices[module].table_pages(old)], Owner.WEIGHT)
        self._planes[module][layer, expert, old : pending.bits] = pending.planes
        self._commit(block, pending.bits, pending.table)

    def cancel_raise(self, block: Block) -> None:
        """Gives a raise up: the committed width stays, the reserved pages are returned."""
        pending = self._raises.pop(block)
        ids = np.concatenate([pending.planes.reshape(-1), pending.table])
        self._allocator.give(ids, Owner.WEIGHT)

    def snapshot(self) -> tuple[ModulePages, ModulePages]:
        """Device arrays of the committed state, remade only after a change.

        They are replaced whole and never written, so a step keeps what it was given.
        """
        if self._snapshot is None:
            for module, widths in enumerate(self._widths):
                widths[...] = self._bits[..., module]
            # A copy: the device may read it late.
            gate_up, down = self._unpack(self._packing.vector.copy())
            self._snapshot = ModulePages(*gate_up), ModulePages(*down)
        return self._snapshot

    @cached_property
    def _unpack(self) -> Any:
        unpack = jax.jit(self._packing.unpack, out_shardings=self._sharding)
        return unpack.lower(self._packing.vector).compile()

    def used_pages(self) -> Int32[np.ndarray, " count"]:
        """Every page that a block holds or has reserved, for accounting; ascending."""
        ids = [table[table > 0] for table in (*self._planes, *self._tables)]
        for pending in self._raises.values():
            ids += [pending.planes.reshape(-1), pending.table]
        return np.sort(np.concatenate(ids))

    def _summarize(self) -> tuple[dict[int, int], float]:
        if self._summary is None:
            counts = np.bincount(self._bits.reshape(-1), minlength=self.widths[-1] + 1)
            sizes = np.array(self.block_weights)
            mean = float((self._bits.mean(axis=(0, 1)) * sizes).sum() / sizes.sum())
            self._summary = {bits: int(counts[bits]) for bits in self.widths}, mean
        return self._summary

    def _take_table(self, block: Block, bits: int) -> Transfer:
        pages = self._matrices[block[2]].table_pages(bits)
        return Transfer(self._host.table(block, bits), self._allocator.take(pages, Owner.WEIGHT))

    def _commit(self, block: Block, bits: int, table: Int32[np.ndarray, " n"]) -> None:
        layer, expert, module = block
        self._tables[module][layer, expert] = 0
        self._tables[module][layer, expert, : len(table)] = table
        self._bits[block] = bits
        self._snapshot = self._summary = None

    def _check_transition(self, block: Block, bits: int, *, lowering: bool) -> None:
        matrix, old = self._matrices[block[2]], int(self._bits[block])
        if bits not in matrix.widths or (bits >= old if lowering else bits <= old):
            raise ValueError(f"block {block} cannot go from {old} to {bits} bits")
        if block in self._raises:
            raise ValueError(f"block {block} is loading; commit or cancel that first")
