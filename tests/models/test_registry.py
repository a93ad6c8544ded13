"""Building models without memory, and giving them weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden import read
from test_config import LLAMA, QWEN

from pw_jax.errors import UserError
from pw_jax.models import registry


@pytest.fixture
def config():
    return read("qwen2_moe/reference").config


def zeros(model) -> dict[str, np.ndarray]:
    return {
        name: np.zeros(leaf.shape, np.float32)
        for name, leaf in registry.parameter_shapes(model).items()
    }


@pytest.mark.parametrize(("raw", "billions"), [(QWEN, 14.3), (LLAMA, 70.6)])
def test_full_size_costs_nothing(raw, billions):
    model = registry.build_model(registry.read_config(raw), dtype=jnp.bfloat16)
    assert registry.parameter_count(model) / 1e9 == pytest.approx(billions, rel=0.01)
    leaves = jax.tree.leaves(model)
    assert leaves
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)


def test_names_are_those_of_hugging_face(config):
    shapes = registry.parameter_shapes(registry.build_model(config))
    assert shapes["model.layers.0.mlp.experts.gate_up_proj"].shape == (8, 32, 32)
    assert shapes["model.layers.0.mlp.experts.down_proj"].shape == (8, 32, 16)
    assert shapes["model.layers.0.mlp.shared_expert_gate.weight"].shape == (1, 32)
    assert shapes["model.layers.1.mlp.gate_proj.weight"].shape == (48, 32)
    assert shapes["model.layers.2.self_attn.q_proj.bias"].shape == (32,)
    assert "model.layers.2.self_attn.o_proj.bias" not in shapes


def test_paged_experts_are_no_parameters(config):
    dense = registry.parameter_shapes(registry.build_model(config))
    paged = registry.parameter_shapes(registry.build_model(config, "paged"))
    assert set(dense) - set(paged) == {
        f"model.layers.{layer}.mlp.experts.{part}_proj"
        for layer in config.moe_layers
        for part in ("gate_up", "down")
    }


def test_a_tied_model_has_no_head():
    tied = read("llama_tied/reference").config
    assert "lm_head.weight" not in registry.parameter_shapes(registry.build_model(tied))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_weights_are_cast_and_the_model_is_not_changed(config, dtype):
    abstract = registry.build_model(config, dtype=dtype)
    model = registry.set_weights(abstract, zeros(abstract))
    assert all(isinstance(x, jax.Array) and x.dtype == dtype for x in jax.tree.leaves(model))
    assert all(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(abstract))


def test_all_mistakes_are_named_at_once(config):
    model = registry.build_model(config)
    weights = zeros(model)
    del weights["model.norm.weight"]
    weights["model.extra.weight"] = np.zeros(1, np.float32)
    weights["lm_head.weight"] = weights["lm_head.weight"].T
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"].astype(np.int8)
    with pytest.raises(UserError) as error:
        registry.set_weights(model, weights)
    for part in (
        "missing (1): model.norm.weight",
        "not expected (1): model.extra.weight",
        "wrong shape (1): lm_head.weight (32, 96) instead of (96, 32)",
        "not floating point (1): model.embed_tokens.weight",
    ):
        assert part in str(error.value)
    assert "\n" not in str(error.value)


def test_long_lists_are_cut(config):
    model = registry.build_model(config)
    with pytest.raises(UserError, match=r"missing \(47\): lm_head.weight, .* and 39 more"):
        registry.set_weights(model, {})


def test_random_models_repeat(config):
    first, second, other = (registry.random_model(config, seed=seed) for seed in (0, 0, 1))
    flat = [
        np.concatenate([np.ravel(x) for x in jax.tree.leaves(m)]) for m in (first, second, other)
    ]
    np.testing.assert_array_equal(flat[0], flat[1])
    assert not np.array_equal(flat[0], flat[2])
