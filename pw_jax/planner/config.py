"""Every constant of the planner, in one place."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class PlannerConfig:
    """When to move pages, and how routing weighs on the choice of blocks.

    The PagedWeight paper publishes none of these values: not the decay of the routing mass, not the
    bucket edges, multipliers and floors, not the thresholds. They are ours, meant to be swept, and
    no result obtained with them may be quoted as the paper's.

    The three bucket tuples run from the coldest bucket to the hottest. With the defaults the
    buckets are cold, warm and hot; any number from one up is allowed.

    Attributes:
        bucket_edges: Lower edges of all buckets but the coldest, rising, as relative routing mass
            ``m_e * E / sum(m)`` of an expert in its layer (1 = its uniform share).
        bucket_multipliers: Factor on the damage of a block, for each bucket; above 0, not falling.
        bucket_floors: Bits below which an expert of each bucket is never lowered, not falling.
            A floor outside seed..parent bits is moved to the nearer of the two.
        bucket_hysteresis: A block changes bucket only when its mass has passed the edge by this
            share of the edge: up at ``edge * (1 + h)``, down below ``edge * (1 - h)``.
        half_life_tokens: Tokens after which the weight of older routing has halved.
        release_watermark_blocks: Free KV blocks to keep (a block is one page in every layer).
            With this many or fewer left, weight pages are released.
        restore_watermark_blocks: Free KV blocks above which precision is restored; only the pages
            above this mark are spent. Above the release mark, so that the two do not chase each
            other.
        restore_pages_per_step: Most pages that one step boundary starts to load: a rate limit, so
            that copies do not crowd the link and plans stay fresh.
        restore_residence_steps: Steps for which a block keeps its width before it may be restored.
            Releases do not wait: running out of pages is worse than moving a block twice.
        shrink_tokens: Calibration tokens that the mean of the layer counts for when the sensitivity
            of a rarely routed expert is drawn towards it.
    """

    bucket_edges: tuple[float, ...] = (0.5, 1.5)
    bucket_multipliers: tuple[float, ...] = (1.0, 1.25, 2.0)
    bucket_floors: tuple[int, ...] = (3, 4, 5)
    bucket_hysteresis: float = 0.15
    half_life_tokens: float = 512.0
    release_watermark_blocks: int = 4
    restore_watermark_blocks: int = 16
    restore_pages_per_step: int = 256
    restore_residence_steps: int = 32
    shrink_tokens: float = 128.0

    def __post_init__(self):
        buckets = len(self.bucket_edges) + 1
        if not len(self.bucket_multipliers) == len(self.bucket_floors) == buckets:
            raise ValueError(
                f"{buckets - 1} bucket_edges make {buckets} buckets: give as many "
                f"bucket_multipliers and bucket_floors, not {len(self.bucket_multipliers)} and "
                f"{len(self.bucket_floors)}"
            )
        for name in ("bucket_edges", "bucket_multipliers", "bucket_floors"):
            if list(getattr(self, name)) != sorted(getattr(self, name)):
                raise ValueError(f"{name} must run from cold to hot without falling")
        if min((*self.bucket_edges, *self.bucket_multipliers), default=1.0) <= 0:
            raise ValueError("bucket_edges and bucket_multipliers must be above 0")
        if not 0 <= self.bucket_hysteresis < 1:
            raise ValueError("bucket_hysteresis must be at least 0 and below 1")
        if self.half_life_tokens <= 0:
            raise ValueError("half_life_tokens must be above 0")
        if not 0 <= self.release_watermark_blocks < self.restore_watermark_blocks:
            raise ValueError("need 0 <= release_watermark_blocks < restore_watermark_blocks")
        if min(self.restore_residence_steps, self.restore_pages_per_step, self.shrink_tokens) < 0:
            raise ValueError(
                "restore_residence_steps, restore_pages_per_step and shrink_tokens must not be "
                "negative"
            )
