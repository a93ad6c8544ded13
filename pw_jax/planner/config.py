"""Every constant of the planner, in one place."""

import dataclasses
from typing import Literal, get_args

PlannerKind = Literal["full", "uniform", "random", "frequency", "static", "per_layer", "oracle"]
"""What decides which blocks lose bits; see `pw_jax.planner.kinds`."""

PromptMode = Literal["off", "heads", "direct"]
"""Where the correction for the running prompts comes from; see `pw_jax.planner.residual`."""


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
        release_extra_blocks: Blocks that a release frees beyond the one above the mark that the
            paper asks for, so that not every new block takes a plan; at most up to the restore
            mark.
        restore_watermark_blocks: Free KV blocks above which precision is restored; only the pages
            above this mark are spent. Above the release mark, so that the two do not chase each
            other.
        restore_pages_per_step: Most pages that one plan, and one step boundary, starts to load: a
            rate limit, so that copies do not crowd the link and plans stay fresh.
        moves_per_turn: Most blocks that one step boundary moves when no page is lacking, so that
            no step waits long for moves. What is lacking is freed at once, however many it takes.
        restore_residence_steps: Steps for which a block keeps its width before it may be restored.
            Releases do not wait: running out of pages is worse than moving a block twice.
        raise_turns: Steps after which a raise is committed, waiting for its copies if need be, so
            that runs under pressure repeat exactly. None commits it at the first step that finds
            them landed, which is a matter of time, and never waits.
        shrink_tokens: Calibration tokens that the mean of the layer counts for when the sensitivity
            of a rarely routed expert is drawn towards it.
        kind: What decides; all but "full" are there to compare with.
        routing: False takes routing out: no multipliers, and the coldest floor for all.
        sensitivity: False takes the calibrated sensitivity out: a block's error then depends on
            its width and size only.
        page_movement: False fixes the widths at load time and sets pages for all slots at full
            length aside.
        prompt_residual: Correction for the running prompts; needs scripts/calibrate.py.
        residual_strength: Exponent on the predicted ratio of prompt damage to global damage.
        residual_limit: The correction stays within 1 / limit .. limit.
        residual_tokens: Routed tokens that "no correction" counts for in the direct form, so that
            an expert that a prompt used twice is not judged by two tokens.
        random_seed: Of the kind "random".
    """

    bucket_edges: tuple[float, ...] = (0.5, 1.5)
    bucket_multipliers: tuple[float, ...] = (1.0, 1.25, 2.0)
    bucket_floors: tuple[int, ...] = (3, 4, 5)
    bucket_hysteresis: float = 0.15
    half_life_tokens: float = 512.0
    release_watermark_blocks: int = 4
    release_extra_blocks: int = 8
    restore_watermark_blocks: int = 16
    restore_pages_per_step: int = 1024
    moves_per_turn: int = 16
    restore_residence_steps: int = 32
    raise_turns: int | None = None
    shrink_tokens: float = 128.0
    kind: PlannerKind = "full"
    routing: bool = True
    sensitivity: bool = True
    page_movement: bool = True
    prompt_residual: PromptMode = "off"
    residual_strength: float = 1.0
    residual_limit: float = 2.0
    residual_tokens: float = 32.0
    random_seed: int = 0

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
        for name in (
            "release_extra_blocks",
            "restore_residence_steps",
            "restore_pages_per_step",
            "shrink_tokens",
        ):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative")
        if self.moves_per_turn < 1:
            raise ValueError("moves_per_turn must be at least 1")
        if self.raise_turns is not None and self.raise_turns < 1:
            raise ValueError("raise_turns must be at least 1, or None")
        for name, allowed in (("kind", PlannerKind), ("prompt_residual", PromptMode)):
            if getattr(self, name) not in get_args(allowed):
                raise ValueError(f"{name} must be one of {', '.join(get_args(allowed))}")
        if self.residual_strength < 0 or self.residual_limit < 1 or self.residual_tokens <= 0:
            raise ValueError(
                "need residual_strength >= 0, residual_limit >= 1 and residual_tokens > 0"
            )

    @property
    def moves_pages(self) -> bool:
        """Whether widths change after loading."""
        return self.page_movement and self.kind != "static"

    @property
    def prompt_statistics(self) -> PromptMode:
        """What prefill must collect."""
        return "direct" if self.kind == "oracle" else self.prompt_residual
