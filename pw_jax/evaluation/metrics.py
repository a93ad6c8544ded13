"""What scores say about a task, item by item, with intervals."""

import math
from collections.abc import Callable, Sequence

import numpy as np

from pw_jax.evaluation.bootstrap import Estimate, estimate
from pw_jax.evaluation.scoring import Score
from pw_jax.evaluation.tasks import Pair, Question, Task

Items = dict[str, list[float]]
"""One number a question, by the name of the metric."""


def task_items(task: Task, scores: Sequence[Score]) -> Items:
    """Every metric of every question.

    For ``choice``: ``acc``, whether the right answer has the greatest log-likelihood; ``acc_norm``
    and ``acc_bytes``, the same a character and a byte of the answer (without the space in front of
    it), as lm-eval has them. For ``answer``: ``greedy``. For both ``bits_per_byte`` of the right
    answer, the space counted.

    Args:
        task: The task.
        scores: One for each pair of each question, in order.
    """
    items: Items = {}
    rest = iter(scores)
    for question in task.questions:
        own = [next(rest) for _ in question.pairs]
        found = _choice(question, own) if task.kind == "choice" else _answer(own)
        gold = question.pairs[question.gold]
        found["bits_per_byte"] = bits_per_byte(gold, own[question.gold])
        for name, value in found.items():
            items.setdefault(name, []).append(value)
    return items


def _choice(question: Question, scores: Sequence[Score]) -> dict[str, float]:
    sums = np.array([score.log_likelihood for score in scores])

    def right(length: Callable[[str], int]) -> float:
        answers = [pair.continuation.removeprefix(" ") for pair in question.pairs]
        lengths = np.array([max(1, length(answer)) for answer in answers])
        return float(np.argmax(sums / lengths) == question.gold)

    return {
        "acc": right(lambda answer: 1),
        "acc_norm": right(len),
        "acc_bytes": right(lambda answer: len(answer.encode())),
    }


def _answer(scores: Sequence[Score]) -> dict[str, float]:
    (score,) = scores
    return {"greedy": float(score.greedy)}


def bits_per_byte(pair: Pair, score: Score) -> float:
    """Bits that an answer costs, for each of its bytes."""
    return -score.log_likelihood / (math.log(2) * len(pair.continuation.encode()))


def summarise(items: Items) -> dict[str, Estimate]:
    """Means over questions, with intervals."""
    return {name: estimate(np.array(values)) for name, values in items.items()}
