"""Golden files have every feature of Gemma and DeepSeek-V2 on: without one they do not match."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from golden import Forward, Golden, read

from pw_jax.models.config import RopeConfig


def error(golden: Golden, model: Any) -> float:
    logits, _ = Forward(model)(golden.tokens, golden.mask)
    return float(np.abs(logits[golden.mask] - golden.logits).max())


def windows(config: Any, window: int) -> tuple:
    return tuple(
        kv if kv.window is None else dataclasses.replace(kv, window=window)
        for kv in config.kv_shapes
    )


CONFIGS: dict[str, tuple[str, Callable[[Any], dict[str, Any]]]] = {
    "logits are capped": ("gemma4_text", lambda c: {"final_soft_cap": None}),
    "a dense model caps them too": ("gemma4", lambda c: {"final_soft_cap": None}),
    "windows end": ("gemma4_text", lambda c: {"kv_shapes": windows(c, 6)}),
    "sliding layers turn faster": ("gemma4", lambda c: {"sliding_rope": RopeConfig(1e6)}),
    "full layers turn in part": ("gemma4_text", lambda c: {"rope": RopeConfig(1e6)}),
    "gelu is the tanh one": ("gemma4", lambda c: {"activation": "silu"}),
    "scores have a scale of their own": ("gemma3_text", lambda c: {"query_scale": 16**-0.5}),
    "full layers are stretched": ("gemma3_text", lambda c: {"rope": RopeConfig(300.0)}),
    "layers with a window turn faster": ("gemma3_text", lambda c: {"sliding_rope": c.rope}),
    "embeddings are scaled": ("gemma3_text", lambda c: {"embedding_scale": 5.0}),
    "chosen experts are scaled": ("deepseek_v2", lambda c: {"routed_scale": 2.4}),
    "groups limit the choice": ("deepseek_v2", lambda c: {"top_groups": 4}),
    "scores grow with the context": (
        "deepseek_v2_lite",
        lambda c: {"latent": dataclasses.replace(c.latent, scale=12**-0.5)},
    ),
    "rope tables do as well": (
        "deepseek_v2_lite",
        lambda c: {"rope": dataclasses.replace(c.rope, attention_factor=1.0)},
    ),
    "yarn blends": (
        "deepseek_v2_lite",
        lambda c: {"rope": dataclasses.replace(c.rope, kind="linear")},
    ),
}


@pytest.mark.parametrize("feature", CONFIGS)
def test_configurations_matter(feature):
    name, change = CONFIGS[feature]
    golden = read(f"{name}/reference")
    assert golden.config.activation == ("gelu_pytorch_tanh" if "gemma" in name else "silu")
    changed: Any = dataclasses.replace(golden.config, **change(golden.config))
    assert error(golden, dataclasses.replace(golden, config=changed).model()) > 1e-3


WEIGHTS = {
    "gemma4_text": (
        "layers.1.layer_scalar",
        "layers.0.router.scale",
        "layers.1.router.per_expert_scale",
        "layers.1.self_attn.q_norm.weight",
        "layers.2.self_attn.k_norm.weight",
        "layers.2.post_attention_layernorm.weight",
        "layers.1.pre_feedforward_layernorm.weight",
        "layers.1.pre_feedforward_layernorm_2.weight",
        "layers.0.post_feedforward_layernorm.weight",
        "layers.0.post_feedforward_layernorm_1.weight",
        "layers.0.post_feedforward_layernorm_2.weight",
    ),
    "deepseek_v2": (
        "layers.0.self_attn.q_a_layernorm.weight",
        "layers.1.self_attn.kv_a_layernorm.weight",
        "layers.1.self_attn.q_a_proj.bias",
        "layers.1.self_attn.kv_a_proj_with_mqa.bias",
        "layers.2.self_attn.o_proj.bias",
        "layers.2.mlp.shared_experts.down_proj.bias",
    ),
}


@pytest.mark.parametrize(("name", "path"), [(name, p) for name in WEIGHTS for p in WEIGHTS[name]])
def test_small_weights_matter(name, path):
    golden = read(f"{name}/reference")
    model = golden.model()
    part: Any = model.model
    for step in path.split("."):
        part = part[int(step)] if step.isdigit() else getattr(part, step)
    part.set_value(jnp.full_like(part[...], 0.0 if path.endswith("bias") else 1.0))
    assert error(golden, model) > 1e-3


def test_latents_have_a_norm_constant_of_their_own():
    golden = read("deepseek_v2/reference")
    model: Any = golden.model()
    for layer in model.model.layers:
        assert layer.input_layernorm.eps == 0.01
        layer.self_attn.kv_a_layernorm.eps = 0.01
    assert error(golden, model) > 1e-3
