"""Tuned sizes of the attention kernels: data, found by ``benchmark.py`` on an H200."""

from dataclasses import dataclass


@dataclass(frozen=True)
class DecodeConfig:
    """Sizes of the decode kernel.

    Attributes:
        tile: Tokens a step of a program.
        warps: Warps a program.
        stages: Depth of the software pipeline: ``stages - 1`` tiles are on their way.
        programs: A sequence is split until about so many programs exist...
        split_tokens: ... but a split keeps at least so many tokens.
    """

    tile: int
    warps: int
    stages: int
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

    rows: int
    tile: int
    warps: int
    stages: int


DECODE = {
    32: DecodeConfig(tile=64, warps=2, stages=3, programs=768, split_tokens=256),
    64: DecodeConfig(tile=32, warps=2, stages=4, programs=2048, split_tokens=256),
    128: DecodeConfig(tile=16, warps=4, stages=3, programs=512, split_tokens=128),
    256: DecodeConfig(tile=16, warps=2, stages=3, programs=512, split_tokens=128),
    512: DecodeConfig(tile=16, warps=4, stages=1, programs=512, split_tokens=128),
}
"""By words a head."""

PREFILL = {
    32: (PrefillConfig(rows=64, tile=64, warps=4, stages=3),),
    64: (
        PrefillConfig(rows=128, tile=64, warps=8, stages=4),
        PrefillConfig(rows=64, tile=64, warps=4, stages=3),
    ),
    128: (PrefillConfig(rows=64, tile=32, warps=4, stages=3),),
    256: (PrefillConfig(rows=32, tile=32, warps=8, stages=3),),
    512: (PrefillConfig(rows=16, tile=16, warps=4, stages=1),),
}
"""By words a head; the first that makes ``FULL`` programs, else the last."""

FULL = 128
"""Programs of a prefill that keep a GPU busy."""

MOST_SPLITS = 64


def decode_config(words: int) -> DecodeConfig:
    """The decode sizes for heads of so many words."""
    return DECODE[_row(DECODE, words)]


def prefill_config(words: int, rows: int) -> PrefillConfig:
    """The prefill sizes for heads of so many words and so many rows in all programs together."""
    configs = PREFILL[_row(PREFILL, words)]
    return next((config for config in configs if rows >= FULL * config.rows), configs[-1])


def _row(table: dict, words: int) -> int:
    """The smallest tuned size that is no smaller, else the largest."""
    return min((row for row in table if row >= words), default=max(table))
