"""The KV pages of sequences: host side."""

from collections import Counter
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from itertools import islice
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32

from pw_jax.engine.sequence import Sequence
from pw_jax.engine.steps import NewPages
from pw_jax.paging.allocator import Owner, PageAllocator
from pw_jax.paging.layout import PagingLayout
from pw_jax.paging.prefix_tree import GroupPages, PrefixTree, TextBlock
from pw_jax.paging.weight_pages import WeightPageTable

LOOKED_AT = 64
"""Of the blocks that may begin like the rest of a text, only so many of the newest are compared."""


class PageCopies(NamedTuple):
    """Pages to copy inside the pool.

    Attributes:
        sources: Pages that others go on using.
        targets: Pages of the sequence's own.
    """

    sources: Int32[np.ndarray, " count"]
    targets: Int32[np.ndarray, " count"]


class _Beginning(NamedTuple):
    """A block that begins like the rest of a text.

    Attributes:
        tokens: How many are alike.
        pages: Its pages.
        block: Itself; None if it is what a running sequence is just filling.
    """

    tokens: int
    pages: list[GroupPages]
    block: TextBlock | None


class KvCache:
    """Gives pages to sequences, and takes them back.

    Sequences whose texts begin alike share the pages of all full blocks, if ``sharing``. A block is
    as many tokens as the largest page of any KV group holds. No sequence ever writes into a block
    that is shared: it writes behind its cached tokens only, and :meth:`reuse` copies the block that
    those end in.

    Args:
        layout: The model's layouts.
        allocator: Owns the pages.
        sharing: Whether full blocks are kept and shared.
    """

    def __init__(self, layout: PagingLayout, allocator: PageAllocator, *, sharing: bool = False):
        self._groups = layout.kv_groups
        self._allocator = allocator
        self.block_pages = sum(len(group.layers) for group in self._groups)
        self.block_tokens = layout.block_tokens
        self._tree = PrefixTree(allocator, self.block_tokens) if sharing else None
        self._filling: dict[Sequence, None] = {}  # sequences with pages

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
        self._filling[sequence] = None
        return grown

    def pages_in_use(self, tokens: Many[int]) -> int:
        """Pages that a new sequence would not have to take, as others have them in use."""
        if self._tree is None:
            return 0
        blocks = self._tree.find(tokens[:-1])
        return sum(len(block.page_ids()) for block in blocks if block.holders)

    def reuse(self, sequence: Sequence, make_room: Callable[[int], None]) -> PageCopies:
        """Gives a sequence without pages what others have computed of its text.

        That is all full blocks, and of the next block the tokens that are alike, in pages of the
        sequence's own, if they are a fourth of it. At least one token is left to compute, as the
        next one comes out of its logits.

        Args:
            sequence: About to begin its prefill. How much it has is in ``cached`` then.
            make_room: Is told how many pages the copy needs, and may find them.

        Returns:
            The copies to make before anything else is written into the pool.
        """
        nothing = np.zeros(0, np.int32)
        if self._tree is None:
            return PageCopies(nothing, nothing)
        text = sequence.tokens[: sequence.to_prefill - 1]
        sequence.blocks = self._tree.find(text)
        sequence.pages = self._held(sequence)
        for block in sequence.blocks:
            self._tree.hold(block)
            for held, pages in zip(sequence.pages, block.pages, strict=True):
                held.extend(pages)
        sequence.cached = sequence.room = len(sequence.blocks) * self.block_tokens
        found = self._most_alike(sequence, text[sequence.cached :])
        if 4 * found.tokens < self.block_tokens:
            return PageCopies(nothing, nothing)
        if found.block is not None:
            self._tree.hold(found.block)
        reused, sources = sequence.cached + found.tokens, []
        needed = self.pages_needed(sequence, reused)
        make_room(needed)
        targets = nothing
        if needed <= self._allocator.free:  # else the tokens are computed, when there is room
            grown = self.grow(sequence, reused)
            sequence.cached = reused
            for new, pages in zip(grown, found.pages, strict=True):
                sources += pages[: len(new)]
            targets = np.concatenate([pages for new in grown for _, pages in new])
        if found.block is not None:
            self._tree.drop(found.block)
        return PageCopies(np.concatenate([nothing, *sources]), targets)

    def offer(self, sequence: Sequence) -> None:
        """Lets others have the full blocks whose steps are dispatched and whose tokens are read."""
        self._offer(sequence, leaves=False)

    def release(self, sequence: Sequence) -> None:
        """Takes all pages of a sequence; its full blocks may be kept."""
        own = self._offer(sequence, leaves=True)
        for pages in self._own_pages(sequence):
            own += pages
        if own:
            self._allocator.give(np.concatenate(own), Owner.KV)
        for block in reversed(sequence.blocks):
            assert self._tree is not None
            self._tree.drop(block)
        self._filling.pop(sequence, None)
        sequence.pages, sequence.blocks = [], []
        sequence.cached = sequence.room = 0

    def check(self, running: list[Sequence]) -> None:
        """Accounts for every page that holds keys and values.

        Raises:
            AssertionError: A page is lost or has two owners, or the holders are miscounted.
        """
        own = [page for s in running for pages in self._own_pages(s) for page in pages]
        holders = Counter(block for sequence in running for block in sequence.blocks)
        blocks = list(self._tree.blocks()) if self._tree is not None else []
        assert all(block.holders == holders.pop(block, 0) for block in blocks)
        assert not holders
        used = [*own, *(block.page_ids() for block in blocks if block.holders)]
        kept = [block.page_ids() for block in blocks if not block.holders]
        for ids, owner in ((used, Owner.KV), (kept, Owner.KEPT)):
            ids = np.sort(np.concatenate([np.zeros(0, np.int32), *ids]))
            assert np.array_equal(ids, self._allocator.owned_ids(owner))

    def _held(self, sequence: Sequence) -> list[GroupPages]:
        return sequence.pages or [[] for _ in self._groups]

    def _own_pages(self, sequence: Sequence) -> list[GroupPages]:
        """Pages behind the shared blocks, in each group."""
        return self._pages_of(sequence, len(sequence.blocks), None)

    def _pages_of(self, sequence: Sequence, block: int, end: int | None) -> list[GroupPages]:
        """Pages of the blocks from one to before another, in each group."""
        each = [self.block_tokens // group.layout.tokens_per_page for group in self._groups]
        return [
            held[block * count : None if end is None else end * count]
            for held, count in zip(self._held(sequence), each, strict=True)
        ]

    def _last_block(self, sequence: Sequence) -> TextBlock:
        assert self._tree is not None
        return sequence.blocks[-1] if sequence.blocks else self._tree.root

    def _offer(self, sequence: Sequence, *, leaves: bool) -> GroupPages:
        """Offers blocks; one that is known already ends it, unless the sequence leaves.

        Returns:
            Pages that the sequence has and that others have as well.
        """
        doubles: GroupPages = []
        if self._tree is None:
            return doubles
        tokens, size = sequence.tokens, self.block_tokens
        full = min(sequence.cached, len(tokens)) // size
        for index in range(len(sequence.blocks), full):
            parent, text = self._last_block(sequence), tuple(tokens[index * size :][:size])
            pages = self._pages_of(sequence, index, index + 1)
            block = parent.following.get(text)
            if block is None:
                block = self._tree.add(parent, text, pages)
            elif leaves:
                self._tree.hold(block)
                doubles += [page for group in pages for page in group]
            else:
                break
            sequence.blocks.append(block)
        return doubles

    def _most_alike(self, sequence: Sequence, rest: list[int]) -> _Beginning:
        """What begins most like the rest of a text, behind the blocks that the sequence has."""
        best = _Beginning(0, [], None)
        for tokens, pages, block in self._behind(self._last_block(sequence)):
            alike = _alike(tokens, rest)
            if alike > best.tokens:
                best = _Beginning(alike, pages, block)
        return best

    def _behind(
        self, parent: TextBlock
    ) -> Iterator[tuple[Many[int], list[GroupPages], TextBlock | None]]:
        """Blocks behind one, the newest first, and what running sequences have behind it."""
        for block in islice(reversed(parent.following.values()), LOOKED_AT):
            yield block.tokens, block.pages, block
        for other in self._filling:
            if self._last_block(other) is parent:
                first = len(other.blocks) * self.block_tokens
                tokens = other.tokens[first : other.cached][: self.block_tokens]
                yield tokens, self._own_pages(other), None


def _alike(left: Many[int], right: Many[int]) -> int:
    """How many tokens two texts begin with alike."""
    for index, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return index
    return min(len(left), len(right))


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
    allocator: PageAllocator,
    cache: KvCache,
    running: list[Sequence],
    table: WeightPageTable | None,
) -> None:
    """Accounts for every page of the pool.

    Raises:
        AssertionError: A page is lost, or has two owners.
    """
    cache.check(running)
    if table is not None:
        assert np.array_equal(table.used_pages(), allocator.owned_ids(Owner.WEIGHT))
    assert all(allocator.owned(owner) == len(allocator.owned_ids(owner)) for owner in Owner)
    assert allocator.owned(Owner.FREE) + allocator.owned(Owner.KEPT) == allocator.free
