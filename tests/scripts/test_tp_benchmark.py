"""scripts/benchmark.py tp on CPU devices: the harness, not the times."""

import json
from pathlib import Path

import pytest

from pw_jax.errors import UserError
from pw_jax.models import registry

ROOT = Path(__file__).parents[2]
TINY = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 46,
    "intermediate_size": 74,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


@pytest.fixture
def benchmark(command, load, monkeypatch, tmp_path):
    """Runs it on a tiny model and a tiny workload; gives its records, printed lines and error."""
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    module = load("_tp_model")
    monkeypatch.setitem(module.WORKLOADS, "s1", module.Workload("s1", 3, 4, 6))
    out = tmp_path / "results" / "tp.json"

    def run(*flags):
        few = ("--workloads", "s1", "--calls", 2, "--repeats", 2)
        sizes = ("--config", tmp_path, *few, "--json", out, *flags)
        code, printed, error = command("benchmark", "tp", *sizes)
        records = json.loads(out.read_text())["records"] if code == 0 else []
        return records, printed.splitlines(), error

    return run


@pytest.mark.slow
def test_layouts_are_timed(benchmark):
    flags = ("--layouts", "dense", "gathered", "--ratios", 0.8, "--layers", 1)
    records, printed, error = benchmark("--tp", 2, *flags)
    assert not error
    assert len(records) == len(printed) == 3
    dense, gathered, latent = records
    assert (dense["layout"], dense["ratio"], gathered["ratio"]) == ("dense", 1.0, 0.8)
    assert [record["kv"] for record in records] == ["full", "full", "latent"]
    assert latent["decode_wire_bytes"] == gathered["decode_wire_bytes"]
    # Two all-reduces of the hidden width a layer; the head's argmax comes on top.
    assert 2 * 2 * 46 * 2 / 2 <= dense["decode_wire_bytes"] < 2 * 2 * 46 * 2 / 2 + 100
    for record in records:
        assert all(value > 0 for key, value in record.items() if key.endswith(("_us", "_ms")))
        seconds = record["model_first_token_ms"] + 5 * record["model_per_token_ms"]
        assert record["model_tokens_per_s"] == pytest.approx(1e3 * 3 * 6 / seconds, rel=1e-2)


def test_bytes_are_those_of_the_formulas(benchmark):
    """It raises where a compiled program sends something else."""
    flags = ("--bytes", "--layers", 2, "--layouts", "gathered", "--ratios", 0.8)
    (full, latent), _, error = benchmark("--tp", 3, *flags)
    assert not error
    assert full["wire_bytes"] == latent["wire_bytes"] > 0
    assert full["cache_bytes"] == 2 * 8 * 2 * 2 / 2  # a device has one of the two heads
    assert latent["cache_bytes"] == 2 * 2 * 16  # ranks of 9 in rows of 16 bytes


def test_a_likeness(load):
    module = load("_tp_model")
    config = registry.read_config(TINY | {"hidden_size": 64, "intermediate_size": 128})
    small = module.shrunk(config, 4)
    assert (small.hidden_size, small.kv_shapes[0].head_dim, small.num_heads) == (16, 2, 4)
    with pytest.raises(UserError, match="--shrink 3"):
        module.shrunk(config, 3)


def test_one_of_several_alone(benchmark):
    records, _, error = benchmark("--alone", 8, "--layouts", "gathered", "--ratios", 0.8, 0.5)
    assert not error
    wide, narrow = (record["weight_bytes"] for record in records)
    assert wide > narrow > 0
    assert all(record["decode_us"] > 0 for record in records)


def test_more_devices_than_there_are(benchmark):
    _, _, error = benchmark("--tp", 99)
    assert "--tp 99, but there are 8 devices" in error


def test_tables_of_the_documentation_are_those_of_the_results(command):
    text = (ROOT / "docs/tensor_parallel.md").read_text()
    for results in ("tp_bytes", "tp"):
        code, printed, _ = command("make_tp_table", ROOT / f"docs/results/cpu/{results}.json")
        assert code == 0
        assert len(printed) > 200
        assert printed in text


def test_tables_of_times(command, tmp_path):
    record = {"model": "m", "layout": "gathered", "devices": 8, "ratio": 0.6, "kv": "latent"}
    record |= {"workload": "decode", "model_tokens_per_s": 10.0, "model_per_token_ms": 1.5}
    record |= {"decode_us": 50.0, "decode_spread_us": 5.0, "decode_collectives_us": 20.0}
    names = ("prefill_us", "prefill_collectives_us", "model_first_token_ms")
    records = [record | dict.fromkeys(names)]
    path = tmp_path / "tp.json"
    path.write_text(json.dumps({"device": "a GPU", "records": records}))
    code, printed, _ = command("make_tp_table", path)
    assert code == 0
    expected = "| m | gathered | 8 | 60% | latent | decode | 10 | - | 1.50 | 10% | - | 40% |"
    assert printed.splitlines()[-1] == expected
