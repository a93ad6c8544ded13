"""The any-precision format: layout of bits, sharing of tables, dequantisation."""

import jax
import numpy as np
import pytest

from pallas_kernels.bitplanes import pack_codes, unpack_codes
from pw_jax.quantizer.format import QuantizedMatrix, dequantize, rows_per_table, table_dtype


@pytest.mark.parametrize("columns", [32, 704, 1408, 2816, 14336])
@pytest.mark.parametrize("bits", [3, 8])
def test_unpacking_undoes_packing(columns: int, bits: int):
    codes = np.random.default_rng(columns).integers(0, 2**bits, (3, columns), np.uint8)
    planes = np.asarray(pack_codes(jax.numpy.asarray(codes), bits))
    assert planes.shape == (bits, 3, columns // 32)
    np.testing.assert_array_equal(np.asarray(unpack_codes(jax.numpy.asarray(planes))), codes)


def test_bit_j_of_word_w_is_column_j_times_words_plus_w():
    columns, words = 96, 3
    codes = np.random.default_rng(0).integers(0, 256, (2, columns), np.uint8)
    planes = np.asarray(pack_codes(jax.numpy.asarray(codes), 8))
    for plane in range(8):
        for word in range(words):
            for bit in range(32):
                expected = (codes[:, bit * words + word] >> (7 - plane)) & 1
                found = (planes[plane, :, word] >> np.uint32(bit)) & 1
                np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("rows", "columns", "expected"),
    [
        (256, 576, 8),  # demo model, gate_up
        (576, 128, 32),  # demo model, down
        (2816, 2048, 2),  # Qwen1.5-MoE, gate_up
        (2048, 1408, 4),  # Qwen1.5-MoE, down
        (4096, 14336, 1),  # Mixtral, down
        (6, 32, 2),  # no larger power of two divides the rows
        (7, 32, 1),
    ],
)
def test_rows_per_table_keeps_a_table_to_one_bit_a_weight(rows: int, columns: int, expected: int):
    assert rows_per_table(rows, columns, 8) == expected


def test_narrow_parents_need_less_sharing():
    assert rows_per_table(256, 576, 6) == 2
    assert rows_per_table(256, 1024, 6) == 1


def random_matrix(rows: int, columns: int, shared: int) -> tuple[QuantizedMatrix, np.ndarray]:
    rng = np.random.default_rng(1)
    codes = rng.integers(0, 256, (rows, columns), np.uint8)
    tables, scales = {}, {}
    for bits in range(3, 9):
        dtype = table_dtype(bits)
        limits = np.iinfo(dtype)
        size = (rows // shared, 2**bits)
        tables[bits] = np.sort(rng.integers(limits.min, limits.max, size, dtype), axis=1)
        scales[bits] = rng.uniform(0.5, 2, rows).astype(np.float32)
    planes = np.asarray(pack_codes(jax.numpy.asarray(codes), 8))
    return QuantizedMatrix(planes, tables, scales), codes


@pytest.mark.parametrize("shared", [1, 4])
def test_dequantize_follows_the_formula(shared: int):
    matrix, codes = random_matrix(8, 64, shared)
    assert matrix.shape == (8, 64)
    assert matrix.rows_per_table == shared
    assert matrix.widths == (3, 4, 5, 6, 7, 8)
    for bits in matrix.widths:
        dense = np.asarray(jax.jit(dequantize, static_argnums=1)(matrix, bits))
        assert dense.dtype == np.float32
        for row in range(8):
            entries = matrix.tables[bits][row // shared].astype(np.float32)
            expected = matrix.scales[bits][row] * entries[codes[row] >> (8 - bits)]
            np.testing.assert_array_equal(dense[row], expected)


def test_it_is_a_tree_that_takes_placeholders_and_stacks():
    matrix, _ = random_matrix(8, 64, 4)
    shapes = jax.tree.map(lambda leaf: leaf.shape, matrix)
    assert isinstance(shapes, QuantizedMatrix)
    assert shapes.tables[8] == (2, 256)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(matrix)]
    assert ".planes" in paths
    assert ".tables[3]" in paths
    stacked = jax.tree.map(lambda leaf: np.stack([leaf, leaf]), matrix)
    both = jax.vmap(lambda one: dequantize(one, 5))(stacked)
    np.testing.assert_array_equal(np.asarray(both[1]), np.asarray(dequantize(matrix, 5)))
