"""scripts/decompose.py and scripts/perplexity.py as a user calls them."""

import json
import shutil
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parents[1] / "golden" / "opt"


@pytest.fixture
def dense(tmp_path, source):
    """An OPT checkpoint whose vocabulary takes the byte tokenizer of the other scripts' tests."""
    folder = tmp_path / "dense"
    shutil.copytree(GOLDEN, folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, folder / name)
    return folder


def test_decompose_and_its_warning(tmp_path, dense, command):
    out = tmp_path / "out"
    flags = ("--model", dense, "--out", out, "--method", "svd")
    code, printed, error = command("decompose", *flags, "--ratio", 0.8)
    assert code == 0, error
    assert "of the linear layers' parameters kept" in printed
    assert not error
    ranks = tmp_path / "ranks.json"
    name = "model.decoder.layers.0.self_attn.q_proj"
    ranks.write_text(json.dumps({name: 16, "model.decoder.layers.1.fc1": None}))
    flags = ("--model", dense, "--out", tmp_path / "given", "--method", "svd")
    code, printed, error = command("decompose", *flags, "--ranks", ranks)
    assert code == 0
    assert "1 matrices factored" in printed
    assert f"at least mn/(m+n) for a matrix of m x n: {name}" in error
    assert json.loads((tmp_path / "given" / "ranks.json").read_text()) == {name: 16}


def test_decompose_refuses(tmp_path, dense, command):
    flags = ("--model", dense, "--out", tmp_path / "out")
    for extra, message in (
        ((), "either --ratio (the fraction of parameters kept) or --ranks"),
        (("--ratio", 0.8), "needs --calibration"),
        (("--ratio", 80, "--method", "svd"), "fraction of parameters kept"),
    ):
        code, _, error = command("decompose", *flags, *extra)
        assert code == 2
        assert message in error
