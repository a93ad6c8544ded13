"""Work lists of experts, against numpy's stable sort."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paged_pool import lowered_for_h200

from pallas_kernels.paged_expert_ffn.routing import MOST_COUNTED, make_units, route, unit_places

EXPERTS = 11


def random_ids(tokens: int, top_k: int, seed: int) -> np.ndarray:
    """Choices among a few experts, so that some are idle and some busy; EXPERTS means none."""
    rng = np.random.default_rng(seed)
    return rng.choice([0, 2, 3, 7, 10, EXPERTS], size=(tokens, top_k)).astype(np.int32)


@pytest.mark.parametrize("tokens", [1, 2, 37, MOST_COUNTED // 4, MOST_COUNTED // 4 + 1])
def test_places_are_those_of_a_stable_sort(tokens):
    ids = random_ids(tokens, 4, tokens)
    routing = route(jnp.asarray(ids), EXPERTS)
    order = np.argsort(ids.reshape(-1), kind="stable")
    np.testing.assert_array_equal(routing.token, order // 4)
    np.testing.assert_array_equal(np.asarray(routing.place).reshape(-1)[order], np.arange(ids.size))
    np.testing.assert_array_equal(routing.real, ids < EXPERTS)
    np.testing.assert_array_equal(routing.counts, np.bincount(ids[ids < EXPERTS], minlength=11))
    np.testing.assert_array_equal(routing.starts, [(ids < expert).sum() for expert in range(11)])


@pytest.mark.parametrize("capacity", [4, 16])
def test_units_hold_every_place_of_an_expert_once(capacity):
    ids = random_ids(50, 4, capacity)
    routing = route(jnp.asarray(ids), EXPERTS)
    cost = np.asarray([3, 8, 5, 8, 3, 4, 3, 5, 8, 3, 8], np.int32)
    units = make_units(routing, capacity, jnp.asarray(cost))
    places = np.asarray(unit_places(units, capacity, ids.size))
    seen = {}
    for unit in range(int(units.count[0])):
        tokens = int(units.tokens[unit])
        assert 0 < tokens <= capacity
        for place in places[unit, :tokens].tolist():
            assert place not in seen
            seen[place] = int(units.expert[unit])
    assert [seen[place] for place in sorted(seen)] == sorted(ids[ids < EXPERTS].tolist())
    used = np.asarray(units.expert)[: int(units.count[0])]
    np.testing.assert_array_equal(units.tokens[len(used) :], 0)
    needed = -(-np.asarray(routing.counts) // capacity)
    by_cost = np.argsort(-cost, kind="stable")  # the costliest first, no loss of any
    np.testing.assert_array_equal(used, np.repeat(by_cost, needed[by_cost]))


def test_warps_that_take_turns_get_equal_work():
    """As warps take items: in turn, over a stride that is as long as six experts."""
    cost = np.asarray([3 + expert % 6 for expert in range(60)], np.int32)
    tiles, warps = 176, 6 * 176
    ids = jnp.arange(60, dtype=jnp.int32)[:, None]
    units = make_units(route(ids, 60), 4, jnp.asarray(cost))
    work = np.repeat(cost[np.asarray(units.expert)], tiles).reshape(-1, warps).sum(axis=0)
    assert work.max() <= 1.05 * work.mean()
    in_order = np.repeat(cost, tiles).reshape(-1, warps).sum(axis=0)
    assert in_order.max() > 1.4 * in_order.mean()  # what it was


def test_a_decode_step_has_no_loop_in_its_work_list():
    def work_list(ids, cost):
        units = make_units(route(ids, 60), 4, cost)
        return units, unit_places(units, 4, ids.size)

    shapes = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((64, 4), (60,))]
    text = lowered_for_h200(work_list, *shapes)
    assert "stablehlo.reduce" in text
    assert not [op for op in ("while", "sort", "reduce_window") if f"stablehlo.{op}" in text]
