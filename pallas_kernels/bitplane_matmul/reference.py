"""The jnp form: dequantise everything, then multiply."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, UInt32

from pallas_kernels.bitplanes import look_up, unpack_codes


def bitplane_matmul(
    x: Float[Array, "M K"],
    planes: UInt32[Array, "b N words"],
    table: Int[Array, "groups entries"],
    scale: Float32[Array, " N"],
) -> Float32[Array, "M N"]:
    """See :func:`pallas_kernels.bitplane_matmul.bitplane_matmul`."""
    weight = look_up(unpack_codes(planes), table, scale).astype(x.dtype)
    return jnp.einsum("mk,nk->mn", x, weight, preferred_element_type=jnp.float32)
