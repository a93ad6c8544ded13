"""Tiny Qwen2-MoE checkpoints, written in every spelling that files come in."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from pw_jax.models import registry

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen2MoeForCausalLM"],
    "model_type": "qwen2_moe",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "qkv_bias": True,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "eos_token_id": 0,
}

Weights = dict[str, np.ndarray]


def make_weights(config: Mapping[str, Any], seed: int = 0) -> Weights:
    """Random float32 weights by our names."""
    model = registry.random_model(registry.read_config(config), seed=seed)
    flat = registry.parameter_shapes(model)
    generator = np.random.default_rng(seed)
    return {
        name: (generator.standard_normal(leaf.shape) / 8).astype(np.float32)
        for name, leaf in flat.items()
    }


def split_experts(
    weights: Weights, projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> Weights:
    """The same weights with one tensor an expert and projection, as in the hub's files.

    Args:
        weights: Fused, by our names.
        projections: What the file calls gate, up and down.
    """
    gate_name, up_name, down_name = projections
    out = {}
    for name, array in weights.items():
        block, _, last = name.rpartition(".")
        if not block.endswith(".experts"):
            out[name] = array
            continue
        for expert, matrix in enumerate(array):
            if last == "down_proj":
                out[f"{block}.{expert}.{down_name}.weight"] = matrix.copy()
            else:
                gate, up = np.split(matrix, 2)
                out[f"{block}.{expert}.{gate_name}.weight"] = gate.copy()
                out[f"{block}.{expert}.{up_name}.weight"] = up.copy()
    return out


def write(
    directory: Path, tensors: Weights, config: Mapping[str, Any] = CONFIG, shards: int = 1
) -> Path:
    """Writes a folder; with several shards the tensors are dealt out in turn, with an index."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(tensors, directory / "model.safetensors")
        return directory
    weight_map = {}
    for shard in range(shards):
        name = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {key: tensors[key] for key in list(tensors)[shard::shards]}
        save_file(part, directory / name)
        weight_map |= dict.fromkeys(part, name)
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory
