"""Attention over latents in pages of the pool: keys and values are rebuilt, or never made."""

from pallas_kernels.kv_reconstruct.api import Mode, latent_attention
from pallas_kernels.kv_reconstruct.compact import CompactBlocks, compact_blocks
from pallas_kernels.kv_reconstruct.expansion import Rotation, UpProjections

__all__ = [
    "CompactBlocks",
    "Mode",
    "Rotation",
    "UpProjections",
    "compact_blocks",
    "latent_attention",
]
