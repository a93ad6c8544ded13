"""Attention over keys and values in pages of the pool."""

from pallas_kernels.paged_attention.api import paged_attention

__all__ = ["paged_attention"]
