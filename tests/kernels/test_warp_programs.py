"""The GPU warp programs, lane by lane on the CPU, against their array form."""

import jax.numpy as jnp
import numpy as np
import pytest
from warp_simulator import simulate

from pallas_kernels.bitplane_matmul import (
    activations,
    interpret,
    prepare,
    warp_matmul,
    warpgroup_matmul,
)
from pallas_kernels.bitplane_matmul.warp_matmul import WarpMatmul, Weights
from pallas_kernels.bitplane_matmul.warpgroup_matmul import WarpgroupMatmul
from pallas_kernels.paged_expert_ffn.product import geometry
from pallas_kernels.paged_expert_ffn.routing import make_units, route, unit_places
from pallas_kernels.random_experts import Shape, random_experts


@pytest.mark.parametrize(
    ("bits", "token_blocks", "words", "columns", "gate", "splits", "depth"),
    [
        (3, 1, 2, 704, "silu", 1, 2),
        pytest.param(4, 4, 4, 1024, None, 2, 1, marks=pytest.mark.slow),
        pytest.param(4, 1, 1, 224, "gelu_tanh", 1, 2, marks=pytest.mark.slow),
        pytest.param(5, 2, 2, 256, None, 1, 3, marks=pytest.mark.slow),
        (5, 1, 4, 640, "silu", 1, 2),
        pytest.param(6, 1, 2, 320, "silu", 1, 2, marks=pytest.mark.slow),
        (7, 1, 2, 256, None, 1, 1),
        (8, 8, 2, 320, "silu", 1, 2),
        pytest.param(8, 1, 4, 1024, None, 2, 1, marks=pytest.mark.slow),
        pytest.param(4, 16, 2, 256, None, 1, 1, marks=pytest.mark.slow),
    ],
)
def test_matmul(bits, token_blocks, words, columns, gate, splits, depth, monkeypatch):
    layout = Shape("tiny", 2, columns, 24, 4, 4).layout("gate_up", 128)
    pool, module = random_experts(layout, (bits, 3 if bits > 3 else 4), bits)
    tokens = 4 * token_blocks - 1
    routing = route(jnp.asarray([[0]] * tokens + [[1]] * 2, jnp.int32), 2)
    units = make_units(routing, 4 * token_blocks, module.bits)
    rng = np.random.default_rng(bits)
    x = jnp.asarray(rng.normal(size=(tokens + 2, columns)), jnp.float32)
    integers, scale = activations.quantize(x)
    index = routing.token[unit_places(units, 4 * token_blocks, tokens + 2)]
    x_words = activations.gather_units(activations.fragments(integers, words), index)
    form = WarpMatmul(
        geometry(layout), 2, (bits,), gate, units.expert.shape[0], tokens + 2, token_blocks,
        words, (depth,), splits, warps=2, blocks=1,
    )  # fmt: skip
    out = jnp.full((splits, tokens + 2, form.columns_out), jnp.nan)
    weights = Weights(pool, pool, module.bits, module.planes, module.tables)
    arrays = [*weights, *units, x_words, scale[index], out]
    found = simulate(
        warp_matmul._body,
        form,
        form.warps,
        [np.asarray(array) for array in arrays],
        2 * form.shared_bytes,
        monkeypatch,
    )
    expected = np.asarray(
        interpret.warp_matmul(form, weights, units, x_words, scale[index], out).sum(axis=0)
    )
    assert np.isnan(found[:, tokens:]).all(), "another width's rows were written"
    found = found[:, :tokens].sum(axis=0)
    error = np.linalg.norm(found - expected[:tokens]) / np.linalg.norm(expected[:tokens])
    assert error < 1e-5


@pytest.mark.parametrize(
    ("bits", "columns", "gate"),
    [
        pytest.param(3, 320, None, marks=pytest.mark.slow),
        (5, 128, "silu"),
        pytest.param(8, 192, "gelu_tanh", marks=pytest.mark.slow),
    ],
)
def test_warpgroup_matmul(bits, columns, gate, monkeypatch):
    layout = Shape("tiny", 3, columns, 36, 4, 4).layout("gate_up", 128)
    pool, module = random_experts(layout, (bits, bits, bits), bits)
    counts, capacity = (11, 0, 18), 16
    ids = np.repeat(np.arange(3, dtype=np.int32), counts)
    tokens = len(ids)
    routing = route(jnp.asarray(ids)[:, None], 3)
    units = make_units(routing, capacity, module.bits)
    x = jnp.asarray(np.random.default_rng(bits).normal(size=(tokens, columns)), jnp.float32)
    blocks, scale = activations.half_blocks(x)
    index = routing.token[unit_places(units, capacity, tokens)]
    form = WarpgroupMatmul(
        geometry(layout), (bits,), gate, capacity, tokens + 1, stages=3, blocks=2
    )
    out = jnp.full((tokens + 1, form.columns_out), jnp.nan)
    weights = Weights(pool, pool, module.bits, module.planes, module.tables)
    arrays = [*weights, *units, activations.gather_tiles(blocks, index), scale[index], out]
    found = simulate(
        warpgroup_matmul._body,
        form,
        warpgroup_matmul.WARPS + 1,
        [np.asarray(array) for array in arrays],
        form.shared_bytes,
        monkeypatch,
    )
    expected = np.asarray(interpret.warpgroup_matmul(form, *(weights, units), *arrays[-3:]))
    assert np.isnan(found[tokens]).all(), "a row of no token was written"
    error = np.linalg.norm((found - expected)[:tokens]) / np.linalg.norm(expected[:tokens])
    assert error < 1e-5


@pytest.mark.parametrize("columns", [96, 704])
def test_preparing_kernels_make_the_same_arrays(columns):
    rng = np.random.default_rng(columns)
    x = jnp.asarray(rng.normal(size=(11, columns)), jnp.bfloat16).at[3].set(0)
    index = jnp.asarray(rng.integers(0, 11, (3, 8)), jnp.int32)
    words = 1 if columns == 96 else 2
    pairs = [
        (prepare.fragments(x, index, words), prepare.fragments_kernel(x, index, words)),
        (prepare.tiles(x, index), prepare.tiles_kernel(x, index)),
    ]
    for (expected, scale), (found, found_scale) in pairs:
        np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))
        np.testing.assert_allclose(np.asarray(found_scale), np.asarray(scale), rtol=1e-6)
