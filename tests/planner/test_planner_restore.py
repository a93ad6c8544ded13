import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from planner_instances import all_outcomes, check_plan, instances

from pw_jax.planner.hull import RESTORE, convex_steps
from pw_jax.planner.plan import PlanInputs, _blocks_that_may_move, plan_release, plan_restore


@given(instances(), st.integers(0, 150))
@settings(max_examples=200, deadline=None)
def test_against_brute_force(inputs, available):
    plan = plan_restore(inputs, available)
    check_plan(inputs, plan, release=False)
    assert 0 <= -plan.pages_released <= available
    assert plan.shortage == 0
    pages, damage = all_outcomes(inputs, release=False)
    best = damage[-pages <= available].min()
    assert best <= plan.damage_added <= best + plan.bound_gap + 1e-9


@given(instances(), st.data())
@settings(max_examples=200, deadline=None)
def test_optimal_where_convex_steps_end_on_what_is_available(inputs, data):
    steps = convex_steps(_blocks_that_may_move(inputs, RESTORE)[1])
    assume(len(steps.size))
    available = int(data.draw(st.sampled_from(np.cumsum(steps.size).tolist())))
    plan = plan_restore(inputs, available)
    pages, damage = all_outcomes(inputs, release=False)
    assert plan.damage_added == damage[-pages <= available].min()
    assert plan.bound_gap == 0


@given(instances(), st.integers(0, 100))
@settings(max_examples=200, deadline=None)
def test_only_upwards_and_only_what_may_move(inputs, available):
    after = plan_restore(inputs, available).apply(inputs.bits)
    assert (after >= inputs.bits).all()
    assert (after <= inputs.parent_bits).all()
    assert (after[~inputs.movable] == inputs.bits[~inputs.movable]).all()


@given(instances(monotone=True))
@settings(max_examples=100, deadline=None)
def test_plenty_of_pages_leaves_nothing_to_gain(inputs):
    plan = plan_restore(inputs, 10_000)
    after = plan.apply(inputs.bits)
    left = (
        inputs.damage[..., -1]
        < np.take_along_axis(inputs.damage, after[..., None] - inputs.seed_bits, axis=-1)[..., 0]
    )
    assert not left[inputs.movable].any()
    assert plan.bound_gap == 0


def inputs_at(bits):
    damage = np.array([[[[32.0, 16, 8, 4, 2, 1], [31, 15, 7, 3, 1, 0]]]])
    pages = np.array([[6, 8, 10, 12, 14, 18], [3, 4, 5, 6, 7, 9]])
    ones = np.ones((1, 1))
    floors = np.full((1, 1), 3)
    return PlanInputs(
        np.array([[bits]]), damage, pages, ones, floors, np.ones((1, 1, 2), dtype=bool)
    )


def test_greatest_damage_avoided_per_page_comes_first():
    plan = plan_restore(inputs_at([3, 3]), 1)
    assert [tuple(step) for step in plan] == [(0, 0, 1, 3, 4)]


def test_too_large_a_step_does_not_bar_smaller_ones():
    # gate_up 3 -> 4 needs 2 pages; with 1 page left, down still moves.
    plan = plan_restore(inputs_at([3, 4]), 1)
    assert [tuple(step) for step in plan] == [(0, 0, 1, 4, 5)]


def test_a_width_above_the_hull_is_taken_where_the_hull_step_does_not_fit():
    damage = np.array([[[[90.0, 80, 0], [90, 80, 0]]]])
    pages = np.array([[2, 18, 35], [2, 18, 35]])
    ones, floors = np.ones((1, 1)), np.full((1, 1), 5)
    movable = np.array([[[True, False]]])
    inputs = PlanInputs(np.full((1, 1, 2), 3), damage, pages, ones, floors, movable)
    plan = plan_restore(inputs, 22)
    assert [tuple(step) for step in plan] == [(0, 0, 0, 3, 4)]
    nothing = plan_restore(inputs, 11)
    assert len(nothing) == 0
    # An empty plan has its gap too: a third of the step would have avoided 30.
    assert nothing.bound_gap == 30.0


def test_release_undone_by_restore():
    inputs = inputs_at([8, 8])
    down = plan_release(inputs, 12)
    up = plan_restore(inputs_at(down.apply(inputs.bits)[0, 0].tolist()), down.pages_released)
    assert (up.apply(down.apply(inputs.bits)) == 8).all()
    assert up.pages_released == -down.pages_released
    assert up.damage_added == -down.damage_added


def test_a_block_below_its_floor_may_rise_by_steps():
    inputs = inputs_at([3, 3])
    raised = PlanInputs(
        inputs.bits,
        inputs.damage,
        inputs.pages,
        inputs.multiplier,
        inputs.floors + 2,
        inputs.movable,
    )
    assert plan_restore(raised, 1).apply(inputs.bits).tolist() == [[[3, 4]]]
    assert plan_release(raised, 1).shortage == 1
