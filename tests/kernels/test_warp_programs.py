"""The GPU warp programs, lane by lane on the CPU, against their array form."""

import jax.numpy as jnp
import numpy as np
import pytest
from warp_simulator import simulate

from pallas_kernels.bitplane_matmul import activations, interpret, warp_dequantize, warp_matmul
from pallas_kernels.bitplane_matmul.row_reader import shared_table_bytes
from pallas_kernels.bitplane_matmul.warp_dequantize import WarpDequantize
from pallas_kernels.bitplane_matmul.warp_matmul import WarpMatmul, Weights
from pallas_kernels.paged_expert_ffn.product import geometry
from pallas_kernels.paged_expert_ffn.routing import make_units, route, unit_places
from pallas_kernels.random_experts import Shape, random_experts


@pytest.mark.parametrize(
    ("bits", "token_blocks", "words", "columns", "gate", "splits", "depth"),
    [
        (3, 1, 2, 704, "silu", 1, 2),
        (4, 4, 4, 1024, None, 2, 1),
        (4, 1, 1, 224, "gelu_tanh", 1, 2),
        (5, 2, 2, 256, None, 1, 3),
        (5, 1, 4, 640, "silu", 1, 2),
        (6, 1, 2, 320, "silu", 1, 2),
        (7, 1, 2, 256, None, 1, 1),
        (8, 8, 2, 320, "silu", 1, 2),
        (8, 1, 4, 1024, None, 2, 1),
        (4, 16, 2, 256, None, 1, 1),
    ],
)
def test_matmul(bits, token_blocks, words, columns, gate, splits, depth, monkeypatch):
    layout = Shape("tiny", 2, columns, 24, 4, 4).layout("gate_up", 128)
    pool, module = random_experts(layout, (bits, 3 if bits > 3 else 4), bits)
    tokens = 4 * token_blocks - 1
    routing = route(jnp.asarray([[0]] * tokens + [[1]] * 2, jnp.int32), 2)
    units = make_units(routing, 4 * token_blocks)
    rng = np.random.default_rng(bits)
    x = jnp.asarray(rng.normal(size=(tokens + 2, columns)), jnp.float32)
    integers, scale = activations.quantize(x)
    index = routing.token[unit_places(units, 4 * token_blocks, tokens + 2)]
    x_words = activations.gather_units(activations.fragments(integers, words), index)
    form = WarpMatmul(
        geometry(layout), 2, (bits,), gate, units.expert.shape[0], tokens + 2, token_blocks,
        words, depth, splits, warps=2, blocks=1,
    )  # fmt: skip
    out = jnp.full((splits, tokens + 2, form.columns_out), jnp.nan)
    weights = Weights(pool, pool, module.bits, module.planes, module.tables)
    arrays = [*weights, *units, x_words, scale[index], out]
    found = simulate(
        warp_matmul._body,
        form,
        [np.asarray(array) for array in arrays],
        2 * shared_table_bytes(bits),
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
    ("bits", "words", "columns"),
    [(4, 4, 1024), (5, 2, 352 * 2), (6, 4, 640), (8, 2, 256), (7, 1, 96)],
)
def test_dequantize(bits, words, columns, monkeypatch):
    layout = Shape("tiny", 2, columns, 20, 4, 4).layout("gate_up", 128)
    pool, module = random_experts(layout, (bits, bits), bits)
    units = make_units(route(jnp.asarray([[1]], jnp.int32), 2), 1)
    weights = Weights(pool, pool, module.bits, module.planes, module.tables)
    form = WarpDequantize(geometry(layout), (bits,), words, warps=2, blocks=1)
    out = jnp.full((2, layout.rows, form.columns), jnp.nan, jnp.float16)
    arrays = [*weights, units.expert, units.count, out]
    found = simulate(
        warp_dequantize._body,
        form,
        [np.asarray(array) for array in arrays],
        2 * shared_table_bytes(bits),
        monkeypatch,
    )
    assert np.isnan(found[0]).all(), "an expert without tokens was written"
    expected = np.asarray(interpret.warp_dequantize(form, weights, units, out))[1]
    real = np.asarray(activations.permuted(jnp.ones((1, columns)), words))[0] > 0
    np.testing.assert_array_equal(found[1][:, real], expected[:, real])
