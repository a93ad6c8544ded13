"""scripts/convert.py and scripts/verify.py as a user calls them."""

import importlib
import json

import numpy as np
import pytest
from rich.console import Console

from checkpoints.verify import Comparison


def test_convert_then_verify(tmp_path, source, command):
    out = tmp_path / "out"
    flags = ("--model", source, "--out", out, "--dtype", "float32")
    code, printed, error = command("convert", *flags)
    assert code == 0
    assert "16 expert matrices, 3 to 8 bits" in printed
    assert "damage is the plain squared error" in error
    assert json.loads((out / "pw_jax.json").read_text())["damage"] == "squared error"
    arguments = ("--model", source, "--converted", out, "--tokens", 256)
    code, printed, _ = command("verify", *arguments, "--json")
    assert code == 0
    result = json.loads(printed)
    assert result["tokens"] == 256
    assert [row["bits"] for row in result["widths"]] == [None, 8, 7, 6, 5, 4, 3]
    kl = [row["kl"] for row in result["widths"][1:]]
    assert kl == sorted(kl)
    assert 0 < 100 * kl[0] < kl[-1]
    perplexity = [row["perplexity"] for row in result["widths"]]
    assert perplexity[1] == pytest.approx(perplexity[0], rel=0.01)


def test_verify_prints_a_table(command, capsys):
    table = importlib.import_module("verify").table
    results = [Comparison(None, 0.0, 0.0, 1.0, 12.5), Comparison(3, 0.25, 1.5, 0.875, 15.0)]
    Console(width=100).print(table(results, 64))
    printed = capsys.readouterr().out
    for part in ("perplexity", "source", "12.500", "2.50e-01", "1.500", "87.5%", "64 tokens"):
        assert part in printed


def test_calibrated(tmp_path, source, command):
    text = tmp_path / "text.txt"
    text.write_text("A quick brown fox jumps over the lazy dog. " * 50)
    out = tmp_path / "out"
    arguments = ("--model", source, "--out", out, "--calibration", text)
    code, _, error = command("convert", *arguments, "--calibration-tokens", 512)
    assert code == 0
    assert not error
    manifest = json.loads((out / "pw_jax.json").read_text())
    assert manifest["calibration"]["name"] == "text.txt"
    assert manifest["calibration"]["tokens"] == 512
    assert manifest["damage"] == "Fisher-weighted squared error"
    from checkpoints.store import open_store

    store = open_store(out)
    assert store.calibration is not None
    assert store.calibration["routing_mass"].shape == (2, 4)
    seen = store.calibration["tokens_seen"]
    np.testing.assert_allclose(seen.sum(axis=1), 2 * 512)
    assert (store.load_experts(0, "down").damage[seen[0] > 0] > 0).all()


def test_user_errors_are_one_line_and_code_2(tmp_path, source, command):
    out = tmp_path / "out"
    cases = [
        ("convert", "--model", tmp_path / "nope", "--out", out),
        ("convert", "--model", source, "--out", source),
        ("convert", "--model", source, "--out", out, "--seed-bits", 9),
        ("convert", "--model", source, "--out", out, "--calibration", tmp_path / "nope"),
        ("convert", "--model", source, "--out", source / "config.json" / "out"),
        ("verify", "--model", source, "--converted", source),
        ("verify", "--model", source, "--converted", tmp_path / "nope"),
    ]
    for case in cases:
        code, printed, error = command(*case)
        assert code == 2, case
        assert not printed
        assert error.startswith("error: ")
        assert error.count("\n") == 1
    assert not any(tmp_path.iterdir())
    assert not list(source.glob("*.partial"))
