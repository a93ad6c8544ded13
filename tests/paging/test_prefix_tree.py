"""Shared pages against a model of what every page holds, under random operations."""

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pw_jax.engine.kv_cache import KvCache
from pw_jax.engine.sequence import Request, Sequence
from pw_jax.models.config import KvShape
from pw_jax.paging.allocator import Owner, PageAllocator
from pw_jax.paging.layout import paging_layout
from pw_jax.paging.prefix_tree import PrefixTree

LAYOUT = paging_layout(
    (KvShape(1, 16), KvShape(1, 32), KvShape(1, 16)), kv_dtype="float32", page_words=128
)
BLOCK = 4
POISON, MOST_TOKENS = -1, 20


@dataclass
class Simulation:
    """What an engine does with a cache, with the pages' content as one number a token."""

    allocator: PageAllocator
    cache: KvCache
    content: np.ndarray
    running: list[Sequence] = field(default_factory=list)
    weights: list[np.ndarray] = field(default_factory=list)
    texts: dict[tuple[int, ...], int] = field(default_factory=dict)
    reused: int = 0
    copied: int = 0

    @classmethod
    def of(cls, pages: int) -> "Simulation":
        allocator = PageAllocator(pages)
        cache = KvCache(LAYOUT, allocator, sharing=True)
        assert cache.block_tokens == BLOCK
        return cls(allocator, cache, np.full((pages, BLOCK), POISON))

    def start(self, prompt: list[int]) -> None:
        sequence = Sequence(Request(tuple(prompt), MOST_TOKENS), len(self.texts))
        sequence.to_prefill = len(prompt)
        copies = self.cache.reuse(sequence, lambda pages: None)
        self.content[copies.targets] = self.content[copies.sources]
        assert sequence.cached < len(prompt)
        self.reused += sequence.cached
        self.copied += len(copies.targets)
        self.running.append(sequence)

    def run(self, sequence: Sequence, tokens: int) -> None:
        """Prefills or decodes so many tokens, if there is room."""
        last = min(sequence.cached + tokens, len(sequence.tokens))
        if self.cache.pages_needed(sequence, last) > self.allocator.free:
            return
        self.cache.grow(sequence, last)
        for place in range(sequence.cached, last):
            self.content[self.places(sequence, place)] = self.number(sequence, place)
        sequence.cached = last
        self.cache.offer(sequence)

    def places(self, sequence: Sequence, place: int) -> tuple[np.ndarray, np.ndarray]:
        pages, offsets = [], []
        for group, held in zip(LAYOUT.kv_groups, sequence.pages, strict=True):
            block, offset = divmod(place, group.layout.tokens_per_page)
            pages += held[block].tolist()
            offsets += [offset] * len(group.layers)
        return np.array(pages), np.array(offsets)

    def number(self, sequence: Sequence, place: int) -> int:
        """Of a token behind all that stands before it."""
        return self.texts.setdefault(tuple(sequence.tokens[: place + 1]), len(self.texts))

    def check(self) -> None:
        self.cache.check(self.running)
        self.content[self.allocator.owned_ids(Owner.FREE)] = POISON
        taken = np.concatenate([np.zeros(0, np.int32), *self.weights])
        assert np.array_equal(np.sort(taken), self.allocator.owned_ids(Owner.WEIGHT))
        self.content[taken] = POISON
        for sequence in self.running:
            for place in range(sequence.cached):
                found = self.content[self.places(sequence, place)]
                assert (found == self.number(sequence, place)).all()


@settings(deadline=None, max_examples=30)
@given(
    st.integers(12, 60),
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 1 << 20)), min_size=20, max_size=60),
)
def test_no_text_is_mixed_no_page_lost_or_owned_twice(pages, operations):
    simulation = Simulation.of(pages)
    for kind, number in operations:
        draw = np.random.default_rng(number)
        running = simulation.running
        if kind == 0 or not running:  # texts of few tokens: beginnings are often alike
            simulation.start((draw.integers(0, 12, draw.integers(1, MOST_TOKENS)) // 11).tolist())
        elif kind in (1, 2):
            simulation.run(running[number % len(running)], 1 + number % 7)
        elif kind == 3:
            sequence = running[number % len(running)]
            if sequence.cached == len(sequence.tokens) < MOST_TOKENS:
                sequence.generated.append(number % 2)
        elif kind == 4:
            simulation.cache.release(running.pop(number % len(running)))
        elif number % 2 and simulation.weights:
            simulation.allocator.give(simulation.weights.pop(), Owner.WEIGHT)
        elif simulation.allocator.free:
            count = 1 + number % simulation.allocator.free
            simulation.weights.append(simulation.allocator.take(count, Owner.WEIGHT))
        simulation.check()
    for sequence in simulation.running:
        simulation.cache.release(sequence)
    simulation.running.clear()
    simulation.check()
    taken = sum(len(ids) for ids in simulation.weights)
    assert simulation.allocator.free == pages - 1 - taken
    simulation.weights.append(simulation.allocator.take(simulation.allocator.free, Owner.WEIGHT))
    simulation.check()
    assert simulation.allocator.owned(Owner.KEPT) == 0


def test_what_is_reused_and_what_is_copied():
    """Full blocks are shared, of the next one a copy is made; one token is left to compute."""
    simulation = Simulation.of(60)
    simulation.start([1, 2, 3, 4, 5, 6, 7, 8, 9])
    simulation.run(simulation.running[0], 9)
    for prompt, cached, copied in (
        ([1, 2, 3, 4, 5, 6, 7, 8, 9, 9], 9, 3),  # a page in each of three layers
        ([1, 2, 3, 4, 5, 6, 7, 8], 7, 4),  # wholly known; one layer has two tokens a page
        ([1, 2, 3, 4, 9, 6], 4, 0),
        ([2, 2, 3, 4], 0, 0),
    ):
        before = simulation.copied
        simulation.start(prompt)
        assert simulation.running[-1].cached == cached
        assert simulation.copied - before == copied
        simulation.run(simulation.running[-1], 20)
        simulation.check()
    first, second = simulation.running[:2]
    assert [a is b for a, b in zip(first.pages[0], second.pages[0], strict=False)][:2] == [True] * 2
    assert simulation.allocator.owned(Owner.KEPT) == 0
    simulation.cache.release(simulation.running.pop(0))  # the others hold all its blocks
    assert simulation.allocator.owned(Owner.KEPT) == 0
    simulation.check()


def test_the_block_idle_for_longest_goes_first_and_ends_before_beginnings():
    allocator = PageAllocator(10)
    tree = PrefixTree(allocator, 2)

    def add(parent, *tokens):
        return tree.add(parent, tokens, [list(allocator.take(1, Owner.KV)[None])])

    first = add(tree.root, 1, 2)
    second = add(first, 3, 4)
    other = add(tree.root, 5, 6)
    for block in (other, second, first):
        tree.drop(block)
    assert allocator.free == 9
    assert tree.find([1, 2, 3, 4, 5, 6]) == [first, second]
    allocator.take(7, Owner.KV)
    assert tree.find([5, 6]) == []
    assert tree.find([1, 2, 3, 4]) == [first, second]
    allocator.take(1, Owner.WEIGHT)
    assert tree.find([1, 2, 3, 4]) == [first]
    with pytest.raises(ValueError, match="not new"):
        tree.add(tree.root, (1, 2), [])
    with pytest.raises(ValueError, match="not full"):
        tree.add(tree.root, (1,), [])
