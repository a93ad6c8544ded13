"""Whole matrices: invariants of the result, use of the weights, degenerate and bad input."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from pallas_kernels.bitplanes import unpack_codes
from pw_jax.errors import UserError
from pw_jax.quantizer.damage import damage
from pw_jax.quantizer.format import QuantizedMatrix, dequantize
from pw_jax.quantizer.nested import quantize_matrix

ROWS, COLUMNS = 8, 64  # one shape in most tests: each new one compiles


def quantize(weight: np.ndarray, **settings_) -> QuantizedMatrix:
    return quantize_matrix(weight, name="layer.weight", **settings_)


def codes_of(matrix: QuantizedMatrix, bits: int) -> np.ndarray:
    return np.asarray(unpack_codes(jnp.asarray(matrix.planes[:bits])))


def weighted_errors(weight, matrix, column_weight) -> np.ndarray:
    """Weighted squared error of each row at each width, float64 [widths, N]."""
    exact = weight.astype(np.float64)
    return np.array(
        [
            (column_weight * (exact - np.asarray(dequantize(matrix, bits), np.float64)) ** 2).sum(1)
            for bits in matrix.widths
        ]
    )


def rounding_allowance(weight, matrix, column_weight) -> np.ndarray:
    """What rounding the table can add: half a step a weight, as centroids are means."""
    steps = np.array([matrix.scales[bits] for bits in matrix.widths], np.float64)
    return column_weight.sum() * (0.51 * steps) ** 2


matrices = arrays.arrays(
    np.float32,
    (ROWS, COLUMNS),
    elements=st.floats(-1e6, 1e6, width=32, allow_subnormal=False),
    fill=st.just(np.float32(0.5)),
)
seeds = st.integers(0, 2**31)


def random_matrix(seed: int, rows: int = ROWS, columns: int = COLUMNS) -> np.ndarray:
    rng = np.random.default_rng(seed)
    scale = np.exp(rng.standard_normal((rows, 1)))
    return (scale * rng.standard_t(5, (rows, columns))).astype(np.float32)


def random_columns(seed: int, columns: int = COLUMNS) -> np.ndarray:
    return np.exp(1.5 * np.random.default_rng(seed).standard_normal(columns)).astype(np.float32)


@settings(max_examples=40, deadline=None)
@given(weight=matrices | seeds.map(random_matrix), seed=seeds, shared=st.sampled_from([1, 4]))
def test_tables_ascend_and_everything_is_finite(weight: np.ndarray, seed: int, shared: int):
    matrix = quantize(weight, column_weight=random_columns(seed), rows_per_table=shared)
    assert matrix.widths == (3, 4, 5, 6, 7, 8)
    for bits in matrix.widths:
        table = matrix.tables[bits]
        assert table.dtype == (np.int8 if bits <= 6 else np.int16)
        assert table.shape == (ROWS // shared, 2**bits)
        assert (np.diff(table.astype(int), axis=1) >= 0).all()
        assert matrix.scales[bits].dtype == np.float32
        assert np.isfinite(matrix.scales[bits]).all()
        assert (matrix.scales[bits] >= 0).all()
        assert (codes_of(matrix, bits) == codes_of(matrix, 8) >> (8 - bits)).all()


@settings(max_examples=40, deadline=None)
@given(weight=matrices | seeds.map(random_matrix), seed=seeds)
def test_more_bits_never_hurt_but_for_rounding(weight: np.ndarray, seed: int):
    """Exact for real-valued tables; an integer table may add its rounding error."""
    columns = random_columns(seed).astype(np.float64)
    matrix = quantize(weight, column_weight=columns, rows_per_table=1)
    errors = weighted_errors(weight, matrix, columns)
    allowance = rounding_allowance(weight, matrix, columns)
    assert (errors[1:] <= errors[:-1] * (1 + 1e-4) + allowance[1:]).all()


@settings(max_examples=20, deadline=None)
@given(seed=seeds)
def test_more_bits_help_rows_that_share_a_table(seed: int):
    weight, columns = random_matrix(seed), random_columns(seed).astype(np.float64)
    matrix = quantize(weight, column_weight=columns, rows_per_table=4)
    errors = weighted_errors(weight, matrix, columns).sum(axis=1)
    assert (errors[1:4] < 0.7 * errors[:3]).all()
    assert (errors[4:] < errors[3:-1]).all()


@settings(max_examples=20, deadline=None)
@given(seed=seeds)
def test_permuting_rows_commutes(seed: int):
    weight, columns = random_matrix(seed), random_columns(seed)
    order = np.random.default_rng(seed).permutation(ROWS)
    plain = quantize(weight, column_weight=columns, rows_per_table=1)
    permuted = quantize(weight[order], column_weight=columns, rows_per_table=1)
    np.testing.assert_array_equal(permuted.planes, plain.planes[:, order])
    for bits in plain.widths:
        np.testing.assert_array_equal(permuted.tables[bits], plain.tables[bits][order])
        np.testing.assert_array_equal(permuted.scales[bits], plain.scales[bits][order])


def test_scaling_rows_by_powers_of_two_changes_scales_only():
    weight = random_matrix(0)
    factor = np.array([1, 2, 4, 1024, 0.5, 2.0**-20, 1, 1], np.float32)
    plain = quantize(weight, rows_per_table=1)
    scaled = quantize(weight * factor[:, None], rows_per_table=1)
    np.testing.assert_array_equal(scaled.planes, plain.planes)
    for bits in plain.widths:
        np.testing.assert_array_equal(scaled.scales[bits], plain.scales[bits] * factor)


@pytest.mark.parametrize("shared", [1, 4])
def test_column_weights_lower_the_weighted_error(shared: int):
    weight = random_matrix(1, columns=512)
    columns = random_columns(2, 512).astype(np.float64)
    plain = quantize(weight, rows_per_table=shared)
    weighted = quantize(weight, column_weight=columns, rows_per_table=shared)
    before = weighted_errors(weight, plain, columns).sum(axis=1)
    after = weighted_errors(weight, weighted, columns).sum(axis=1)
    assert (after[:4] < 0.85 * before[:4]).all()


def test_row_weights_favour_their_rows_within_a_table():
    weight = random_matrix(3, columns=512)
    weight[::4] = np.random.default_rng(4).uniform(-1, 1, (2, 512))  # unlike the others in shape
    favour = np.where(np.arange(ROWS) % 4 == 0, 1000.0, 1.0).astype(np.float32)
    plain = quantize(weight, rows_per_table=4)
    favoured = quantize(weight, rows_per_table=4, row_weight=favour)
    ones = np.ones(512)
    before = weighted_errors(weight, plain, ones)[:4, ::4].sum(axis=1)
    after = weighted_errors(weight, favoured, ones)[:4, ::4].sum(axis=1)
    assert (after < 0.9 * before).all()


def test_three_bit_error_of_normal_weights_is_the_textbook_one():
    weight = np.random.default_rng(0).standard_normal((ROWS, 512)).astype(np.float32)
    matrix = quantize(weight, rows_per_table=1)
    errors = np.sqrt(weighted_errors(weight, matrix, np.ones(512)).sum(axis=1) / (weight**2).sum())
    # Lloyd-Max for the normal distribution at 8 levels: 0.1857; less where a row fits itself.
    assert 0.17 < errors[0] < 0.1857
    assert errors[3] < 0.03
    assert errors[5] < 0.01


def test_chunks_do_not_change_the_result():
    weight, columns = random_matrix(5), random_columns(5)
    whole = quantize(weight, column_weight=columns, rows_per_table=1)
    parts = quantize(weight, column_weight=columns, rows_per_table=1, chunk_weights=3 * 1024)
    assert parts.planes.shape == (8, ROWS, 2)
    np.testing.assert_array_equal(parts.planes, whole.planes)
    for bits in whole.widths:
        np.testing.assert_array_equal(parts.tables[bits], whole.tables[bits])
        np.testing.assert_array_equal(parts.scales[bits], whole.scales[bits])


def test_narrow_widths_on_request():
    matrix = quantize(random_matrix(0), seed_bits=2, parent_bits=4)
    assert matrix.widths == (2, 3, 4)
    assert matrix.planes.shape == (4, ROWS, 2)


@pytest.mark.parametrize("shared", [1, 4])
@pytest.mark.parametrize("columns", ["uniform", "all zero", "mostly zero"])
def test_degenerate_rows(shared: int, columns: str):
    weight = random_matrix(7)
    weight[0] = 0
    weight[1] = 3.25
    weight[2] = np.where(np.arange(COLUMNS) % 3 == 0, -1.5, 2.0)
    weight[3] = np.arange(COLUMNS) % 5
    weight[4] = 0
    weight[4, 9] = 1e30
    weight[5] = -0.0
    weight[6] = 1e-38
    column_weight = {
        "uniform": None,
        "all zero": np.zeros(COLUMNS, np.float32),
        "mostly zero": (np.arange(COLUMNS) == 9).astype(np.float32),
    }[columns]
    matrix = quantize(weight, column_weight=column_weight, rows_per_table=shared)
    for bits in matrix.widths:
        dense = np.asarray(dequantize(matrix, bits))
        assert np.isfinite(dense).all()
        np.testing.assert_array_equal(dense[[0, 5]], 0)
        if shared == 1 and columns != "mostly zero":
            np.testing.assert_allclose(dense[1], 3.25, rtol=1e-6)
            step = np.max(np.abs(matrix.tables[bits])).astype(np.float32)
            np.testing.assert_allclose(dense[2], weight[2], atol=2.0 / step)
            np.testing.assert_allclose(dense[3], weight[3], atol=4.0 / step)
            np.testing.assert_allclose(dense[4], weight[4], rtol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e300])
def test_values_that_are_not_float32_are_refused_by_name(bad: float):
    weight = random_matrix(0).astype(np.float64)
    weight[2, 3] = bad
    with pytest.raises(UserError, match=r"layer\.weight has 1 values that are NaN, infinite"):
        quantize(weight)


@pytest.mark.parametrize("shape", [(8, 33), (8, 0), (0, 32), (32,), (2, 8, 32)])
def test_shapes_that_do_not_fit_are_refused_by_name(shape: tuple[int, ...]):
    with pytest.raises(UserError, match=r"layer\.weight of shape"):
        quantize(np.zeros(shape, np.float32))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"column_weight": np.ones(3, np.float32)}, "column weights of tensor layer.weight"),
        ({"column_weight": -np.ones(COLUMNS, np.float32)}, "column weights of tensor"),
        ({"row_weight": np.full(ROWS, np.nan, np.float32)}, "row weights of tensor"),
        ({"seed_bits": 4}, "seed bits"),
        ({"parent_bits": 9}, "parent bits"),
        ({"parent_bits": 2}, "parent bits"),
        ({"rows_per_table": 3}, "rows per table"),
        ({"rows_per_table": 16}, "rows per table"),
    ],
)
def test_bad_settings_are_refused(options: dict, message: str):
    with pytest.raises(UserError, match=message):
        quantize(random_matrix(0), **options)


def test_damage_is_the_fisher_weighted_squared_error():
    weight, columns = random_matrix(8), random_columns(8)
    rows = np.random.default_rng(9).uniform(0, 1e-30, ROWS).astype(np.float32)
    matrix = quantize(weight, column_weight=columns, rows_per_table=4)
    per_row = weighted_errors(weight, matrix, columns.astype(np.float64))
    expected = per_row @ rows.astype(np.float64) / columns.sum(dtype=np.float64)
    found = damage(weight, matrix, rows, columns)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    assert (damage(weight, matrix, rows, np.zeros(COLUMNS, np.float32)) == 0).all()
