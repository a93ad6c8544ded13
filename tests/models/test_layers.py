"""Shared layers and the cacheless memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pw_jax.models.config import RopeConfig
from pw_jax.models.layers import Embedding, Linear, RmsNorm, rope_frequencies, rope_tables, rotate
from pw_jax.models.memory import Memory, SequenceMemory

LLAMA3 = RopeConfig(5e5, "llama3", 8.0, 1.0, 4.0, 8192)


def test_plain_and_linear_frequencies():
    np.testing.assert_allclose(rope_frequencies(RopeConfig(1e4), 8), [1, 0.1, 0.01, 0.001])
    linear = RopeConfig(1e4, "linear", factor=4.0)
    np.testing.assert_allclose(rope_frequencies(linear, 8), [0.25, 0.025, 0.0025, 0.00025])


def test_llama3_frequencies_follow_the_published_rule():
    plain = rope_frequencies(RopeConfig(5e5), 128)
    ours = rope_frequencies(LLAMA3, 128)
    rules = set()
    for frequency, scaled in zip(plain.tolist(), ours.tolist(), strict=True):
        wavelength = 2 * np.pi / frequency
        if wavelength < 8192 / 4:
            rule, expected = "kept", frequency
        elif wavelength > 8192:
            rule, expected = "stretched", frequency / 8
        else:
            blend = (8192 / wavelength - 1) / (4 - 1)
            rule, expected = "blended", (1 - blend) * frequency / 8 + blend * frequency
        rules.add(rule)
        assert scaled == pytest.approx(expected, rel=1e-6)
    assert rules == {"kept", "blended", "stretched"}


def test_rotation_keeps_relative_positions():
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.standard_normal((1, 1, 1, 16), np.float32)) for _ in range(2))

    def score(query_position, key_position):
        rotated = [
            rotate(x, rope_tables(LLAMA3, 16, jnp.asarray([[p]], jnp.int32), jnp.float32))
            for x, p in ((q, query_position), (k, key_position))
        ]
        return float(jnp.vdot(*rotated))

    assert score(7, 3) == pytest.approx(score(104, 100), abs=1e-4)
    assert score(7, 3) != pytest.approx(score(7, 4), abs=1e-2)


def test_rope_tables_are_computed_in_float32():
    positions = jnp.asarray([[4097]], jnp.int32)  # bfloat16 cannot tell it from 4096
    wide = rope_tables(RopeConfig(1e4), 8, positions, jnp.float32)
    narrow = rope_tables(RopeConfig(1e4), 8, positions, jnp.bfloat16)
    for a, b in zip(wide, narrow, strict=True):
        assert b.dtype == jnp.bfloat16
        np.testing.assert_allclose(a, b.astype(jnp.float32), atol=4e-3)


def test_norm_casts_before_it_weighs():
    norm = RmsNorm(8, 1e-6, dtype=jnp.bfloat16)
    weight = jnp.asarray(np.linspace(0.5, 1.5, 8), jnp.bfloat16)
    norm.weight.set_value(weight)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((3, 8)), jnp.bfloat16)
    wide = np.asarray(x, np.float32)
    normal = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6)
    expected = jnp.asarray(normal, jnp.bfloat16) * weight[None]
    np.testing.assert_array_equal(norm(x), expected)


def test_linear_and_embedding():
    layer = Linear(3, 2, bias=True, dtype=jnp.float32)
    layer.weight.set_value(jnp.asarray([[1.0, 2, 3], [4, 5, 6]]))
    layer.bias.set_value(jnp.asarray([10.0, 20]))
    np.testing.assert_array_equal(layer(jnp.asarray([[1.0, 0, 1]])), [[14, 30]])
    table = Embedding(3, 2, dtype=jnp.float32)
    table.weight.set_value(jnp.asarray([[0.0, 1], [2, 3], [4, 5]]))
    np.testing.assert_array_equal(table(jnp.asarray([2, 99])), [[4, 5], [4, 5]])


@pytest.mark.parametrize("window", [None, 1, 2, 4])
def test_sequence_memory_sees_its_window(window):
    tokens, real = 6, 5
    mask = np.arange(tokens) < real
    memory = SequenceMemory(jnp.asarray(mask)[None])
    assert isinstance(memory, Memory)
    zeros = jnp.zeros((1, tokens, 2, 4))
    values = jnp.broadcast_to(jnp.eye(tokens)[None, :, None, :], (1, tokens, 1, tokens))
    out, same = memory.attend(
        0, zeros, zeros[:, :, :1], values, scale=1.0, window=window, soft_cap=None
    )
    assert same is memory
    for t in range(real):
        seen = [s for s in range(t + 1) if window is None or t - s < window]
        expected = np.isin(np.arange(tokens), seen) / len(seen)
        np.testing.assert_allclose(out[0, t, 0], expected, rtol=1e-6)


def test_memory_is_a_tree():
    memory = SequenceMemory(jnp.ones((2, 3), bool))
    assert jax.tree.map(jnp.shape, memory) == SequenceMemory((2, 3))
    assert jax.eval_shape(lambda m: m, memory).token_mask.shape == (2, 3)
