"""scripts/benchmark.py ramp and plan, at sizes of a test."""

import json

import pytest

FLAGS = ("--layers", "1", "--steady", "1", "--burst", "3", "--burst-tokens", "64")
SIZES = ("--quiet-turns", "20", "--prompt-tokens", "32")


@pytest.fixture(scope="module")
def path(load, tmp_path_factory):
    path = tmp_path_factory.mktemp("ramp") / "ramp.json"
    load("benchmark").main(["ramp", *FLAGS, *SIZES, "--json", str(path)])
    return path


@pytest.fixture
def found(path):
    return json.loads(path.read_text())


def test_experts_give_pages_to_the_burst_and_get_them_back(found):
    before, least, after = found["mean_bits"]
    assert before == 8
    assert least < 8
    assert after > least
    assert found["lowered"] > 0
    assert found["raised"] > 0
    assert found["preemptions"] == 0


def test_pages_are_used_within_the_step_boundary_that_frees_them(found):
    assert found["handed_over_within_a_step"]["pages"] > 0
    assert found["compilations"] == 0


def test_every_decoding_turn_is_counted_once(found):
    names = ("turns_without_plan_ms", "turns_with_plan_ms")
    turns = sum(found[name]["count"] for name in names) + found["not_judged"]
    ramp = found["ramp"]
    prompts = ramp["steady"] + ramp["burst"]
    assert turns >= ramp["burst_tokens"] + 2 * ramp["quiet_turns"] - prompts
    assert found["ratio_without_plan"]["p50"] == pytest.approx(1, abs=0.2)


def test_the_table_is_made_from_the_file(load, path, found, capsys):
    load("benchmark").main(["ramp", "--tables", str(path)])
    table = capsys.readouterr().out
    assert f"| blocks lowered, raised | {found['lowered']}, {found['raised']} |" in table
    assert f"{found['host_with_plan_ms']['p99']:.2f}" in table


def test_planning_is_timed(load, monkeypatch, tmp_path):
    benchmark = load("_plan_benchmark")
    monkeypatch.setattr(benchmark, "RUNS", 3)
    load("benchmark").main(["plan", "--json", str(tmp_path / "plan.json")])
    found = json.loads((tmp_path / "plan.json").read_text())
    assert found["steps"] == 40_000
    assert 0 < found["least_cpu_ms"] <= found["median_cpu_ms"] < 500
