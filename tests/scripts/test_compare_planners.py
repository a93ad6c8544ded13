"""scripts/compare_planners.py on a tiny checkpoint."""

import json

import numpy as np
import pytest

PLANNERS = ("full", "uniform", "no_page_movement", "random_0", "static", "oracle_fisher")
SIZES = ("--texts", "3", "--text-tokens", "32", "--budgets", "3.5", "6", "--planners", *PLANNERS)


@pytest.fixture(scope="module")
def report(load, source, calibrated, text, tmp_path_factory):
    out = tmp_path_factory.mktemp("planners") / "planners.json"
    flags = ("--model", source, "--checkpoint", calibrated, "--text", text, "--out", out, *SIZES)
    load("compare_planners").main([str(flag) for flag in flags])
    return out


def test_every_planner_holds_the_budget_within_a_step(report):
    found = json.loads(report.read_text())
    assert [(e["planner"], e["budget_bits"]) for e in found["results"]] == [
        (planner, bits) for bits in (3.5, 6.0) for planner in PLANNERS
    ]
    for entry in found["results"]:
        held = np.array(entry["held_bytes_of_texts"])
        assert (held <= entry["budget_bytes"]).all()
        assert (held > entry["budget_bytes"] - found["largest_step_bytes"]).all()
        assert entry["kl"] == pytest.approx(np.mean(entry["kl_of_texts"]))


def test_more_bytes_lower_the_divergence(report):
    entries = json.loads(report.read_text())["results"]
    by_budget = {(e["planner"], e["budget_bits"]): e["kl"] for e in entries}
    for planner in PLANNERS:
        assert 0 < by_budget[planner, 6.0] < by_budget[planner, 3.5]


def test_tables_are_made_from_the_file(command, report):
    code, out, _ = command("compare_planners", "--tables", report)
    assert code == 0
    assert out.count("| uniform |") == 2  # its KL, and its difference to full
    assert out.count("| full |") == 1
    entry = json.loads(report.read_text())["results"][0]
    assert f"| full | {1e3 * entry['kl']:.1f} (" in out


def test_missing_flags_end_in_one_line(command, calibrated):
    code, _, error = command("compare_planners", "--checkpoint", calibrated)
    assert code == 2
    assert "--tables" in error
