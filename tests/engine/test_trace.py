"""What a run under pressure leaves in its trace, and in which order."""

import dataclasses
import itertools
import json

import pytest
from test_engine import some_prompts
from test_pressure import FLOOR_3, pressed_engine

from pw_jax.engine.engine import Engine
from pw_jax.engine.sequence import Request
from pw_jax.engine.trace import write_trace

TURNS = 3


@pytest.fixture(scope="module")
def engine(experts) -> Engine:
    """After a run in which experts lost pages and got them back, raises committed by count."""
    engine = pressed_engine(experts, 530, dataclasses.replace(FLOOR_3, raise_turns=TURNS))
    for prompt in some_prompts(40, 40, 40, 20):
        engine.submit(Request(tuple(prompt), 60))
    for _ in engine.run():
        engine.check_pages()
    return engine


@pytest.fixture(scope="module")
def lines(engine, tmp_path_factory) -> list[dict]:
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    write_trace(path, engine.trace, engine.precision.moves.events)
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_events_stand_before_the_step_that_they_belong_to(lines):
    assert [line["step"] for line in lines] == sorted(line["step"] for line in lines)
    kinds = {line["event"] for line in lines}
    assert {"release", "restore", "commit", "plan", "step"} <= kinds
    for line, after in itertools.pairwise(lines):
        if line["event"] != "step":
            assert after["step"] == line["step"]
    assert lines[-1]["event"] == "step"


def test_steps_count_what_events_say(lines):
    lowered = raised = 0
    for line in lines:
        if line["event"] == "release":
            lowered += len(line["moves"])
            assert all(to < before for *_, before, to in line["moves"])
        elif line["event"] == "commit":
            raised += len(line["moves"])
        elif line["event"] == "step":
            assert (line["lowered"], line["raised"]) == (lowered, raised)
    assert lowered > 0
    assert raised > 0


def test_raises_commit_after_the_turns_that_the_config_names(lines):
    begun = {}
    for line in lines:
        for *block, _, _ in line.get("moves", ()):
            if line["event"] == "restore":
                begun[tuple(block)] = line["step"]
            elif line["event"] == "commit":
                assert line["step"] == begun[tuple(block)] + TURNS
