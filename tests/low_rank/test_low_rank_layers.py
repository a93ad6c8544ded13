"""Factored models compute what dense ones do, and layers apart what they do together."""

from typing import cast

import golden
import jax.numpy as jnp
import numpy as np
import pytest

from pw_jax.errors import UserError
from pw_jax.low_rank.activations import LayerRunner
from pw_jax.low_rank.layers import LowRankLinear, factorable_shapes, linear_shapes
from pw_jax.models import registry
from pw_jax.models.gemma4 import Gemma4Config
from pw_jax.models.memory import SequenceMemory


def dense(name):
    found = golden.read(f"{name}/reference")
    names = golden.Checkpoint(found.directory)
    return found, golden.load_weights(names, np.float32)


def logits(model, tokens, mask):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    out = model(jnp.asarray(tokens), positions, SequenceMemory(jnp.asarray(mask)))
    return np.asarray(model.logits(out.hidden))


@pytest.mark.parametrize("name", ["llama", "opt", "deepseek_v2", "mixtral"])
def test_full_rank_computes_what_the_dense_model_does(name):
    found, weights = dense(name)
    shapes = linear_shapes(registry.build_model(found.config))
    ranks = {linear: min(shape) for linear, shape in shapes.items()}
    model = registry.set_weights(
        registry.build_model(found.config, ranks=ranks), golden.factored(weights, ranks)
    )
    ours = logits(model, found.tokens, found.mask)
    np.testing.assert_allclose(ours[found.mask], found.logits, atol=2e-4, rtol=2e-4)


def test_a_low_rank_model_equals_the_dense_one_of_the_product():
    found, weights = dense("opt")
    names = [f"model.decoder.layers.0.self_attn.{n}_proj" for n in ("q", "k", "v")]
    ranks: dict[str, int] = dict(zip(names, (5, 7, 11), strict=True))
    ranks["model.decoder.layers.1.fc2"] = 3
    parts = golden.factored(weights, ranks)
    product = dict(weights)
    for name in ranks:
        product[f"{name}.weight"] = parts[f"{name}.u"] @ parts[f"{name}.v"]
    ours = registry.set_weights(registry.build_model(found.config, ranks=ranks), parts)
    theirs = registry.set_weights(registry.build_model(found.config), product)
    np.testing.assert_allclose(
        logits(ours, found.tokens, found.mask),
        logits(theirs, found.tokens, found.mask),
        atol=2e-5,
        rtol=2e-5,
    )
    assert registry.parameter_shapes(ours)["model.decoder.layers.1.fc2.v"].shape == (3, 64)


def test_the_bias_is_added_once_behind_u():
    layer = LowRankLinear(4, 3, 2, bias=True, dtype=jnp.float32)
    layer.u[...] = jnp.ones((3, 2))
    layer.v[...] = jnp.ones((2, 4))
    layer.bias[...] = jnp.asarray([1.0, 2.0, 3.0])
    np.testing.assert_allclose(layer(jnp.ones((5, 4)))[0], [9, 10, 11])
    assert layer(jnp.ones((2, 5, 4), jnp.float32)).shape == (2, 5, 3)


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ({"model.layers.0.mlp.nothing": 3}, "no linear layer"),
        ({"lm_head": 3}, "no linear layer"),
        ({"model.layers.0.mlp.up_proj": 0}, "must be 1 to 32"),
        ({"model.layers.0.mlp.up_proj": 33}, "must be 1 to 32"),
        ({"model.layers.0.mlp.up_proj": True}, "whole number"),
    ],
)
def test_ranks_that_do_not_fit(ranks, message):
    with pytest.raises(UserError, match=message):
        registry.build_model(golden.read("llama/reference").config, ranks=ranks)


@pytest.mark.parametrize(
    "name",
    [
        "opt",
        "gemma4_text",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("llama", "deepseek_v2", "qwen2_moe", "gemma3_text")
        ),
    ],
)
def test_layers_apart_compute_what_the_model_does(name):
    found, weights = dense(name)
    runner = LayerRunner(found.config, lambda key: weights[key])
    hidden = runner.embed(found.tokens.astype(np.int32))
    groups = {}
    for layer in range(found.config.num_layers):
        own = {key: weights[key] for key in runner.weight_names(layer)}
        parts = list(runner.run(layer, hidden, found.mask, own))
        hidden = np.concatenate([out for out, _ in parts])
        for names in parts[0][1]:
            groups[names] = np.concatenate([inputs[names] for _, inputs in parts])
    model = registry.set_weights(registry.build_model(found.config), weights)
    last = runner.decoder.final_layer_norm if name == "opt" else runner.decoder.norm
    prefix = "model.decoder.final_layer_norm" if name == "opt" else "model.norm"
    norm = registry.set_weights(
        last, {k.removeprefix(f"{prefix}."): v for k, v in weights.items() if prefix in k}
    )
    ours = np.asarray(model.logits(norm(jnp.asarray(hidden))))
    np.testing.assert_allclose(ours[found.mask], found.logits, atol=2e-4, rtol=2e-4)
    linears = {linear for names in groups for linear in names}
    assert linears == set(runner.shapes)
    first = min(groups, key=lambda names: (-len(names), names))
    shared = {"q_proj", "k_proj", "v_proj"}
    if name == "deepseek_v2":  # its attention has factors of its own
        shared = {"gate_proj", "up_proj"}
    elif name == "gemma4_text":  # the values of full layers are their keys
        assert cast(Gemma4Config, found.config).keys_are_values
        first = next(names for names in groups if "layers.1" in names[0] and len(names) == 3)
    assert {linear.rsplit(".", 1)[1] for linear in first} == shared
    for names, rows in groups.items():  # padding is not among them
        assert rows.shape == (found.mask.sum(), runner.shapes[names[0]][1])


def test_padding_changes_nothing():
    found, weights = dense("llama")
    runner = LayerRunner(found.config, lambda key: weights[key])
    own = {key: weights[key] for key in runner.weight_names(0)}
    runs = []
    for token in (0, 7):
        tokens = np.where(found.mask, found.tokens, token).astype(np.int32)
        parts = runner.run(0, runner.embed(tokens), found.mask, own)
        runs.append([inputs for _, inputs in parts])
    for first, second in zip(*runs, strict=True):
        for names in first:
            np.testing.assert_array_equal(first[names], second[names])


def test_what_is_factored_in_a_model_with_experts_and_latents():
    config = golden.read("deepseek_v2_lite/reference").config
    kept = {name.split(".", 3)[3] for name in factorable_shapes(registry.build_model(config))}
    mlp = {f"{part}_proj" for part in ("gate", "up", "down")}
    assert kept == {
        "self_attn.q_proj",
        "self_attn.o_proj",
        *(f"mlp.{part}" for part in mlp),
        *(f"mlp.shared_experts.{part}" for part in mlp),
    }
    config = golden.read("qwen2_moe/reference").config
    names = factorable_shapes(registry.build_model(config))
    assert not any("gate." in name or name.endswith("_gate") for name in names)
