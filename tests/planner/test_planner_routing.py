import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pw_jax.planner.config import PlannerConfig
from pw_jax.planner.routing import RoutingMass

CONFIG = PlannerConfig(half_life_tokens=100.0, bucket_hysteresis=0.2)


def at_share(relative):
    """One layer of 4 experts whose first has this relative mass."""
    rest = (4 - relative) / 3
    return np.array([[relative, rest, rest, rest]])


def test_starts_from_calibration():
    routing = RoutingMass.start(np.array([[30.0, 10.0, 0.0, 0.0]]), 10, CONFIG)
    np.testing.assert_allclose(routing.mass, [[3, 1, 0, 0]])
    np.testing.assert_allclose(routing.relative(), [[3, 1, 0, 0]])
    assert routing.buckets.tolist() == [[2, 1, 0, 0]]
    assert routing.multiplier().tolist() == [[2.0, 1.25, 1.0, 1.0]]
    assert routing.floors().tolist() == [[5, 4, 3, 3]]


def test_half_life():
    routing = RoutingMass.start(np.array([[1.0, 0.0]]), 1, CONFIG)
    routing = routing.update(np.array([[0.0, 100.0]]), 100)
    np.testing.assert_allclose(routing.mass, [[0.5, 0.5]])


@given(st.lists(st.integers(0, 50), min_size=1, max_size=6))
@settings(deadline=None)
def test_one_long_step_equals_many_short_ones(sizes):
    """A prefill weighs as much as the same tokens decoded one by one."""
    mean = np.array([[0.7, 0.2, 0.1]])
    start = RoutingMass.uniform(1, 3, CONFIG)
    many = start
    for size in sizes:
        many = many.update(mean * size, size)
    total = sum(sizes)
    np.testing.assert_allclose(many.mass, start.update(mean * total, total).mass, rtol=1e-12)


def test_a_steady_mean_has_no_start_up_bias():
    mean = np.array([[0.6, 0.4]])
    routing = RoutingMass.start(mean * 50, 50, CONFIG)
    np.testing.assert_allclose(routing.update(mean, 1).mass, mean)


def test_an_empty_step_changes_nothing():
    routing = RoutingMass.uniform(2, 4, CONFIG)
    assert routing.update(np.zeros((2, 4)), 0) is routing


def test_a_layer_without_mass_counts_as_uniform():
    routing = RoutingMass.start(np.array([[0.0, 0.0], [2.0, 0.0]]), 1, CONFIG)
    np.testing.assert_allclose(routing.relative(), [[1, 1], [2, 0]])


def test_uniform_mass_is_warm():
    assert (RoutingMass.uniform(3, 60, CONFIG).buckets == 1).all()


def test_buckets_have_hysteresis():
    config = PlannerConfig(half_life_tokens=1e-9, bucket_hysteresis=0.2)  # follows at once
    routing = RoutingMass.start(at_share(1.4), 1, config)
    seen = []
    for relative in (1.6, 1.79, 1.81, 1.5, 1.21, 1.19, 0.45, 0.39, 0.55, 0.61, 3.0, 0.1):
        routing = routing.update(at_share(relative), 1)
        seen.append(int(routing.buckets[0, 0]))
    assert seen == [1, 1, 2, 2, 2, 1, 1, 0, 0, 1, 2, 0]


@pytest.mark.parametrize("bad", [np.nan, -1.0, np.inf])
def test_bad_mass_is_refused(bad):
    with pytest.raises(ValueError, match="finite"):
        RoutingMass.uniform(1, 2, CONFIG).update(np.array([[bad, 1.0]]), 1)


def test_wrong_shape_and_tokens_are_refused():
    routing = RoutingMass.uniform(1, 2, CONFIG)
    with pytest.raises(ValueError, match=r"expected \(1, 2\)"):
        routing.update(np.ones((1, 3)), 1)
    with pytest.raises(ValueError, match="-1 tokens"):
        routing.update(np.ones((1, 2)), -1)
    with pytest.raises(ValueError, match="at least one token"):
        RoutingMass.start(np.ones((1, 2)), 0, CONFIG)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bucket_edges": (1.0,)}, "make 2 buckets"),
        ({"bucket_edges": (2.0, 1.0)}, "bucket_edges must run from cold to hot"),
        ({"bucket_floors": (5, 4, 3)}, "bucket_floors must run"),
        ({"bucket_multipliers": (0.0, 1.0, 2.0)}, "above 0"),
        ({"bucket_hysteresis": 1.0}, "bucket_hysteresis"),
        ({"half_life_tokens": 0.0}, "half_life_tokens"),
        ({"release_watermark_blocks": 16}, "restore_watermark_blocks"),
        ({"restore_pages_per_step": -1}, "restore_pages_per_step"),
        ({"restore_residence_steps": -1}, "negative"),
    ],
)
def test_bad_config_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        PlannerConfig(**changes)


def test_one_bucket_switches_routing_off():
    config = PlannerConfig(bucket_edges=(), bucket_multipliers=(1.0,), bucket_floors=(3,))
    routing = RoutingMass.start(np.array([[9.0, 0.0]]), 1, config)
    assert routing.multiplier().tolist() == [[1.0, 1.0]]
    assert routing.floors().tolist() == [[3, 3]]
