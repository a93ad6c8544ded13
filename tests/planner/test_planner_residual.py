"""The prompt correction as arithmetic: chunks add up, ratios mean what they say."""

import numpy as np
import pytest

from pw_jax.planner.config import PlannerConfig
from pw_jax.planner.residual import Heads, PromptSums, direct_ratio, oracle_damage, prompt_factor

LAYERS, EXPERTS, WIDTH = 2, 3, 5


def sums_of(x: np.ndarray, chosen: np.ndarray, weight: np.ndarray) -> PromptSums:
    """x [L, T, D], chosen [L, T, E], weight [L, E, D]."""
    length = np.linalg.norm(x, axis=-1)
    norms = np.stack([length.sum(1), (length**2).sum(1), length.max(1)], axis=-1)
    ratio = np.einsum("ltd,led,lte->le", x**2, weight, chosen)
    return PromptSums(x.shape[1], norms, chosen.sum(1), ratio)


@pytest.fixture
def prompt():
    generator = np.random.default_rng(0)
    x = generator.standard_normal((LAYERS, 8, WIDTH))
    chosen = (generator.random((LAYERS, 8, EXPERTS)) < 0.6).astype(np.float64)
    error = generator.random((LAYERS, EXPERTS, WIDTH))
    return x, chosen, error / error.sum(axis=-1, keepdims=True)


def test_chunks_add_up_to_the_prompt(prompt):
    x, chosen, weight = prompt
    whole = sums_of(x, chosen, weight)
    parts = sums_of(x[:, :3], chosen[:, :3], weight) + sums_of(x[:, 3:], chosen[:, 3:], weight)
    for field in ("norms", "routed", "ratio"):
        np.testing.assert_allclose(getattr(parts, field), getattr(whole, field))
    assert parts.tokens == whole.tokens == 8


def test_features_are_log_norms(prompt):
    length = np.linalg.norm(prompt[0], axis=-1)
    expected = [length.mean(1), np.sqrt((length**2).mean(1)), length.max(1)]
    np.testing.assert_allclose(sums_of(*prompt).features(), np.log(np.stack(expected, 1)))


def test_inputs_of_twice_the_size_have_four_times_the_ratio(prompt):
    x, chosen, weight = prompt
    few, many = (direct_ratio(sums_of(f * x, chosen, weight), 1e-9) for f in (1, 2))
    np.testing.assert_allclose(many, 4 * few, rtol=1e-6)


def test_few_routed_tokens_hardly_count(prompt):
    sums = sums_of(*prompt)
    assert np.abs(direct_ratio(sums, 1e9) - 1).max() < 1e-6
    nothing = PromptSums(4, sums.norms, 0 * sums.routed, 0 * sums.routed)
    np.testing.assert_array_equal(direct_ratio(nothing, 32.0), 1.0)


def test_the_factor_is_the_mean_over_prompts_weighted_by_tokens(prompt):
    x, chosen, weight = prompt
    config = PlannerConfig(prompt_residual="direct", residual_limit=1e6, residual_tokens=1e-9)
    first = sums_of(x, chosen, weight)
    second = sums_of(3 * x[:, :2], np.ones((LAYERS, 2, EXPERTS)), weight)
    factor = prompt_factor({0: first, 7: second}, None, config, EXPERTS)
    assert factor is not None
    expected = (8 * direct_ratio(first, 1e-9) + 2 * direct_ratio(second, 1e-9)) / 10
    np.testing.assert_allclose(factor[..., 0], expected)
    np.testing.assert_array_equal(factor[..., 1], 1.0)


def test_the_factor_is_clipped_and_off_without_prompts(prompt):
    config = PlannerConfig(prompt_residual="direct", residual_limit=1.5)
    loud = sums_of(100 * prompt[0], prompt[1], prompt[2])
    factor = prompt_factor({0: loud}, None, config, EXPERTS)
    assert factor is not None
    assert factor.max() == 1.5
    assert prompt_factor({}, None, config, EXPERTS) is None
    assert prompt_factor({0: loud}, None, PlannerConfig(), EXPERTS) is None


def test_heads_are_linear_in_scaled_features_and_dropped_ones_say_nothing(prompt):
    sums = sums_of(*prompt)
    weights = np.random.default_rng(1).standard_normal((LAYERS, 2, 4)) / 10
    kept = np.array([[True, False], [True, True]])
    heads = Heads(
        np.full((LAYERS, 3), 0.5), np.full((LAYERS, 3), 2.0), weights, np.zeros((LAYERS, 2)), kept
    )
    factor = prompt_factor({0: sums}, heads, PlannerConfig(prompt_residual="heads"), EXPERTS)
    assert factor is not None
    scaled = (sums.features() - 0.5) / 2.0
    for layer, module in np.ndindex(LAYERS, 2):
        log = scaled[layer] @ weights[layer, module, :3] + weights[layer, module, 3]
        expected = np.exp(log) if kept[layer, module] else 1.0
        np.testing.assert_allclose(factor[layer, :, module], np.clip(expected, 0.5, 2.0))


def test_the_oracle_knows_routing_and_inputs(prompt):
    sums = sums_of(*prompt)
    damage = np.random.default_rng(2).random((LAYERS, EXPERTS, 2, 4))
    oracle = oracle_damage({0: sums}, damage)
    assert oracle is not None
    assert sums.ratio is not None
    np.testing.assert_allclose(oracle[:, :, 0], damage[:, :, 0] * sums.ratio[..., None] / 8)
    np.testing.assert_allclose(oracle[:, :, 1], damage[:, :, 1] * sums.routed[..., None] / 8)
    assert oracle_damage({}, damage) is None
