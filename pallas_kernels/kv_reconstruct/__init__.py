"""Attention over latents in pages of the pool: keys and values are rebuilt, or never made."""

from pallas_kernels.kv_reconstruct.api import Mode, latent_attention
from pallas_kernels.kv_reconstruct.compact import (
    CompactBlocks,
    UsedPages,
    bucket_sizes,
    compact_blocks,
    smallest_bucket,
    used_pages,
)
from pallas_kernels.kv_reconstruct.expansion import Rotation, UpProjections

__all__ = [
    "CompactBlocks",
    "Mode",
    "Rotation",
    "UpProjections",
    "UsedPages",
    "bucket_sizes",
    "compact_blocks",
    "latent_attention",
    "smallest_bucket",
    "used_pages",
]
