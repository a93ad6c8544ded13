"""scripts/long_context.py and make_tables.py on a tiny checkpoint and small results."""

import json

import pytest

from checkpoints.convert import convert


@pytest.fixture(scope="module")
def results(source, tmp_path_factory):
    """Runs the script once; its file."""
    folder = tmp_path_factory.mktemp("long")
    text = folder / "text.jsonl"
    text.write_text(json.dumps({"text": "".join(f"Line {n} says little. " for n in range(200))}))
    return convert(source, folder / "converted"), text, folder / "long.json"


@pytest.mark.slow
def test_keys_are_asked_for_while_pages_move(command, results, tmp_path):
    converted, text, out = results
    flags = ("--checkpoint", converted, "--text", text, "--json", out, "--bits-left", 3.5)
    sizes = ("--lengths", 256, 480, "--slots", 2, "--keys", 2, "--prefill-chunk", 64)
    code, shown, error = command("long_context", *flags, *sizes, "--planner", "uniform")
    assert code == 0, error
    assert "keys found" in shown
    short, long = json.loads(out.read_text())["results"]
    assert short["found"]["count"] == 2
    assert abs(short["tokens"] - 256) < 16
    assert long["most_kv_pages"] > short["most_kv_pages"]
    assert long["least_bits"] < short["least_bits"]  # experts gave pages to the longer texts
    code, _, error = command("make_tables", "--long-context", out, "--out", tmp_path)
    assert code == 0, error
    table = (tmp_path / "long_context.md").read_text()
    assert f"| uniform | {long['budget_bytes'] / 2**30:.3f} | {long['tokens']} |" in table
    assert "python scripts/long_context.py --checkpoint converted" in table
    assert (tmp_path / "long_context.png").stat().st_size > 1000
