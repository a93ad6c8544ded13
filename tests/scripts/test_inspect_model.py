"""scripts/inspect_model.py on the named models at full size."""

import json
from pathlib import Path

import pytest

CONFIGS = Path(__file__).parents[1] / "configs"
PUBLISHED = {  # billions of parameters, and KV bytes a token in bfloat16
    "qwen1.5-moe-a2.7b": (14.3, 24 * 2 * 16 * 128 * 2),
    "mixtral-8x7b": (46.7, 32 * 2 * 8 * 128 * 2),
    "llama-3-70b": (70.6, 80 * 2 * 8 * 128 * 2),
    "llama-65b": (65.2, 80 * 2 * 64 * 128 * 2),
    "opt-30b": (30.0, 48 * 2 * 56 * 128 * 2),
    "gemma-4-26b-a4b": (25.2, (25 * 2 * 8 * 256 + 5 * 2 * 2 * 512) * 2),
    "deepseek-v2-lite": (15.7, 27 * 2 * 16 * 192 * 2),
}


def inspect(command, name: str, *flags: str) -> dict:
    code, printed, _ = command("inspect_model", "--config", CONFIGS / f"{name}.json", *flags)
    assert code == 0
    return json.loads(printed)


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_sizes_are_the_published_ones(name, command):
    billions, kv_bytes = PUBLISHED[name]
    sizes = inspect(command, name, "--json")
    assert sizes["parameters"] / 1e9 == pytest.approx(billions, rel=0.01)
    cache = sizes["kv_bytes_per_token"]
    assert cache["full"] == kv_bytes
    # DeepSeek's latent is 512 numbers and a key of 64 that all heads share.
    latent = 27 * (512 + 64) * 2 if name == "deepseek-v2-lite" else None
    assert (cache["latent"], cache["engine"]) == (latent, latent or kv_bytes)
    blocks = sizes["blocks"]
    experts = sum(b["rows"] * b["columns"] * b["layers"] * b["experts"] for b in blocks)
    assert sizes["parameters"] == sizes["parameters_outside_pages"] + experts


def test_blocks_of_mixtral(command):
    sizes = inspect(command, "mixtral-8x7b", "--json", "--page-kib", "64", "--parent-bits", "6")
    gate_up, down = sizes["blocks"]
    assert (gate_up["module"], gate_up["rows"], gate_up["columns"]) == ("gate_up", 28672, 4096)
    assert (down["module"], down["rows"], down["columns"]) == ("down", 4096, 14336)
    assert (gate_up["layers"], gate_up["experts"]) == (32, 8)
    # 128 rows of 512 bytes a page; 36 rows of 1792 bytes.
    assert (gate_up["pages_per_plane"], down["pages_per_plane"]) == (224, 114)
    assert list(gate_up["pages_per_width"]) == ["3", "4", "5", "6"]
    # 8 entries of one byte and a scale of four bytes a row.
    assert gate_up["pages_per_width"]["3"] == 3 * 224 + -(-28672 * 12 // 65536)
    a_layer = gate_up["pages_per_width"]["3"] + down["pages_per_width"]["3"]
    assert sizes["expert_bytes"]["3"] == 32 * 8 * a_layer * 65536


def test_tables_are_for_people(command):
    code, printed, _ = command("inspect_model", "--config", CONFIGS / "mixtral-8x7b.json")
    assert code == 0
    for part in ("46.70 B", "32 layers of 8 x 128", "128 KiB", "28672 x 4096", "8 bits, with"):
        assert part in printed
    code, printed, _ = command("inspect_model", "--config", CONFIGS / "opt-30b.json")
    assert code == 0
    assert "experts" not in printed


def test_latents_of_factored_layers(command):
    """MHA at 60%: 2457 numbers, rows of 16 bytes, instead of 64 heads of 128; the engine rebuilds
    nothing unless told, as keys rotate. OPT's do not.
    """
    llama = inspect(command, "llama-65b", "--json", "--ratio", "0.6")
    full = 80 * 2 * 64 * 128 * 2
    latent = 80 * 2 * 2464 * 2
    assert llama["kv_bytes_per_token"] == {"full": full, "latent": latent, "engine": full}
    opt = inspect(command, "opt-30b", "--json", "--ratio", "0.4")["kv_bytes_per_token"]
    assert opt["engine"] == opt["latent"] < opt["full"] / 4
    code, printed, _ = command("inspect_model", "--config", CONFIGS / "deepseek-v2-lite.json")
    assert code == 0
    for part in ("27 layers of latents 512 + 64", "30.375 KiB", "324 KiB"):
        assert part in printed


def test_a_folder_and_bad_input(command, tmp_path):
    (tmp_path / "config.json").write_bytes((CONFIGS / "opt-30b.json").read_bytes())
    assert command("inspect_model", "--config", tmp_path)[0] == 0
    for flags, message in {
        ("--page-kib", "1"): "pages of 1024 bytes do not suit this model",
        ("--parent-bits", "9"): "parent bits must be 3 to 8",
    }.items():
        code, _, error = command("inspect_model", "--config", tmp_path, *flags)
        assert code == 2
        assert message in error
    code, _, error = command("inspect_model", "--config", tmp_path / "nope.json")
    assert code == 2
    assert "nope.json does not exist" in error
    (tmp_path / "config.json").write_text('{"model_type": "gpt9"}')
    code, _, error = command("inspect_model", "--config", tmp_path)
    assert code == 2
    assert "known: " in error
    assert "mixtral, opt, qwen2_moe" in error
