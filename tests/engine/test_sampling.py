"""Draws, on one device and over a mesh."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from pw_jax.engine.sampling import SamplingArrays, sample
from sharding.collectives import read_collectives
from sharding.mesh import AXIS, tensor_mesh

ROWS, VOCABULARY = 3, 256


def arrays(top_k=0, top_p=1.0):
    """Three rows: warm, greedy, hot."""
    return SamplingArrays(
        np.array([0.8, 0, 5], np.float32),
        np.full(ROWS, top_k, np.int32),
        np.full(ROWS, top_p, np.float32),
        np.array([1, 2, 3], np.uint32),
    )


def logits(seed=0):
    draws = np.random.default_rng(seed).standard_normal((ROWS, VOCABULARY))
    return jnp.asarray(4 * draws, jnp.float32)


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (5, 1.0), (0, 0.7)])
@pytest.mark.parametrize("devices", [2, 4])
def test_over_a_mesh_the_same_tokens_are_drawn(devices, top_k, top_p):
    filters = top_k > 0 or top_p < 1
    alone = jax.jit(partial(sample, filters=filters))
    columns = NamedSharding(tensor_mesh(devices), PartitionSpec(None, AXIS))
    whole = NamedSharding(tensor_mesh(devices), PartitionSpec())
    divided = jax.jit(
        partial(sample, filters=filters), in_shardings=(columns, None, None), out_shardings=whole
    )
    sampling = arrays(top_k, top_p)
    drawn = []
    for step in range(20):
        positions = jnp.full(ROWS, step, jnp.int32)
        drawn.append(np.asarray(alone(logits(step), sampling, positions)))
        again = divided(jax.device_put(logits(step), columns), sampling, positions)
        np.testing.assert_array_equal(again, drawn[-1])
    assert len({int(tokens[0]) for tokens in drawn}) > 5
    if filters:
        return
    found = read_collectives(divided.lower(logits(), sampling, jnp.zeros(ROWS, jnp.int32)))
    assert found
    # Of each row a few numbers of each device, not its logits.
    assert max(one.elements for one in found) <= 2 * ROWS * devices


def test_without_filters_the_same_is_drawn():
    positions = jnp.arange(ROWS, dtype=jnp.int32)
    for step in range(20):
        plain, filtered = (
            sample(logits(step), arrays(), positions + step, filters=filters)
            for filters in (False, True)
        )
        np.testing.assert_array_equal(plain, filtered)


def test_filters_rule_tokens_out():
    positions = jnp.arange(ROWS, dtype=jnp.int32)
    best = np.argsort(-logits())
    drawn = np.stack(
        [sample(logits(), arrays(top_k=3), positions + ROWS * step) for step in range(40)]
    )
    for row in (0, 2):
        assert set(drawn[:, row]) <= set(best[row, :3])
    assert len(set(drawn[:, 2])) == 3
    np.testing.assert_array_equal(drawn[:, 1], best[1, 0])
