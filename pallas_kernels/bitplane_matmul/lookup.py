"""Plane words to table entries in registers: the bit tricks, written once for every backend.

Words are ``jnp.uint32`` arrays (tests, interpretation) or :class:`emit.Word` (GPU registers). The
32 weights of a word come out as eight words of four bytes: word ``(r, h)`` holds, in byte ``c``,
the weight of bit ``r + 16 h + 4 c``.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

Word = Any


@runtime_checkable
class Operations(Protocol):
    """Instructions that Python's operators cannot name."""

    def permute(self, a: Word, b: Word, selector: Word) -> Word:
        """PTX ``prmt.b32``: nibble i of the selector's low half picks byte i out of (a, b)."""
        ...

    def select(self, mask: np.uint32, a: Word, b: Word) -> Word:
        """``(a & mask) | (b & ~mask)``, one instruction."""
        ...

    def keep_or(self, a: Word, mask: np.uint32, c: np.uint32) -> Word:
        """``(a & mask) | c``, one instruction."""
        ...


PAIRS = np.uint32(0x55555555)
NIBBLES = np.uint32(0x33333333)
BYTES = np.uint32(0x0F0F0F0F)


def _spread(
    ops: Operations, low: Word, high: Word | None, mask: np.uint32, shift: int
) -> tuple[Word, Word]:
    """Interleaves fields of two words: (the fields at even places, those at odd places)."""
    step = np.uint32(shift)
    if high is None:
        return low & mask, (low >> step) & mask
    return ops.select(mask, low, high << step), ops.select(mask, low >> step, high)


def nibble_codes(ops: Operations, planes: Sequence[Word]) -> list[Word]:
    """Transposes one to four planes, most significant first, to nibbles.

    Returns:
        Four words: nibble n of word r is the code of bit ``r + 4 n``.
    """
    reverse = [*reversed(planes), None, None]
    even, odd = _spread(ops, reverse[0], reverse[1], PAIRS, 1)
    if reverse[1] is None:
        shifted = (even, odd, even >> np.uint32(2), odd >> np.uint32(2))
        return [word & np.uint32(0x11111111) for word in shifted]
    if reverse[2] is None:
        high_even = high_odd = None
    else:
        high_even, high_odd = _spread(ops, reverse[2], reverse[3], PAIRS, 1)
    zero, two = _spread(ops, even, high_even, NIBBLES, 2)
    one, three = _spread(ops, odd, high_odd, NIBBLES, 2)
    return [zero, one, two, three]


def byte_codes(ops: Operations, planes: Sequence[Word]) -> list[Word]:
    """Transposes five to eight planes to bytes: byte n of word r is the code of bit ``r + 8 n``."""
    fields = zip(nibble_codes(ops, planes[-4:]), nibble_codes(ops, planes[:-4]), strict=True)
    pairs = [_spread(ops, low, high, BYTES, 4) for low, high in fields]
    return [pair[0] for pair in pairs] + [pair[1] for pair in pairs]


def _selectors(ops: Operations, plane: Word) -> list[Word]:
    """Selectors that take byte i of the first or of the second word, as a plane's bits say."""
    bit, same = np.uint32(0x44444444), np.uint32(0x32103210)
    moved = (plane << np.uint32(2), plane << np.uint32(1), plane, plane >> np.uint32(1))
    return [ops.keep_or(word, bit, same) for word in moved]


def look_up_bytes(
    ops: Operations, planes: Sequence[Word], table: Sequence[Word]
) -> Iterator[list[Word]]:
    """Looks up entries of 8 bits with byte permutations: 2 to 6 planes.

    A permutation picks out of eight entries with three bits of the code; each further bit chooses
    between two of its results, so the cost is 2**b / 4 - 1 permutations for four weights.

    Args:
        ops: The instructions.
        planes: b plane words, most significant first.
        table: The 2**b entries, four to a word.

    Yields:
        For each r, its words ``[h]``.
    """
    codes = nibble_codes(ops, planes[-3:])
    upper = [_selectors(ops, plane) for plane in reversed(planes[:-3])]
    half_word = np.uint32(16)
    starts = range(0, len(table), 2)
    for r in range(4):
        code, choices = codes[r], [selector[r] for selector in upper]
        halves = []
        for half in range(2):
            if half:
                code, choices = code >> half_word, [choice >> half_word for choice in choices]
            picked = [
                ops.permute(table[i], table[min(i + 1, len(table) - 1)], code) for i in starts
            ]
            for choice in choices:
                pairs = zip(picked[::2], picked[1::2], strict=True)
                picked = [ops.permute(a, b, choice) for a, b in pairs]
            halves.append(picked[0])
        yield halves
