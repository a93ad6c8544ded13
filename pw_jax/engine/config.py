"""The engine's settings."""

from dataclasses import dataclass, field
from typing import Literal

from pallas_kernels.implementation import Implementation
from pw_jax.planner.config import PlannerConfig

KvCacheKind = Literal["auto", "full", "latent"]


@dataclass(frozen=True)
class EngineConfig:
    """Sizes that shape the compiled steps, and the memory they run in.

    Attributes:
        memory_budget_bytes: Device memory for weights and pages together; None takes what all
            experts at parent bits and all slots at full length need, or 85% of the device if that
            is less. What XLA needs besides for temporary values is not in it;
            :attr:`Engine.temporary_bytes` tells how much.
        slots: Sequences that run at once, B.
        max_sequence_tokens: Most tokens of a sequence, prompt and generated.
        prefill_chunk: Tokens of one prefill step.
        page_bytes: Bytes a page, a multiple of 512; None chooses the largest that wastes little.
        kv_dtype: ``"bfloat16"``, or ``"float32"`` to compare with a float32 reference.
        kv_cache: ``"full"`` keeps keys and values; ``"latent"`` keeps, where a layer has them, the
            latents that they come from; ``"auto"`` keeps what is cheaper, see `cache_choice`.
        latent_bucket_tokens: Steps over latents are compiled for several lengths of page tables:
            from about so many tokens a sequence to all, each twice the one before. The host takes
            the shortest that holds what is used. ``max_sequence_tokens`` makes one of all lengths.
        prefix_sharing: Texts that begin alike share pages, also after the first has ended; see
            `KvCache`. Not while statistics of prompts are collected, for which every prompt is run.
        implementation: Which kernels run.
        planner: Constants of the planner.
        routing_read_steps: Steps between two readings of the routing mass.
    """

    memory_budget_bytes: int | None = None
    slots: int = 4
    max_sequence_tokens: int = 1024
    prefill_chunk: int = 64
    page_bytes: int | None = None
    kv_dtype: str = "bfloat16"
    kv_cache: KvCacheKind = "auto"
    latent_bucket_tokens: int = 256
    prefix_sharing: bool = True
    implementation: Implementation = "auto"
    planner: PlannerConfig = field(default_factory=PlannerConfig)
    routing_read_steps: int = 8

    @property
    def shares_prefixes(self) -> bool:
        """Whether pages are shared; see ``prefix_sharing``."""
        return self.prefix_sharing and self.planner.prompt_statistics == "off"

    def __post_init__(self):
        for name in (
            "slots",
            "max_sequence_tokens",
            "prefill_chunk",
            "latent_bucket_tokens",
            "routing_read_steps",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.page_bytes is not None and (self.page_bytes <= 0 or self.page_bytes % 512):
            raise ValueError(f"page_bytes must be a multiple of 512, got {self.page_bytes}")
