"""Activations of each unit's tokens, in the forms of :mod:`activations`, by one GPU kernel each.

The jnp forms say what the arrays hold; on a GPU they would be five kernels, which take longer than
the product of few tokens can spare.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Float16, Float32, Int32, UInt32

from pallas_kernels.bitplane_matmul import activations
from pallas_kernels.bitplane_matmul.activations import LARGEST, LARGEST_HALF, TOKENS_PER_BLOCK
from pallas_kernels.implementation import on_gpu, triton_call

BLOCKS = 8
"""Pairs (r, h): bit ``r + 16 h + 4 c`` of a word belongs to pair ``2 r + h`` and byte c."""
TOKENS_TOGETHER = 8


def _bit(pair: Array, c: int) -> Array:
    return (pair >> 1) + 16 * (pair & 1) + 4 * c


def fragments(
    x: Float[Array, "R K"], index: Int32[Array, "U capacity"], words: int
) -> tuple[UInt32[Array, "U S blocks 2 32 4"], Float32[Array, "U capacity"]]:
    """Tokens as int16 in fragments, and their scales; see :func:`activations.fragments`.

    Args:
        x: Activations.
        index: Rows of x of each unit; the capacity is a multiple of four.
        words: Words that a lane takes at once.
    """
    if on_gpu():
        return fragments_kernel(x, index, words)
    integers, scale = activations.quantize(x)
    found = activations.gather_units(activations.fragments(integers, words), index)
    return found, scale[index]


def tiles(
    x: Float[Array, "R K"], index: Int32[Array, "U capacity"]
) -> tuple[Float16[Array, "U S capacity 8"], Float32[Array, "U capacity"]]:
    """Tokens as float16 in tiles, and their scales; see :func:`activations.half_blocks`."""
    if on_gpu():
        return tiles_kernel(x, index)
    blocks, scale = activations.half_blocks(x)
    return activations.gather_tiles(blocks, index), scale[index]


def _inverse(largest: Array, top: float | int) -> Array:
    return jnp.where(largest > 0, np.float32(top) / jnp.where(largest > 0, largest, 1), 0)


def fragments_kernel(
    x: Float[Array, "R K"], index: Int32[Array, "U capacity"], words: int
) -> tuple[UInt32[Array, "U S blocks 2 32 4"], Float32[Array, "U capacity"]]:
    """:func:`fragments` in Pallas: a program for each token."""
    units, capacity = index.shape
    per_row = x.shape[1] // 32
    steps = words * activations.chunks(per_row, words)
    shift = words.bit_length() - 1  # words are a power of two
    width = pl.next_power_of_2(4 * steps)

    def body(index_ref, x_ref, out_ref, scale_ref):
        inside, unit = pl.program_id(0), pl.program_id(1)
        row = index_ref[unit, inside]
        pair, word = (lax.broadcasted_iota(jnp.int32, (BLOCKS, width), axis) for axis in (0, 1))
        values = [
            plt.load(x_ref.at[row, _bit(pair, c) * per_row + word], mask=word < per_row, other=0)
            for c in range(4)
        ]
        values = [value.astype(jnp.float32) for value in values]
        largest = _largest(values)
        inverse = _inverse(largest, LARGEST)
        integers = [jnp.floor(value * inverse + 0.5).astype(jnp.int32) for value in values]
        high = [(integer + 128) >> 8 for integer in integers]
        low = [integer - (top << 8) for integer, top in zip(integers, high, strict=True)]
        step = (word >> (shift + 2) << shift) + (word & (words - 1))
        lane = word >> shift & 3
        place = unit, step, inside >> 2, pair >> 2
        for part, byte in enumerate((high, low)):
            packed = jnp.zeros((BLOCKS, width), jnp.int32)
            for c, value in enumerate(byte):
                packed |= (value & 255) << (8 * c)
            where = ((inside & 3) * 2 + part) * 4 + lane
            target = out_ref.at[*place, where, pair & 3]
            bits = lax.bitcast_convert_type(packed, jnp.uint32)
            plt.store(target, bits, mask=word < 4 * steps)
        scale_ref[unit, inside] = largest / LARGEST

    shape = (units, steps, capacity // TOKENS_PER_BLOCK, 2, 32, 4)
    return _call(body, x, index, shape, jnp.uint32, "bitplane_fragments", (capacity, units), width)


def tiles_kernel(
    x: Float[Array, "R K"], index: Int32[Array, "U capacity"]
) -> tuple[Float16[Array, "U S capacity 8"], Float32[Array, "U capacity"]]:
    """:func:`tiles` in Pallas: a program for eight tokens."""
    units, capacity = index.shape
    per_row = x.shape[1] // 32
    chunk_count = -(-per_row // 8)
    width = pl.next_power_of_2(chunk_count)
    shape = (width, TOKENS_TOGETHER, 8)
    groups = capacity // TOKENS_TOGETHER

    def body(index_ref, x_ref, out_ref, scale_ref):
        first, unit = pl.program_id(0) * TOKENS_TOGETHER, pl.program_id(1)
        chunk, inside, place = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in range(3))
        inside = first + inside
        row = plt.load(index_ref.at[unit, inside])
        word = 8 * chunk + place

        def load(pair):
            columns = [_bit(pair, c) * per_row + word for c in range(4)]
            mask = word < per_row
            loaded = [plt.load(x_ref.at[row, one], mask=mask, other=0) for one in columns]
            return [one.astype(jnp.float32) for one in loaded]

        def measure(pair, largest):
            for value in load(pair):
                largest = jnp.maximum(largest, jnp.abs(value))
            return largest

        found = lax.fori_loop(0, BLOCKS, measure, jnp.zeros(shape, jnp.float32))
        largest = jnp.max(jnp.max(found, axis=2), axis=0)
        inverse = _inverse(largest, LARGEST_HALF)[None, :, None]

        def write(pair, _):
            for c, value in enumerate(load(pair)):
                target = out_ref.at[unit, (chunk * BLOCKS + pair) * 4 + c, inside, place]
                half = (value * inverse).astype(jnp.float16)
                plt.store(target, half, mask=chunk < chunk_count)

        lax.fori_loop(0, BLOCKS, write, None)
        token = first + lax.iota(jnp.int32, TOKENS_TOGETHER)
        plt.store(scale_ref.at[unit, token], largest / LARGEST_HALF)

    sizes = (units, 32 * chunk_count, capacity, 8)
    return _call(body, x, index, sizes, jnp.float16, "bitplane_tiles", (groups, units), 8 * width)


def _largest(values: list[Array]) -> Array:
    largest = jnp.abs(values[0])
    for value in values[1:]:
        largest = jnp.maximum(largest, jnp.abs(value))
    return jnp.max(jnp.max(largest, axis=1), axis=0)  # lowering takes one axis at a time


def _call(
    body: Callable,
    x: Array,
    index: Array,
    shape: tuple[int, ...],
    dtype: type,
    name: str,
    grid: tuple[int, int],
    width: int,
) -> tuple[Array, Array]:
    result = triton_call(
        body,
        [jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct(index.shape, jnp.float32)],
        name=name,
        grid=grid,
        warps=4 if width <= 128 else 8,
        stages=1,
    )(index, x)
    return result[0], result[1]
