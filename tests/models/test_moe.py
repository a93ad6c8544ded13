"""Routing and experts against loops over tokens."""

import dataclasses
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pallas_kernels.paged_expert_ffn import Activation
from pw_jax.errors import UserError
from pw_jax.models import moe
from pw_jax.models.config import ExpertShape
from pw_jax.models.layers import ACTIVATIONS
from pw_jax.models.memory import SequenceMemory
from pw_jax.models.moe import (
    KERNEL_ACTIVATIONS,
    DenseExperts,
    PagedExperts,
    Router,
    all_experts,
    chosen_experts,
    routing_mass,
)

SHAPE = ExpertShape(experts=6, top_k=3, embed=16, ffn=8, activation="silu")
MEMORY = SequenceMemory(jnp.ones((1, 5), bool))


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def dense_experts(dtype=jnp.float32) -> DenseExperts:
    experts = DenseExperts(SHAPE, dtype=dtype)
    experts.gate_up_proj.set_value(jnp.asarray(normal(6, 16, 16, seed=1), dtype))
    experts.down_proj.set_value(jnp.asarray(normal(6, 16, 8, seed=2), dtype))
    return experts


def expected_sum(experts: DenseExperts, x, expert_ids, weights) -> np.ndarray:
    gate_up, down = np.asarray(experts.gate_up_proj[...]), np.asarray(experts.down_proj[...])
    out = np.zeros_like(x)
    for m in range(len(x)):
        for e, weight in zip(expert_ids[m], weights[m], strict=True):
            gate, up = np.split(gate_up[e] @ x[m], 2)
            out[m] += weight * (down[e] @ (gate / (1 + np.exp(-gate)) * up))
    return out


@pytest.mark.parametrize("renormalize", [False, True])
def test_router_takes_the_largest_of_a_softmax_over_all(renormalize):
    router = Router(SHAPE, renormalize=renormalize, dtype=jnp.float32)
    router.weight.set_value(jnp.asarray(normal(6, 16, seed=3)))
    x = normal(5, 16)
    expert_ids, weights = router(jnp.asarray(x))
    assert expert_ids.dtype == jnp.int32
    assert weights.dtype == jnp.float32
    logits = x @ np.asarray(router.weight[...]).T
    probability = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    order = np.argsort(-probability, axis=-1)[:, :3]
    expected = np.take_along_axis(probability, order, axis=-1)
    if renormalize:
        expected = expected / expected.sum(-1, keepdims=True)
    np.testing.assert_array_equal(expert_ids, order)
    np.testing.assert_allclose(weights, expected, rtol=1e-5)


def test_equal_scores_take_the_first_experts():
    router = Router(SHAPE, renormalize=False, dtype=jnp.float32)
    expert_ids, _ = router(jnp.asarray(normal(2, 16)))
    np.testing.assert_array_equal(expert_ids, [[0, 1, 2]] * 2)


@pytest.mark.parametrize("product", [all_experts, chosen_experts])
def test_dense_experts_sum_the_chosen(product):
    experts, x = dense_experts(), normal(5, 16)
    expert_ids = np.array([[0, 1, 2], [5, 0, 3], [4, 2, 1], [0, 5, 4], [3, 4, 5]], np.int32)
    weights = np.abs(normal(5, 3, seed=4))
    arrays = experts.gate_up_proj[...], experts.down_proj[...]
    out = product(
        jnp.asarray(x), jnp.asarray(expert_ids), jnp.asarray(weights), *arrays, SHAPE.activation
    )
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(
        out, expected_sum(experts, x, expert_ids, weights), rtol=1e-4, atol=1e-4
    )


def test_few_choices_on_a_gpu_read_the_chosen_only(monkeypatch):
    """Six choices of six experts are not few; three are."""
    made = []
    for name in ("all_experts", "chosen_experts"):
        monkeypatch.setattr(moe, name, lambda *a, name=name: made.append(name) or a[0])
    experts, x = dense_experts(), jnp.asarray(normal(2, 16))
    ids, weights = jnp.zeros((2, 3), jnp.int32), jnp.ones((2, 3))
    experts(x, ids, weights, MEMORY, 0)
    monkeypatch.setattr(moe, "on_gpu", lambda: True)
    experts(x, ids, weights, MEMORY, 0)
    experts(x[:1], ids[:1], weights[:1], MEMORY, 0)
    assert made == ["all_experts", "all_experts", "chosen_experts"]


def test_bfloat16_experts_sum_in_float32():
    x, ids = jnp.asarray(normal(1, 16), jnp.bfloat16), jnp.asarray([[0, 1, 2]], jnp.int32)
    out = dense_experts(jnp.bfloat16)(x, ids, jnp.full((1, 3), 0.3, jnp.float32), MEMORY, 0)
    assert out.dtype == jnp.float32
    assert not np.array_equal(out, out.astype(jnp.bfloat16).astype(jnp.float32))


def test_only_chosen_experts_have_gradients():
    graph, state = nnx.split(dense_experts())
    ids = jnp.asarray([[0, 3, 4]], jnp.int32)

    def loss(state):
        experts = nnx.merge(graph, state)
        out = experts(jnp.asarray(normal(1, 16)), ids, jnp.ones((1, 3), jnp.float32), MEMORY, 0)
        return jnp.square(out).sum()

    for gradient in jax.tree.leaves(jax.grad(loss)(state)):
        size = np.abs(np.asarray(gradient)).sum(axis=(1, 2))
        np.testing.assert_array_equal(size > 0, [True, False, False, True, True, False])


def test_paged_experts_ask_the_memory():
    x, ids, weights = jnp.ones((2, 16)), jnp.zeros((2, 3), jnp.int32), jnp.ones((2, 3))

    class Pages(SequenceMemory):
        def expert_ffn(self, moe_index, x, expert_ids, weights, activation):
            assert (moe_index, activation, expert_ids.shape) == (4, "silu", (2, 3))
            return 2 * x

    experts = PagedExperts(SHAPE)
    assert not jax.tree.leaves(experts)
    np.testing.assert_array_equal(experts(x, ids, weights, Pages(MEMORY.token_mask), 4), 2 * x)
    with pytest.raises(TypeError, match="need a memory with pages, got SequenceMemory"):
        experts(x, ids, weights, MEMORY, 4)


def test_activations_are_called_as_the_kernels_do():
    gelu = dataclasses.replace(SHAPE, activation="gelu_pytorch_tanh")
    assert PagedExperts(gelu).activation == "gelu_tanh"
    assert set(KERNEL_ACTIVATIONS) <= set(ACTIVATIONS)
    assert set(KERNEL_ACTIVATIONS.values()) == set(get_args(Activation))
    with pytest.raises(UserError, match="no activation 'relu', only gelu_pytorch_tanh, silu"):
        PagedExperts(dataclasses.replace(SHAPE, activation="relu"))


def test_padding_has_no_routing_mass():
    ids = jnp.asarray([[0, 1, 2], [2, 3, 4]], jnp.int32)
    weights = jnp.asarray([[0.5, 0.25, 0.125], [0.5, 0.25, 0.125]], jnp.float32)
    mass = routing_mass(ids, weights, jnp.asarray([True, False]), 6)
    np.testing.assert_array_equal(mass, [0.5, 0.25, 0.125, 0, 0, 0])
    mass = routing_mass(ids, weights, jnp.asarray([True, True]), 6)
    np.testing.assert_array_equal(mass, [0.5, 0.25, 0.625, 0.25, 0.125, 0])
