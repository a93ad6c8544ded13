"""Gemma 4 in the spellings of its files: all load to equal trees, and other parts are skipped."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from tiny_moe import Weights, make_weights, split_experts, write

from checkpoints.huggingface import Checkpoint, load_weights
from pw_jax.errors import UserError

GOLDEN = Path(__file__).parents[1] / "golden"

TEXT: dict[str, Any] = {
    "model_type": "gemma4_text",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_global_key_value_heads": 1,
    "head_dim": 16,
    "global_head_dim": 32,
    "attention_k_eq_v": True,
    "enable_moe_block": True,
    "num_experts": 3,
    "top_k_experts": 2,
    "moe_intermediate_size": 32,
}
WHOLE = {"model_type": "gemma4", "text_config": TEXT, "vision_config": {}}


def as_ours(weights: Weights) -> Weights:
    return dict(weights)


def in_moe(weights: Weights) -> Weights:
    """Experts in a block of their own, as in quantised releases."""
    return {name.replace(".experts.", ".moe.experts."): array for name, array in weights.items()}


def separate_in_moe(weights: Weights) -> Weights:
    return in_moe(split_experts(weights))


def with_other_parts(weights: Weights) -> Weights:
    """The names of a model that also sees and hears."""
    named = {name.replace("model.", "model.language_model.", 1): a for name, a in weights.items()}
    other = ("vision_tower.encoder.layers.0.x.weight", "embed_vision.y", "audio_tower.layers.0.z")
    return named | {f"model.{name}": np.zeros(3, np.float32) for name in other}


@pytest.fixture(scope="module")
def weights() -> Weights:
    return make_weights(TEXT)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("spell", [as_ours, split_experts, in_moe, separate_in_moe])
def test_spellings_give_the_same_tree(tmp_path, weights, spell, whole):
    tensors, config = (with_other_parts(spell(weights)), WHOLE) if whole else (spell(weights), TEXT)
    checkpoint = Checkpoint(write(tmp_path, tensors, config, shards=2))
    loaded = load_weights(checkpoint, np.float32)
    assert loaded.keys() == weights.keys()
    for name, array in weights.items():
        np.testing.assert_array_equal(loaded[name], array, err_msg=name)
    one = checkpoint.expert_matrix(1, "gate_up", 2)
    np.testing.assert_array_equal(one, weights["model.layers.1.experts.gate_up_proj"][2])
    assert not [name for name in checkpoint.dense_names() if ".experts." in name]


@pytest.mark.parametrize("kind", ["dropped", "renamed", "added"])
@pytest.mark.parametrize(
    "name", ["layers.1.router.per_expert_scale", "layers.0.layer_scalar", "layers.1.experts.2."]
)
def test_a_fault_is_named(tmp_path, weights, name, kind):
    tensors = with_other_parts(split_experts(weights))
    found = next(key for key in tensors if name in key)
    if kind == "added":
        extra = "model.language_model.layers.1.self_attn.v_proj.weight"  # keys are values there
        with pytest.raises(UserError, match=f"unexpected: {extra}"):
            Checkpoint(write(tmp_path, tensors | {extra: tensors[found]}, WHOLE))
        return
    moved = tensors.pop(found)
    if kind == "renamed":
        tensors[f"{found}.old"] = moved
    with pytest.raises(UserError) as caught:
        Checkpoint(write(tmp_path, tensors, WHOLE))
    assert f"missing: {found}" in str(caught.value)
    assert (f"unexpected: {found}.old" in str(caught.value)) == (kind == "renamed")


def test_both_prefixes_at_once_clash(tmp_path, weights):
    tensors = with_other_parts(weights)
    name = "model.layers.0.layer_scalar"
    tensors[name] = weights[name]
    with pytest.raises(UserError, match=r"given twice: .*layers\.0\.layer_scalar"):
        Checkpoint(write(tmp_path, tensors, WHOLE))


@pytest.mark.parametrize("head", ["same", "other"])
def test_a_stored_head_must_equal_the_embedding(tmp_path, weights, head):
    tensors = with_other_parts(weights)
    embedding = tensors["model.language_model.embed_tokens.weight"]
    tensors["lm_head.weight"] = embedding + np.float32(head == "other")
    path = write(tmp_path, tensors, WHOLE)
    if head == "same":
        assert "lm_head.weight" not in Checkpoint(path).names()
        return
    with pytest.raises(UserError, match=r"differs from model\.language_model\.embed_tokens"):
        Checkpoint(path)


def test_golden_files_are_spelt_as_on_the_hub():
    whole = load_file(GOLDEN / "gemma4" / "model.safetensors").keys()
    assert "model.language_model.layers.0.layer_scalar" in whole
    assert [name for name in whole if name.startswith("model.vision_tower.")]
    text = load_file(GOLDEN / "gemma4_text" / "model.safetensors").keys()
    assert "model.layers.0.experts.gate_up_proj" in text
    assert "model.layers.0.self_attn.v_proj.weight" not in text
    assert "model.layers.1.self_attn.v_proj.weight" in text
