"""The rule behind ``mode="auto"``, held against what an H200 measured."""

import json
import sys
from pathlib import Path

import pytest

from pallas_kernels.kv_reconstruct.api import decode_shape
from pallas_kernels.kv_reconstruct.counts import cheapest

ROOT = Path(__file__).parents[2]
RECORDS = json.loads((ROOT / "docs/results/h200/latent_kv.json").read_text())["records"]
CASES = sorted({(r["model"], r["tp"], r["context"]) for r in RECORDS})


@pytest.mark.parametrize(("name", "devices", "context"), CASES)
def test_the_choice_is_the_quickest_that_was_measured(name, devices, context, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(ROOT / "scripts"), *sys.path])
    from _latent_benchmark import BATCH, Case, projection_shapes

    case = Case(name, devices, context)
    layout = case.latent_layout
    shape = decode_shape(
        projection_shapes(case), layout, case.model.rotation, case.heads, BATCH, case.blocks(layout)
    )
    us = {
        r["mode"]: r["us"]
        for r in RECORDS
        if (r["model"], r["tp"], r["context"]) == (name, devices, context)
    }
    full = us.pop("full")
    assert us[cheapest(shape)] == min(us.values())
    assert us[cheapest(shape)] < us["rebuild"]
    assert full < min(us.values())  # what docs/latent_kv.md says
