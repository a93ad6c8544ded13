"""Bitplanes: codes of any precision stored as one packed plane a bit.

Plane 0 holds the most significant bit, so the first ``b`` planes are the ``b``-bit code. Bit ``j``
of word ``w`` of a row belongs to column ``j * words + w``: for one bit position the columns of all
words are adjacent, so a kernel reads activations in contiguous runs.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, UInt8, UInt32

WORD_BITS = 32


def pack_codes(codes: UInt8[Array, "*batch N K"], bits: int) -> UInt32[Array, "*batch P N W"]:
    """Packs codes into planes.

    Args:
        codes: Codes of ``bits`` bits; K must be a multiple of 32.
        bits: Width of a code, 1 to 8; also the number of planes P.

    Returns:
        Planes, most significant first, with W = K / 32 words a row.

    Raises:
        ValueError: K is not a multiple of 32.
    """
    *batch, rows, columns = codes.shape
    if columns % WORD_BITS:
        raise ValueError(f"columns must be a multiple of {WORD_BITS}, got {columns}")
    grouped = codes.astype(jnp.uint32).reshape(*batch, rows, WORD_BITS, columns // WORD_BITS)
    position = lax.broadcasted_iota(jnp.uint32, grouped.shape, grouped.ndim - 2)
    planes = [
        jnp.sum(((grouped >> jnp.uint32(bits - 1 - plane)) & jnp.uint32(1)) << position, axis=-2)
        for plane in range(bits)
    ]
    return jnp.stack([plane.astype(jnp.uint32) for plane in planes], axis=-3)


def unpack_codes(planes: UInt32[Array, "*batch P N W"]) -> UInt8[Array, "*batch N K"]:
    """Unpacks planes into codes of P bits; the inverse of :func:`pack_codes`.

    Giving only the first ``b`` planes of a wider code yields its ``b``-bit code.
    """
    *batch, bits, rows, words = planes.shape
    shape = (*batch, rows, WORD_BITS, words)
    position = lax.broadcasted_iota(jnp.uint32, shape, len(shape) - 2)
    codes = jnp.zeros(shape, jnp.uint8)
    for plane in range(bits):
        bit = (planes[..., plane, :, None, :] >> position) & jnp.uint32(1)
        codes = (codes << jnp.uint8(1)) | bit.astype(jnp.uint8)
    return codes.reshape(*batch, rows, WORD_BITS * words)


def look_up(codes: UInt8[Array, "N K"], tables: jax.Array, scales: jax.Array) -> jax.Array:
    """Turns codes into weights: ``scales[n] * tables[n // G, code]``.

    Args:
        codes: Codes of ``b`` bits.
        tables: ``[N / G, 2**b]`` int8 or int16 entries; G consecutive rows share a table.
        scales: ``[N]`` float32.

    Returns:
        ``[N, K]`` float32.
    """
    rows, columns = codes.shape
    groups, entries = tables.shape
    base = (jnp.arange(rows, dtype=jnp.int32) // (rows // groups)) * entries
    index = base[:, None] + codes.astype(jnp.int32)
    picked = tables.reshape(-1)[index.reshape(-1)].reshape(rows, columns)
    return picked.astype(jnp.float32) * scales[:, None]
