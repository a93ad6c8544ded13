"""The warp programs on arrays, for machines without a GPU: slow, and the same bits.

Only what a GPU does differently is written again (page look-ups, the matrix instruction); the bit
tricks and the order of activations are the kernels' own.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float32, Int32

from pallas_kernels.bitplane_matmul.activations import chunks
from pallas_kernels.bitplane_matmul.lookup import byte_codes, look_up_bytes
from pallas_kernels.bitplane_matmul.row_reader import Geometry, keeps_in_registers


class ArrayOperations:
    """:class:`lookup.Operations` on arrays of uint32."""

    def permute(self, a: Array, b: Array, selector: Array) -> Array:
        """``prmt.b32`` for selectors without sign bits."""
        out = jnp.zeros_like(a)
        for place in range(4):
            pick = (selector >> np.uint32(4 * place)) & np.uint32(15)
            shift = (pick & np.uint32(3)) << np.uint32(3)
            byte = jnp.where(pick < 4, a >> shift, b >> shift) & np.uint32(255)
            out |= byte << np.uint32(8 * place)
        return out

    def select(self, mask: np.uint32, a: Array, b: Array) -> Array:
        """``(a & mask) | (b & ~mask)``."""
        return (a & mask) | (b & ~mask)

    def keep_or(self, a: Array, mask: np.uint32, c: np.uint32) -> Array:
        """``(a & mask) | c``."""
        return (a & mask) | c


def expert_entries(
    shape: Geometry, weights: Any, expert: Array, bits: int, words: int
) -> tuple[Int32[Array, "N padded"], Float32[Array, " N"]]:
    """Entries and row scales of one expert, columns in the kernels' order."""
    row = jnp.arange(shape.rows, dtype=jnp.int32)
    page = weights.planes[expert][:bits, row // shape.rows_per_page]
    start = row % shape.rows_per_page * shape.words_per_row
    word = start[:, None] + jnp.arange(shape.words_per_row, dtype=jnp.int32)[None, :]
    planes = list(weights.pool[page[:, :, None], word[None]])
    table = weights.table_pool[weights.tables[expert]].reshape(-1)
    first = shape.scale_word(bits)
    scales = lax.bitcast_convert_type(table[first : first + shape.rows], jnp.float32)
    entries = table[:first].reshape(-1, shape.table_entry_words(bits))
    entries = entries[row // shape.rows_per_table]
    if keeps_in_registers(bits):
        registers = [
            jnp.broadcast_to(entries[:, i : i + 1], planes[0].shape)
            for i in range(entries.shape[1])
        ]
        found = list(look_up_bytes(ArrayOperations(), planes, registers))
        packed = jnp.stack([jnp.stack(pair, -1) for pair in found], -2)
        values = lax.bitcast_convert_type(packed, jnp.int8).astype(jnp.int32)
    else:
        values = _entries_of_codes(planes, entries, bits)
    return _in_order(values, words), scales


def _entries_of_codes(planes: list[Array], entries: Array, bits: int) -> Array:
    codes = byte_codes(ArrayOperations(), planes)
    rows = []
    for r in range(4):
        bytes_of = [
            (codes[r + 4 * (c % 2)] >> np.uint32(8 * (2 * half + c // 2))) & np.uint32(255)
            for half in range(2)
            for c in range(4)
        ]
        rows.append(jnp.stack(bytes_of, -1).reshape(*planes[0].shape, 2, 4))
    code = jnp.stack(rows, -3).astype(jnp.int32)
    kind = jnp.int8 if bits <= 6 else jnp.int16
    table = lax.bitcast_convert_type(entries, kind).reshape(entries.shape[0], -1)
    flat = jnp.take_along_axis(table, code.reshape(code.shape[0], -1), axis=1)
    return flat.reshape(code.shape).astype(jnp.int32)


def _in_order(values: Int32[Array, "N words 4 2 4"], words: int) -> Int32[Array, "N padded"]:
    """From ``[row, word, r, h, c]`` to ``[row, (chunk, word, r, lane t, h, c)]``."""
    rows, per_row = values.shape[:2]
    count = chunks(per_row, words)
    padded = jnp.pad(values, ((0, 0), (0, 4 * words * count - per_row)) + ((0, 0),) * 3)
    padded = padded.reshape(rows, count, 4, words, 4, 2, 4).transpose(0, 1, 3, 4, 2, 5, 6)
    return padded.reshape(rows, -1)


def _activations(x_words: Array) -> Array:
    """Integers ``[U, capacity, padded]`` out of fragments ``[U, S, blocks, 2, 32, 4]``."""
    units, steps, blocks = x_words.shape[:3]
    bytes_ = lax.bitcast_convert_type(x_words, jnp.int8).astype(jnp.int32)
    bytes_ = bytes_.reshape(units, steps, blocks, 2, 4, 2, 4, 2, 2, 4)  # half tok part t rr h c
    integers = bytes_[..., 0, :, :, :, :] * 256 + bytes_[..., 1, :, :, :, :]
    integers = integers.transpose(0, 2, 4, 1, 3, 6, 5, 7, 8)
    return integers.reshape(units, 4 * blocks, -1)


def warp_matmul(
    form: Any, weights: Any, units: Any, x_words: Array, x_scale: Array, out: Array
) -> Array:
    """See :func:`warp_matmul.warp_matmul`; the first part of K's sums holds them all."""
    integers = _activations(x_words).astype(jnp.float32)
    return _multiply_units(form, weights, units, integers, x_scale, out, jnp.float32)


def _multiply_units(
    form: Any, weights: Any, units: Any, x: Array, x_scale: Array, out: Array, kind: Any
) -> Array:
    """Multiplies tokens ``[U, capacity, K]``, ordered as the kernels' columns, with entries."""
    capacity = x.shape[1]
    inside = jnp.arange(capacity, dtype=jnp.int32)

    def add_unit(unit: Array, out: Array) -> Array:
        expert = units.expert[unit]
        for bits in form.widths:
            entries, scales = expert_entries(form.geometry, weights, expert, bits, form.words)
            total = jnp.einsum("tk,nk->tn", x[unit], entries.astype(kind).astype(jnp.float32))
            total *= x_scale[unit][:, None] * scales[None, :]
            if form.gate is not None:
                gate, up = jnp.split(total, 2, axis=1)
                silu = form.gate == "silu"
                total = (jax.nn.silu(gate) if silu else jax.nn.gelu(gate, approximate=True)) * up
            real = (inside < units.tokens[unit]) & (weights.bits[expert] == bits)
            row = jnp.where(real, units.first[unit] + inside, out.shape[1])
            out = out.at[0, row].set(total, mode="drop")
            out = out.at[1:, row].set(0, mode="drop")
        return out

    return lax.fori_loop(0, units.count[0], add_unit, out)


def warpgroup_matmul(
    form: Any, weights: Any, units: Any, x: Array, x_scale: Array, out: Array
) -> Array:
    """See :func:`warpgroup_matmul.warpgroup_matmul`."""
    count, _, capacity, _ = x.shape
    steps = x.astype(jnp.float32).reshape(
        count, -1, 4, 2, 4, capacity, 4, 2
    )  # chunk r h c token t word
    ordered = steps.transpose(0, 5, 1, 7, 2, 6, 3, 4).reshape(count, capacity, -1)
    return _multiply_units(form, weights, units, ordered, x_scale, out[None], jnp.float16)[0]
