"""Activations as the kernels read them: int16 a token, in the order of the weights' bits.

A token is scaled so that its largest value becomes 32512 = 127 * 256 and rounded to int16; the
high and low bytes are two int8 columns of the matrix product, whose int32 sums are exact.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32, UInt32

TOKENS_PER_BLOCK = 4
LARGEST = 127 * 256


def chunks(words_per_row: int, words: int) -> int:
    """Chunks of ``4 * words`` words that cover a row."""
    return -(-words_per_row // (4 * words))


def quantize(x: Float[Array, "M K"]) -> tuple[Int32[Array, "M K"], Float32[Array, " M"]]:
    """Rounds each token to 16 bits: ``x ~ scale * integers``."""
    x = x.astype(jnp.float32)
    largest = jnp.max(jnp.abs(x), axis=-1)
    inverse = jnp.where(largest > 0, LARGEST / jnp.where(largest > 0, largest, 1), 0)
    return jnp.round(x * inverse[:, None]).astype(jnp.int32), largest / LARGEST


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


def permuted(x: Float[Array, "M K"], words: int) -> Float[Array, "M padded"]:
    """Columns in the order in which the dequantising kernel writes weights."""
    return _by_step(x, words).reshape(x.shape[0], -1)
