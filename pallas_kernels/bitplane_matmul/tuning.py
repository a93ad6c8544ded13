"""Tuned shapes of launches, read from a data file."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from pallas_kernels.bitplane_matmul.activations import chunks


@dataclass(frozen=True)
class SmallLaunch:
    """How the product with few tokens is launched.

    Attributes:
        words: Most words that a lane takes from a row at once.
        warps: Warps a block; bounds the registers of a thread.
        blocks: Blocks of the grid: all stay on the device.
        items_per_warp: Work items that each warp should have at least.
        least_chunks: Chunks that a part of K should have at least.
        chunks_in_flight: Chunks in flight of each width, by blocks of tokens in a unit.
    """

    words: int
    warps: int
    blocks: int
    items_per_warp: int
    least_chunks: int
    chunks_in_flight: dict[str, dict[str, int]]

    def words_at_once(self, words_per_row: int) -> int:
        """Words that a lane takes at once from rows of this length: they must divide it."""
        return next(words for words in (self.words, 2, 1) if words_per_row % words == 0)

    def depths(self, widths: Sequence[int], token_blocks: int) -> tuple[int, ...]:
        """Chunks in flight, width by width."""
        depths = self.chunks_in_flight
        size = next(size for size in depths if int(size) >= token_blocks)
        return tuple(depths[size][str(bits)] for bits in widths)

    def splits(self, words_per_row: int, items: int) -> int:
        """Parts that K is cut into so that there are a few items a warp."""
        count = chunks(words_per_row, self.words_at_once(words_per_row))
        for parts in range(1, count + 1):
            enough = items * parts >= self.items_per_warp * self.warps * self.blocks
            if count % parts == 0 and (enough or count // parts < 2 * self.least_chunks):
                return parts
        return 1


@dataclass(frozen=True)
class LargeLaunch:
    """How the product with many tokens is launched.

    Attributes:
        stages: Stages of the ring of activations.
        blocks: Blocks of the grid.
    """

    stages: int
    blocks: int


@cache
def _table() -> dict:
    return json.loads(Path(__file__).with_name("tuned.json").read_text())


def unit_capacity(tokens: float | int, words_per_row: Sequence[int]) -> int:
    """Most tokens of a unit.

    Args:
        tokens: About how many tokens an expert sees.
        words_per_row: Words a row of the matrices; warp groups need an even number.
    """
    sizes = _table()["unit_capacities"]
    if any(words % 2 for words in words_per_row):
        sizes = [size for size in sizes if is_small(size)]
    return next((size for size in sizes if size >= tokens), sizes[-1])


def is_small(capacity: int) -> bool:
    """Whether units of this many tokens are for single warps, not for warp groups."""
    return capacity <= _table()["most_small_tokens"]


def small_launch() -> SmallLaunch:
    """The launch for few tokens."""
    return SmallLaunch(**_table()["small"])


def large_launch() -> LargeLaunch:
    """The launch for many tokens."""
    return LargeLaunch(**_table()["large"])
