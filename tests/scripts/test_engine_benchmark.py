"""The engine's benchmark on a tiny model, and the bytes that it compares with."""

import json
import shutil
import sys
from pathlib import Path

import pytest

from checkpoints.dummy import read_model_config
from pw_jax.errors import UserError
from pw_jax.paging.layout import paging_layout

CONFIGS = Path(__file__).parents[1] / "configs"


def test_a_run_at_four_bits(tmp_path, source, load):
    shutil.copy(source / "config.json", tmp_path)
    out = tmp_path / "results" / "engine.json"
    sizes = ["--batch", "2", "--input-len", "20", "--output-len", "24", "--prefill-chunk", "16"]
    load("benchmark").main(
        ["engine", "--model", str(tmp_path), "--bits", "4", *sizes, "--json", str(out)]
    )
    result = json.loads(out.read_text())
    (record,) = result["records"]
    assert result["command"].startswith("python ")
    assert record["weights"].startswith("random")
    assert record["bits_first_least_last"] == [4, 4, 4]
    assert record["compilations"] == record["lowered"] == record["preemptions"] == 0
    assert record["turns"] >= 24
    assert 0 < record["host_ms"][0] <= record["token_ms"][0] <= record["token_ms"][1]
    assert 0 < record["first_token_ms"][0] <= record["first_token_ms"][1]


@pytest.mark.parametrize(
    ("name", "active"), [("mixtral-8x7b", 12.88e9), ("qwen1.5-moe-a2.7b", 2.69e9)]
)
def test_one_token_needs_the_published_active_parameters(name, active, load):
    """Their count includes the embedding, of which a step reads one row only."""
    model = read_model_config(CONFIGS / f"{name}.json")
    layout = paging_layout(model.kv_shapes, kv_dtype="bfloat16", page_words=16384)
    embedding = model.vocab_size * model.hidden_size
    needed = load("_engine_benchmark").step_bytes(model, layout, batch=1, context=0, mean_bits=None)
    assert needed / 2 + embedding == pytest.approx(active, rel=0.01)


def test_without_torch_there_is_nothing_to_compare_with(tmp_path, monkeypatch, load):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(UserError, match="torch"):
        load("benchmark").main(
            ["transformers", "--model", str(tmp_path), "--json", str(tmp_path / "j")]
        )
