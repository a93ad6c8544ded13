"""Activations as the kernels read them: int16 a token, in the order of the weights' bits.

A token is scaled so that its largest value becomes 32512 = 127 * 256 and rounded to int16; the
high and low bytes are two int8 columns of the matrix product, whose int32 sums are exact.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float16, Float32, Int32, UInt32

TOKENS_PER_BLOCK = 4
LARGEST = 127 * 256
LARGEST_HALF = 1024.0
"""Largest value of a token in float16, so that eleven bits are kept down to 6e-8 of it."""


def chunks(words_per_row: int, words: int) -> int:
    """Chunks of ``4 * words`` words that cover a row."""
    return -(-words_per_row // (4 * words))


def quantize(x: Float[Array, "M K"]) -> tuple[Int32[Array, "M K"], Float32[Array, " M"]]:
    """Rounds each token to 16 bits: ``x ~ scale * integers``."""
    x = x.astype(jnp.float32)
    largest = jnp.max(jnp.abs(x), axis=-1)
    inverse = jnp.where(largest > 0, LARGEST / jnp.where(largest > 0, largest, 1), 0)
    return jnp.floor(x * inverse[:, None] + 0.5).astype(jnp.int32), largest / LARGEST


def _by_step(values: Array, words: int) -> Array:
    """Reorders columns to ``[M, chunk, word, r, lane t, h, c]``; columns past the row are zero."""
    tokens, columns = values.shape
    per_row = columns // 32
    count = chunks(per_row, words)
    spread = values.reshape(tokens, 2, 4, 4, per_row)
    spread = jnp.pad(spread, ((0, 0),) * 4 + ((0, 4 * words * count - per_row),))
    spread = spread.reshape(tokens, 2, 4, 4, count, 4, words)
    return spread.transpose(0, 4, 6, 3, 5, 1, 2)


def fragments(integers: Int32[Array, "M K"], words: int) -> UInt32[Array, "M S 2 2 4 4"]:
    """The bytes of each token as right operands of the matrix instruction.

    Args:
        integers: Values of :func:`quantize`.
        words: Words that a lane takes at once.

    Returns:
        ``[M, word step, r // 2, high or low byte, lane t, (r % 2, h)]``, four weights a word.
    """
    ordered = _by_step(integers, words)
    tokens, count = ordered.shape[:2]
    high = (ordered + 128) >> 8
    both = jnp.stack([high, ordered - (high << 8)]).astype(jnp.int8)
    packed = lax.bitcast_convert_type(both, jnp.uint32)
    packed = packed.reshape(2, tokens, count * words, 2, 2, 4, 2)
    return packed.transpose(1, 2, 3, 0, 5, 4, 6).reshape(tokens, count * words, 2, 2, 4, 4)


def gather_units(
    tokens: UInt32[Array, "M S 2 2 4 4"], index: Int32[Array, "U capacity"]
) -> UInt32[Array, "U S blocks 2 32 4"]:
    """Puts the fragments of each unit's tokens side by side, lane by lane."""
    units, capacity = index.shape
    steps = tokens.shape[1]
    picked = tokens[index].reshape(units, capacity // 4, 4, steps, 2, 2, 4, 4)
    picked = picked.transpose(0, 3, 1, 4, 2, 5, 6, 7)
    return picked.reshape(units, steps, capacity // 4, 2, 32, 4)


def half_blocks(x: Float[Array, "M K"]) -> tuple[Float16[Array, "M S 8"], Float32[Array, " M"]]:
    """Each token in float16, in blocks of eight columns of the product for warp groups.

    A block holds one bit's columns of eight neighbouring words, two for each lane t.

    Returns:
        ``[M, (chunk, r, h, c), 8]``, and the scale of each token.
    """
    x = x.astype(jnp.float32)
    largest = jnp.max(jnp.abs(x), axis=-1)
    factor = jnp.where(largest > 0, LARGEST_HALF / jnp.where(largest > 0, largest, 1), 0)
    halves = (x * factor[:, None]).astype(jnp.float16)
    tokens, columns = x.shape
    spread = halves.reshape(tokens, 2, 4, 4, columns // 32)
    spread = jnp.pad(spread, ((0, 0),) * 4 + ((0, -(columns // 32) % 8),))
    spread = spread.reshape(tokens, 2, 4, 4, -1, 8).transpose(0, 4, 3, 1, 2, 5)
    return spread.reshape(tokens, -1, 8), largest / LARGEST_HALF


def gather_tiles(
    tokens: Float16[Array, "M S 8"], index: Int32[Array, "U capacity"]
) -> Float16[Array, "U S capacity 8"]:
    """The blocks of each unit's tokens as the tensor cores read them, token by token."""
    return tokens[index].transpose(0, 2, 1, 3)
