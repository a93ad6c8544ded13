from functools import partial
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paged_pool import lowered_for_h200

from pallas_kernels.bitplane_matmul import bitplane_matmul
from pallas_kernels.bitplanes import pack_codes
from pallas_kernels.implementation import Implementation

WIDTHS = (2, 3, 4, 5, 6, 7, 8)


class Matrix:
    """Random planes, tables and scales, and their weights in float64."""

    def __init__(self, bits: int, rows: int, columns: int, groups: int, seed: int):
        rng = np.random.default_rng(seed)
        codes = rng.integers(0, 1 << bits, (rows, columns), dtype=np.uint8)
        kind = np.int8 if bits <= 6 else np.int16
        limit = np.iinfo(kind).max
        table = np.sort(rng.integers(-limit, limit + 1, (groups, 1 << bits)), axis=1).astype(kind)
        table[0, 0], table[0, -1] = -limit, limit
        scale = rng.uniform(1e-5, 1e-3, rows).astype(np.float32)
        self.planes = pack_codes(jnp.asarray(codes), bits)
        self.table, self.scale = jnp.asarray(table), jnp.asarray(scale)
        entries = table[np.arange(rows)[:, None] // (rows // groups), codes]
        self.weight = entries.astype(np.float64) * scale[:, None].astype(np.float64)


class BitplaneMatmulTests:
    """Cases that every implementation must pass."""

    implementation: ClassVar[Implementation]

    def check(self, bits: int, tokens: int, rows: int, columns: int, groups: int, dtype: str):
        matrix = Matrix(bits, rows, columns, groups, seed=bits + tokens)
        rng = np.random.default_rng(tokens)
        values = rng.standard_t(3, size=(tokens, columns)) * rng.uniform(0.01, 10, (tokens, 1))
        values[:, 1] *= 100  # an outlier channel
        x = jnp.asarray(values, dtype)
        run = jax.jit(partial(bitplane_matmul, implementation=self.implementation))
        out = np.asarray(run(x, matrix.planes, matrix.table, matrix.scale), np.float64)
        expected = np.asarray(x, np.float64) @ matrix.weight.T
        assert out.shape == expected.shape
        # the reference multiplies weights in x's dtype
        limit = 5e-3 if self.implementation == "xla" and dtype == "bfloat16" else 1e-3
        assert np.linalg.norm(out - expected) < limit * np.linalg.norm(expected)

    @pytest.mark.parametrize("bits", WIDTHS)
    def test_widths(self, bits):
        self.check(bits, 3, 64, 256, 8, "bfloat16")

    def test_rows_and_columns_of_no_tile(self):
        self.check(4, 5, 37, 96, 37, "float32")

    def test_one_word_a_row(self):
        self.check(6, 2, 24, 32, 3, "float16")

    def test_many_tokens(self):
        self.check(5, 70, 48, 704, 6, "bfloat16")


class TestXla(BitplaneMatmulTests):
    implementation = "xla"


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="runs for real there")
class TestPallasInterpret(BitplaneMatmulTests):
    implementation = "pallas"


@pytest.mark.gpu
class TestPallasGpu(BitplaneMatmulTests):
    implementation = "pallas"

    @pytest.mark.parametrize("bits", WIDTHS)
    def test_long_rows(self, bits):
        self.check(bits, 9, 512, 14336, 512, "bfloat16")

    def test_most_tokens(self):
        self.check(4, 4096, 256, 2048, 128, "bfloat16")


def test_a_table_of_another_width_is_refused():
    matrix = Matrix(4, 32, 64, 4, 0)
    with pytest.raises(ValueError, match="int8"):
        bitplane_matmul(jnp.ones((1, 64)), matrix.planes[:3], matrix.table, matrix.scale)


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("tokens", [1, 64])
def test_lowers_for_h200(bits, tokens):
    kind = jnp.int8 if bits <= 6 else jnp.int16
    text = lowered_for_h200(
        partial(bitplane_matmul, implementation="pallas"),
        jax.ShapeDtypeStruct((tokens, 4096), jnp.bfloat16),
        jax.ShapeDtypeStruct((bits, 14336, 128), jnp.uint32),
        jax.ShapeDtypeStruct((14336, 1 << bits), kind),
        jax.ShapeDtypeStruct((14336,), jnp.float32),
    )
    assert "mosaic_gpu" in text
