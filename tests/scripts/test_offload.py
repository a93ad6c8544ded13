"""scripts/offload.py on a tiny model, and its rows in the table of quality."""

import json

import pytest


def test_fewer_experts_on_the_device_are_fetched_more_often(command, source, text, tmp_path):
    path = tmp_path / "offload.json"
    flags = ("--model", source, "--text", text, "--text-tokens", 512, "--batch", 1, 2)
    code, out, error = command("offload", *flags, "--json", path)
    assert code == 0, error
    assert "misses a token" in out
    record = json.loads(path.read_text())
    rows = [row for row in record["results"] if row["batch"] == 1]
    assert [row["kept"] for row in rows] == [1, 2, 3, 4]
    misses = [row["misses_a_token"]["mean"] for row in rows]
    assert misses == sorted(misses, reverse=True)
    assert misses[-1] <= 2 * 4 / 256  # each of 2 x 4 experts once in 512 tokens of two sequences
    assert rows[0]["bytes_a_token"] == pytest.approx(misses[0] * 3 * 64 * 64 * 2)
    sizes = [row["memory"]["expert_pages"] for row in rows]
    assert sizes[1] == 2 * 2 * 3 * 64 * 64 * 2
    assert sizes[0] == sizes[1] - 3 * 64 * 64 * 2  # one place for what is fetched and dropped
    both = [row for row in record["results"] if row["batch"] == 2]
    assert both[0]["misses_a_token"]["mean"] <= misses[0]
    flags = ("--quality", path, "--out", tmp_path)
    code, _, error = command("make_tables", *flags)
    assert code == 2
    assert "needs results of evaluate.py" in error
