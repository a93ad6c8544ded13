"""Host side: numbers the used pages of a batch compactly, under fixed shapes. Pure numpy."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int


class CompactBlocks(NamedTuple):
    """The used pages of B sequences, each once, and where every sequence finds its own.

    Layers of one KV group share it: their page ids differ, the blocks that are used or shared do
    not. The fields are numpy arrays on the host and traced in a step.

    Attributes:
        sequence: int32 ``[C]``: a row whose page table names the page.
        block: int32 ``[C]``: the block of that row, and so the positions of its tokens.
        remap: int32 ``[B, blocks]``: the compact number of each block of each sequence. Blocks that
            are not used point to number 0 and must not be looked at.
    """

    sequence: Any
    block: Any
    remap: Any


class UsedPages(NamedTuple):
    """The pages that a batch uses, to be laid out in a bucket.

    Attributes:
        sequence: Row of each used entry of the page tables.
        block: Its column.
        first: Of each page, the first entry that names it; in ascending order of pages.
        number: The number of each entry's page in that order.
    """

    sequence: np.ndarray
    block: np.ndarray
    first: np.ndarray
    number: np.ndarray

    @property
    def count(self) -> int:
        """Pages, each counted once."""
        return len(self.first)

    @property
    def columns(self) -> int:
        """Blocks of the longest sequence."""
        return int(self.block.max(initial=-1)) + 1

    def laid_out(self, batch: int, *, capacity: int, columns: int) -> CompactBlocks:
        """Under fixed shapes.

        Args:
            batch: Sequences.
            capacity: Length C of the lists; what is over repeats block 0 of sequence 0.
            columns: Columns of ``remap``.

        Raises:
            ValueError: More pages are used than ``capacity``, or a sequence uses more blocks than
                ``columns``: the caller chose too small a bucket.
        """
        if self.columns > columns:
            raise ValueError(f"a sequence of {self.columns} blocks does not fit {columns} columns")
        if self.count > capacity:
            raise ValueError(f"{self.count} used pages do not fit a bucket of {capacity}")
        compact = CompactBlocks(
            np.zeros(capacity, np.int32),
            np.zeros(capacity, np.int32),
            np.zeros((batch, columns), np.int32),
        )
        compact.sequence[: self.count] = self.sequence[self.first]
        compact.block[: self.count] = self.block[self.first]
        compact.remap[self.sequence, self.block] = self.number
        return compact


def used_pages(pages: Int[np.ndarray, "B blocks"], used: Int[np.ndarray, " B"]) -> UsedPages:
    """Numbers the pages that are used, in ascending order of their ids.

    A page of several sequences (a shared prefix) gets one number: it is rebuilt once, out of place.
    Ascending ids make a gather read runs of neighbouring pages as they lie.

    Args:
        pages: Page ids of one layer; what lies behind the used blocks means nothing.
        used: Blocks that each sequence uses; 0 for an empty slot.
    """
    sequence, block = np.nonzero(np.arange(pages.shape[1])[None, :] < used[:, None])
    _, first, number = np.unique(pages[sequence, block], return_index=True, return_inverse=True)
    return UsedPages(sequence, block, first, number)


def compact_blocks(
    pages: Int[np.ndarray, "B blocks"],
    used: Int[np.ndarray, " B"],
    *,
    capacity: int,
    columns: int | None = None,
) -> CompactBlocks:
    """See :func:`used_pages` and :meth:`UsedPages.laid_out`; ``columns`` None for all of them."""
    width = pages.shape[1] if columns is None else columns
    return used_pages(pages, used).laid_out(len(pages), capacity=capacity, columns=width)


def all_blocks(batch: int, blocks: int) -> CompactBlocks:
    """Every block of every sequence, used or not: for callers that did not count."""
    numbers = np.arange(batch * blocks, dtype=np.int32)
    return CompactBlocks(numbers // blocks, numbers % blocks, numbers.reshape(batch, blocks))


def bucket_sizes(most: int, ratio: int = 2, least: int = 1) -> tuple[int, ...]:
    """Sizes from about ``least`` to ``most``, each at most ``ratio`` times the one before."""
    sizes = [most]
    while sizes[-1] > least:
        sizes.append(-(-sizes[-1] // ratio))
    return tuple(int(size) for size in reversed(sizes))


def smallest_bucket(sizes: Sequence[int], wanted: int) -> int:
    """Index of the smallest size that holds ``wanted``.

    Raises:
        ValueError: None does.
    """
    for index, size in enumerate(sizes):
        if size >= wanted:
            return index
    raise ValueError(f"{wanted} is more than the largest bucket of {sizes[-1]}")
