"""Experts over several devices: each has a slice of the hidden units of every expert.

A device's gate_up has its gate rows and then its up rows; its down has the columns that belong to
them. Slices are as wide as a multiple of 32 columns needs; what is added behind the last hidden
unit has scales of zero, and so adds nothing.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float, Float32, Shaped, UInt32

from pallas_kernels.bitplanes import WORD_BITS
from pw_jax.models.config import ExpertShape
from pw_jax.paging.host_pages import ExpertArrays
from pw_jax.paging.layout import ExpertFormat
from sharding.padding import pad_axis, round_up


@dataclass(frozen=True)
class ExpertSlice:
    """One device's part of all experts of a module; an `ExpertArrays`."""

    planes: UInt32[np.ndarray, "E P N words"]
    tables: Mapping[int, Shaped[np.ndarray, "E groups entries"]]
    scales: Mapping[int, Float32[np.ndarray, "E N"]]
    damage: Float[np.ndarray, "E widths"]


def slice_layouts(
    shape: ExpertShape, expert_format: ExpertFormat, devices: int
) -> tuple[ExpertShape, ExpertFormat]:
    """Shape and format of the experts as a device has them.

    A table that rows of two devices share is copied, and then fewer rows share it.
    """
    if devices == 1:
        return shape, expert_format
    part = _part(shape.ffn, devices)
    gate_up, down = expert_format.rows_per_table
    shared = (math.gcd(gate_up, shape.ffn, part), down)
    return replace(shape, ffn=part), replace(expert_format, rows_per_table=shared)


def slice_experts(arrays: ExpertArrays, module: int, devices: int) -> list[ExpertArrays]:
    """Divides a module of a layer, one part a device.

    Args:
        arrays: All of it.
        module: 0 gate_up, whose rows are divided; 1 down, whose columns are.
        devices: How many parts.
    """
    if devices == 1:
        return [arrays]
    return _columns(arrays, devices) if module else _rows(arrays, devices)


def _rows(arrays: ExpertArrays, devices: int) -> list[ExpertArrays]:
    hidden = arrays.planes.shape[2] // 2
    part = _part(hidden, devices)

    def own(array: np.ndarray, axis: int, rows: int) -> list[np.ndarray]:
        """The parts of an axis that has one entry for so many rows."""
        halves = np.split(array, 2, axis=axis)
        padded = [pad_axis(half, axis, devices * part // rows) for half in halves]
        cut = [np.split(half, devices, axis=axis) for half in padded]
        return [np.concatenate(both, axis=axis) for both in zip(*cut, strict=True)]

    planes = own(arrays.planes, 2, 1)
    tables = {}
    for bits, table in arrays.tables.items():
        rows = 2 * hidden // table.shape[1]
        shared = math.gcd(rows, hidden, part)
        tables[bits] = own(np.repeat(table, rows // shared, axis=1), 1, shared)
    scales = {b: own(s, 1, 1) for b, s in arrays.scales.items()}
    return [
        ExpertSlice(
            planes[device],
            {bits: parts[device] for bits, parts in tables.items()},
            {bits: parts[device] for bits, parts in scales.items()},
            arrays.damage,
        )
        for device in range(devices)
    ]


def _columns(arrays: ExpertArrays, devices: int) -> list[ExpertArrays]:
    planes = [repack(expert, devices) for expert in arrays.planes]  # one at a time: bits are bytes
    return [
        ExpertSlice(np.stack(own), arrays.tables, arrays.scales, arrays.damage)
        for own in zip(*planes, strict=True)
    ]


def _part(hidden: int, devices: int) -> int:
    """Hidden units of a device, padding included."""
    return round_up(hidden, WORD_BITS * devices) // devices


def repack(planes: UInt32[np.ndarray, "P N words"], devices: int) -> list[np.ndarray]:
    """Planes of each device's columns; bit j of word w of a row is column ``j * words + w``."""
    *batch, words = planes.shape
    position = np.arange(WORD_BITS, dtype=np.uint32)[:, None]
    bits = ((planes[..., None, :] >> position) & np.uint32(1)).astype(np.uint8)
    columns = pad_axis(bits.reshape(*batch, WORD_BITS * words), -1, WORD_BITS * devices)
    parts = columns.reshape(*batch, devices, WORD_BITS, -1)
    packed = (parts.astype(np.uint32) << position).sum(axis=-2, dtype=np.uint32)
    return list(np.moveaxis(packed, -2, 0))
