"""The spellings of each family's files: all load to equal trees, and faults are named in them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from tiny_moe import Weights, make_weights, split_experts, write

from checkpoints.huggingface import Checkpoint, load_weights
from pw_jax.errors import UserError

GOLDEN = Path(__file__).parents[1] / "golden"

MIXTRAL: dict[str, Any] = {
    "model_type": "mixtral",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 3,
    "num_experts_per_tok": 2,
}
OPT: dict[str, Any] = {
    "model_type": "opt",
    "vocab_size": 96,
    "hidden_size": 64,
    "ffn_dim": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}


def hub_file(ours: Weights) -> Weights:
    """As in the hub's files and those of ``save_pretrained``."""
    return _renamed_block(split_experts(ours, ("w1", "w3", "w2")))


def separate(ours: Weights) -> Weights:
    """One tensor an expert and projection, named as in other families."""
    return split_experts(ours)


def fused(ours: Weights) -> Weights:
    """As the modules of transformers 5 hold them."""
    return dict(ours)


def fused_in_old_block(ours: Weights) -> Weights:
    return _renamed_block(ours)


def _renamed_block(weights: Weights) -> Weights:
    return {name.replace(".mlp.", ".block_sparse_moe."): a for name, a in weights.items()}


SPELLINGS = [hub_file, separate, fused, fused_in_old_block]


@pytest.fixture(scope="module")
def mixtral() -> Weights:
    return make_weights(MIXTRAL)


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("spell", SPELLINGS)
def test_four_spellings_of_mixtral_give_the_same_tree(tmp_path, mixtral, spell, shards):
    loaded = load_weights(
        Checkpoint(write(tmp_path, spell(mixtral), MIXTRAL, shards=shards)), np.float32
    )
    assert loaded.keys() == mixtral.keys()
    for name, array in mixtral.items():
        np.testing.assert_array_equal(loaded[name], array, err_msg=name)


def test_mixtral_golden_file_is_spelt_as_on_the_hub():
    names = load_file(GOLDEN / "mixtral" / "model.safetensors").keys()
    assert "model.layers.0.block_sparse_moe.experts.5.w3.weight" in names
    assert not [name for name in names if ".mlp." in name]


@pytest.mark.parametrize("spell", SPELLINGS)
@pytest.mark.parametrize("kind", ["dropped", "renamed", "added"])
def test_a_fault_is_named_as_the_file_spells_it(tmp_path, mixtral, spell, kind):
    tensors = spell(mixtral)
    name = [name for name in tensors if "layers.1" in name and ".experts" in name][-1]
    found = []
    if kind == "added":
        extra = "model.layers.1.self_attn.q_proj.bias"
        tensors[extra] = np.zeros(64, np.float32)
        found.append(f"unexpected: {extra}$")
    else:
        moved = tensors.pop(name)
        # A whole fused tensor is missing under our own name: nothing shows which other was meant.
        ours = name.replace(".block_sparse_moe.", ".mlp.") if name.endswith("_proj") else name
        found.append(f"missing: {ours}")
        if kind == "renamed":
            tensors[f"{name}.old"] = moved
            found.append(f"unexpected: {name}.old")
    with pytest.raises(UserError) as caught:
        Checkpoint(write(tmp_path, tensors, MIXTRAL))
    for part in found:
        assert part.rstrip("$") in str(caught.value)
    assert ("missing" in str(caught.value)) == (kind != "added")


def test_two_spellings_of_one_expert_clash(tmp_path, mixtral):
    tensors = separate(mixtral)
    name = "model.layers.0.block_sparse_moe.experts.1.w1.weight"
    tensors[name] = tensors["model.layers.0.mlp.experts.1.gate_proj.weight"]
    with pytest.raises(UserError, match=r"given twice: .*experts\.1\.gate_proj\.weight"):
        Checkpoint(write(tmp_path, tensors, MIXTRAL))


def as_ours(weights: Weights) -> Weights:
    return dict(weights)


def without_model(weights: Weights) -> Weights:
    """The names of the 30B files."""
    return {name.removeprefix("model."): array for name, array in weights.items()}


@pytest.mark.parametrize("head", ["absent", "same", "other"])
@pytest.mark.parametrize("spell", [as_ours, without_model])
def test_opt_with_and_without_its_prefix(tmp_path, spell: Callable[[Weights], Weights], head: str):
    weights = make_weights(OPT)
    tensors = spell(weights)
    embedding = weights["model.decoder.embed_tokens.weight"]
    if head != "absent":
        tensors["lm_head.weight"] = embedding + np.float32(head == "other")
    path = write(tmp_path, tensors, OPT)
    if head == "other":
        with pytest.raises(UserError, match=r"lm_head\.weight differs from .*decoder\.embed_tok"):
            Checkpoint(path)
        return
    loaded = load_weights(Checkpoint(path), np.float32)
    assert loaded.keys() == weights.keys()
    for name, array in weights.items():
        np.testing.assert_array_equal(loaded[name], array, err_msg=name)


def test_both_prefixes_at_once_clash(tmp_path):
    weights = make_weights(OPT)
    tensors = without_model(weights)
    name = "model.decoder.layers.0.fc1.bias"
    tensors[name] = weights[name]
    with pytest.raises(UserError, match=f"given twice: {name}"):
        Checkpoint(write(tmp_path, tensors, OPT))
