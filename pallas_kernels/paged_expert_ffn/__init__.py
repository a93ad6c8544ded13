"""The feed-forward product of mixed-precision experts, read straight from pages of the pool."""

from pallas_kernels.paged_expert_ffn.api import paged_expert_ffn
from pallas_kernels.paged_expert_ffn.pages import Activation, ModulePages

__all__ = ["Activation", "ModulePages", "paged_expert_ffn"]
