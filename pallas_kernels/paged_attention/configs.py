"""Tuned sizes of the attention kernels: data, found by ``benchmark.py`` on an H200."""

from dataclasses import dataclass


@dataclass(frozen=True)
class DecodeConfig:
    """Sizes of the decode kernel.

    Attributes:
        tile: Tokens a step of a program.
        warps: Warps a program.
        stages: Depth of the software pipeline.
        lanes: Work on the CUDA cores, with one running softmax a row of the tile, instead of on the
            tensor cores, with the query heads padded to 16.
        programs: Splits are added until about so many programs exist...
        split_tokens: ... but a split keeps at least so many tokens.
    """

    tile: int = 64
    warps: int = 4
    stages: int = 2
    lanes: bool = False
    programs: int = 2048
    split_tokens: int = 256


@dataclass(frozen=True)
class PrefillConfig:
    """Sizes of the prefill kernel.

    Attributes:
        rows: Queries times query heads a program.
        tile: Tokens a step of a program.
        warps: Warps a program.
        stages: Depth of the software pipeline.
    """

    rows: int = 64
    tile: int = 64
    warps: int = 4
    stages: int = 2


DECODE = {
    32: DecodeConfig(),
    64: DecodeConfig(),
    128: DecodeConfig(tile=32),
    256: DecodeConfig(tile=32),
    512: DecodeConfig(tile=16, stages=1),
}
"""By words a head."""

DECODE_UNGROUPED = {}
"""By words a head, where a kv head serves one query head."""

PREFILL = {
    32: PrefillConfig(),
    64: PrefillConfig(),
    128: PrefillConfig(tile=32, warps=8),
    256: PrefillConfig(tile=32, warps=8),
    512: PrefillConfig(rows=16, tile=16, stages=1),
}
"""By words a head."""

MOST_SPLITS = 64


def decode_config(words: int, group: int) -> DecodeConfig:
    """The decode sizes for heads of so many words, and so many query heads a kv head."""
    table = DECODE | DECODE_UNGROUPED if group == 1 else DECODE
    return table[_row(table, words)]


def prefill_config(words: int) -> PrefillConfig:
    """The prefill sizes for heads of so many words."""
    return PREFILL[_row(PREFILL, words)]


def _row(table: dict, words: int) -> int:
    """The smallest tuned size that is no smaller, else the largest."""
    return min((row for row in table if row >= words), default=max(table))
