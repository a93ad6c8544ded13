"""Decomposed checkpoints: resumed, loaded, generated from."""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from checkpoints import low_rank, spectra
from checkpoints.engine import TensorParallel, load_engine
from checkpoints.huggingface import Checkpoint, load_dense_model
from checkpoints.low_rank import (
    decompose,
    load_low_rank_model,
    load_low_rank_weights,
    read_model_ranks,
)
from checkpoints.low_rank_options import DecomposeOptions
from checkpoints.store import open_store
from pw_jax.engine.config import EngineConfig
from pw_jax.errors import UserError
from pw_jax.low_rank.layers import linear_shapes
from pw_jax.low_rank.ranks import kept_parameters
from pw_jax.models import registry

GOLDEN = Path(__file__).parents[1] / "golden"
TEXT = "The ferry came in at nine, and the fog lifted from the hills behind the harbour. " * 30


@pytest.fixture(params=["llama", "opt"])
def family(request):
    return request.param


@pytest.fixture
def source(tmp_path, family):
    """A golden checkpoint with a tokenizer of the bytes of `TEXT`."""
    folder = tmp_path / "source"
    shutil.copytree(GOLDEN / family, folder)
    symbols = sorted(set(TEXT.replace(" ", "Ġ")))
    vocabulary = {symbol: index for index, symbol in enumerate(symbols)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def options(text=None, **changes):
    defaults = {"ratio": 0.7, "method": "whitened", "dtype": "float32", "calibration_tokens": 400}
    return DecomposeOptions(calibration=text, **{**defaults, **changes})


def everything(directory):
    config, ranks = read_model_ranks(directory)
    return config, ranks, load_low_rank_weights(directory, np.float32)


def same(first, second):
    config, ranks, weights = everything(first)
    other_config, other_ranks, other_weights = everything(second)
    assert config == other_config
    assert ranks == other_ranks
    assert weights.keys() == other_weights.keys()
    for name, weight in weights.items():
        np.testing.assert_array_equal(weight, other_weights[name], err_msg=name)


def test_the_factored_checkpoint_has_the_ratio_and_its_biases(tmp_path, source, text):
    result = decompose(source, tmp_path / "out", options(text))
    checkpoint = Checkpoint(source)
    shapes = linear_shapes(registry.build_model(checkpoint.model_config))
    assert 0.67 < result.kept <= 0.7
    assert result.kept == kept_parameters(result.ranks, shapes) / kept_parameters({}, shapes)
    _, ranks, weights = everything(result.directory)
    assert ranks == result.ranks
    for name in ranks:
        assert weights[f"{name}.u"].shape == (shapes[name][0], ranks[name])
        assert weights[f"{name}.v"].shape == (ranks[name], shapes[name][1])
    for name in checkpoint.names():
        if name.removesuffix(".weight") not in ranks:
            np.testing.assert_array_equal(weights[name], checkpoint.read(name))
    assert not (result.directory / "spectra").exists()
    assert (result.directory / "tokenizer.json").exists()


class Killed(Exception):
    """What a test stops a decomposition with."""


@pytest.mark.parametrize(
    "stop",  # at hidden states, vectors and factors, twice, or the rest
    [stop if stop in (1, 5) else pytest.param(stop, marks=pytest.mark.slow) for stop in range(7)],
)
def test_interrupted_and_resumed_equals_uninterrupted(tmp_path, source, text, monkeypatch, stop):
    wanted = decompose(source, tmp_path / "wanted", options(text)).directory
    saved = 0
    save_item = low_rank.save_item

    def save(path, tree):
        nonlocal saved
        if saved == stop:
            raise Killed
        saved += 1
        save_item(path, tree)

    for module in (low_rank, spectra):
        monkeypatch.setattr(module, "save_item", save)
    with pytest.raises(Killed):
        decompose(source, tmp_path / "out", options(text))
    assert not (tmp_path / "out").exists()
    for module in (low_rank, spectra):
        monkeypatch.setattr(module, "save_item", save_item)
    same(decompose(source, tmp_path / "out", options(text)).directory, wanted)
    assert not (tmp_path / "out.partial").exists()


def test_other_settings_do_not_go_on(tmp_path, source, text, monkeypatch):
    def fail(*arguments):
        raise Killed

    with monkeypatch.context() as context:
        context.setattr(low_rank, "_factored", fail)
        with pytest.raises(Killed):
            decompose(source, tmp_path / "out", options(text))
    with pytest.raises(UserError, match="another kept_ratio"):
        decompose(source, tmp_path / "out", options(text, ratio=0.6))
    result = decompose(source, tmp_path / "out", options(text, ratio=0.6), restart=True)
    assert result.kept <= 0.6


def test_kept_spectra_serve_every_ratio(tmp_path, source, text):
    folder = tmp_path / "spectra"
    for ratio in (0.8, 0.5):
        kept = decompose(
            source, tmp_path / f"kept{ratio}", options(text, ratio=ratio), spectra=folder
        )
        alone = decompose(source, tmp_path / f"alone{ratio}", options(text, ratio=ratio))
        same(kept.directory, alone.directory)
    with pytest.raises(UserError, match="another calibration, method"):
        decompose(source, tmp_path / "svd", options(method="svd"), spectra=folder)


def test_full_ranks_generate_what_the_dense_model_does(tmp_path, source, family):
    config, model = load_dense_model(source, np.float32)
    ranks = {name: min(shape) for name, shape in linear_shapes(model).items()}
    result = decompose(source, tmp_path / "out", options(method="svd", ranks=ranks))
    assert sorted(result.wasteful) == sorted(ranks)
    with np.load(GOLDEN / family / "reference.npz") as arrays:
        tokens, length = arrays["tokens"][1], int(arrays["lengths"][1])
        wanted = arrays["generated"][1].tolist()
    sizes = EngineConfig(slots=1, max_sequence_tokens=128, kv_dtype="float32", page_bytes=2048)
    engine = load_engine(result.directory, sizes, "float32", with_tokenizer=False)
    (generation,) = engine.generate([tokens[:length].tolist()], 24, stop_token_ids=())
    assert list(generation.tokens) == wanted[:24]
    assert config == read_model_ranks(result.directory)[0]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["deepseek_v2_lite", "gemma3_text", "qwen2_moe"])
def test_experts_and_latents_generate_the_same_over_devices(tmp_path, source, text, family):
    out = decompose(source, tmp_path / "out", options(text, ratio=0.7, allotment="uniform"))
    assert any(name.endswith("o_proj") for name in out.ranks)
    assert not any("kv_" in name or ".experts" in name for name in out.ranks)
    sizes = EngineConfig(slots=2, max_sequence_tokens=64, kv_dtype="float32", page_bytes=2048)
    prompts = [list(range(4, 24)), [7, 30, 11]]
    written = []
    for parallel in (None, TensorParallel.over(3, "sharded")):
        engine = load_engine(
            out.directory, sizes, "float32", with_tokenizer=False, parallel=parallel
        )
        written.append([g.tokens for g in engine.generate(prompts, 16, stop_token_ids=())])
    assert written[0] == written[1]
    # not one token again and again; how much a tiny random model varies is the machine's rounding
    assert len({token for tokens in written[0] for token in tokens}) > 2


def test_different_ranks_for_q_k_and_v(tmp_path, source):
    _, model = load_dense_model(source, np.float32)
    names = sorted(name for name in linear_shapes(model) if name[-6:] in ("q_proj", "v_proj"))
    ranks = {name: 3 + 2 * number for number, name in enumerate(names)}
    result = decompose(source, tmp_path / "out", options(method="svd", ranks=ranks))
    _, model = load_low_rank_model(result.directory, np.float32)
    shapes = registry.parameter_shapes(model)
    assert {name: shapes[f"{name}.v"].shape[0] for name in names} == ranks
    assert sum(name.endswith(".u") for name in shapes) == len(ranks)


@pytest.mark.parametrize("method", ["svd", "asvd", "whitened"])
@pytest.mark.parametrize("family", ["llama"])
def test_every_method_and_allotment(tmp_path, source, text, method):
    for allotment in ("loss", "uniform"):
        out = tmp_path / allotment
        result = decompose(source, out, options(text, method=method, allotment=allotment))
        _, model = load_low_rank_model(result.directory, np.float32)
        assert all(
            np.isfinite(np.asarray(leaf)).all()
            for leaf in jax.tree.leaves(registry.nnx.state(model))
        )


@pytest.mark.parametrize("family", ["llama"])
def test_it_loads_onto_other_devices(tmp_path, source):
    result = decompose(source, tmp_path / "out", options(method="svd"))
    mesh = jax.make_mesh((2,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,))
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    weights = load_low_rank_weights(result.directory, np.float32, place)
    for name, weight in load_low_rank_weights(result.directory, np.float32).items():
        np.testing.assert_array_equal(np.asarray(weights[name]), weight)
        assert len(weights[name].sharding.device_set) == 2


@pytest.mark.parametrize("family", ["llama"])
def test_messages(tmp_path, source, text):
    with pytest.raises(UserError, match="whitened needs --calibration"):
        options()
    with pytest.raises(UserError, match="fraction of parameters kept"):
        options(text, ratio=1.5)
    with pytest.raises(UserError, match="no linear layer"):
        decompose(source, tmp_path / "out", options(method="svd", ranks={"lm_head": 2}))
    assert not (tmp_path / "out.partial").exists()
    with pytest.raises(UserError, match="is not a decomposed model"):
        load_low_rank_model(source, np.float32)
    result = decompose(source, tmp_path / "out", options(method="svd"))
    with pytest.raises(UserError, match="exists; remove it"):
        decompose(source, tmp_path / "out", options(method="svd"))
    with pytest.raises(UserError, match="is a decomposed model"):
        open_store(result.directory)
    shutil.rmtree(result.directory / "layers" / "layer_001")
    with pytest.raises(UserError, match="does not exist"):
        load_low_rank_model(result.directory, np.float32)
