"""DeepSeek-V2: its configuration, the rotation of neighbours, and routing in groups."""

import json
from pathlib import Path
from typing import Any, cast

import jax.numpy as jnp
import numpy as np
import pytest
from golden import read

from pw_jax.errors import UserError
from pw_jax.models import registry
from pw_jax.models.config import KvShape
from pw_jax.models.deepseek_v2 import DeepseekV2Config, GroupedRouter, rotate_neighbours
from pw_jax.models.layers import rope_frequencies, rope_tables

LITE = json.loads((Path(__file__).parents[1] / "configs" / "deepseek-v2-lite.json").read_text())
GROUPS = {"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3}


def read_config(raw: dict[str, Any]) -> DeepseekV2Config:
    return cast(DeepseekV2Config, registry.read_config(raw))


def test_full_size():
    config = read_config(LITE)
    assert config.kv_shapes == (KvShape(16, 192),) * 27
    assert config.moe_layers == tuple(range(1, 27))
    assert config.shared_experts_ffn == 2816
    assert config.latent.query_rank is None
    assert (config.expert_groups, config.top_groups) == (1, 1)
    magnitude = 0.1 * 0.707 * np.log(40) + 1
    assert config.latent.scale == pytest.approx(192**-0.5 * magnitude**2)
    assert config.rope.attention_factor == 1  # mscale and mscale_all_dim are equal
    shapes = registry.parameter_shapes(registry.build_model(config))
    assert shapes["model.layers.0.mlp.gate_proj.weight"].shape == (10944, 2048)
    assert shapes["model.layers.1.self_attn.kv_a_proj_with_mqa.weight"].shape == (576, 2048)
    assert shapes["model.layers.1.self_attn.o_proj.weight"].shape == (2048, 2048)
    assert shapes["model.layers.1.mlp.shared_experts.up_proj.weight"].shape == (2816, 2048)
    assert "model.layers.1.mlp.shared_expert_gate.weight" not in shapes


def test_full_v2_has_query_latents_and_groups():
    config = read_config(LITE | GROUPS | {"q_lora_rank": 1536, "routed_scaling_factor": 16.0})
    assert (config.expert_groups, config.top_groups, config.routed_scale) == (8, 3, 16.0)
    shapes = registry.parameter_shapes(registry.build_model(config))
    assert shapes["model.layers.0.self_attn.q_b_proj.weight"].shape == (16 * 192, 1536)
    assert "model.layers.0.self_attn.q_proj.weight" not in shapes


def test_yarn_keeps_fast_pairs_and_stretches_slow_ones():
    rope = read_config(LITE).rope
    plain = 1e4 ** (-np.arange(0, 64, 2) / 64)
    # Pairs 10.47 and 22.51 turn 32 times and once in 4096 positions: the ramp is from 10 to 23.
    keep = np.clip((23 - np.arange(32)) / 13, 0, 1)
    np.testing.assert_allclose(
        rope_frequencies(rope, 64), plain * (keep + (1 - keep) / 40), rtol=1e-6
    )


def test_magnitudes_of_yarn():
    scaling = LITE["rope_scaling"] | {"mscale": 1.0, "mscale_all_dim": 0}
    config = read_config(LITE | {"rope_scaling": scaling})
    assert config.rope.attention_factor == pytest.approx(0.1 * np.log(40) + 1)
    assert config.latent.scale == 192**-0.5
    del scaling["factor"]
    assert read_config(LITE | {"rope_scaling": scaling}).rope.factor == 40
    assert read_config(LITE | {"rope_scaling": None}).latent.scale == 192**-0.5


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"scoring_func": "sigmoid"}, "scoring_func 'sigmoid'"),
        ({"moe_layer_freq": 2}, "moe_layer_freq 2"),
        ({"num_key_value_heads": 4}, "num_key_value_heads 4"),
        ({"topk_method": "noaux_tc"}, "topk_method 'noaux_tc'"),
        ({"norm_topk_prob": True, "routed_scaling_factor": 2.0}, "no agreed meaning"),
        (GROUPS | {"n_group": 7}, "cannot choose 6 of 64 experts in 3 of 7 groups"),
        (GROUPS | {"n_group": 32, "topk_group": 2}, "in 2 of 32 groups"),
        (GROUPS | {"topk_group": 9}, "in 9 of 8 groups"),
        (GROUPS | {"n_group": None}, "'n_group' is missing"),
        ({"num_experts_per_tok": 65}, "cannot choose 65 of 64"),
        ({"qk_rope_head_dim": 63}, "must be even"),
        ({"rope_scaling": LITE["rope_scaling"] | {"truncate": False}}, "truncate"),
    ],
)
def test_bad_values_are_named(fields, message):
    with pytest.raises(UserError, match=message):
        registry.read_config(LITE | fields)


def test_neighbours_turn_as_complex_numbers():
    rng = np.random.default_rng(3)
    q, k = rng.standard_normal((2, 1, 6, 2, 8)).astype(np.float32)
    rope = read_config(LITE).rope
    positions = np.arange(6, dtype=np.int32)[None] * 7
    turn = np.exp(1j * positions[..., None, None] * rope_frequencies(rope, 8))

    def as_complex(x: np.ndarray) -> np.ndarray:
        return (x[..., ::2] + 1j * x[..., 1::2]) * turn

    tables = rope_tables(rope, 8, jnp.asarray(positions), jnp.float32)
    ours = [np.asarray(rotate_neighbours(jnp.asarray(x), tables)) for x in (q, k)]
    scores = np.einsum("btnh,bsnh->bnts", *ours)
    expected = np.einsum("btnh,bsnh->bnts", as_complex(q), as_complex(k).conj()).real
    np.testing.assert_allclose(scores, expected, atol=1e-4)
    np.testing.assert_allclose(ours[0][..., :4] + 1j * ours[0][..., 4:], as_complex(q), atol=1e-5)


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("groups", [(1, 1), (4, 2)])
def test_routing_in_groups(groups, renormalize):
    raw = read("deepseek_v2/reference").raw | {
        "n_group": groups[0],
        "topk_group": groups[1],
        "norm_topk_prob": renormalize,
        "routed_scaling_factor": 1.0 if renormalize else 2.5,
    }
    config = read_config(raw)
    shape = config.expert_shape
    assert shape is not None
    router = GroupedRouter(config, shape, dtype=jnp.float32)
    rng = np.random.default_rng(4)
    rows, x = rng.standard_normal((8, 32)), rng.standard_normal((9, 32))
    router.weight.set_value(jnp.asarray(rows, jnp.float32))
    expert_ids, weights = router(jnp.asarray(x, jnp.float32))
    for token, own_ids, own_weights in zip(x, expert_ids, weights, strict=True):
        scores = np.exp(rows @ token)
        scores /= scores.sum()
        size = 8 // groups[0]
        best = sorted(range(groups[0]), key=lambda g: -scores[g * size : g * size + size].max())
        allowed = [e for e in range(8) if e // size in best[: groups[1]]]
        chosen = sorted(allowed, key=lambda e: -scores[e])[:3]
        assert own_ids.tolist() == chosen
        total = scores[chosen].sum() if renormalize else 1 / 2.5
        np.testing.assert_allclose(own_weights, scores[chosen] / total, rtol=1e-4)


def test_a_bfloat16_router_scores_in_float32():
    config = read_config(read("deepseek_v2_lite/reference").raw)
    assert config.expert_shape is not None
    router = GroupedRouter(config, config.expert_shape, dtype=jnp.bfloat16)
    rows = np.zeros((4, 32), np.float32)
    rows[:, 0] = [8, 8, 8, 0]
    rows[:, 1] = [0.0, 0.0078125, 0.015625, 0]  # 0.1 % and 0.2 %: less than bfloat16 keeps of 8
    router.weight.set_value(jnp.asarray(rows, jnp.bfloat16))
    expert_ids, _ = router(jnp.ones((1, 32), jnp.bfloat16))
    assert expert_ids.tolist() == [[2, 1]]


def test_values_of_another_width_than_keys():
    config = read_config(read("deepseek_v2/reference").raw)
    assert (config.latent.plain_dim, config.latent.rope_dim, config.latent.value_dim) == (8, 4, 10)
    assert config.kv_shapes[0] == KvShape(4, 12)
    wide = read_config(read("deepseek_v2/reference").raw | {"v_head_dim": 15})
    assert wide.kv_shapes[0] == KvShape(4, 16)
