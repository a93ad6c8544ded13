"""Log-likelihoods of continuations, in batches of few fixed shapes."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pw_jax.evaluation.encoding import Encoded
from pw_jax.evaluation.forward import Forward

Report = Callable[[int, int], None]

LENGTHS = tuple(2**power for power in range(5, 18))
"""Sequences are padded to one of these: each is compiled once."""

POSITIONS = 128
"""Positions whose logits are made at once: V floats each."""


class Score(NamedTuple):
    """What a model thinks of a continuation.

    Attributes:
        log_likelihood: Summed over its tokens, in nats.
        greedy: Every token was the likeliest.
        tokens: How many there were.
    """

    log_likelihood: float
    greedy: bool
    tokens: int


@dataclass(frozen=True)
class BatchShapes:
    """How sequences are put together.

    Attributes:
        tokens: Tokens of a batch, padding counted: 4096 keeps two CPU cores busy, a GPU wants
            more.
        lengths: Padded lengths, rising.
    """

    tokens: int = 4096
    lengths: tuple[int, ...] = LENGTHS

    def length(self, tokens: int) -> int:
        """The least length that holds a sequence.

        Raises:
            ValueError: There is none.
        """
        for length in self.lengths:
            if tokens <= length:
                return length
        raise ValueError(f"a sequence of {tokens} tokens is longer than {self.lengths[-1]}")

    def rows(self, length: int) -> int:
        """Sequences of one batch."""
        return max(1, self.tokens // length)


def score(
    forward: Forward,
    sequences: Sequence[Encoded],
    shapes: BatchShapes | None = None,
    report: Report = lambda done, of: None,
) -> list[Score]:
    """Scores the end of each sequence.

    Args:
        forward: The model.
        sequences: In any order; the last token of each is not run, only predicted.
        shapes: Of the batches.
        report: Called with the sequences done, and all.

    Returns:
        One score a sequence, in the order given.
    """
    shapes = shapes or BatchShapes()
    scores: list[Score | None] = [None] * len(sequences)
    done = 0
    for members in batches([len(one.tokens) - 1 for one in sequences], shapes):
        batch = [sequences[index] for index in members]
        length = shapes.length(max(len(one.tokens) - 1 for one in batch))
        tokens, mask = padded([one.tokens[:-1] for one in batch], shapes.rows(length), length)
        hidden = forward.hidden(tokens, mask)
        counts = np.array([one.scored for one in batch])
        rows = np.repeat(np.arange(len(batch)), counts).astype(np.int32)
        ends = np.array([len(one.tokens) - 1 for one in batch])
        columns = np.concatenate(
            [np.arange(end - count, end) for end, count in zip(ends, counts, strict=True)]
        ).astype(np.int32)
        targets = np.concatenate([one.tokens[-one.scored :] for one in batch])
        likelihood, greedy = [], []
        for start in range(0, len(rows), POSITIONS):
            part = slice(start, start + POSITIONS)
            here = [np.resize(array[part], POSITIONS) for array in (rows, columns, targets)]
            found = forward.score(hidden, *here)
            size = len(rows[part])
            likelihood.append(np.asarray(found[0])[:size])
            greedy.append(np.asarray(found[1])[:size])
        edges = np.cumsum(counts)[:-1]
        sums = np.split(np.concatenate(likelihood).astype(np.float64), edges)
        same = np.split(np.concatenate(greedy), edges)
        for index, one, total, right in zip(members, batch, sums, same, strict=True):
            scores[index] = Score(float(total.sum()), bool(right.all()), one.scored)
        done += len(batch)
        report(done, len(sequences))
    return [one for one in scores if one is not None]


def batches(lengths: Sequence[int], shapes: BatchShapes) -> Iterator[list[int]]:
    """Indices of the sequences of each batch: those of one padded length together."""
    groups: dict[int, list[int]] = {}
    for index, tokens in enumerate(lengths):
        groups.setdefault(shapes.length(tokens), []).append(index)
    for length, members in sorted(groups.items()):
        rows = shapes.rows(length)
        for start in range(0, len(members), rows):
            yield members[start : start + rows]


def padded(
    sequences: Sequence[np.ndarray], rows: int, length: int
) -> tuple[np.ndarray, np.ndarray]:
    """Token ids int32 [rows, length] and which of them are real; missing rows are padding."""
    tokens, mask = np.zeros((rows, length), np.int32), np.zeros((rows, length), bool)
    for row, sequence in enumerate(sequences):
        tokens[row, : len(sequence)] = sequence
        mask[row, : len(sequence)] = True
    return tokens, mask
