import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_instances import SEED_BITS, instances

from pw_jax.errors import UserError
from pw_jax.planner.initial import BudgetTooSmallError, initial_bits, total_pages


@given(instances(monotone=True), st.integers(0, 200))
@settings(max_examples=200, deadline=None)
def test_fits_or_says_what_it_needs(inputs, budget):
    parts = (inputs.damage, inputs.pages, inputs.multiplier, inputs.floors)
    floors = np.clip(inputs.floors, SEED_BITS, inputs.parent_bits)
    lowest = np.repeat(floors[..., None], 2, axis=-1)
    needed = total_pages(lowest, inputs.pages)
    if needed > budget:
        with pytest.raises(BudgetTooSmallError) as caught:
            initial_bits(*parts, budget)
        assert (caught.value.pages_needed, caught.value.pages_budget) == (needed, budget)
        assert str(needed) in str(caught.value)
        assert str(budget) in str(caught.value)
        assert isinstance(caught.value, UserError)
        return
    bits = initial_bits(*parts, budget)
    assert total_pages(bits, inputs.pages) <= budget
    assert (bits >= lowest).all()
    parent = np.full_like(bits, inputs.parent_bits)
    if total_pages(parent, inputs.pages) <= budget:
        np.testing.assert_array_equal(bits, parent)


def test_what_the_last_step_left_over_is_spent():
    # 30 pages at parent; gate_up frees 10 for the 2 that are missing, so down need not move.
    pages = np.array([[5, 15], [13, 15]])
    damage = np.array([[[[10.0, 0.0], [40.0, 0.0]]]])
    ones, floors = np.ones((1, 1)), np.full((1, 1), 3)
    bits = initial_bits(damage, pages, ones, floors, 28)
    assert bits.tolist() == [[[3, 4]]]
    assert initial_bits(damage, pages, ones, floors, 30).tolist() == [[[4, 4]]]
