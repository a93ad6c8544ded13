"""Whole factored models over devices write what they write on one, token by token."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from parallel_models import LLAMA, MLA, OPT, model_of

from pw_jax.errors import UserError
from pw_jax.models.memory import SequenceMemory
from pw_jax.tensor_parallel.model import parallelize
from sharding.collectives import read_collectives, widths
from sharding.mesh import tensor_mesh

LENGTH, NEW = 24, 16


def greedy(step) -> list[int]:
    """Tokens written after a prompt, the whole text anew for each."""
    tokens = np.zeros((1, LENGTH), np.int32)
    tokens[0, : LENGTH - NEW] = np.arange(3, 3 + LENGTH - NEW) * 7 % 131
    for end in range(LENGTH - NEW, LENGTH):
        scores = step(jnp.asarray(tokens), jnp.int32(end - 1))
        tokens[0, end] = int(jnp.argmax(scores))
    return tokens[0].tolist()


def step_of(model: Any):
    """One compiled step: logits behind the token at `last`."""
    split = nnx.split(model) if isinstance(model, nnx.Module) else None
    leaves = model if split is None else split[1]

    def step(leaves, tokens, last):
        whole: Any = leaves if split is None else nnx.merge(split[0], leaves)
        positions = jnp.arange(LENGTH, dtype=jnp.int32)[None]
        memory = SequenceMemory(jnp.ones((1, LENGTH), bool))
        hidden = whole(tokens, positions, memory).hidden
        return whole.logits(jax.lax.dynamic_slice_in_dim(hidden, last, 1, axis=1))[0, 0]

    compiled = jax.jit(step)
    return lambda tokens, last: compiled(leaves, tokens, last)


@pytest.fixture(scope="module", params=["llama", "opt", "mla"])
def factored(request):
    model = model_of({"llama": LLAMA, "opt": OPT, "mla": MLA}[request.param])
    written = greedy(step_of(model))
    assert len(set(written[LENGTH - NEW :])) > 4  # not one token for ever
    return model, written


@pytest.mark.parametrize(
    ("layout", "devices"),
    [
        ("naive", 8),
        pytest.param("gathered", 1, marks=pytest.mark.slow),
        pytest.param("gathered", 5, marks=pytest.mark.slow),
        ("gathered", 8),
        ("sharded", 3),
        pytest.param("sharded", 8, marks=pytest.mark.slow),
    ],
)
def test_factored_model_writes_the_same(factored, layout, devices):
    model, written = factored
    over_devices = parallelize(model, tensor_mesh(devices), layout)
    assert greedy(step_of(over_devices)) == written


def test_whole_model_in_the_dense_layout():
    model = model_of(LLAMA, factored=False)
    over_devices = parallelize(model, tensor_mesh(8), "dense")
    assert greedy(step_of(over_devices)) == greedy(step_of(model))
    # 12 heads in pairs with a copy of their kv head each.
    assert [kv.kv_heads for kv in over_devices.kv_shapes] == [1, 1, 1]


@pytest.mark.parametrize("layout", ["gathered", "sharded"])
def test_layers_communicate_in_the_rank_space(layout):
    over_devices = parallelize(model_of(LLAMA), tensor_mesh(8), layout)

    def hidden(model, tokens):
        positions = jnp.arange(LENGTH, dtype=jnp.int32)[None]
        return model(tokens, positions, SequenceMemory(jnp.ones((1, LENGTH), bool))).hidden

    tokens = jax.ShapeDtypeStruct((1, LENGTH), jnp.int32)
    found = read_collectives(jax.jit(hidden).lower(over_devices, tokens))
    assert found
    assert not widths(found) & {46, 48, 74, 80, 96}
    assert sum(len(one.shapes) for one in found) == 12 + 7 * (layout == "sharded")


def test_what_is_not_laid_out_is_refused():
    mesh = tensor_mesh(2)
    with pytest.raises(UserError, match=r"model\.layers\.0: the naive layout needs factors"):
        parallelize(model_of(LLAMA, factored=False), mesh, "naive")
    with pytest.raises(UserError, match=r"layers\.0: the dense layout .* multiply the factors"):
        parallelize(model_of(LLAMA), mesh, "dense")
