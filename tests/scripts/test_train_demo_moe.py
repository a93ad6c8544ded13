"""scripts/train_demo_moe.py on a tiny model: losses, resumption, the folder that comes out."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from checkpoints.huggingface import load_dense_model
from checkpoints.verify import mean_loss

SIZES = ("--sequences", 2, "--sequence", 24, "--warmup", 2, "--learning-rate", 0.01)


@pytest.fixture(scope="module")
def model_folder(source, tmp_path_factory):
    """The tiny model with an end token."""
    folder = tmp_path_factory.mktemp("model") / "model"
    shutil.copytree(source, folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text()) | {"eos_token": "!"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture
def tokens(model_folder, command, tmp_path):
    text = tmp_path / "text.jsonl"
    lines = [json.dumps({"text": f"document {number} is about {number}"}) for number in range(20)]
    text.write_text("\n".join(lines))
    path = tmp_path / "train.u16"
    flags = ("--prepare", "--model", model_folder, "--text", text, "--tokens", path)
    code, out, error = command("train_demo_moe", *flags)
    assert code == 0, error
    assert f"{path.stat().st_size // 2} tokens" in out
    return path


def test_token_files_hold_every_document_and_end(tokens, load, model_folder):
    tokenizer = load("train_demo_moe").load_tokenizer(model_folder)
    text = tokenizer.decode(np.fromfile(tokens, "<u2"))
    assert sorted(text.split("!"))[1:] == sorted(f"document {n} is about {n}" for n in range(20))
    file = load("_moe_training").TokenFile(tokens, 24)
    epoch = [file.batch(step, 1, seed=0)[0] for step in range(file.count)]
    assert len({tuple(row) for row in epoch}) == file.count  # each once
    again = load("_moe_training").TokenFile(tokens, 24)
    np.testing.assert_array_equal(again.batch(2, 2, seed=0)[0], epoch[4])


def test_losses(load, model_folder, tokens):
    training = load("_moe_training")
    even = jnp.full((8, 4), 0.25)
    spread = jnp.asarray([[0, 1], [2, 3]] * 4, jnp.int32)
    assert float(training.balance(even, spread)) == pytest.approx(1)
    one_sided = jnp.asarray(np.tile([0.5, 0.5, 0, 0], (8, 1)), jnp.float32)
    crowded = jnp.zeros((8, 2), jnp.int32).at[:, 1].set(1)
    assert float(training.balance(one_sided, crowded)) == pytest.approx(4 / 2)
    _, model = load_dense_model(model_folder, np.float32)
    batch = training.TokenFile(tokens, 24).batch(0, 2, seed=0)
    graph, state = nnx.split(model)
    losses = jax.jit(lambda batch: training.losses_of(nnx.merge(graph, state), batch))(batch)
    assert float(losses.text) == pytest.approx(mean_loss(model, batch), rel=1e-4)
    assert 1 <= float(losses.balance) < 2


def test_a_resumed_run_equals_an_uninterrupted_one(load, model_folder, tokens, tmp_path):
    training = load("_moe_training")
    options = training.TrainOptions(steps=4, sequences=2, sequence=24, warmup=1, learning_rate=0.01)
    file = training.TokenFile(tokens, 24)
    _, model = load_dense_model(model_folder, np.float32)
    whole, parts = (training.Trainer(model, options) for _ in range(2))
    assert not whole.resume(tmp_path / "run")
    whole.train(file, 2, lambda step, losses: None)
    whole.save(tmp_path / "run")
    whole.train(file, 4, lambda step, losses: None)
    assert parts.resume(tmp_path / "run")
    parts.train(file, 4, lambda step, losses: None)
    assert whole.losses == parts.losses
    assert len(parts.losses) == 4
    _, model = load_dense_model(model_folder, np.float32)
    weights_of = load("train_demo_moe").weights_of
    start, first, second = (weights_of(m) for m in (model, whole.model, parts.model))
    for name, weight in first.items():
        np.testing.assert_array_equal(weight, second[name])
        assert (weight != start[name]).any(), name  # routers and norms too
    other = dataclasses.replace(options, learning_rate=0.1)
    with pytest.raises(Exception, match="left by another learning_rate"):
        training.Trainer(model, other).resume(tmp_path / "run")


def test_the_trained_folder_loads_and_is_better(command, model_folder, tokens, tmp_path, load):
    out = tmp_path / "trained"
    flags = ("--model", model_folder, "--tokens", tokens, "--out", out, *SIZES, "--steps", 20)
    code, shown, error = command("train_demo_moe", *flags, "--save-every", 8)
    assert code == 0, error
    assert "affine 4-bit error" in shown
    report = json.loads((out / "training.json").read_text())
    assert len(report["losses"]) == 20
    assert report["losses"][-1][0] < report["losses"][0][0] - 0.5
    assert sorted(report["affine_4_bit_group_32_error"]["after"])[0] == "mlp.experts.down_proj"
    assert {path.name for path in out.iterdir()} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "training.json",
        "training.png",
    }
    batch = load("_moe_training").TokenFile(tokens, 24).batch(0, 8, seed=0)
    before, after = (
        mean_loss(load_dense_model(folder, np.float32)[1], batch) for folder in (model_folder, out)
    )
    assert after < before - 0.5
    code, _, error = command("train_demo_moe", *flags)
    assert code == 2
    assert "exists" in error


def test_affine_errors_tell_the_grid(load):
    error = load("_moe_training").affine_error
    normal = np.random.default_rng(0).standard_normal((64, 256))
    assert error(normal) == pytest.approx(0.078, abs=0.004)
    low, step = normal[:, :1], np.abs(normal[:, 1:2]) + 0.1
    codes = np.random.default_rng(1).integers(0, 16, (64, 32))
    codes[:, :2] = [0, 15]
    assert error(low + step * codes) < 1e-6


def test_flags_that_do_not_go_together(command, tmp_path):
    flags = ("--model", tmp_path, "--tokens", tmp_path / "x.u16")
    for wrong in ((), ("--prepare",), ("--text", "a", "--out", "b")):
        code, _, error = command("train_demo_moe", *flags, *wrong)
        assert code == 2
        assert "--prepare and --text, or --out" in error
