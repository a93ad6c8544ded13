"""Stored checkpoints load wherever the caller wants, whatever mesh saved them."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
from tiny_moe import CONFIG, make_weights, split_experts, write

from checkpoints.convert import convert
from checkpoints.store import (
    ExpertArrays,
    dequantized_model,
    item_path,
    load_item,
    open_store,
    save_item,
)
from pw_jax.errors import UserError
from pw_jax.quantizer.format import dequantize


@pytest.fixture
def mesh():
    return jax.make_mesh((2,), ("x",), (jax.sharding.AxisType.Auto,))


def shardings(mesh):
    first, second, *_ = jax.devices()
    return {
        "one": SingleDeviceSharding(first),
        "other": SingleDeviceSharding(second),
        "rows": NamedSharding(mesh, PartitionSpec("x")),
        "columns": NamedSharding(mesh, PartitionSpec(None, "x")),
        "replicated": NamedSharding(mesh, PartitionSpec()),
    }


@pytest.mark.parametrize("saved", ["one", "rows", "columns", "replicated"])
def test_saved_anywhere_loads_anywhere(tmp_path, mesh, saved):
    tree = {
        "a.weight": np.arange(64, dtype=np.float32).reshape(8, 8),
        "b": {"3": np.arange(16, dtype=np.uint32).reshape(4, 4)},
    }
    places = shardings(mesh)
    save_item(tmp_path / "item", jax.device_put(tree, places[saved]))
    for loaded in places.values():
        out = load_item(tmp_path / "item", loaded)
        for leaf, original in zip(jax.tree.leaves(out), jax.tree.leaves(tree), strict=True):
            assert leaf.sharding == loaded
            np.testing.assert_array_equal(np.asarray(leaf), original)
    with jax.set_mesh(mesh):
        assert load_item(tmp_path / "item", places["one"])["a.weight"].shape == (8, 8)
    host = load_item(tmp_path / "item", None)
    assert isinstance(host["a.weight"], np.ndarray)
    np.testing.assert_array_equal(host["b"]["3"], tree["b"]["3"])


def test_each_leaf_can_have_its_own_place(tmp_path, mesh):
    places = shardings(mesh)
    save_item(tmp_path / "item", {"a.weight": np.ones((4, 4)), "b": {"3": np.ones(3)}})
    seen = {}

    def place(name, shape):
        seen[name] = shape
        return places["rows" if name == "a.weight" else "replicated"]

    out = load_item(tmp_path / "item", place, jnp.bfloat16)
    assert seen == {"a.weight": (4, 4), "b.3": (3,)}
    assert out["a.weight"].sharding == places["rows"]
    assert out["b"]["3"].dtype == jnp.bfloat16


def test_a_relative_path_works(tmp_path, monkeypatch, tiny):
    monkeypatch.chdir(tmp_path)
    convert("tiny", "out")
    store = open_store("out")
    monkeypatch.chdir("/")
    assert store.load_dense(jnp.float32)["model.norm.weight"].shape == (64,)


def test_what_was_converted_comes_back(tmp_path, tiny, weights, mesh):
    store = open_store(convert(tiny, tmp_path / "out"))
    assert list(store.widths) == [3, 4, 5, 6, 7, 8]
    assert store.calibration is None
    dense = store.load_dense(jnp.float32, NamedSharding(mesh, PartitionSpec()))
    assert dense.keys() == {name for name in weights if ".experts." not in name}
    for name, array in dense.items():
        np.testing.assert_array_equal(array, weights[name].astype(jnp.bfloat16), err_msg=name)
    arrays = store.load_experts(1, "gate_up")
    assert arrays.planes.shape == (4, 8, 64, 2)
    assert arrays.planes.dtype == np.uint32
    assert arrays.damage.shape == (4, 6)
    assert (np.diff(arrays.damage, axis=1) < 0).all()  # each bit helps
    shared = store.manifest["rows_per_table"]["gate_up"]
    for bits in store.widths:
        assert arrays.tables[bits].shape == (4, 64 // shared, 2**bits)
        assert arrays.tables[bits].dtype == (np.int8 if bits <= 6 else np.int16)
        assert arrays.scales[bits].shape == (4, 64)
    original = weights["model.layers.1.mlp.experts.gate_up_proj"]
    for expert in range(4):
        error = np.asarray(dequantize(arrays.matrix(expert), 8)) - original[expert]
        assert np.sqrt(np.mean(error**2)) < 0.01 * original.std()
        # without calibration the damage is the plain squared error
        np.testing.assert_allclose(np.sum(error**2), arrays.damage[expert, -1], rtol=1e-3)


def test_dequantized_model_holds_the_quantised_weights(tmp_path, tiny, weights):
    store = open_store(convert(tiny, tmp_path / "out"))
    for bits in (3, 8):
        config, model = dequantized_model(store, bits, jnp.float32)
        assert config.model_type == "qwen2_moe"
        experts = nnx.to_pure_dict(nnx.state(model))["model"]["layers"][0]["mlp"]["experts"]
        built = experts["down_proj"]
        expected = dequantize(store.load_experts(0, "down").matrix(2), bits)
        np.testing.assert_array_equal(built[2], expected)
    with pytest.raises(UserError, match="holds 3 to 8 bits, not 9"):
        dequantized_model(store, 9, jnp.float32)


def test_layers_without_experts(tmp_path):
    config = CONFIG | {"num_hidden_layers": 3, "mlp_only_layers": [1]}
    source = write(tmp_path / "source", split_experts(make_weights(config)), config)
    store = open_store(convert(source, tmp_path / "out"))
    assert store.manifest["moe_layers"] == [0, 2]
    assert "model.layers.1.mlp.gate_proj.weight" in store.load_dense(jnp.bfloat16)
    dequantized_model(store, 4, jnp.bfloat16)


def test_a_dense_family_converts_too(tmp_path):
    config = {name: v for name, v in CONFIG.items() if "expert" not in name}
    config |= {"model_type": "llama", "tie_word_embeddings": True}
    weights = make_weights(config)
    store = open_store(convert(write(tmp_path / "source", weights, config), tmp_path / "out"))
    assert store.load_dense(jnp.float32).keys() == weights.keys()
    dequantized_model(store, 8, jnp.float32)


def test_stack_and_matrix_are_inverse(tmp_path, tiny):
    arrays = open_store(convert(tiny, tmp_path / "out")).load_experts(0, "down")
    matrices = [arrays.matrix(expert) for expert in range(arrays.experts)]
    again = ExpertArrays.stack(matrices, list(arrays.damage))
    for first, second in zip(
        jax.tree.leaves([again.planes, again.tables, again.scales, again.damage]),
        jax.tree.leaves([arrays.planes, arrays.tables, arrays.scales, arrays.damage]),
        strict=True,
    ):
        np.testing.assert_array_equal(first, second)


def test_a_truncated_item_is_named(tmp_path):
    save_item(tmp_path / "item", {"a": np.arange(9999)})  # one leaf: orbax abandons other reads
    blob = max((p for p in (tmp_path / "item").rglob("*") if p.is_file()), key=_size)
    blob.write_bytes(blob.read_bytes()[:100])
    with pytest.raises(UserError, match="item is damaged") as caught:
        load_item(tmp_path / "item", None)
    assert "\n" not in str(caught.value)


def _size(path):
    return path.stat().st_size


def test_folders_that_are_no_store(tmp_path, tiny):
    with pytest.raises(UserError, match="nope is not a folder"):
        open_store(tmp_path / "nope")
    with pytest.raises(UserError, match=r"has no pw_jax\.json"):
        open_store(tiny)
    out = convert(tiny, tmp_path / "out")
    store = open_store(out)
    item = item_path(out, 1, "down")
    (item / "state" / "_METADATA").unlink()
    with pytest.raises(UserError, match=r"layer_001\.down is damaged"):
        store.load_experts(1, "down")
    shutil.rmtree(item)
    with pytest.raises(UserError, match=r"layer_001\.down does not exist"):
        store.load_experts(1, "down")
    manifest = out / "pw_jax.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"format": 99}))
    with pytest.raises(UserError, match="has format 99, this version reads 1"):
        open_store(out)
