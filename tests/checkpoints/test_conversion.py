"""Conversion: resumable after a kill, nothing half-written, and the same from every spelling."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_moe import CONFIG, make_weights, split_experts, write

from checkpoints import convert as module
from checkpoints.convert import convert
from checkpoints.manifest import ConvertOptions
from checkpoints.store import MODULES, Store, open_store
from pw_jax.errors import UserError


class Killed(Exception):
    pass


def kill_at(monkeypatch, count):
    """Lets the quantizer do ``count - 1`` matrices and die at the next; returns the names done."""
    done = []
    real = module.quantize_matrix

    def quantize(weight, *, name, **options):
        if len(done) + 1 == count:
            raise Killed
        done.append(name)
        return real(weight, name=name, **options)

    monkeypatch.setattr(module, "quantize_matrix", quantize)
    return done


def contents(store: Store):
    experts = {
        (layer, name): store.load_experts(layer, name)
        for layer in store.model_config.moe_layers
        for name in MODULES
    }
    trees = {key: [a.planes, a.tables, a.scales, a.damage] for key, a in experts.items()}
    return [store.load_dense(jnp.float32), {str(key): tree for key, tree in trees.items()}]


def assert_equal(first: Path, second: Path):
    one, other = contents(open_store(first)), contents(open_store(second))
    assert jax.tree.structure(one) == jax.tree.structure(other)
    jax.tree.map(np.testing.assert_array_equal, one, other)


def test_a_killed_conversion_goes_on(tmp_path, tiny, monkeypatch):
    whole = convert(tiny, tmp_path / "whole")
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        done = kill_at(patch, 7)  # the third matrix of the second module
        with pytest.raises(Killed):
            convert(tiny, out)
        assert len(done) == 6
    assert not out.exists()
    dense = tmp_path / "out.partial" / "dense"
    written = dense.stat().st_mtime_ns
    with monkeypatch.context() as patch:
        done = kill_at(patch, -1)
        reports = []
        assert convert(tiny, out, report=reports.append) == out
    assert len(done) == 16 - 4  # the first module was complete
    assert not any("layers.0.mlp.experts.gate_up" in name for name in done)
    assert reports[-1].matrices == reports[-1].total == 16
    assert (out / "dense").stat().st_mtime_ns == written
    assert not (tmp_path / "out.partial").exists()
    assert_equal(whole, out)
    assert json.loads((whole / "pw_jax.json").read_text()) == open_store(out).manifest


def test_half_written_items_are_swept(tmp_path, tiny, monkeypatch):
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        kill_at(patch, 6)
        with pytest.raises(Killed):
            convert(tiny, out)
    partial = tmp_path / "out.partial"
    left = [
        partial / "dense.orbax-checkpoint-tmp",
        partial / "experts/layer_000.down.orbax-checkpoint-tmp",
    ]
    for path in left:
        path.mkdir()
        (path / "half").write_text("")
    convert(tiny, out)
    assert sorted(path.name for path in (out / "experts").iterdir()) == [
        f"layer_00{layer}.{name}" for layer in (0, 1) for name in ("down", "gate_up")
    ]
    assert not list(out.glob("*tmp*"))


def test_other_options_do_not_mix(tmp_path, tiny, weights, monkeypatch):
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        kill_at(patch, 7)
        with pytest.raises(Killed):
            convert(tiny, out)
    four = ConvertOptions(parent_bits=4)
    with pytest.raises(UserError, match=r"another parent_bits.*--restart"):
        convert(tiny, out, four)
    changed = write(
        tmp_path / "changed",
        split_experts(weights | {"model.norm.weight": np.ones(64, np.float32)}),
    )
    with pytest.raises(UserError, match=r"another source; remove it"):
        convert(changed, out)
    convert(tiny, out, four, restart=True)
    store = open_store(out)
    assert store.manifest["parent_bits"] == 4
    assert store.load_experts(0, "down").planes.shape == (4, 4, 64, 1)


def test_spellings_convert_alike(tmp_path, tiny, weights):
    fused = write(tmp_path / "fused", weights)
    assert_equal(convert(tiny, tmp_path / "a"), convert(fused, tmp_path / "b"))


def test_side_files_come_along(tmp_path, tiny):
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "LICENSE"):
        (tiny / name).write_text("{}")
    (tiny / "chat_template.jinja").write_text("x")
    (tiny / "notes.txt").write_text("x")
    out = convert(tiny, tmp_path / "out")
    assert {path.name for path in out.iterdir()} == {
        "config.json", "pw_jax.json", "dense", "experts", "tokenizer.json",
        "tokenizer_config.json", "generation_config.json", "LICENSE", "chat_template.jinja",
    }  # fmt: skip
    assert json.loads((out / "config.json").read_text()) == CONFIG


def test_nothing_is_written_for_bad_input(tmp_path, tiny):
    before = sorted(tmp_path.iterdir())
    faults: list[tuple[dict[str, Any], str]] = [
        ({"seed_bits": 1}, "seed bits must be 2 or 3"),
        ({"parent_bits": 9}, "parent bits must be 3 to 8"),
        ({"seed_bits": 3, "parent_bits": 2}, "parent bits must be 3 to 8"),
        ({"dtype": "int4"}, "dtype must be one of"),
    ]
    for options, message in faults:
        with pytest.raises(UserError, match=message):
            ConvertOptions(**options)
    with pytest.raises(UserError, match="exists; remove it"):
        convert(tiny, tiny)
    with pytest.raises(UserError, match=r"nope\.txt"):
        convert(tiny, tmp_path / "out", ConvertOptions(calibration=tmp_path / "nope.txt"))
    (tiny / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(UserError, match="names files that do not exist"):
        convert(tiny, tmp_path / "out")
    assert sorted(tmp_path.iterdir()) == before


def test_a_foreign_folder_is_left_alone(tmp_path, tiny):
    foreign = tmp_path / "out.partial"
    foreign.mkdir()
    (foreign / "thesis.tex").write_text("x")
    for restart in (False, True):
        with pytest.raises(UserError, match="is not an unfinished conversion"):
            convert(tiny, tmp_path / "out", restart=restart)
    assert (foreign / "thesis.tex").exists()


def test_a_non_finite_weight_is_named(tmp_path, weights):
    tensors = split_experts(weights)
    tensors["model.layers.0.mlp.experts.1.up_proj.weight"][3, 4] = np.nan
    source = write(tmp_path / "tiny", tensors)
    with pytest.raises(UserError, match=r"model.layers.0.mlp.experts.gate_up_proj\[1\]"):
        convert(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_calibration_is_kept_when_resumed(tmp_path, tiny, monkeypatch):
    text = tmp_path / "text.txt"
    text.write_text("x")
    tokens = np.random.default_rng(0).integers(0, 96, (4, 16)).astype(np.int32)
    monkeypatch.setattr(module, "calibration_tokens", lambda *arguments: tokens)
    options = ConvertOptions(parent_bits=4, calibration=text)
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        kill_at(patch, 7)
        with pytest.raises(Killed):
            convert(tiny, out, options)
    kept = (tmp_path / "out.partial" / "calibration").stat().st_mtime_ns
    convert(tiny, out, options)
    assert (out / "calibration").stat().st_mtime_ns == kept
    store = open_store(out)
    assert store.manifest["calibration"]["tokens"] == 64
    assert store.calibration is not None
    assert store.calibration["tokens_seen"].sum(axis=1).tolist() == [128, 128]
    damage = store.load_experts(0, "gate_up").damage
    assert (damage[store.calibration["tokens_seen"][0] > 0] > 0).all()


def test_a_bad_text_leaves_nothing_behind(tmp_path, tiny):
    text = tmp_path / "text.jsonl"
    text.write_text("nonsense")
    (tiny / "tokenizer.json").write_text("{")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(UserError, match="tokenizer"):
        convert(tiny, tmp_path / "out", ConvertOptions(calibration=text))
    assert sorted(tmp_path.iterdir()) == before


def test_widths_that_do_not_fill_words_are_refused(tmp_path):
    config = CONFIG | {"moe_intermediate_size": 48}
    source = write(tmp_path / "source", make_weights(config), config)
    with pytest.raises(UserError, match=r"width 64 and hidden width 48 .* multiples of 32"):
        convert(source, tmp_path / "out")
    assert not (tmp_path / "out.partial").exists()
