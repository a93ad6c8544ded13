"""scripts/benchmark.py tp on CPU devices: the harness, not the times."""

import json

TINY = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 46,
    "intermediate_size": 74,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


def test_all_layouts_are_timed(command, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    out = tmp_path / "results" / "tp.json"
    sizes = ("--tp", 2, "--ratios", 0.8, 0.5, "--tokens", 3, "--layers", 2)
    code, printed, error = command("benchmark", "tp", "--config", tmp_path, *sizes, "--json", out)
    assert code == 0, error
    records = json.loads(out.read_text())["records"]
    assert len(records) == len(printed.splitlines()) == 1 + 3 * 2
    wire = {(r["layout"], r["ratio"]): r["wire_bytes"] for r in records}
    assert wire["gathered", 0.5] < wire["gathered", 0.8] < wire["naive", 0.8]
    assert wire["dense", 0.8] == 2 * 2 * 46 * 2 / 2
    assert all(r["us_per_layer"] > 0 for r in records)
    code, _, error = command("benchmark", "tp", "--config", tmp_path, "--tp", 99, "--json", out)
    assert code == 2
    assert "--tp 99, but there are 8 devices" in error
