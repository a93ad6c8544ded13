"""The product of activations with one any-precision matrix given as plain arrays."""

from pallas_kernels.bitplane_matmul.api import bitplane_matmul

__all__ = ["bitplane_matmul"]
