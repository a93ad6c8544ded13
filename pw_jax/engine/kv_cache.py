"""The KV pages of sequences: host side."""

import numpy as np

from pw_jax.engine.sequence import Sequence
from pw_jax.engine.steps import NewPages
from pw_jax.paging.allocator import Owner, PageAllocator
from pw_jax.paging.layout import PagingLayout
from pw_jax.paging.weight_pages import WeightPageTable


class KvCache:
    """Gives pages to sequences, and takes them back.

    Args:
        layout: The model's layouts.
        allocator: Owns the pages.
    """

    def __init__(self, layout: PagingLayout, allocator: PageAllocator):
        self._groups = layout.kv_groups
        self._allocator = allocator
        self.block_pages = sum(len(group.layers) for group in self._groups)

    def pages_needed(self, sequence: Sequence, tokens: int) -> int:
        """Pages that a sequence lacks to hold ``tokens`` tokens."""
        if tokens <= sequence.room:
            return 0
        return sum(
            max(0, group.blocks(tokens) - len(held)) * len(group.layers)
            for group, held in zip(self._groups, self._held(sequence), strict=True)
        )

    def needed_next(self, running: list[Sequence], prefill_chunk: int) -> int:
        """Pages that the next turn's steps will take, for all that is known now."""
        decoding = (s for s in running if s.prefilled and s.wants_token)
        pages = sum(self.pages_needed(s, s.cached + 1) for s in decoding)
        for sequence in running:
            if not sequence.prefilled:  # one chunk a turn, of the oldest
                tokens = min(sequence.cached + prefill_chunk, sequence.to_prefill)
                return pages + self.pages_needed(sequence, tokens)
        return pages

    def grow(self, sequence: Sequence, tokens: int) -> list[list[tuple[int, np.ndarray]]]:
        """Takes the pages that a sequence lacks to hold ``tokens`` tokens.

        Returns:
            For each KV group, the new blocks: (index of the block, int32 pages ``[layers]``).

        Raises:
            OutOfPagesError: Too few free pages; make room first.
        """
        ids = self._allocator.take(self.pages_needed(sequence, tokens), Owner.KV)
        sequence.pages = self._held(sequence)
        grown = []
        for group, held in zip(self._groups, sequence.pages, strict=True):
            first, layers = len(held), len(group.layers)
            count = max(0, group.blocks(tokens) - first)
            own, ids = ids[: count * layers], ids[count * layers :]
            held.extend(own.reshape(count, layers))
            grown.append(list(enumerate(held[first:], start=first)))
        sequence.room = min(
            len(held) * group.layout.tokens_per_page
            for group, held in zip(self._groups, sequence.pages, strict=True)
        )
        return grown

    def release(self, sequence: Sequence) -> None:
        """Returns all pages of a sequence."""
        pages = [block for held in self._held(sequence) for block in held]
        if pages:
            self._allocator.give(np.concatenate(pages), Owner.KV)
        sequence.pages = []
        sequence.cached = sequence.room = 0

    def _held(self, sequence: Sequence) -> list[list[np.ndarray]]:
        return sequence.pages or [[] for _ in self._groups]


def fill_new_pages(
    arrays: tuple[NewPages, ...],
    row: int,
    slot: int,
    grown: list[list[tuple[int, np.ndarray]]],
) -> None:
    """Writes a slot's new blocks into a step's (numpy) arguments, from a row on."""
    for new, blocks in zip(arrays, grown, strict=True):
        for offset, (index, pages) in enumerate(blocks):
            new.slots[row + offset] = slot
            new.blocks[row + offset] = index
            new.pages[row + offset] = pages


def check_pages(
    allocator: PageAllocator, running: list[Sequence], table: WeightPageTable | None
) -> None:
    """Accounts for every page of the pool.

    Raises:
        AssertionError: A page is lost, or has two owners.
    """
    kv = [page for sequence in running for held in sequence.pages for page in held]
    held = np.sort(np.concatenate([*kv, np.zeros(0, np.int32)]))
    assert np.array_equal(held, allocator.owned_ids(Owner.KV))
    if table is not None:
        assert np.array_equal(table.used_pages(), allocator.owned_ids(Owner.WEIGHT))
    assert all(allocator.owned(owner) == len(allocator.owned_ids(owner)) for owner in Owner)
    assert allocator.owned(Owner.FREE) == allocator.free
