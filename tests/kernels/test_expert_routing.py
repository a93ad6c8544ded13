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
    units = make_units(routing, capacity)
    places = np.asarray(unit_places(units, capacity, ids.size))
    seen = {}
    for unit in range(int(units.count[0])):
        tokens = int(units.tokens[unit])
        assert 0 < tokens <= capacity
        for place in places[unit, :tokens].tolist():
            assert place not in seen
            seen[place] = int(units.expert[unit])
    assert [seen[place] for place in sorted(seen)] == sorted(ids[ids < EXPERTS].tolist())
    np.testing.assert_array_equal(units.tokens[int(units.count[0]) :], 0)


def test_a_decode_step_has_no_loop_in_its_work_list():
    def work_list(ids):
        units = make_units(route(ids, 60), 4)
        return units, unit_places(units, 4, ids.size)

    text = lowered_for_h200(work_list, jax.ShapeDtypeStruct((64, 4), jnp.int32))
    assert "stablehlo.reduce" in text
    assert not [op for op in ("while", "sort", "reduce_window") if f"stablehlo.{op}" in text]
