"""The reader: every spelling gives the same tree, and every fault is named."""

import json
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file
from tiny_moe import CONFIG, Weights, make_weights, split_experts, write

from checkpoints import huggingface
from checkpoints.huggingface import Checkpoint, load_dense_model, load_weights
from pw_jax.errors import UserError
from pw_jax.models.memory import SequenceMemory

EXPERT = "model.layers.1.mlp.experts.2.up_proj.weight"
NORM = "model.layers.0.input_layernorm.weight"


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("spelling", ["fused", "separate"])
def test_four_spellings_give_the_same_tree(tmp_path, weights, spelling, shards):
    tensors = weights if spelling == "fused" else split_experts(weights)
    loaded = load_weights(Checkpoint(write(tmp_path, tensors, shards=shards)), np.float32)
    assert loaded.keys() == weights.keys()
    for name, array in weights.items():
        np.testing.assert_array_equal(loaded[name], array, err_msg=name)


@pytest.mark.parametrize("spelling", ["fused", "separate"])
def test_one_expert_is_read_alone(tmp_path, weights, spelling, monkeypatch):
    tensors = weights if spelling == "fused" else split_experts(weights)
    checkpoint = Checkpoint(write(tmp_path, tensors))
    read = huggingface.read_tensor

    def read_little(*arguments):
        array = read(*arguments)
        assert array.ndim == 2
        return array

    monkeypatch.setattr(huggingface, "read_tensor", read_little)
    for module in ("gate_up", "down"):
        whole = weights[f"model.layers.1.mlp.experts.{module}_proj"]
        np.testing.assert_array_equal(checkpoint.expert_matrix(1, module, 3), whole[3])


def test_gate_rows_come_first(tmp_path, weights):
    tensors = split_experts(weights)
    matrix = Checkpoint(write(tmp_path, tensors)).expert_matrix(0, "gate_up", 1)
    prefix = "model.layers.0.mlp.experts.1"
    np.testing.assert_array_equal(matrix[:32], tensors[f"{prefix}.gate_proj.weight"])
    np.testing.assert_array_equal(matrix[32:], tensors[f"{prefix}.up_proj.weight"])


def test_three_dtypes_in_one_file_are_bit_equal(tmp_path, weights):
    dtypes = [ml_dtypes.bfloat16, np.float16, np.float32]
    tensors = {
        name: array.astype(dtypes[index % 3])
        for index, (name, array) in enumerate(sorted(weights.items()))
    }
    checkpoint = Checkpoint(write(tmp_path, tensors))
    for name, array in tensors.items():
        read = checkpoint.read(name)
        assert read.dtype == array.dtype
        assert read.tobytes() == array.tobytes()
    loaded = load_weights(checkpoint, jnp.bfloat16)
    for name, array in tensors.items():
        np.testing.assert_array_equal(loaded[name], array.astype(ml_dtypes.bfloat16))


def test_experts_of_several_dtypes_become_float32(tmp_path, weights):
    tensors = split_experts(weights)
    tensors[EXPERT] = tensors[EXPERT].astype(ml_dtypes.bfloat16)
    name = "model.layers.1.mlp.experts.gate_up_proj"
    read = Checkpoint(write(tmp_path, tensors)).read(name)
    assert read.dtype == np.float32
    np.testing.assert_array_equal(read[2, 32:], tensors[EXPERT].astype(np.float32))


def test_all_faults_are_named_together(tmp_path, weights):
    tensors = split_experts(weights)
    del tensors[EXPERT]
    tensors["model.layers.0.self_attn.q_proj.scale"] = tensors.pop(NORM)
    tensors["model.norm.weight"] = np.zeros(32, np.float32)
    tensors["lm_head.weight"] = np.zeros(tensors["lm_head.weight"].shape, np.int32)
    with pytest.raises(UserError) as caught:
        Checkpoint(write(tmp_path, tensors))
    message = str(caught.value)
    assert "\n" not in message
    for part in (
        f"missing: {NORM}, {EXPERT}",
        "unexpected: model.layers.0.self_attn.q_proj.scale",
        "wrong shape: model.norm.weight ([32], not [64])",
        "wrong dtype: lm_head.weight (I32, not BF16 or F16 or F32)",
    ):
        assert part in message


@pytest.mark.parametrize(
    ("dropped", "named"),
    [(EXPERT, EXPERT), (NORM, NORM), ("model.layers.0.mlp.gate.weight",) * 2],
)
def test_a_dropped_key_is_named(tmp_path, weights, dropped, named):
    tensors = split_experts(weights)
    del tensors[dropped]
    with pytest.raises(UserError, match=f"missing: {named}$"):
        Checkpoint(write(tmp_path, tensors))


def test_a_wholly_missing_kind_of_expert_key_is_named(tmp_path, weights):
    tensors = {name: a for name, a in split_experts(weights).items() if ".up_proj" not in name}
    tensors |= {n: a for n, a in split_experts(weights).items() if "shared_expert.up" in n}
    with pytest.raises(UserError, match=r"missing: model.layers.0.mlp.experts.0.up_proj.weight,"):
        Checkpoint(write(tmp_path, tensors))


def test_an_expert_too_many_is_unexpected(tmp_path, weights):
    tensors = split_experts(weights)
    extra = "model.layers.0.mlp.experts.4.down_proj.weight"
    tensors[extra] = tensors["model.layers.0.mlp.experts.0.down_proj.weight"]
    with pytest.raises(UserError, match=f"unexpected: {extra}$"):
        Checkpoint(write(tmp_path, tensors))


def test_long_lists_are_cut(tmp_path, weights):
    tensors = {name: a for name, a in weights.items() if "self_attn" not in name}
    with pytest.raises(UserError, match=r"and \d+ more$"):
        Checkpoint(write(tmp_path, tensors))


def test_a_key_in_two_shards_is_named(tmp_path, weights):
    write(tmp_path, weights, shards=2)
    second = tmp_path / "model-00002-of-00002.safetensors"
    part = {name: weights[name] for name in list(weights)[1::2]}
    first = next(iter(weights))
    save_file(part | {first: weights[first]}, second)
    with pytest.raises(UserError, match="given twice: ") as caught:
        Checkpoint(tmp_path)
    assert first in str(caught.value)
    assert second.name in str(caught.value)


def test_fused_and_separate_at_once_is_refused(tmp_path, weights):
    tensors = weights | {EXPERT: split_experts(weights)[EXPERT]}
    with pytest.raises(UserError, match=f"given twice: .*{EXPERT}"):
        Checkpoint(write(tmp_path, tensors))


def test_rotary_buffers_are_ignored(tmp_path, weights):
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}
    loaded = load_weights(Checkpoint(write(tmp_path, weights | extra)), np.float32)
    assert loaded.keys() == weights.keys()


def test_a_tied_head_may_be_present_but_must_be_the_embedding(tmp_path, weights):
    config = CONFIG | {"tie_word_embeddings": True}
    head = weights["lm_head.weight"]
    tied: Weights = {name: a for name, a in weights.items() if name != "lm_head.weight"}
    embedding = tied["model.embed_tokens.weight"]
    absent = load_weights(Checkpoint(write(tmp_path / "absent", tied, config)), np.float32)
    present = write(tmp_path / "present", tied | {"lm_head.weight": embedding}, config)
    assert absent.keys() == load_weights(Checkpoint(present), np.float32).keys() == tied.keys()
    with pytest.raises(UserError, match=r"lm_head.weight differs from model.embed_tokens.weight"):
        Checkpoint(write(tmp_path / "other", tied | {"lm_head.weight": head}, config))
    with pytest.raises(UserError, match=r"missing: lm_head\.weight"):
        Checkpoint(write(tmp_path / "untied", tied))


@pytest.mark.parametrize(
    ("content", "ends"),
    [({}, (0,)), ({"eos_token_id": 5}, (5,)), ({"eos_token_id": [0, 7]}, (0, 7))],
)
def test_end_tokens_of_generation_config_come_first(tiny, content, ends):
    assert Checkpoint(tiny).model_config.eos_token_ids == (0,)
    (tiny / "generation_config.json").write_text(json.dumps(content))
    assert Checkpoint(tiny).model_config.eos_token_ids == ends


def test_bad_end_tokens_are_named(tiny):
    (tiny / "generation_config.json").write_text('{"eos_token_id": "</s>"}')
    with pytest.raises(UserError, match=r"generation_config\.json: field 'eos_token_id' must be"):
        Checkpoint(tiny)


def damage_index(directory: Path, change) -> None:
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lambda d: (d / "config.json").unlink(), r"config.json does not exist"),
        (lambda d: (d / "config.json").write_text("{"), r"config.json is not readable JSON"),
        (lambda d: (d / "config.json").write_text("[]"), r"must hold a JSON object"),
        (lambda d: (d / "config.json").write_text("{}"), r'has no "model_type"'),
        (
            lambda d: (d / "config.json").write_text('{"model_type": "gpt9"}'),
            r"config.json: model_type 'gpt9' .*known: .*qwen2_moe",
        ),
        (
            lambda d: (d / "model-00002-of-00002.safetensors").unlink(),
            r"names files that do not exist: model-00002-of-00002.safetensors$",
        ),
        (
            lambda d: damage_index(
                d, lambda m: m.update({"extra": "model-00001-of-00002.safetensors"})
            ),
            r"names tensors that their file lacks: extra \(model-00001-of-00002.safetensors\)",
        ),
        (
            lambda d: damage_index(d, lambda m: m.update(extra="../x.safetensors")),
            r"extra must name a file of the same folder",
        ),
        (lambda d: damage_index(d, lambda m: m.clear()), r'has no "weight_map"'),
        (
            lambda d: (d / "model.safetensors.index.json").unlink(),
            r"has neither model.safetensors nor model.safetensors.index.json",
        ),
    ],
)
def test_damaged_folders(tiny, fault, message):
    fault(tiny)
    with pytest.raises(UserError, match=message) as caught:
        Checkpoint(tiny)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kept", [0, 4, 100, -1])
def test_a_truncated_file_is_named(tiny, kept):
    path = tiny / "model-00001-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(UserError, match=r"model-00001-of-00002.safetensors is damaged or cut"):
        Checkpoint(tiny)


def test_no_such_folder(tmp_path):
    with pytest.raises(UserError, match="nope is not a folder"):
        Checkpoint(tmp_path / "nope")


def test_load_dense_model_runs(tiny, weights):
    config, model = load_dense_model(tiny, jnp.float32)
    tokens = jnp.arange(8, dtype=jnp.int32)[None]
    out = model(tokens, tokens, SequenceMemory(jnp.ones((1, 8), bool)))
    assert model.logits(out.hidden).shape == (1, 8, config.vocab_size)
    assert make_weights(CONFIG).keys() == weights.keys()
