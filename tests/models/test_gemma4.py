"""Gemma 4: its configuration, and where rounding would be a trap."""

import json
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden import Forward, read
from ml_dtypes import bfloat16

from pw_jax.calibration import calibrate
from pw_jax.errors import UserError
from pw_jax.models import registry
from pw_jax.models.config import ExpertShape, KvShape
from pw_jax.models.gemma4 import Gemma4Config, Gemma4Router
from pw_jax.models.layers import rope_frequencies

FULL_SIZE = json.loads((Path(__file__).parents[1] / "configs" / "gemma-4-26b-a4b.json").read_text())
TEXT = FULL_SIZE["text_config"]


def read_config(raw: dict[str, Any]) -> Gemma4Config:
    return cast(Gemma4Config, registry.read_config(raw))


def test_full_size():
    config = read_config(FULL_SIZE)
    sliding, full = KvShape(8, 256, 1024), KvShape(2, 512)
    assert config.kv_shapes == ((sliding,) * 5 + (full,)) * 5
    assert config.expert_shape == ExpertShape(128, 8, 2816, 704, "gelu_pytorch_tanh")
    assert config.moe_layers == tuple(range(30))
    assert config.keys_are_values
    assert config.tie_word_embeddings
    assert config.final_soft_cap == 30
    assert config.eos_token_ids == (1, 106)
    assert (config.bos_token_id, config.pad_token_id) == (2, 0)
    shapes = registry.parameter_shapes(registry.build_model(config))
    assert shapes["model.layers.0.experts.gate_up_proj"].shape == (128, 1408, 2816)
    assert shapes["model.layers.5.self_attn.k_proj.weight"].shape == (1024, 2816)
    assert "model.layers.5.self_attn.v_proj.weight" not in shapes
    assert "model.layers.4.self_attn.v_proj.weight" in shapes


def test_text_models_and_spellings_of_files_agree():
    expected = read_config(FULL_SIZE | {"eos_token_id": None})
    assert expected.eos_token_ids == (1,)
    assert read_config(TEXT).kv_shapes == expected.kv_shapes
    early = {"expert_intermediate_size": 704, "moe_intermediate_size": None}
    assert read_config(TEXT | early) == read_config(TEXT)
    full = {"head_dim": 512, "num_key_value_heads": 2}
    by_layer = {
        "global_head_dim": None,
        "num_global_key_value_heads": None,
        "per_layer_config": {f"{layer:02d}": full for layer in range(5, 30, 6)},
        "layer_types": ([*["sliding_attention"] * 5, "full_attention"]) * 5,
    }
    assert read_config(TEXT | by_layer) == read_config(TEXT)
    assert read_config(TEXT | {"rope_parameters": None}) == read_config(TEXT)


def test_a_model_without_experts_or_shared_projections():
    config = read_config(TEXT | {"enable_moe_block": False, "attention_k_eq_v": False})
    assert config.expert_shape is None
    assert config.moe_layers == ()
    assert config.kv_shapes[5] == KvShape(8, 512)
    shapes = registry.parameter_shapes(registry.build_model(config))
    assert "model.layers.5.self_attn.v_proj.weight" in shapes
    assert not [name for name in shapes if "router" in name or "_layernorm_1" in name]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_kv_shared_layers": 20}, "num_kv_shared_layers 20 is not supported"),
        ({"hidden_size_per_layer_input": 256}, "hidden_size_per_layer_input 256"),
        ({"use_bidirectional_attention": "all"}, "'all' is not supported"),
        ({"top_k_experts": 129}, "exceeds num_experts"),
        ({"layer_types": ["full_attention"] * 29}, "'layer_types' must give 30 times"),
        ({"layer_types": ["chunked_attention"] * 30}, "'layer_types' must give 30 times"),
        ({"num_global_key_value_heads": 3}, "layer 5 cannot have"),
        ({"per_layer_config": {"05": {"window": 3}}}, "layer 5 cannot have"),
        ({"rope_parameters": {"rope_theta": 1.0}}, "must have an object 'full_attention'"),
        ({"moe_intermediate_size": None}, "'moe_intermediate_size' is missing"),
    ],
)
def test_bad_values_are_named(fields, message):
    with pytest.raises(UserError, match=message):
        registry.read_config(TEXT | fields)


def test_full_layers_turn_64_pairs_of_256():
    config = read_config(TEXT)
    frequencies = rope_frequencies(config.rope, 512)
    pairs = np.arange(64)
    np.testing.assert_allclose(frequencies[:64], 1e6 ** (-2 * pairs / 512), rtol=1e-6)
    np.testing.assert_array_equal(frequencies[64:], np.zeros(192))
    assert config.sliding_rope is not None
    sliding = rope_frequencies(config.sliding_rope, 256)
    np.testing.assert_allclose(sliding[[0, 127]], [1, 1e4 ** (-254 / 256)], rtol=1e-6)


def test_the_embedding_scale_is_rounded_to_the_weights():
    raw = read("gemma4/reference").raw["text_config"] | {"hidden_size": 2816, "vocab_size": 8}
    model = registry.random_model(registry.read_config(raw), dtype=jnp.bfloat16)
    rows = model.model.embed_tokens.weight[...]
    seen = model.embed(jnp.arange(8, dtype=jnp.int32)[None])[0]  # pyright: ignore
    assert seen.dtype == jnp.bfloat16
    np.testing.assert_array_equal(seen, rows * jnp.bfloat16(53.0))


def close_experts() -> tuple[np.ndarray, np.ndarray]:
    """Tokens [M, D] and router rows [E, D] in bfloat16, where for token 0 the last expert's score
    is 0.1 % above that of the second best, as near as bfloat16 weights allow."""
    rng = np.random.default_rng(5)
    x = rng.standard_normal((4, 2816)).astype(bfloat16)
    rows = (3 * rng.standard_normal((8, 2816))).astype(bfloat16)
    token = x[0].astype(np.float64)
    scores = rows.astype(np.float64) @ token
    second = np.argsort(-scores[:-1])[1]
    rows[-1] = rows[second]
    for column in np.argsort(-np.abs(token)):
        changed = rows[-1].copy()
        changed[column] = rows[-1, column] * bfloat16(1 + 2**-7)
        ratio = (changed.astype(np.float64) @ token) / scores[second]
        if 1.0007 < ratio < 1.0013:
            rows[-1] = changed
            return x, rows
    raise AssertionError("no such weight")


def test_a_bfloat16_router_tells_experts_apart_that_differ_by_a_thousandth():
    x, rows = close_experts()
    router = Gemma4Router(ExpertShape(8, 2, 2816, 32, "silu"), 1e-6, dtype=jnp.bfloat16)
    router.scale.set_value(jnp.ones(2816, jnp.bfloat16))
    router.per_expert_scale.set_value(jnp.full(8, 0.5, jnp.bfloat16))
    router.proj.weight.set_value(jnp.asarray(rows))
    expert_ids, weights = jax.jit(router)(jnp.asarray(x))

    wide, rows_wide = x.astype(np.float64), rows.astype(np.float64)
    normal = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6)
    scores = normal @ rows_wide.T * 2816**-0.5
    order = np.argsort(-scores, axis=-1)[:, :2]
    chosen = np.exp(np.take_along_axis(scores, order, -1))
    np.testing.assert_array_equal(expert_ids, order)
    assert order[0, 1] == 7
    np.testing.assert_allclose(weights, 0.5 * chosen / chosen.sum(-1, keepdims=True), rtol=1e-5)
    # In bfloat16 throughout, the two tie and the first is taken.
    rounded = (normal.astype(bfloat16) @ rows.T).astype(bfloat16)
    assert 7 not in np.argsort(-rounded[0].astype(np.float64), kind="stable")[:2]


@pytest.mark.slow
def test_experts_beside_the_mlp_are_calibrated():
    golden = read("gemma4_text/reference")
    tokens, mask = golden.tokens[1:], golden.mask[1:]
    found = calibrate(golden.model(), tokens, mask)
    _, mass = Forward(golden.model())(tokens, mask)
    np.testing.assert_allclose(found.routing_mass, mass, rtol=1e-4)
    assert found.tokens_seen.sum(1).tolist() == [mask.sum() * 2] * 3
    np.testing.assert_array_equal(found.gate_up_row.sum((0, 2)) > 0, True)
    np.testing.assert_array_equal(found.down_column.sum(2) > 0, found.tokens_seen > 0)
