"""Metrics by hand, and intervals against scipy."""

import math

import numpy as np
import pytest
from scipy import stats

from pw_jax.evaluation.bootstrap import estimate, interval
from pw_jax.evaluation.metrics import summarise, task_items
from pw_jax.evaluation.scoring import Score
from pw_jax.evaluation.tasks import Pair, Question, Task


def test_choices_are_made_by_sum_by_character_and_by_byte():
    answers = (" ab", " abcdef", " ééé")
    question = Question(tuple(Pair("q", answer) for answer in answers), gold=1)
    scores = [Score(-2.0, False, 1), Score(-5.0, False, 3), Score(-2.4, True, 2)]
    items = task_items(Task("t", "choice", (question,), ""), scores)
    # Sums: -2 wins. A character: -1, -0.83, -0.8. A byte: -1, -0.83, -0.4.
    assert items["acc"] == items["acc_norm"] == items["acc_bytes"] == [0.0]
    better = [Score(-2.0, False, 1), Score(-4.0, False, 3), Score(-2.4, True, 2)]
    items = task_items(Task("t", "choice", (question,), ""), better)
    # A character: -1, -0.67, -0.8; a byte: -1, -0.67, -0.4.
    assert (items["acc"], items["acc_norm"], items["acc_bytes"]) == ([0.0], [1.0], [0.0])
    assert items["bits_per_byte"] == [pytest.approx(4 / math.log(2) / 7)]


def test_answers_have_no_choice():
    task = Task("t", "answer", (Question((Pair("q", " ab"),), 0),) * 2, "")
    items = task_items(task, [Score(-3.0, True, 1), Score(-6.0, False, 1)])
    assert items == {
        "greedy": [1.0, 0.0],
        "bits_per_byte": [pytest.approx(1 / math.log(2)), pytest.approx(2 / math.log(2))],
    }
    assert summarise(items)["greedy"].mean == 0.5


def test_gold_must_be_one_of_the_answers():
    with pytest.raises(ValueError, match="gold 1 is none of 1"):
        Question((Pair("", "a"),), 1)


def test_the_interval_is_scipys():
    values = np.random.default_rng(1).gamma(2.0, size=40)
    theirs = stats.bootstrap((values,), np.mean, method="percentile", rng=5).confidence_interval
    low, high = interval(values)
    assert low == pytest.approx(theirs.low, abs=0.03)
    assert high == pytest.approx(theirs.high, abs=0.03)
    assert low < values.mean() < high


def test_intervals_of_the_same_count_are_paired():
    values = np.random.default_rng(2).normal(size=30)
    assert interval(values + 1) == pytest.approx(np.array(interval(values)) + 1)
    found = estimate(np.full(5, 0.25))
    assert found == (0.25, 0.25, 0.25, 5)
    with pytest.raises(ValueError, match="at least one"):
        estimate(np.zeros(0))
