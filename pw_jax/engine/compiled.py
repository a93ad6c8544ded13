"""The steps, compiled once for one fixed set of shapes.

They are compiled ahead of time and called as executables: an argument of another shape, dtype or
sharding is an error, never a silent compilation in the middle of a generation.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pw_jax.engine.buckets import UsedTables
from pw_jax.engine.config import EngineConfig
from pw_jax.engine.memory_plan import MemoryPlan
from pw_jax.engine.reuse import copy_pages, no_reuse, reuse_pages
from pw_jax.engine.sampling import GREEDY, Sampling, SamplingArrays
from pw_jax.engine.steps import (
    Caches,
    DecodeArguments,
    NewPages,
    PrefillArguments,
    StepOutput,
    Steps,
)
from pw_jax.models.config import ModelConfig
from pw_jax.packing import Packing
from pw_jax.paging.layout import PagingLayout
from pw_jax.paging.observer import PromptStatistics
from sharding.placement import Placement


def no_new_pages(layout: PagingLayout, count: int, blocks: tuple[int, ...]) -> tuple[NewPages, ...]:
    """Arrays for up to ``count`` new blocks a KV group, none of them used yet.

    Args:
        layout: The model's layouts.
        count: Rows U.
        blocks: Blocks of each group's table; as an index it is out of range and means none.
    """
    return tuple(
        NewPages(
            np.zeros(count, np.int32),
            np.full(count, most, np.int32),
            np.zeros((count, len(group.layers)), np.int32),
        )
        for group, most in zip(layout.kv_groups, blocks, strict=True)
    )


def no_sampling(slots: int) -> SamplingArrays:
    """Greedy sampling for every slot, as numpy arrays to be filled in."""
    return SamplingArrays(
        np.zeros(slots, np.float32),
        np.zeros(slots, np.int32),
        np.ones(slots, np.float32),
        np.zeros(slots, np.uint32),
    )


def fill_sampling(
    arrays: SamplingArrays, row: int, sampling: Sampling = GREEDY, seed: int = 0
) -> None:
    """Writes how a row samples into a step's (numpy) arguments."""
    arrays.temperature[row] = sampling.temperature  # pyright: ignore[reportIndexIssue]
    arrays.top_k[row] = sampling.top_k  # pyright: ignore[reportIndexIssue]
    arrays.top_p[row] = sampling.top_p  # pyright: ignore[reportIndexIssue]
    arrays.seeds[row] = seed  # pyright: ignore[reportIndexIssue]


def fill_chunk(arguments: PrefillArguments, slot: int, start: int, tokens: list[int]) -> None:
    """Writes a prompt's chunk into a prefill step's (numpy) arguments."""
    arguments.chunk[: len(tokens)] = tokens
    arguments.slot[...] = slot
    arguments.start[...] = start
    arguments.count[...] = len(tokens)


def first_state(
    plan: MemoryPlan, model: ModelConfig, slots: int, placement: Placement
) -> tuple[Caches, StepOutput]:
    """The empty pool and page tables, and an output of zeros, on the device.

    The pool is made where it stays, so that there is never a second copy of it.
    """
    experts = model.expert_shape.experts if model.expert_shape else 0
    pages = placement.devices * plan.pool_pages
    pool = jnp.zeros((pages, plan.layout.page_words), jnp.uint32, device=placement.pool)
    tables = tuple(
        np.zeros((len(group.layers), slots, blocks), np.int32)
        for group, blocks in zip(plan.layout.kv_groups, plan.kv_blocks, strict=True)
    )
    mass = np.zeros((len(model.moe_layers), experts), np.float32)
    tokens = np.zeros(slots, np.int32)
    tables, tokens, mass = jax.device_put((tables, tokens, mass), placement.whole)
    return Caches(pool, tables), StepOutput(tokens, mass)


class CompiledSteps:
    """Executables of the decode step, of the prefill chunk, and of the draws after each.

    Attributes:
        decode_arguments: The decode step's arguments, packed; the sampling of the slots is kept in
            the defaults.
        prefill_arguments: The prefill step's arguments, packed.
        reuse_arguments: Arguments of the program that gives a slot pages of other texts, packed.
        tables: Which steps over latents there are, and which one is called.
        decode_steps: Executables, by the sizes of ``tables``.
        prefill_steps: Likewise.
        draw_decoded: By whether any slot has a top-k or top-p; likewise ``draw_prefilled``.

    Args:
        steps: The step functions.
        config: The engine's settings.
        weights: The model's arrays.
        caches: The caches, or their shapes.
        output: A step output, or its shapes.
        expert_pages: A snapshot of the weight page table, or None.
        column_weight: What prefill needs for the direct prompt correction, or None.
        placement: Where the arrays are.
        vocabulary: Columns of the logits.
    """

    def __init__(
        self,
        steps: Steps,
        config: EngineConfig,
        weights: list[jax.Array],
        caches: Caches,
        output: StepOutput,
        expert_pages: Any,
        column_weight: jax.Array | None,
        placement: Placement,
        vocabulary: int,
    ):
        slots = config.slots
        blocks = tuple(table.shape[2] for table in caches.kv_pages)
        lengths = (config.max_sequence_tokens, config.latent_bucket_tokens)
        self.tables = UsedTables(steps.layout, slots, blocks, *lengths)
        prefill_rows = 2 + max(
            config.prefill_chunk // group.layout.tokens_per_page for group in steps.layout.kv_groups
        )
        scalar = np.zeros((), np.int32)
        self.decode_arguments = Packing(
            DecodeArguments(
                no_new_pages(steps.layout, slots, blocks),
                np.full(slots, -1, np.int32),
                no_sampling(slots),
            )
        )
        self.prefill_arguments = Packing(
            PrefillArguments(
                no_new_pages(steps.layout, prefill_rows, blocks),
                np.zeros(config.prefill_chunk, np.int32),
                scalar,
                scalar,
                scalar,
                no_sampling(1),
            )
        )

        def decode(compact, weights, caches, output, expert_pages, packed):
            words = self.decode_arguments.vector.size
            arguments = self.decode_arguments.unpack(packed[:words])
            pages = compact.unpack(packed[words:])
            return steps.decode(weights, caches, output, expert_pages, arguments, pages)

        def prefill(columns, weights, caches, output, expert_pages, packed, column_weight):
            arguments = self.prefill_arguments.unpack(packed)
            state = (weights, caches, output, expert_pages)
            return steps.prefill(*state, arguments, column_weight, columns)

        def draw_decoded(filters, logits, output, packed):
            arguments = self.decode_arguments.unpack(packed)
            return steps.draw_decoded(logits, output, arguments, filters)

        def draw_prefilled(filters, logits, output, packed):
            arguments = self.prefill_arguments.unpack(packed)
            return steps.draw_prefilled(logits, output, arguments, filters)

        common = (weights, caches, output, expert_pages)
        decoded, prefilled = self.decode_arguments.vector, self.prefill_arguments.vector
        # Given back as they came: the next step is compiled for nothing else.
        state = jax.tree.map(lambda array: array.sharding, (caches, output))
        scores = placement.columns(vocabulary)

        def draw(function: Any, logits: Any, packed: Any) -> dict[bool, Any]:
            logits = jax.ShapeDtypeStruct(logits.shape, jnp.float32, sharding=scores)
            compiled = jax.jit(function, out_shardings=state[1], static_argnums=0)
            return {
                filters: compiled.lower(filters, logits, output, packed).compile()
                for filters in (False, True)
            }

        outputs = (*state, scores)
        lowered = []
        for size in self.tables.decode:
            compact = Packing(size.blank(slots))
            compiled = jax.jit(partial(decode, compact), donate_argnums=1, out_shardings=outputs)
            packed = np.concatenate([decoded, compact.vector])
            lowered.append(compiled.lower(*common, packed))
        self.decode_steps = [step.compile() for step in lowered]
        self.draw_decoded = draw(draw_decoded, lowered[0].out_info[2], decoded)
        outputs, lowered = (*outputs, None), []
        for size in self.tables.prefill:
            run = partial(prefill, size.columns)
            compiled = jax.jit(run, donate_argnums=1, out_shardings=outputs)
            lowered.append(compiled.lower(*common, prefilled, column_weight))
        self.prefill_steps = [step.compile() for step in lowered]
        self.draw_prefilled = draw(draw_prefilled, lowered[0].out_info[2], prefilled)
        if not config.shares_prefixes:
            return
        self.reuse_arguments = Packing(no_reuse(steps.layout, blocks))
        copy = placement.on_each_device(copy_pages, whole_arguments=2)

        def reuse(caches, packed):
            return reuse_pages(caches, self.reuse_arguments.unpack(packed), copy)

        compiled = jax.jit(reuse, donate_argnums=0, out_shardings=state[0])
        self._reuse = compiled.lower(caches, self.reuse_arguments.vector).compile()

    def decode(
        self,
        weights: list[jax.Array],
        caches: Caches,
        output: StepOutput,
        expert_pages: Any,
        packed: np.ndarray,
    ) -> tuple[Caches, StepOutput, jax.Array]:
        """Runs :meth:`Steps.decode` of the size that the batch needs; ``packed`` as filled in."""
        arguments = self.decode_arguments.view(packed)
        self.tables.take_in(arguments.new_pages)
        size, compact = self.tables.decode_size(arguments.positions + 1)
        packed = np.concatenate([packed, Packing.pack(compact)])
        return self.decode_steps[size](weights, caches, output, expert_pages, packed)

    def prefill(
        self,
        weights: list[jax.Array],
        caches: Caches,
        output: StepOutput,
        expert_pages: Any,
        packed: np.ndarray,
        column_weight: jax.Array | None,
    ) -> tuple[Caches, StepOutput, jax.Array, PromptStatistics | None]:
        """Runs :meth:`Steps.prefill` of the size that the sequence needs."""
        arguments = self.prefill_arguments.view(packed)
        self.tables.take_in(arguments.new_pages)
        size = self.tables.prefill_size(int(arguments.start + arguments.count))
        state = (weights, caches, output, expert_pages)
        return self.prefill_steps[size](*state, packed, column_weight)

    def reuse(self, caches: Caches, packed: np.ndarray) -> Caches:
        """Runs :func:`reuse_pages`."""
        self.tables.take_over(self.reuse_arguments.view(packed))
        return self._reuse(caches, packed)

    @property
    def temporary_bytes(self) -> int:
        """Bytes that XLA allocates during a step, besides arguments: the most of all steps."""
        analyses = [step.memory_analysis() for step in (*self.decode_steps, *self.prefill_steps)]
        return max(analysis.temp_size_in_bytes for analysis in analyses if analysis is not None)
