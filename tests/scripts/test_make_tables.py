"""scripts/make_tables.py: the figures are those of the inputs."""

import json
from pathlib import Path

import pytest


def estimate(mean: float) -> dict:
    return {"mean": mean, "low": mean / 2, "high": mean * 2, "count": 4}


def result(held: dict, pages: int, kl: list[float], bits: float | None) -> dict:
    """One of evaluate.py's results; fewer bits cost answers 50 thousandths of a bit a byte."""
    mean = sum(kl) / len(kl)
    text = {"perplexity": 20.0, "metrics": {"kl": estimate(mean)}, "items": {"kl": kl}}
    worse = 0.0 if bits is None else 0.05
    metrics = {"acc_norm": estimate(0.4), "bits_per_byte": estimate(1.25 + worse)}
    task = {"metrics": metrics, "items": {"bits_per_byte": [1.0 + worse, 1.5 + worse]}}
    memory = {"arrays": 3 << 20, "expert_pages": pages << 20, "live": 101, "predicted": 100}
    common = {"dtype": "float32", "mean_bits": bits, "memory": memory}
    return held | common | {"texts": {"t.jsonl": text}, "tasks": {"piqa": task}}


@pytest.fixture
def quality(tmp_path):
    source = result({"held": "source"}, 9, [0.0, 0.0], None)
    pages = {"held": "pages", "bits": 4.0}
    uniform = result(pages | {"planner": "uniform"}, 2, [0.08, 0.06], 4.0)
    full = result(pages | {"planner": "full"}, 2, [0.05, 0.05], 4.0)
    paths = []
    for name, rows in (("a", [source, uniform]), ("b", [source, full])):
        paths.append(tmp_path / f"{name}.json")
        paths[-1].write_text(json.dumps({"command": f"python {name}", "results": rows}))
    return paths


def test_quality_at_equal_bytes(command, quality, tmp_path):
    code, _, error = command("make_tables", "--quality", *quality, "--out", tmp_path / "out")
    assert code == 0, error
    lines = (tmp_path / "out" / "quality.md").read_text().splitlines()
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if "|" in line]
    rows, tasks = table[2:5], table[7:]
    assert [row[:4] for row in rows] == [
        ["source", "float32", "12.0", "1.0100"],  # shown once, though both runs measured it
        ["uniform", "4.00", "5.0", "1.0100"],
        ["full", "4.00", "5.0", "1.0100"],
    ]
    assert rows[1][5:7] == ["70.0 (35.0..140.0)", ""]
    assert rows[2][6] == "-20.0 (-30.0..-10.0)"  # paired: -30 and -10
    assert [row[7] for row in rows] == ["", *["+50.0 (+50.0..+50.0)"] * 2]  # the one task's
    assert [row[8] for row in rows] == ["", "", "+0.0 (+0.0..+0.0)"]
    assert tasks[2] == ["full", "4.00", "40.0 (20.0..80.0); 1.300"]
    assert (tmp_path / "out" / "quality.png").stat().st_size > 1000


def test_before_and_after_training(command, quality, tmp_path):
    before = json.loads(quality[0].read_text())
    before["results"] = before["results"][1:]
    before["results"][0]["texts"]["t.jsonl"]["perplexity"] = 25.0
    first = tmp_path / "before.json"
    first.write_text(json.dumps(before))
    code, _, error = command("make_tables", "--before-after", first, quality[1], "--out", tmp_path)
    assert code == 0, error
    text = (tmp_path / "before_after.md").read_text()
    assert "| t.jsonl: perplexity | 25.00 | 20.00 |" in text
    piqa = "| piqa: acc_norm, % | 40.0 (20.0..80.0) | 40.0 (20.0..80.0) | 1.300 | 1.250 "
    assert f"{piqa}| -50.0 (-50.0..-50.0) |" in text  # the source against 4 bits, by question
    code, _, error = command("make_tables", "--before-after", first, "--out", tmp_path)
    assert code == 2
    assert "two files" in error
    del before["results"][0]["tasks"]["piqa"]
    first.write_text(json.dumps(before))
    code, _, error = command("make_tables", "--before-after", first, quality[1], "--out", tmp_path)
    assert code == 2
    assert "other tasks" in error


def test_lossless_offload_has_rows_of_its_own(command, quality, tmp_path):
    row = {"planner": "offload", "kept": 4, "experts": 6, "batch": 1, "miss_rate": 0.25}
    memory = {"arrays": 3 << 20, "expert_pages": 5 << 20}
    cost = {"misses_a_token": estimate(2.0), "bytes_a_token": 3 << 20}
    row |= {"memory": memory, **cost, "copy_seconds_a_token": None}
    path = tmp_path / "offload.json"
    path.write_text(json.dumps({"command": "python offload", "results": [row]}))
    flags = ("--quality", *quality, path, "--out", tmp_path)
    code, _, error = command("make_tables", *flags)
    assert code == 0, error
    text = (tmp_path / "quality.md").read_text()
    assert "| 4 of 6 | 1 | 8.0 | 2.00 (1.00..4.00) | 25.0% | 3.00 |  |" in text
    assert "python offload" in text


def test_results_of_another_kind_are_refused(command, quality, tmp_path):
    code, _, error = command("make_tables", "--planners", quality[0], "--out", tmp_path)
    assert code == 2
    assert "without planner" in error or "without budget_bits" in error
    code, _, error = command("make_tables", "--quality", tmp_path / "absent", "--out", tmp_path)
    assert code == 2
    assert "cannot read the results" in error


def test_committed_results_make_tables(command, tmp_path):
    cpu = Path(__file__).parents[2] / "docs" / "results" / "cpu"
    flags = ("--planners", cpu / "planners.json", "--decomposition", cpu / "decomposition.json")
    code, out, error = command("make_tables", *flags, "--out", tmp_path)
    assert code == 0, error
    assert out.split() == [str(tmp_path / f"{n}.md") for n in ("planners", "decomposition")]
    assert "| full |" in (tmp_path / "planners.md").read_text()


def test_caches_of_factored_models(command, tmp_path):
    row = {"model": "a", "method": "svd", "allotment": "loss", "kept_ratio": 0.8, "parameters": 10}
    cache = {"perplexity": 3.0, "token_bytes": 100, "pool_bytes": 1 << 20}
    caches = {"full": cache, "latent": cache | {"token_bytes": 60}}
    rows = [row | {"perplexity": 3.0, "caches": caches}, row | {"model": "b", "perplexity": 6.0}]
    path = tmp_path / "decomposition.json"
    path.write_text(json.dumps({"command": "python it", "results": rows}))
    code, _, error = command("make_tables", "--decomposition", path, path, "--out", tmp_path)
    assert code == 0, error
    text = (tmp_path / "decomposition.md").read_text()
    assert text.count("| 3 | 1.00 | 3, 100, 1.00 | 3, 60, 1.00 |") == 1  # of both files
    assert text.count("| 6 | 2.00 |  |  |") == 1


def test_scores_stand_beside_those_of_transformers(command, tmp_path):
    ours, golden = tmp_path / "ours.json", tmp_path / "golden.json"
    metrics = {"acc": estimate(0.5), "bits_per_byte": estimate(1.5)}
    row = {"tasks": {"piqa": {"metrics": metrics}}}
    ours.write_text(json.dumps({"command": "python it", "results": [row]}))
    theirs = {"piqa": {"metrics": {"acc": 0.25, "bits_per_byte": 1.25}}}
    versions = {"transformers": "5", "torch": "2"}
    golden.write_text(json.dumps({"limit": 4, "versions": versions, "tasks": theirs}))
    flags = ("--scores", ours, "--golden", golden, "--out", tmp_path)
    code, _, error = command("make_tables", *flags)
    assert code == 0, error
    text = (tmp_path / "scores.md").read_text()
    assert "| piqa: acc, % | 50.0 (25.0..100.0) | 25.0 |" in text
    assert "| piqa: bits_per_byte | 1.5000 (0.7500..3.0000) | 1.2500 |" in text
    code, _, error = command("make_tables", "--scores", ours, "--out", tmp_path)
    assert code == 2
    assert "together" in error
