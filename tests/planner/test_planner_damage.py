import numpy as np
import pytest

from pw_jax.planner.damage import conditional_damage


def errors(values):
    """[1, E, 2, 1] from one value an expert."""
    return np.repeat(np.array(values, dtype=np.float64)[None, :, None, None], 2, axis=2)


def test_divides_by_the_calibration_mass():
    # Both experts hurt alike each time they are chosen; the first is chosen nine times as often.
    damage = conditional_damage(
        errors([9, 1]), np.array([[9.0, 1.0]]), np.array([[90, 10]]), shrink_tokens=64.0
    )
    np.testing.assert_allclose(damage, 1.0)


def test_unseen_experts_take_the_mean_of_the_layer():
    mass, seen = np.array([[8.0, 2.0, 0.0]]), np.array([[80, 20, 0]])
    damage = conditional_damage(errors([80, 40, 0]), mass, seen, shrink_tokens=20.0)
    layer = 120 / 10
    np.testing.assert_allclose(
        damage[0, :, 0, 0], [0.8 * 10 + 0.2 * layer, 0.5 * 20 + 0.5 * layer, layer]
    )


def test_no_shrinking():
    mass, seen = np.array([[4.0, 0.0]]), np.array([[4, 0]])
    damage = conditional_damage(errors([2, 0]), mass, seen, shrink_tokens=0.0)
    np.testing.assert_allclose(damage[0, :, 0, 0], [0.5, 0.5])


def test_narrower_stays_worse():
    generator = np.random.default_rng(0)
    error = np.sort(generator.exponential(size=(3, 5, 2, 6)), axis=-1)[..., ::-1]
    seen = generator.integers(0, 9, (3, 5))
    seen[:, 0] = 5
    damage = conditional_damage(error, seen / 4, seen, shrink_tokens=128.0)
    assert (np.diff(damage, axis=-1) <= 0).all()


def test_a_layer_that_was_never_reached_is_refused():
    with pytest.raises(ValueError, match="MoE layer 0"):
        conditional_damage(errors([1]), np.zeros((1, 1)), np.zeros((1, 1), dtype=int), 8.0)


def test_bad_numbers_are_refused():
    with pytest.raises(ValueError, match="error must be finite"):
        conditional_damage(errors([np.nan]), np.ones((1, 1)), np.ones((1, 1), dtype=int), 8.0)
