"""How much of the page tables a step over latents looks at: a few sizes, chosen by the host.

Keys and values are rebuilt from latents for every block that a step looks at, used or not. So steps
are compiled for several sizes, and each turn takes the smallest that holds what is used.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Int32

from pallas_kernels.kv_reconstruct import (
    CompactBlocks,
    bucket_sizes,
    smallest_bucket,
    used_pages,
)
from pallas_kernels.page_layout import LatentLayout
from pw_jax.engine.reuse import ReuseArguments
from pw_jax.engine.steps import NewPages
from pw_jax.paging.layout import KvGroup, PagingLayout


class Size(NamedTuple):
    """What one compiled step looks at.

    Attributes:
        columns: For each KV group, blocks of a sequence; None for keys and values, which cost
            nothing where they are not used.
        capacity: For each KV group, pages of all sequences together; likewise.
    """

    columns: tuple[int | None, ...]
    capacity: tuple[int | None, ...]

    def blank(self, slots: int) -> tuple[CompactBlocks | None, ...]:
        """Used pages of each group, none so far."""
        nothing = used_pages(np.zeros((slots, 1), np.int32), np.zeros(slots, np.int32))
        return tuple(
            nothing.laid_out(slots, capacity=capacity, columns=columns)
            if columns is not None and capacity is not None
            else None
            for columns, capacity in zip(self.columns, self.capacity, strict=True)
        )


class UsedTables:
    """The page tables of latents as the device has them, and what is used of them.

    Attributes:
        prefill: Sizes of prefill steps, ascending.
        decode: Sizes of decode steps, ascending. A step holds the longest sequence, and as much for
            all others; of the longest tables there is one more, which holds half of that.

    Args:
        layout: The model's layouts.
        slots: Sequences that run at once.
        blocks: Blocks of each KV group's table.
        most_tokens: Of a sequence.
        least_tokens: Of the smallest size, about.
    """

    def __init__(
        self,
        layout: PagingLayout,
        slots: int,
        blocks: tuple[int, ...],
        most_tokens: int,
        least_tokens: int,
    ):
        self._groups = layout.kv_groups
        self._tables = {
            index: np.zeros((slots, most), np.int32)
            for index, (group, most) in enumerate(zip(self._groups, blocks, strict=True))
            if isinstance(group.layout, LatentLayout)
        }
        self._tokens = (most_tokens,)
        if self._tables:
            self._tokens = bucket_sizes(most_tokens, least=least_tokens)
        self.prefill = [self._size(tokens, 1, 1) for tokens in self._tokens]
        self.decode = [self._size(tokens, slots, slots) for tokens in self._tokens]
        if len(self._tokens) > 1:
            self.decode.insert(-1, self._size(most_tokens, slots, -(-slots // 2)))

    def take_in(self, new_pages: tuple[NewPages, ...]) -> None:
        """Does to the tables what a step does on the device."""
        for index, table in self._tables.items():
            new = new_pages[index]
            real = np.asarray(new.blocks) < table.shape[1]
            table[new.slots[real], new.blocks[real]] = new.pages[real, 0]

    def take_over(self, arguments: ReuseArguments) -> None:
        """Likewise for a slot that is given pages of other texts."""
        for index, table in self._tables.items():
            table[int(arguments.slot)] = arguments.pages[index][0]

    def prefill_size(self, tokens: int) -> int:
        """Index of the size that a sequence of so many tokens needs."""
        return smallest_bucket(self._tokens, tokens)

    def decode_size(
        self, tokens: Int32[np.ndarray, " B"]
    ) -> tuple[int, tuple[CompactBlocks | None, ...]]:
        """Index of the size that a batch needs, and its used pages laid out in it.

        Args:
            tokens: Of each slot; 0 for empty ones.
        """
        used = {
            index: used_pages(table, _blocks(self._groups[index], tokens))
            for index, table in self._tables.items()
        }

        def holds(size: Size) -> bool:
            return all(
                pages.columns <= (size.columns[index] or 0)
                and pages.count <= (size.capacity[index] or 0)
                for index, pages in used.items()
            )

        chosen = next(index for index, size in enumerate(self.decode) if holds(size))
        size, slots = self.decode[chosen], len(tokens)
        return chosen, tuple(
            used[index].laid_out(slots, capacity=capacity, columns=columns)
            if columns is not None and capacity is not None
            else None
            for index, (columns, capacity) in enumerate(
                zip(size.columns, size.capacity, strict=True)
            )
        )

    def _size(self, tokens: int, slots: int, full: int) -> Size:
        """For ``tokens`` a sequence, with pages for so many full ones; a page each at least."""
        columns = [
            group.blocks(tokens) if index in self._tables else None
            for index, group in enumerate(self._groups)
        ]
        return Size(
            tuple(columns), tuple(None if c is None else max(slots, c * full) for c in columns)
        )


def _blocks(group: KvGroup, tokens: Int32[np.ndarray, " B"]) -> Int32[np.ndarray, " B"]:
    return -(-tokens // group.layout.tokens_per_page)
