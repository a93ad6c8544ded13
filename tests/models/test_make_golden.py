"""The committed golden files are what the script makes of them (where torch is installed)."""

import importlib.util
import pathlib

import numpy as np
import pytest
from safetensors.numpy import load_file

ROOT = pathlib.Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"  # stands alone, so that an environment without JAX can run it
SCRIPT = ROOT / "scripts" / "make_golden.py"
FAMILIES = sorted(file.parent.name for file in GOLDEN.glob("*/model.safetensors"))


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore")  # torch's own
@pytest.mark.parametrize("family", FAMILIES)
def test_golden_files_can_be_made_again(family, tmp_path):
    pytest.importorskip("torch", reason="torch is not installed")
    spec = importlib.util.spec_from_file_location("make_golden", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert sorted(script.tiny_models()) == FAMILIES
    script.make_tiny(family, tmp_path)
    committed = GOLDEN / family
    files = {file.name for file in committed.iterdir()}
    assert {file.name for file in tmp_path.iterdir()} == files
    weights, again = (load_file(d / "model.safetensors") for d in (committed, tmp_path))
    assert set(weights) == set(again)
    for name, weight in weights.items():
        np.testing.assert_array_equal(weight, again[name], err_msg=name)
    for file in sorted(file for file in files if file.endswith(".npz")):
        with np.load(committed / file) as old, np.load(tmp_path / file) as new:
            assert str(old["overrides"]) == str(new["overrides"])
            for key in ("tokens", "lengths", "generated"):
                np.testing.assert_array_equal(old[key], new[key], err_msg=f"{file}: {key}")
            np.testing.assert_allclose(old["logits"], new["logits"], rtol=0, atol=1e-5)


def test_every_family_stays_small():
    for directory in GOLDEN.iterdir():
        size = sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())
        assert size < 300_000, f"{directory.name}: {size} bytes"
