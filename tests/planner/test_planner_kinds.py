"""Planners to compare: what each looks at, and what it then does."""

import dataclasses

import numpy as np
import pytest

from pw_jax.planner.config import PlannerConfig
from pw_jax.planner.initial import BudgetTooSmallError, initial_bits, total_pages
from pw_jax.planner.kinds import flat_damage, floors_of, random_damage, weigh
from pw_jax.planner.plan import PlanInputs, plan_release
from pw_jax.planner.routing import RoutingMass
from pw_jax.planner.static import optimal_bits

LAYERS, EXPERTS = 3, 4
PAGES = np.array([[6, 8, 10, 13, 16, 20], [3, 4, 5, 7, 9, 12]])
CONFIG = PlannerConfig(bucket_floors=(3, 3, 3))


@pytest.fixture
def damage() -> np.ndarray:
    generator = np.random.default_rng(0)
    scale = generator.lognormal(0.0, 1.5, (LAYERS, EXPERTS, 2, 1))
    steps = np.cumprod(generator.uniform(0.2, 0.4, (LAYERS, EXPERTS, 2, 6)), axis=-1)
    return scale * steps


@pytest.fixture
def routing() -> RoutingMass:
    mass = np.random.default_rng(1).dirichlet(np.full(EXPERTS, 0.5), LAYERS)
    return RoutingMass.start(mass, 1, CONFIG)


def bits_of(config, damage, routing, budget):
    weighing = weigh(config, damage, PAGES, routing)
    return initial_bits(weighing.damage, PAGES, weighing.multiplier, weighing.floors, budget)


def lower_one_by_one(damage, count):
    """Blocks in the order in which they lose bits."""
    shape = (LAYERS, EXPERTS)
    bits, order = np.full((*shape, 2), 8), []
    for _ in range(count):
        ones, movable = np.ones(shape), np.ones((*shape, 2), bool)
        inputs = PlanInputs(bits, damage, PAGES, ones, np.full(shape, 3), movable)
        plan = plan_release(inputs, 1)
        order += [(s.layer, s.expert, s.module) for s in plan]
        bits = plan.apply(bits)
    return order


@pytest.mark.parametrize("bits", range(3, 9))
def test_uniform_gives_one_width_where_the_budget_allows(damage, routing, bits):
    uniform = dataclasses.replace(CONFIG, kind="uniform")
    budget = total_pages(np.full((LAYERS, EXPERTS, 2), bits), PAGES)
    assert (bits_of(uniform, damage, routing, budget) == bits).all()


def test_uniform_never_spreads_over_more_than_two_widths(damage, routing):
    uniform = dataclasses.replace(CONFIG, kind="uniform")
    for budget in range(120, 380, 7):
        chosen = bits_of(uniform, damage, routing, budget)
        assert np.ptp(chosen) <= 2  # a third only where one last block fills the budget up
        assert (chosen == chosen.max()).sum() + (chosen == chosen.max() - 1).sum() >= 23
        assert total_pages(chosen, PAGES) <= budget


def test_random_is_random_but_repeatable(damage, routing):
    first, again, other = (
        bits_of(dataclasses.replace(CONFIG, kind="random", random_seed=s), damage, routing, 200)
        for s in (1, 1, 2)
    )
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()
    assert (np.diff(random_damage(PAGES, 2, 3, 0), axis=-1) <= 0).all()


def test_frequency_lowers_the_least_used_first(damage, routing):
    config = dataclasses.replace(CONFIG, kind="frequency")
    weighing = weigh(config, damage, PAGES, routing)
    layer, expert, _ = lower_one_by_one(weighing.damage, 1)[0]
    assert routing.relative()[layer, expert] == routing.relative().min()
    assert (weighing.damage[..., -1] == 0).all()


def test_per_layer_gives_the_experts_of_a_layer_one_damage(damage, routing):
    weighing = weigh(dataclasses.replace(CONFIG, kind="per_layer"), damage, PAGES, routing)
    assert (weighing.damage == weighing.damage[:, :1]).all()
    expected = (damage * routing.relative()[..., None, None]).mean(axis=1)
    np.testing.assert_allclose(weighing.damage[:, 0], expected)


def test_switches_take_their_part_out(damage, routing):
    full = weigh(CONFIG, damage, PAGES, routing)
    np.testing.assert_array_equal(full.multiplier, routing.multiplier())
    np.testing.assert_array_equal(full.damage, damage)
    flat = weigh(dataclasses.replace(CONFIG, sensitivity=False), damage, PAGES, routing)
    np.testing.assert_array_equal(flat.damage, flat_damage(PAGES, LAYERS, EXPERTS))
    plain = weigh(dataclasses.replace(CONFIG, routing=False), damage, PAGES, routing)
    assert (plain.multiplier == 1).all()


def test_only_routing_raises_floors(routing):
    hot = PlannerConfig(bucket_floors=(3, 4, 5))
    routing = dataclasses.replace(routing, config=hot)
    assert floors_of(hot, routing).max() == 5
    for change in ({"routing": False}, {"kind": "uniform"}, {"kind": "oracle"}):
        assert floors_of(dataclasses.replace(hot, **change), routing).max() == 3


def test_the_static_optimum_is_never_worse_than_greedy(damage, routing):
    config = dataclasses.replace(CONFIG, kind="static")
    weighing = weigh(config, damage, PAGES, routing)
    for budget in (130, 200, 300):
        best = optimal_bits(weighing.damage, PAGES, weighing.floors, budget)
        greedy = bits_of(config, damage, routing, budget)
        assert total_pages(best, PAGES) <= budget
        costs = [
            np.take_along_axis(weighing.damage, bits[..., None] - 3, axis=-1).sum()
            for bits in (best, greedy)
        ]
        assert costs[0] <= costs[1] * (1 + 1e-3)


def test_the_static_optimum_equals_brute_force():
    generator = np.random.default_rng(3)
    pages = np.array([[2, 3, 5], [1, 3, 4]])
    damage = generator.integers(0, 50, (1, 2, 2, 3)).astype(np.float64)
    for budget in range(6, 19):
        best = np.inf
        for index in np.ndindex(3, 3, 3, 3):
            width = np.array(index).reshape(1, 2, 2)
            if total_pages(width + 3, pages) <= budget:
                best = min(best, np.take_along_axis(damage, width[..., None], axis=-1).sum())
        found = optimal_bits(damage, pages, np.full((1, 2), 3), budget)
        assert np.take_along_axis(damage, found[..., None] - 3, axis=-1).sum() == best


def test_the_static_optimum_respects_floors_and_says_when_they_do_not_fit(damage):
    floors = np.full((LAYERS, EXPERTS), 5)
    ones = np.ones_like(damage)
    assert (optimal_bits(ones, PAGES, floors, 400) >= 5).all()
    with pytest.raises(BudgetTooSmallError):
        optimal_bits(ones, PAGES, floors, 100)


def test_senseless_constants_are_refused():
    with pytest.raises(ValueError, match="residual_limit"):
        PlannerConfig(residual_limit=0.5)
