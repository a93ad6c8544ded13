"""scripts/calibrate.py on a tiny checkpoint, and the planner flags that need it."""

import json

import numpy as np
import pytest

from checkpoints.engine import StoredExperts
from checkpoints.store import open_store

SIZES = ("--max-new-tokens", "5", "--max-sequence-tokens", "64", "--prefill-chunk", "16")
SMALL = ("--tokens", "256", "--prompts", "12", "--prompt-tokens", "16")


def test_the_calibration_and_its_provenance_are_stored(converted, calibrated, text):
    store = open_store(calibrated)
    calibration = store.manifest["calibration"]
    assert calibration["version"] == 2
    assert calibration["files"][0]["name"] == text.name
    assert len(calibration["files"][0]["sha256"]) == 64
    experts = StoredExperts(store)
    damage = experts.load_experts(0, 0).damage
    assert (damage[:, -1] <= 1e-6 * damage[:, 0]).all()  # parent bits are the reference
    assert (damage[:, 0] > damage[:, -2]).any()
    assert experts.calibration is not None
    assert experts.calibration.tokens == 256
    prompts = experts.prompt_calibration
    assert prompts is not None
    assert prompts.column_error.shape == (2, 4, 64)
    assert open_store(converted).calibration is None  # the old one is left alone
    same = open_store(converted).load_experts(0, "down").planes
    np.testing.assert_array_equal(store.load_experts(0, "down").planes, same)


def test_the_hessian_variant_tells_tokens_and_heads(command, converted, text, tmp_path):
    flags = ("--checkpoint", converted, "--text", text, "--out", tmp_path / "h", *SMALL)
    code, out, _ = command("calibrate", *flags, "--sensitivity", "hessian", "--dtype", "bfloat16")
    assert code == 0
    assert "tokens an expert" in out
    assert "heads of down" in out
    assert open_store(tmp_path / "h").manifest["calibration"]["sensitivity"] == "hessian"
    code, _, error = command("calibrate", *flags)
    assert code == 2
    assert "exists" in error


@pytest.mark.parametrize(
    "flags",
    [
        ("--prompt-residual", "direct", "--watch"),
        pytest.param(("--planner", "static", "--no-prompt-residual"), marks=pytest.mark.slow),
        pytest.param(
            ("--no-page-movement", "--no-routing", "--no-sensitivity"), marks=pytest.mark.slow
        ),
    ],
)
def test_planners_and_ablations_generate(command, calibrated, flags, tmp_path):
    trace = tmp_path / "trace.jsonl"
    common = ("--model", calibrated, "--prompt", "hello there", *SIZES, "--json", "-")
    code, out, _ = command("generate", *common, "--trace", trace, *flags)
    assert code == 0
    assert len(json.loads(out)["generations"][0]["tokens"]) == 5
    last = json.loads(trace.read_text().splitlines()[-1])
    assert last["event"] == "step"
    assert sum(last["bits"].values()) == 16
    assert last["bytes_moved"] > 0


def test_a_prompt_residual_without_calibration_ends_in_one_line(command, converted):
    flags = ("--model", converted, "--prompt", "hi", *SIZES, "--prompt-residual", "heads")
    code, _, error = command("generate", *flags)
    assert code == 2
    assert "scripts/calibrate.py" in error
