"""scripts/inspect_collectives.py at full size: nothing is allocated, all is compiled."""

import json
from pathlib import Path

import pytest

CONFIGS = Path(__file__).parents[1] / "configs"


def inspect(command, name: str, *flags: str) -> dict:
    code, printed, error = command(
        "inspect_collectives", "--config", CONFIGS / f"{name}.json", "--json", *flags
    )
    assert code == 0, error
    return json.loads(printed)


@pytest.mark.parametrize(("ratio", "saved"), [("0.8", 0.811), ("0.6", 0.859), ("0.4", 0.906)])
def test_gathered_against_the_baselines_on_llama_3_70b(command, ratio, saved):
    """At 20, 40 and 60% removed."""
    report = inspect(command, "llama-3-70b", "--ratio", ratio, "--tp", "8")
    layouts = report["layouts"]
    gathered, naive, dense = (
        layouts[name]["measured_bytes"] for name in ("gathered", "naive", "dense")
    )
    assert 1 - gathered / naive == pytest.approx(saved, abs=5e-4)
    assert (gathered / dense > 0.95) == (ratio == "0.8")  # at 20% it is no better than dense
    for row in layouts.values():
        assert row["measured_bytes"] == pytest.approx(row["formula_bytes"], rel=1e-9)
    for row in report["collectives"]:
        assert row["measured_elements"] == pytest.approx(row["formula_elements"], rel=1e-9)
        assert row["width"] not in (8192, 28672, 1024)


@pytest.mark.parametrize(
    ("name", "blocks", "tp"),
    [
        ("opt-30b", {"attention": 48, "mlp": 48}, 5),
        ("deepseek-v2-lite", {"attention": 27, "mlp": 1}, 8),
        ("mixtral-8x7b", {"attention": 32}, 3),
    ],
)
def test_other_families_and_uneven_devices(command, name, blocks, tp):
    report = inspect(command, name, "--tp", str(tp), "--layout", "sharded", "--tokens", "3")
    assert report["blocks"] == blocks
    for row in report["layouts"].values():
        assert row["measured_bytes"] == pytest.approx(row["formula_bytes"], rel=1e-9)
    norms = [row for row in report["collectives"] if row["width"] == 1]
    assert len(norms) == len(blocks)
    for row in report["collectives"]:
        assert row["measured_elements"] == pytest.approx(row["formula_elements"], rel=1e-9)


def test_tables_are_for_people(command):
    code, printed, _ = command("inspect_collectives", "--config", CONFIGS / "llama-3-70b.json")
    assert code == 0
    for part in ("all-gather", "4736", "287.00", "no better than dense here (-3.3% bytes)"):
        assert part in printed


def test_ranks_of_a_decomposition(command, tmp_path):
    """The second layer of OPT-30B, its output projection left whole."""
    parts = {"self_attn.q_proj": 11, "self_attn.k_proj": 13, "self_attn.v_proj": 17, "fc1": 19}
    ranks = {f"model.decoder.layers.1.{name}": rank for name, rank in parts.items()}
    file = tmp_path / "ranks.json"
    file.write_text(json.dumps(ranks | {"model.decoder.layers.1.fc2": 23}))
    flags = ("--ranks", file, "--layer", "1", "--tokens", "4")
    report = inspect(command, "opt-30b", *flags)
    assert report["ranks"]["attention.k"] == 13
    assert report["ranks"]["attention.o"] is None
    assert "naive" not in report["layouts"]
    found = {(row["kind"], row["width"]): row for row in report["collectives"]}
    assert set(found) == {
        ("all-gather", 48),  # 11 + 13 + 17 padded to eight devices
        ("all-reduce", 7168),
        ("all-gather", 24),
        ("all-reduce", 23),
    }
    for row in found.values():
        assert row["measured_elements"] == pytest.approx(row["formula_elements"], rel=1e-9)
    code, _, error = command(
        "inspect_collectives", "--config", CONFIGS / "opt-30b.json", *flags, "--layout", "naive"
    )
    assert code == 2
    assert "naive layout needs factors of o" in error
    flags = ("--ranks", file, "--layer", "2")
    code, _, error = command("inspect_collectives", "--config", CONFIGS / "opt-30b.json", *flags)
    assert code == 2
    assert "no matrix of layer 2" in error


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--tp", "0"), "--tp 0 is out of range"),
        (("--tp", "64"), "--tp 64, but this process has 8 devices"),
        (("--ratio", "0"), "--ratio 0.0 is out of range"),
    ],
)
def test_bad_flags(command, flags, message):
    path = CONFIGS / "opt-30b.json"
    code, _, error = command("inspect_collectives", "--config", path, *flags)
    assert code == 2
    assert message in error


def test_a_family_of_other_shapes(command):
    code, _, error = command("inspect_collectives", "--config", CONFIGS / "gemma-4-26b-a4b.json")
    assert code == 2
    assert "are not known here; of llama, opt" in error
