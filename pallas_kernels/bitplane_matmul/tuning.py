"""Tuned shapes of launches, read from a data file."""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from pallas_kernels.bitplane_matmul.activations import TOKENS_PER_BLOCK, chunks


@dataclass(frozen=True)
class Launch:
    """How a family of widths is launched.

    Attributes:
        warps: Warps a block; bounds the registers of a thread.
        blocks: Blocks of the grid: all stay on the device.
        depth: Chunks in flight.
    """

    warps: int
    blocks: int
    depth: int


@cache
def _table() -> dict:
    return json.loads(Path(__file__).with_name("tuned.json").read_text())


def token_blocks(tokens: float | int) -> int:
    """Blocks of four tokens in a unit, for experts that see about this many tokens."""
    sizes = _table()["token_blocks"]
    wanted = [size for size in sizes if size * TOKENS_PER_BLOCK >= tokens]
    return wanted[0] if wanted else sizes[-1]


def families(widths: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Widths that share a launch."""
    groups = [tuple(b for b in entry["widths"] if b in widths) for entry in _table()["families"]]
    return [group for group in groups if group]


def launch(bits: int, use: int | str) -> Launch:
    """The launch for the family of a width.

    Args:
        bits: A width of the family.
        use: Blocks of tokens in a unit, or ``"dequantize"``.
    """
    entry = next(entry for entry in _table()["families"] if bits in entry["widths"])
    return Launch(**entry["launch"][str(use)])


def grouped() -> dict[str, int]:
    """Tile sizes of the product with many tokens."""
    return _table()["grouped"]


def is_large(tokens: float | int) -> bool:
    """Whether experts that see about this many tokens are better dequantised first."""
    return tokens > _table()["most_small_tokens"]


def words_at_once(words_per_row: int) -> int:
    """Words that a lane takes from a row at once; they must divide the row's."""
    return next(words for words in (_table()["words"], 2, 1) if words_per_row % words == 0)


def split_count(words_per_row: int, items: int, warps: int) -> int:
    """Parts that K is cut into so that there are about four items a warp."""
    count = chunks(words_per_row, words_at_once(words_per_row))
    least = _table()["least_chunks"]
    for parts in range(1, count + 1):
        enough = items * parts >= _table()["items_per_warp"] * warps
        if count % parts == 0 and (enough or count // parts < 2 * least):
            return parts
    return 1
