"""Texts that lie in pages, to be found again by their beginnings. Host side.

A text is cut into blocks of a fixed number of tokens. Each full block hangs below the one before
it, in a hash table by its tokens: to find a text is to look up block after block, and each look-up
compares all tokens of its block. So what is found has the same tokens at the same places from the
very first one on, and no collision of hashes can mix two texts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Int32

from pw_jax.paging.allocator import Owner, PageAllocator

GroupPages = list[np.ndarray]
"""The pages of consecutive blocks of one KV group: int32 ``[layers]`` each."""


@dataclass(eq=False)
class TextBlock:
    """A full block of tokens behind one certain text, and the pages that hold it.

    Attributes:
        tokens: Its tokens.
        parent: The block before; None for the root, which is no block.
        pages: For each KV group.
        holders: Sequences that use it.
        following: Blocks behind it, by their tokens, oldest first.
    """

    tokens: tuple[int, ...]
    parent: "TextBlock | None"
    pages: list[GroupPages]
    holders: int = 0
    following: dict[tuple[int, ...], "TextBlock"] = field(default_factory=dict)

    def page_ids(self) -> Int32[np.ndarray, " count"]:
        """All its pages."""
        return np.concatenate([page for group in self.pages for page in group])


class PrefixTree:
    """The full blocks of all texts in the pool, and how many sequences use each.

    A block that nobody uses any more stays until its pages are wanted; the one that has been idle
    for longest goes first. Who holds a block holds those before it, and lets go of the last one
    first: so a block never goes before those behind it.

    Attributes:
        root: Stands before the first block of every text.

    Args:
        allocator: Owns the pages; the tree becomes the one that gives kept pages up.
        block_tokens: Tokens a block.
    """

    def __init__(self, allocator: PageAllocator, block_tokens: int):
        self.root = TextBlock((), None, [])
        self.block_tokens = block_tokens
        self._allocator = allocator
        self._idle: dict[TextBlock, None] = {}  # longest idle first
        allocator.evict = self.evict

    def find(self, tokens: Sequence[int]) -> list[TextBlock]:
        """The blocks that a text begins with, as far as they are known."""
        found, block = [], self.root
        for first in range(0, len(tokens) - self.block_tokens + 1, self.block_tokens):
            following = block.following.get(tuple(tokens[first : first + self.block_tokens]))
            if following is None:
                break
            block = following
            found.append(block)
        return found

    def add(self, parent: TextBlock, tokens: tuple[int, ...], pages: list[GroupPages]) -> TextBlock:
        """Takes in a block whose pages one sequence has; that sequence holds it.

        Raises:
            ValueError: The block is no full one, or is known.
        """
        if len(tokens) != self.block_tokens or tokens in parent.following:
            raise ValueError(f"a block of {len(tokens)} tokens is not full, or not new")
        block = TextBlock(tokens, parent, pages, holders=1)
        parent.following[tokens] = block
        return block

    def hold(self, block: TextBlock) -> None:
        """One more sequence uses a block; all before it are held already."""
        if not block.holders:
            del self._idle[block]
            self._allocator.pass_on(block.page_ids(), Owner.KEPT, Owner.KV)
        block.holders += 1

    def drop(self, block: TextBlock) -> None:
        """One sequence less uses a block; the last one behind first."""
        block.holders -= 1
        if not block.holders:
            self._idle[block] = None
            self._allocator.pass_on(block.page_ids(), Owner.KV, Owner.KEPT)

    def evict(self, pages: int) -> None:
        """Forgets idle blocks until at least so many pages are nobody's."""
        freed = 0
        while freed < pages and self._idle:
            block = next(iter(self._idle))
            del self._idle[block]
            assert block.parent is not None
            assert not block.following, "a block went before those behind it"
            del block.parent.following[block.tokens]
            ids = block.page_ids()
            self._allocator.give(ids, Owner.KEPT)
            freed += len(ids)

    def blocks(self) -> Iterator[TextBlock]:
        """Every block, for accounting."""
        stack = list(self.root.following.values())
        while stack:
            block = stack.pop()
            yield block
            stack += block.following.values()
