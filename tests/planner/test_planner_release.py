import dataclasses

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from planner_instances import all_outcomes, check_plan, instances

from pw_jax.planner import hull as hull_module
from pw_jax.planner import plan as plan_module
from pw_jax.planner.hull import RELEASE, convex_steps, in_reach
from pw_jax.planner.plan import PlanInputs, _blocks_that_may_move, plan_release

PAGES = np.array([[6, 8, 10, 12, 14, 18], [3, 4, 5, 6, 7, 9]])


def one_layer(damage, bits, **changes):
    damage = np.asarray(damage, dtype=np.float64)
    experts = len(damage)
    given_values = {
        "bits": np.full((1, experts, 2), bits),
        "damage": damage[None],
        "pages": PAGES[:, : damage.shape[-1]],
        "multiplier": np.ones((1, experts)),
        "floors": np.full((1, experts), 3),
        "movable": np.ones((1, experts, 2), dtype=bool),
    }
    return PlanInputs(**(given_values | changes))


def check_within_the_bound(inputs, wanted, plan):
    """Against all outcomes there are."""
    pages, damage = all_outcomes(inputs, release=True)
    met = min(wanted, int(pages.max()))
    assert plan.shortage == wanted - met
    assert plan.pages_released >= met
    best = damage[pages >= met].min()
    assert best <= plan.damage_added <= best + plan.bound_gap + 1e-9


@given(instances(), st.integers(1, 150))
@settings(max_examples=200, deadline=None)
def test_against_brute_force(inputs, wanted):
    plan = plan_release(inputs, wanted)
    check_plan(inputs, plan, release=True)
    check_within_the_bound(inputs, wanted, plan)


@given(instances(), st.data())
@settings(max_examples=200, deadline=None)
def test_optimal_where_convex_steps_end_on_the_demand(inputs, data):
    steps = convex_steps(_blocks_that_may_move(inputs, RELEASE)[1])
    assume(len(steps.size))
    wanted = int(data.draw(st.sampled_from(np.cumsum(steps.size).tolist())))
    plan = plan_release(inputs, wanted)
    pages, damage = all_outcomes(inputs, release=True)
    assert plan.damage_added == damage[pages >= wanted].min()
    assert plan.bound_gap == 0
    assert plan.pages_released == wanted


@given(instances(), st.integers(0, 100), st.integers(0, 50))
@settings(max_examples=150, deadline=None)
def test_more_demand_never_gives_less_damage(inputs, wanted, more):
    less, greater = plan_release(inputs, wanted), plan_release(inputs, wanted + more)
    assert less.damage_added <= greater.damage_added
    assert less.shortage <= greater.shortage


@given(instances(), st.integers(0, 100))
@settings(max_examples=200, deadline=None)
def test_floors_hold_and_inputs_stay(inputs, wanted):
    before = inputs.bits.copy(), inputs.damage.copy()
    after = plan_release(inputs, wanted).apply(inputs.bits)
    floors = np.clip(inputs.floors, 3, inputs.parent_bits)[..., None]
    assert (after >= np.minimum(floors, inputs.bits)).all()
    assert (after <= inputs.bits).all()
    assert (after[~inputs.movable] == inputs.bits[~inputs.movable]).all()
    np.testing.assert_array_equal(inputs.bits, before[0])
    np.testing.assert_array_equal(inputs.damage, before[1])


@given(instances())
@settings(max_examples=50, deadline=None)
def test_no_demand_is_an_empty_plan(inputs):
    plan = plan_release(inputs, 0)
    assert len(plan) == 0
    assert (plan.pages_released, plan.shortage, plan.damage_added, plan.bound_gap) == (0, 0, 0, 0)


def test_nothing_movable_is_all_shortage():
    inputs = one_layer(np.ones((2, 2, 6)), bits=8, movable=np.zeros((1, 2, 2), dtype=bool))
    plan = plan_release(inputs, 7)
    assert (len(plan), plan.pages_released, plan.shortage) == (0, 0, 7)


def test_no_experts():
    inputs = one_layer(np.zeros((0, 2, 6)), bits=8)
    assert plan_release(inputs, 3).shortage == 3


def test_steps_of_a_block_are_merged():
    cheap, dear = [5, 4, 3, 2, 1, 0], [500, 400, 300, 200, 100, 0]
    inputs = one_layer([[dear, cheap]], bits=8)
    plan = plan_release(inputs, 6)
    assert [tuple(step) for step in plan] == [(0, 0, 1, 8, 3)]
    assert plan.damage_added == 5


def test_a_large_last_step_is_replaced_by_the_smallest_sufficient_one():
    # By damage per page gate_up (4 pages for 5) goes before down (2 pages for 4).
    gate_up, down = [5, 5, 5, 5, 5, 0], [4, 4, 4, 4, 4, 0]
    inputs = one_layer([[gate_up, down]], bits=8, floors=np.array([[7]]))
    plan = plan_release(inputs, 2)
    assert [tuple(step) for step in plan] == [(0, 0, 1, 8, 7)]
    assert plan.bound_gap == pytest.approx(4 - 2 * 5 / 4)


def test_a_large_last_step_makes_earlier_ones_unnecessary():
    gate_up, down = [90, 90, 90, 90, 90, 0], [2, 2, 2, 2, 2, 0]
    inputs = one_layer([[gate_up, down]], bits=8, floors=np.array([[7]]))
    assert [step.module for step in plan_release(inputs, 3)] == [0]


def test_a_width_that_frees_no_page_is_skipped():
    pages = np.array([[6, 8, 8, 8], [3, 4, 4, 4]])
    damage = np.broadcast_to(np.array([30.0, 20.0, 10.0, 0.0]), (1, 1, 2, 4))
    inputs = one_layer(damage[0], bits=6, pages=pages)
    assert [step.to_bits for step in plan_release(inputs, 1)] == [3]


def test_rounding_bumps_are_stepped_over():
    # 7 bits looks worse than 6: the first step goes from 8 to 6.
    bump = [40, 30, 20, 10, 12, 0]
    inputs = one_layer([[bump, bump]], bits=8)
    steps = convex_steps(_blocks_that_may_move(inputs, RELEASE)[1])
    assert (steps.source[0], steps.target[0]) == (5, 3)


def test_a_narrower_width_that_is_better_costs_nothing_but_is_not_taken_unasked():
    better_below = [9, 8, 7, 6, 1, 5]
    inputs = one_layer([[better_below, [60, 50, 40, 30, 20, 0]]], bits=8)
    assert len(plan_release(inputs, 0)) == 0
    plan = plan_release(inputs, 4)
    assert [tuple(step) for step in plan] == [(0, 0, 0, 8, 7)]
    assert plan.damage_added == 0


def test_ties_are_deterministic():
    damage = np.broadcast_to(np.array([5.0, 4, 3, 2, 1, 0]), (4, 2, 6))
    inputs = one_layer(damage, bits=8, pages=np.arange(1, 13).reshape(2, 6))
    plans = [plan_release(inputs, 5) for _ in range(3)]
    # Widest first, then in the order of the blocks.
    assert [tuple(step)[:3] for step in plans[0]] == [
        (0, 0, 0),
        (0, 0, 1),
        (0, 1, 0),
        (0, 1, 1),
        (0, 2, 0),
    ]
    for plan in plans[1:]:
        np.testing.assert_array_equal(plan.steps, plans[0].steps)


def test_hot_experts_keep_their_bits():
    damage = np.broadcast_to(np.array([5.0, 4, 3, 2, 1, 0]), (2, 2, 6))
    inputs = one_layer(damage, bits=8, multiplier=np.array([[2.0, 1.0]]))
    assert {step.expert for step in plan_release(inputs, 6)} == {1}
    prompts = np.array([[[1.0, 1.0], [3.0, 3.0]]])
    turned = dataclasses.replace(inputs, prompt_factor=prompts)
    assert {step.expert for step in plan_release(turned, 6)} == {0}


@pytest.mark.parametrize("bad", [np.nan, np.inf, -1.0])
@pytest.mark.parametrize("name", ["damage", "multiplier"])
def test_bad_numbers_are_refused(name, bad):
    inputs = one_layer(np.ones((1, 2, 6)), bits=8)
    values = getattr(inputs, name).copy()
    values.flat[0] = bad
    with pytest.raises(ValueError, match=f"{name} must be finite"):
        dataclasses.replace(inputs, **{name: values})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bits": np.full((1, 1, 2), 9)}, "within 3..8"),
        ({"bits": np.full((1, 1, 2), 2)}, "within 3..8"),
        ({"pages": PAGES[:, ::-1]}, "nor fall with the width"),
        ({"floors": np.full((2, 1), 3)}, "floors"),
    ],
)
def test_bad_inputs_are_refused(changes, message):
    inputs = one_layer(np.ones((1, 2, 6)), bits=8)
    # A wrong shape is a TypeError where annotations are checked, as here, and else a ValueError.
    with pytest.raises((ValueError, TypeError), match=message):
        dataclasses.replace(inputs, **changes)


def many_blocks(generator):
    shape = (6, 40, 2)
    damage = np.cumsum(generator.exponential(1.0, (*shape, 6)), axis=-1)[..., ::-1]
    return PlanInputs(
        generator.integers(3, 9, shape),
        damage,
        PAGES,
        np.ones(shape[:2]),
        generator.integers(3, 6, shape[:2]),
        generator.random(shape) < 0.9,
    )


@pytest.mark.parametrize("wanted", [1, 7, 40, 150])
def test_small_releases_look_at_few_blocks_and_choose_the_same(wanted, monkeypatch):
    inputs = many_blocks(np.random.default_rng(wanted))
    plan = plan_release(inputs, wanted)
    looked_at = in_reach(_blocks_that_may_move(inputs, RELEASE)[1], wanted)
    monkeypatch.setattr(plan_module, "in_reach", lambda blocks, _: np.arange(len(blocks.start)))
    of_all = plan_release(inputs, wanted)
    np.testing.assert_array_equal(plan.steps, of_all.steps)
    assert plan.bound_gap == of_all.bound_gap
    assert len(looked_at) < inputs.bits.size / 3


@given(instances(), st.integers(1, 150))
@settings(max_examples=100, deadline=None)
def test_plans_that_look_at_few_blocks_stay_within_the_gap(inputs, wanted):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hull_module, "LEAST_BLOCKS", 1)
        patch.setattr(hull_module, "SMALL_SHARE", 1.0)
        plan = plan_release(inputs, wanted)
    check_within_the_bound(inputs, wanted, plan)
