"""scripts/decompose.py, perplexity.py and output_error.py as a user calls them."""

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

GOLDEN = Path(__file__).parents[1] / "golden" / "opt"
TEXT = "The ferry came in at nine, and the fog lifted from the hills behind the harbour. " * 30


@pytest.fixture
def dense(tmp_path, source):
    """An OPT checkpoint with a tokenizer of the bytes of `TEXT`."""
    folder = tmp_path / "dense"
    shutil.copytree(GOLDEN, folder)
    symbols = sorted(set(TEXT.replace(" ", "Ġ")))
    vocabulary = {symbol: index for index, symbol in enumerate(symbols)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(folder / "tokenizer.json"))
    shutil.copy(source / "tokenizer_config.json", folder)
    return folder


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


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


def test_measurements(tmp_path, dense, text, command):
    made = {}
    for method in ("svd", "whitened"):
        made[method] = tmp_path / method
        flags = ("--model", dense, "--out", made[method], "--dtype", "float32")
        flags += ("--method", method, "--allotment", "uniform", "--ratio", 0.7)
        assert command("decompose", *flags, "--calibration", text)[0] == 0
    results = tmp_path / "results.json"
    flags = ("--text", text, "--tokens", 512, "--json", results)
    code, printed, error = command("perplexity", "--models", dense, *made.values(), *flags)
    assert code == 0, error
    assert "whitened" in printed
    record = json.loads(results.read_text())
    assert record["command"].startswith("python scripts/perplexity.py --models dense svd whitened")
    assert [row["method"] for row in record["results"]] == ["dense", "svd", "whitened"]
    made_by = record["results"][2]["made_by"].split()
    assert made_by[:2] == ["python", "scripts/decompose.py"]
    assert {"--ratio", "0.7", "uniform", "float32", "text.txt"} <= set(made_by)
    counts = [row["parameters"] for row in record["results"]]
    assert counts[1] == counts[2] < counts[0]
    flags = ("--source", dense, *flags)
    code, _, error = command("output_error", "--models", *made.values(), *flags)
    assert code == 0, error
    errors = [
        row["mean_relative_squared_error"] for row in json.loads(results.read_text())["results"]
    ]
    assert 0 < errors[1] < errors[0] < 1


def test_caches_of_models_with_and_without_latents(tmp_path, dense, text, command):
    ranks, layer = tmp_path / "ranks.json", "model.decoder.layers.0"
    models = []
    for name, factored in (("none", ["fc1"]), ("some", ["self_attn.k_proj", "self_attn.v_proj"])):
        ranks.write_text(json.dumps({f"{layer}.{linear}": 8 for linear in factored}))
        models.append(tmp_path / name)
        flags = ("--model", dense, "--out", models[-1], "--method", "svd", "--dtype", "float32")
        assert command("decompose", *flags, "--ranks", ranks)[0] == 0
    results = tmp_path / "results.json"
    flags = ("--text", text, "--tokens", 256, "--kv-cache", "full", "latent", "--json", results)
    code, _, error = command("perplexity", "--models", dense, *models, *flags)
    assert code == 0, error
    rows = json.loads(results.read_text())["results"]
    assert [list(row["caches"]) for row in rows] == [[], ["full"], ["full", "latent"]]
    full, latent = rows[2]["caches"].values()
    assert latent["perplexity"] == pytest.approx(full["perplexity"], rel=1e-4)
    assert latent["token_bytes"] < full["token_bytes"]


def test_a_tokenizer_of_another_model(tmp_path, dense, source, text, command):
    shutil.copy(source / "tokenizer.json", dense)
    flags = ("--model", dense, "--out", tmp_path / "out", "--ratio", 0.5, "--calibration", text)
    code, _, error = command("decompose", *flags)
    assert code == 2
    assert "beyond vocab_size" in error
