"""Weights in .bin files: with a double of torch everywhere, with torch itself where it is."""

import json
import pickle
import sys
import types
import zipfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from checkpoints import torch_files
from checkpoints.tensor_files import list_tensors, read_tensor
from pw_jax.errors import UserError

TENSORS: dict[str, np.ndarray] = {
    "decoder.embed_tokens.weight": np.arange(12, dtype=np.float32).reshape(4, 3) / 7,
    "decoder.fc1.weight": np.arange(24).reshape(2, 3, 4).astype(ml_dtypes.bfloat16),
    "decoder.fc1.bias": np.array([0.1, -65504], np.float16),
}


class TensorDouble:
    """As much of a torch tensor as the reader uses."""

    def __init__(self, array: np.ndarray):
        self.array = array
        self.dtype = f"torch.{array.dtype.name}"
        self.shape = array.shape

    def __getitem__(self, index: int) -> "TensorDouble":
        return TensorDouble(np.asarray(self.array[index]))

    def contiguous(self) -> "TensorDouble":
        return self

    def view(self, dtype: Any) -> "TensorDouble":
        return TensorDouble(self.array.view(dtype))

    def numpy(self) -> np.ndarray:
        if self.array.dtype == ml_dtypes.bfloat16:
            raise TypeError("Got unsupported ScalarType BFloat16")  # torch's own
        return self.array


def load_double(path: Path, *, map_location: str, mmap: bool, weights_only: bool) -> Any:
    assert (map_location, mmap, weights_only) == ("cpu", True, True)
    with zipfile.ZipFile(path) as archive:
        content = pickle.loads(archive.read("data.pkl"))
    if not isinstance(content, dict):
        raise pickle.UnpicklingError("Weights only load failed.\nIn PyTorch 2.6, we changed ...")
    return {
        name: TensorDouble(value) if isinstance(value, np.ndarray) else value
        for name, value in content.items()
    }


def save_double(content: Any, path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("data.pkl", pickle.dumps(content))


def save_with_torch(content: Any, path: Path) -> None:
    import torch  # pyright: ignore[reportMissingImports]

    def tensor(value: Any) -> Any:
        if not isinstance(value, np.ndarray):
            return value
        if value.dtype == ml_dtypes.bfloat16:
            return torch.from_numpy(value.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(value)

    named = isinstance(content, dict)
    torch.save({k: tensor(v) for k, v in content.items()} if named else content, path)


@pytest.fixture(params=["double", pytest.param("torch", marks=pytest.mark.torch)])
def save(request, monkeypatch):
    """Writes a .bin file, and makes the torch that reads it importable."""
    if request.param == "torch":
        pytest.importorskip("torch", reason="torch is not installed")
        return save_with_torch
    double: Any = types.ModuleType("torch")
    double.int16 = np.int16
    double.load = load_double
    double.is_tensor = lambda value: isinstance(value, TensorDouble)
    monkeypatch.setitem(sys.modules, "torch", double)
    return save_double


def write_shards(directory: Path, save, shards: dict[str, dict[str, np.ndarray]]) -> None:
    for name, tensors in shards.items():
        save(tensors, directory / name)
    weight_map = {key: name for name, tensors in shards.items() for key in tensors}
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "pytorch_model.bin.index.json").write_text(json.dumps(index))


def first_and_rest() -> dict[str, dict[str, np.ndarray]]:
    (name, array), *rest = TENSORS.items()
    return {"pytorch_model-1.bin": {name: array}, "pytorch_model-2.bin": dict(rest)}


@pytest.mark.parametrize("sharded", [False, True])
def test_tensors_are_bit_equal(tmp_path, save, sharded):
    if sharded:
        write_shards(tmp_path, save, first_and_rest())
    else:
        save(TENSORS, tmp_path / "pytorch_model.bin")
    tensors, notes = list_tensors(tmp_path)
    assert not notes
    assert tensors.keys() == TENSORS.keys()
    assert {tensor.dtype for tensor in tensors.values()} == {"F32", "BF16", "F16"}
    for name, array in TENSORS.items():
        assert tensors[name].shape == array.shape
        read = read_tensor(name, tensors[name])
        assert read.dtype == array.dtype
        assert read.tobytes() == array.tobytes()
        assert read_tensor(name, tensors[name], 1).tobytes() == array[1].tobytes()


def test_a_key_in_two_shards_is_noted(tmp_path, save):
    shards = first_and_rest()
    write_shards(tmp_path, save, shards)
    save(TENSORS, tmp_path / "pytorch_model-2.bin")
    _, notes = list_tensors(tmp_path)
    (name,) = shards["pytorch_model-1.bin"]
    assert notes == [f"{name} (in pytorch_model-1.bin and pytorch_model-2.bin)"]


def test_a_missing_shard_is_named(tmp_path, save):
    write_shards(tmp_path, save, first_and_rest())
    (tmp_path / "pytorch_model-2.bin").unlink()
    with pytest.raises(UserError, match=r"do not exist: pytorch_model-2\.bin$"):
        list_tensors(tmp_path)


def test_anything_but_tensors_is_refused(tmp_path, save):
    path = tmp_path / "pytorch_model.bin"
    save({"state_dict": {"a": 1}}, path)
    with pytest.raises(UserError, match=r"pytorch_model\.bin must hold tensors by name"):
        list_tensors(tmp_path)
    save(Path("anything"), path)  # a class that torch does not allow
    with pytest.raises(UserError, match="cannot load it as plain weights: Weights only") as caught:
        list_tensors(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kept", [0, 10, -1])
def test_a_cut_file_is_named(tmp_path, save, kept):
    path = tmp_path / "pytorch_model.bin"
    save(TENSORS, path)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(UserError, match=r"pytorch_model\.bin is damaged or cut short"):
        list_tensors(tmp_path)


def test_without_torch_the_extra_is_named(tmp_path, monkeypatch):
    save_double(TENSORS, tmp_path / "pytorch_model.bin")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(UserError, match=r"pytorch_model\.bin: .* pip install 'pw-jax\[torch\]'"):
        list_tensors(tmp_path)


def test_a_file_that_vanished_is_named(tmp_path, save):
    with pytest.raises(UserError, match=r"gone\.bin does not exist"):
        torch_files.read_header(tmp_path / "gone.bin")


def test_a_sharded_opt_30b_folder_loads(tmp_path, save):
    """As the hub has it: .bin shards, float16, names that start at ``decoder.``, no head."""
    pytest.importorskip("jax", reason="this file also runs where torch is and JAX is not")
    from test_family_names import OPT, without_model
    from tiny_moe import make_weights

    from checkpoints.huggingface import Checkpoint, load_weights

    weights = make_weights(OPT)
    tensors = {name: a.astype(np.float16) for name, a in without_model(weights).items()}
    names = sorted(tensors)
    shards = {
        f"pytorch_model-0000{part + 1}-of-00002.bin": {n: tensors[n] for n in names[part::2]}
        for part in range(2)
    }
    write_shards(tmp_path, save, shards)
    (tmp_path / "config.json").write_text(json.dumps(OPT))
    loaded = load_weights(Checkpoint(tmp_path), np.float32)
    assert loaded.keys() == weights.keys()
    for name, array in weights.items():
        np.testing.assert_array_equal(loaded[name], array.astype(np.float16), err_msg=name)
