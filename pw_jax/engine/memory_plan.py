"""Divides the memory budget: weights that are arrays, and the pool."""

from collections.abc import Mapping
from dataclasses import dataclass

import jax

from pw_jax.engine.cache_choice import choose_cache
from pw_jax.engine.config import EngineConfig
from pw_jax.engine.expert_source import ExpertSource
from pw_jax.errors import UserError
from pw_jax.models.config import ModelConfig
from pw_jax.models.latent import LatentLayer
from pw_jax.paging.expert_slices import slice_layouts
from pw_jax.paging.layout import ExpertFormat, PagingLayout, choose_page_words, paging_layout
from pw_jax.planner.config import PlannerConfig

MIB = 1 << 20


@dataclass(frozen=True)
class MemoryPlan:
    """What the budget buys.

    Attributes:
        budget_bytes: The budget.
        layout: Layouts of all pages.
        array_bytes: Bytes of the weights that are plain arrays.
        pool_pages: Pages of the pool, page 0 included.
        weight_pages: Pages that expert weights may fill at load time.
        kv_blocks: For each KV group, blocks of a sequence of the greatest length.
    """

    budget_bytes: int
    layout: PagingLayout
    array_bytes: int
    pool_pages: int
    weight_pages: int
    kv_blocks: tuple[int, ...]

    @property
    def pool_bytes(self) -> int:
        """Bytes of the pool."""
        return self.pool_pages * self.layout.page_bytes


def plan_memory(
    model: ModelConfig,
    config: EngineConfig,
    experts: ExpertSource | None,
    array_bytes: int,
    latents: Mapping[int, LatentLayer],
    devices: int = 1,
) -> MemoryPlan:
    """Plans the memory of an engine: of each of its devices.

    At load time experts may fill the pool but for the KV blocks that the planner keeps free anyway;
    later the two share it as sequences grow. If the planner moves no pages, KV pages for all slots
    at full length are set aside instead.

    Args:
        model: The model, with the heads that a device has.
        config: The engine's settings.
        experts: Of experts in pages.
        array_bytes: Bytes of the weights that are plain arrays, on a device.
        latents: Layers that can keep latents; see `cache_choice.latents_of`.
        devices: Over which the model is divided.

    Raises:
        UserError: The budget leaves no room for a pool, the page size does not suit the model, or
            sequences may be longer than its learned positions.
    """
    if model.rope.kind == "none" and config.max_sequence_tokens > model.max_positions:
        raise UserError(
            f"this model has learned positions for {model.max_positions} tokens and cannot run "
            f"sequences of max_sequence_tokens {config.max_sequence_tokens}: lower it"
        )
    expert_format = None if experts is None else experts.expert_format
    layout = plan_layout(model, config, expert_format, latents, devices)
    block_pages = sum(len(group.layers) for group in layout.kv_groups)
    reserve = 1 + (config.planner.release_watermark_blocks + 1) * block_pages
    budget = config.memory_budget_bytes
    if budget is None:
        budget = _roomy_budget(layout, config, array_bytes, reserve)
    pool_pages = (budget - array_bytes) // layout.page_bytes
    if pool_pages <= reserve:
        raise UserError(
            f"a memory budget of {budget / MIB:.1f} MiB is too small: weights outside the pool "
            f"need {array_bytes / MIB:.1f} MiB, and the least pool "
            f"{reserve * layout.page_bytes / MIB:.1f} MiB more: raise the memory budget"
        )
    weight_pages = pool_pages - reserve
    if not config.planner.moves_pages:
        set_aside = 1 + config.slots * layout.kv_pages(config.max_sequence_tokens)
        weight_pages = max(0, min(weight_pages, pool_pages - set_aside))
    return MemoryPlan(
        budget,
        layout,
        array_bytes,
        pool_pages,
        weight_pages,
        tuple(group.blocks(config.max_sequence_tokens) for group in layout.kv_groups),
    )


def plan_layout(
    model: ModelConfig,
    config: EngineConfig,
    expert_format: ExpertFormat | None,
    latents: Mapping[int, LatentLayer],
    devices: int = 1,
) -> PagingLayout:
    """The layouts of an engine's pages; arguments as in :func:`plan_memory`.

    Raises:
        UserError: The page size does not suit the model, or latents are asked for in vain.
    """
    expert_shape = model.expert_shape
    if expert_shape is None or expert_format is None:
        expert_shape = expert_format = None
    else:
        expert_shape, expert_format = slice_layouts(expert_shape, expert_format, devices)
    kv_shapes = choose_cache(model, latents, config)
    page_words = (
        choose_page_words(kv_shapes, kv_dtype=config.kv_dtype, expert_shape=expert_shape)
        if config.page_bytes is None
        else config.page_bytes // 4
    )
    try:
        return paging_layout(
            kv_shapes,
            kv_dtype=config.kv_dtype,
            page_words=page_words,
            expert_shape=expert_shape,
            expert_format=expert_format,
            moe_layers=len(model.moe_layers),
        )
    except ValueError as problem:
        raise UserError(
            f"pages of {4 * page_words} bytes do not suit this model: {problem}"
        ) from problem


def check_experts(config: EngineConfig, experts: ExpertSource | None, devices: int) -> None:
    """Refuses what experts in pages cannot do over several devices.

    Raises:
        UserError: Prompt statistics; or several processes, in which copies land at different times
            and the schedulers would part.
    """
    if experts is None or devices == 1:
        return
    if config.planner.prompt_statistics != "off":
        raise UserError(
            "statistics of prompts are not collected over several devices: leave "
            "--prompt-residual off"
        )
    if jax.process_count() > 1:
        raise UserError("experts in pages run on the devices of one process only")


def column_weight_bytes(model: ModelConfig, planner: PlannerConfig) -> int:
    """Bytes on the device that the direct prompt correction needs, as float32."""
    shape = model.expert_shape
    if shape is None or planner.prompt_statistics != "direct":
        return 0
    return 4 * len(model.moe_layers) * shape.experts * shape.embed


def _roomy_budget(
    layout: PagingLayout, config: EngineConfig, array_bytes: int, reserve_pages: int
) -> int:
    """Everything at its largest, but no more than 85% of the device."""
    pages = reserve_pages + config.slots * layout.kv_pages(config.max_sequence_tokens)
    for matrix in layout.matrices or ():
        pages += layout.moe_layers * layout.experts * matrix.pages(matrix.parent_bits)
    wanted = array_bytes + pages * layout.page_bytes
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    return wanted if limit is None else min(wanted, int(0.85 * limit))
