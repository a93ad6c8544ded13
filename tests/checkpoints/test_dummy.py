"""Random weights, on one device and over a mesh."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from parallel_models import LLAMA

from checkpoints.dummy import random_parallel_model, random_weights
from checkpoints.engine import TensorParallel
from pw_jax.low_rank.layers import factorable_shapes
from pw_jax.low_rank.ranks import uniform_ranks
from pw_jax.models import registry
from pw_jax.models.memory import SequenceMemory
from sharding.placement import bytes_on_a_device

DEVICES = 3


def logits(model: Any) -> np.ndarray:
    graph, leaves = nnx.split(model) if isinstance(model, nnx.Module) else (None, model)
    tokens = jnp.arange(12, dtype=jnp.int32)[None]

    def run(leaves):
        whole: Any = leaves if graph is None else nnx.merge(graph, leaves)
        hidden = whole(tokens, tokens, SequenceMemory(jnp.ones(tokens.shape, bool))).hidden
        return whole.logits(hidden)

    return np.asarray(jax.jit(run)(leaves))


def test_over_a_mesh_they_are_the_same():
    config = registry.read_config(LLAMA | {"num_hidden_layers": 1})
    ranks = uniform_ranks(factorable_shapes(registry.build_model(config)), 0.8)
    model = registry.build_model(config, ranks=ranks)
    alone = random_weights(model)
    parallel = random_parallel_model(model, TensorParallel.over(DEVICES, "sharded"))
    expected = logits(alone)
    assert expected.std() > 0.1
    np.testing.assert_allclose(logits(parallel), expected, rtol=0, atol=1e-4)
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(alone))
    share = sum(bytes_on_a_device(leaf) for leaf in jax.tree.leaves(parallel))
    assert share < 0.6 * whole
