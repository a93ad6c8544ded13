"""The arrays of an engine on the device, and the compiled steps that change them."""

from collections.abc import Mapping
from collections.abc import Sequence as Many
from typing import Any

import jax
import numpy as np

from pw_jax.engine.compiled import CompiledSteps, fill_chunk, fill_sampling
from pw_jax.engine.kv_cache import PageCopies, fill_new_pages
from pw_jax.engine.reuse import fill_reuse
from pw_jax.engine.sampling import GREEDY, Sampling
from pw_jax.engine.sequence import Sequence
from pw_jax.engine.steps import Caches, StepOutput
from pw_jax.paging.observer import PromptStatistics

NewBlocks = list[list[tuple[int, np.ndarray]]]
"""For each KV group, blocks that a sequence has been given: see `KvCache.grow`."""


class Dispatch:
    """Calls the compiled steps one after another, each with what the one before has left.

    Nothing here waits for the device.

    Attributes:
        caches: The pool and the page tables; donated to each step.
        output: Of the last step.
        compiled: The steps.
        weights: The model's arrays.

    Args:
        compiled: The steps.
        weights: The model's arrays.
        caches: As the steps were compiled for.
        output: Likewise.
        column_weight: See `PromptObserver`; None to leave that out.
    """

    def __init__(
        self,
        compiled: CompiledSteps,
        weights: list[jax.Array],
        caches: Caches,
        output: StepOutput,
        column_weight: jax.Array | None,
    ):
        self.caches = caches
        self.output = output
        self.compiled = compiled
        self.weights = weights
        self._column_weight = column_weight

    @property
    def temporary_bytes(self) -> int:
        """Bytes that XLA needs for temporary values during a step."""
        return self.compiled.temporary_bytes

    def set_pool(self, pool: jax.Array) -> None:
        """Goes on with another pool: the one that was there has been donated."""
        self.caches = Caches(pool, self.caches.kv_pages)

    def set_sampling(self, slot: int, sampling: Sampling = GREEDY, seed: int = 0) -> None:
        """Says how a slot draws in decode steps from now on."""
        fill_sampling(self.compiled.decode_arguments.defaults.sampling, slot, sampling, seed)

    def prefill(
        self, sequence: Sequence, count: int, new_blocks: NewBlocks, expert_pages: Any
    ) -> PromptStatistics | None:
        """Runs the next tokens of one sequence, which has the pages for them.

        Args:
            sequence: It has a slot.
            count: Tokens behind its cached ones.
            new_blocks: Given to it since the last step.
            expert_pages: Snapshot of the weight page table.
        """
        start, request = sequence.cached, sequence.request
        packed, arguments = self.compiled.prefill_arguments.fill()
        fill_new_pages(arguments.new_pages, 0, sequence.slot, new_blocks)
        fill_chunk(arguments, sequence.slot, start, sequence.tokens[start : start + count])
        fill_sampling(arguments.sampling, 0, request.sampling, request.seed)
        self.caches, self.output, logits, statistics = self.compiled.prefill(
            self.weights, self.caches, self.output, expert_pages, packed, self._column_weight
        )
        if sequence.samples:
            draw = self.compiled.draw_prefilled[request.sampling.filters]
            self.output = draw(logits, self.output, packed)
        return statistics

    def decode(
        self,
        sequences: Many[Sequence],
        new_blocks: Mapping[Sequence, NewBlocks | None],
        expert_pages: Any,
    ) -> None:
        """Runs the last token of each sequence, which has the pages for it.

        Args:
            sequences: They have slots.
            new_blocks: Given to some of them since the last step, one a group at most.
            expert_pages: Snapshot of the weight page table.
        """
        packed, arguments = self.compiled.decode_arguments.fill()
        for sequence in sequences:
            blocks = new_blocks.get(sequence)
            if blocks:
                fill_new_pages(arguments.new_pages, sequence.slot, sequence.slot, blocks)
            arguments.positions[sequence.slot] = sequence.cached
        self.caches, self.output, logits = self.compiled.decode(
            self.weights, self.caches, self.output, expert_pages, packed
        )
        drawn = [sequence.request.sampling for sequence in sequences if sequence.samples]
        if drawn:
            draw = self.compiled.draw_decoded[any(sampling.filters for sampling in drawn)]
            self.output = draw(logits, self.output, packed)
        self.output.tokens.copy_to_host_async()

    def reuse(self, sequence: Sequence, copies: PageCopies) -> None:
        """Gives a sequence's slot the pages that it has, and makes the copies."""
        packed, arguments = self.compiled.reuse_arguments.fill()
        fill_reuse(arguments, sequence, copies)
        self.caches = self.compiled.reuse(self.caches, packed)
