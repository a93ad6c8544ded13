"""Writes into the page pool, in place."""

from pallas_kernels.page_write.api import write_kv, write_latents, write_pages

__all__ = ["write_kv", "write_latents", "write_pages"]
