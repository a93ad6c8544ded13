"""Heads: what can be predicted is, and what cannot is dropped."""

import numpy as np
import pytest

from pw_jax.planner.ridge import fit_heads

PROMPTS, LAYERS = 120, 3


@pytest.fixture
def features() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((PROMPTS, LAYERS, 3)) * 0.2 + 3.0


def test_linear_targets_are_found_and_noise_is_dropped(features):
    generator = np.random.default_rng(1)
    target = generator.standard_normal((PROMPTS, LAYERS, 2))
    target[:, 0, 0] = features[:, 0] @ [1.0, -2.0, 0.5] + 0.01 * target[:, 0, 0]
    target[:, 2, 1] = 4 * features[:, 2, 1] + 0.1 * target[:, 2, 1]
    heads = fit_heads(features, target)
    kept = np.zeros((LAYERS, 2), bool)
    kept[0, 0] = kept[2, 1] = True
    np.testing.assert_array_equal(heads.kept, kept)
    assert heads.r_squared[0, 0] > 0.99
    predicted = np.array([heads.log_ratio(one) for one in features])
    assert np.abs(predicted[:, 0, 0] - target[:, 0, 0]).max() < 0.1
    assert (predicted[:, ~kept] == 0).all()


def test_quality_is_measured_on_prompts_the_fit_has_not_seen(features):
    """As many prompts as weights would fit noise perfectly, were it judged on the same ones."""
    noise = np.random.default_rng(2).standard_normal((10, LAYERS, 2))
    heads = fit_heads(features[:10], noise)
    assert heads.r_squared.max() < 0.9


def test_constant_features_and_targets_do_no_harm(features):
    heads = fit_heads(np.ones_like(features), np.zeros((PROMPTS, LAYERS, 2)))
    assert not heads.kept.any()
    assert np.isfinite(heads.weights).all()
    assert (heads.log_ratio(np.ones((LAYERS, 3))) == 0).all()


def test_too_few_prompts_are_refused(features):
    with pytest.raises(ValueError, match="at least 10"):
        fit_heads(features[:9], np.zeros((9, LAYERS, 2)))
