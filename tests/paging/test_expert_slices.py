"""Slices of quantised experts hold the weights of their hidden units, at every width."""

import numpy as np
import pytest

from checkpoints.store import ExpertArrays
from pw_jax.models.config import ExpertShape
from pw_jax.paging.expert_slices import slice_experts, slice_layouts
from pw_jax.paging.layout import ExpertFormat
from pw_jax.quantizer.format import QuantizedMatrix, dequantize

EXPERTS, EMBED, BITS = 2, 32, 4


def random_experts(rows: int, columns: int, rows_per_table: int) -> ExpertArrays:
    random = np.random.default_rng(rows + columns)

    def matrix() -> QuantizedMatrix:
        words = random.integers(0, 2**32, (BITS, rows, columns // 32), np.uint32)
        tables, scales = {}, {}
        for bits in (3, 4):
            shape = (rows // rows_per_table, 2**bits)
            tables[bits] = random.integers(-99, 99, shape).astype(np.int8)
            scales[bits] = random.random(rows, np.float32)
        return QuantizedMatrix(words, tables, scales)

    zeros = np.zeros(2, np.float32)
    return ExpertArrays.stack([matrix() for _ in range(EXPERTS)], [zeros] * EXPERTS)


def weights(part, expert: int, bits: int) -> np.ndarray:
    tables, scales = {bits: part.tables[bits][expert]}, {bits: part.scales[bits][expert]}
    return np.asarray(dequantize(QuantizedMatrix(part.planes[expert], tables, scales), bits))


@pytest.mark.parametrize(
    ("hidden", "rows_per_table", "devices"), [(96, 4, 3), (96, 64, 2), (160, 8, 4), (32, 64, 1)]
)
def test_every_device_has_the_weights_of_its_hidden_units(hidden, rows_per_table, devices):
    gate_up = random_experts(2 * hidden, EMBED, rows_per_table)
    down = random_experts(EMBED, hidden, 2)
    shape = ExpertShape(EXPERTS, 1, EMBED, hidden, "silu")
    own, own_format = slice_layouts(shape, ExpertFormat(3, 4, (rows_per_table, 2)), devices)
    assert own.ffn % 32 == 0
    assert own.ffn * devices >= hidden
    rows, columns = (slice_experts(a, m, devices) for m, a in enumerate((gate_up, down)))
    assert len(rows) == len(columns) == devices
    for expert in range(EXPERTS):
        for bits in (3, 4):
            up = np.split(weights(gate_up, expert, bits), 2)
            parts = [np.split(weights(part, expert, bits), 2) for part in rows]
            for half in (0, 1):
                joined = np.concatenate([part[half] for part in parts])
                np.testing.assert_array_equal(joined[:hidden], up[half])
                assert not joined[hidden:].any()
            joined = np.concatenate([weights(part, expert, bits) for part in columns], axis=1)
            np.testing.assert_array_equal(joined[:, :hidden], weights(down, expert, bits))
    for part, shared in zip((rows[0], columns[0]), own_format.rows_per_table, strict=True):
        assert part.planes.shape[2] // part.tables[3].shape[1] == shared
