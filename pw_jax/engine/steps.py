"""The two programs that an engine runs: a prefill chunk of one sequence, and a decode step."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast, no_type_check

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32, UInt32

from pallas_kernels.implementation import Implementation
from pallas_kernels.kv_reconstruct import CompactBlocks
from pallas_kernels.paged_expert_ffn import ModulePages
from pw_jax.engine.sampling import HostOrDevice, SamplingArrays, most_likely, sample
from pw_jax.models.decoder import CausalLm, Output
from pw_jax.paging.layout import PagingLayout
from pw_jax.paging.memory import PagedMemory
from pw_jax.paging.observer import PromptObserver, PromptStatistics
from pw_jax.tensor_parallel.model import ParallelModel


@jax.tree_util.register_dataclass
@no_type_check  # also built of shapes, when compiling
@dataclass(frozen=True)
class Caches:
    """What each step changes in place: donated to it and returned by it.

    Attributes:
        pool: The page pool.
        kv_pages: For each KV group, the page of each block of each layer of each slot.
    """

    pool: UInt32[Array, "pages words"]
    kv_pages: tuple[Int32[Array, "layers B blocks"], ...]


@jax.tree_util.register_dataclass
@no_type_check
@dataclass(frozen=True)
class NewPages:
    """KV pages given out since the last step, for one KV group.

    Attributes:
        slots: Slot of each new block.
        blocks: Its index in the slot's table; out of range means none.
        pages: Its page in each layer of the group.
    """

    slots: Int32[HostOrDevice, " U"]
    blocks: Int32[HostOrDevice, " U"]
    pages: Int32[HostOrDevice, "U layers"]


@jax.tree_util.register_dataclass
@no_type_check
@dataclass(frozen=True)
class StepOutput:
    """What the next step goes on from; never donated, so the host can read it a step late.

    Attributes:
        tokens: The last token of each slot, not yet in the KV cache.
        routing_mass: Weight that each expert was given since the engine started.
    """

    tokens: Int32[Array, " B"]
    routing_mass: Float32[Array, "L E"]


class DecodeArguments(NamedTuple):
    """What the host tells a decode step; numpy on the way in, traced arrays inside.

    Attributes:
        new_pages: At most one new block a slot and group.
        positions: Position of each slot's last token, int32 ``[B]``; negative for empty slots.
        sampling: How each slot samples.
    """

    new_pages: tuple[NewPages, ...]
    positions: Any
    sampling: SamplingArrays


class PrefillArguments(NamedTuple):
    """What the host tells a prefill step; likewise.

    Attributes:
        new_pages: New blocks of the sequence.
        chunk: Token ids, int32 ``[C]``, padded on the right.
        slot: The sequence's slot, int32 scalar.
        start: Position of the chunk's first token, likewise.
        count: Real tokens in the chunk, at least 1, likewise.
        sampling: One row: how the sequence samples.
    """

    new_pages: tuple[NewPages, ...]
    chunk: Any
    slot: Any
    start: Any
    count: Any
    sampling: SamplingArrays


@dataclass(frozen=True)
class Steps:
    """The step functions of one model; pure, to be compiled with the caches donated.

    Attributes:
        weights_tree: The model without its arrays.
        layout: Layouts of its pages.
        implementation: Which kernels run.
        observe_prompts: Prefill also returns statistics of the prompt.
    """

    weights_tree: Any  # a PyTreeDef, which is no type for checkers
    layout: PagingLayout
    implementation: Implementation = "auto"
    observe_prompts: bool = False

    def decode(
        self,
        weights: list[Array],
        caches: Caches,
        previous: StepOutput,
        expert_pages: tuple[ModulePages, ModulePages] | None,
        arguments: DecodeArguments,
        compact: tuple[CompactBlocks | None, ...] = (),
    ) -> tuple[Caches, StepOutput, Float32[Array, "B V"]]:
        """The most likely token for every slot with a position of 0 or more, and the logits.

        Args:
            weights: The model's arrays, as flat leaves (a tree costs the host time a step).
            caches: Donated.
            previous: Output of the step before.
            expert_pages: Snapshot of the weight page table.
            arguments: What the host says.
            compact: Used pages of KV groups of latents, see `PagedMemory`.
        """
        new_pages, positions, _ = arguments
        kv_pages = self._with_new_pages(caches, new_pages)
        model = self._model(weights)
        memory = self._memory(caches.pool, kv_pages, positions[:, None], expert_pages)
        memory = replace(memory, compact=compact)
        out = model(previous.tokens[:, None], jnp.maximum(positions, 0)[:, None], memory)
        logits = model.logits(out.hidden[:, 0])
        tokens = jnp.where(positions >= 0, most_likely(logits), previous.tokens)
        return *_finish(out, kv_pages, tokens, previous), logits

    def prefill(
        self,
        weights: list[Array],
        caches: Caches,
        previous: StepOutput,
        expert_pages: tuple[ModulePages, ModulePages] | None,
        arguments: PrefillArguments,
        column_weight: Float32[Array, "L E D"] | None = None,
        columns: tuple[int | None, ...] | None = None,
    ) -> tuple[Caches, StepOutput, Float32[Array, "1 V"], PromptStatistics | None]:
        """Runs one chunk of one sequence: the most likely token that follows it, and the logits.

        Only the token after a prompt's last chunk means anything; earlier ones are overwritten.

        Args:
            weights: The model's arrays, as flat leaves (a tree costs the host time a step).
            caches: Donated.
            previous: Output of the step before.
            expert_pages: Snapshot of the weight page table.
            arguments: What the host says.
            column_weight: For the direct prompt correction; see `PromptObserver`.
            columns: Of each KV group, the first blocks of a sequence that it looks at; None for
                all, also in place of the tuple.
        """
        new_pages, chunk, slot, start, count, _ = arguments
        kv_pages = self._with_new_pages(caches, new_pages)
        index = jnp.arange(chunk.shape[0], dtype=jnp.int32)
        positions = jnp.where(index < count, start + index, -1)[None]
        own = tuple(
            jax.lax.dynamic_slice_in_dim(table, slot, 1, axis=1)[:, :, :most]
            for table, most in zip(kv_pages, columns or (None,) * len(kv_pages), strict=True)
        )
        model = self._model(weights)
        observer = PromptObserver(column_weight) if self.observe_prompts else None
        memory = self._memory(caches.pool, own, positions, expert_pages, observer)
        out = model(chunk[None], jnp.maximum(positions, 0), memory)
        last = jax.lax.dynamic_slice_in_dim(out.hidden[0], count - 1, 1, axis=0)
        logits = model.logits(last)
        tokens = previous.tokens.at[slot].set(most_likely(logits)[0])
        seen = observer.statistics() if observer is not None else None
        return *_finish(out, kv_pages, tokens, previous), logits, seen

    # Draws are programs of their own, run when a temperature asks for them. A condition inside the
    # step would make the host wait, on a GPU, for all that comes before it.

    @staticmethod
    def draw_decoded(
        logits: Float32[Array, "B V"],
        output: StepOutput,
        arguments: DecodeArguments,
        filters: bool,
    ) -> StepOutput:
        """A decode step's output with the tokens drawn as each slot's sampling says.

        Args:
            logits: What the step gave.
            output: Likewise.
            arguments: The step's.
            filters: Whether any slot has a top-k or top-p.
        """
        drawn = sample(logits, arguments.sampling, arguments.positions, filters=filters)
        tokens = jnp.where(arguments.positions >= 0, drawn, output.tokens)
        return StepOutput(tokens, output.routing_mass)

    @staticmethod
    def draw_prefilled(
        logits: Float32[Array, "1 V"],
        output: StepOutput,
        arguments: PrefillArguments,
        filters: bool,
    ) -> StepOutput:
        """A prefill step's output likewise."""
        position = arguments.start + arguments.count - 1
        drawn = sample(logits, arguments.sampling, position[None], filters=filters)
        return StepOutput(output.tokens.at[arguments.slot].set(drawn[0]), output.routing_mass)

    def _model(self, weights: list[Array]) -> CausalLm | ParallelModel:
        return jax.tree.unflatten(self.weights_tree, weights)

    def _memory(self, pool, kv_pages, positions, expert_pages, observer=None) -> PagedMemory:
        return PagedMemory(
            pool, kv_pages, positions, expert_pages, self.layout, self.implementation, observer
        )

    @staticmethod
    def _with_new_pages(
        caches: Caches, new_pages: tuple[NewPages, ...]
    ) -> tuple[Int32[Array, "layers B blocks"], ...]:
        return tuple(
            table.at[:, new.slots, new.blocks].set(new.pages.T, mode="drop")
            for table, new in zip(caches.kv_pages, new_pages, strict=True)
        )


def _finish(out: Output, kv_pages, tokens, previous: StepOutput) -> tuple[Caches, StepOutput]:
    memory = cast(PagedMemory, out.memory)
    mass = previous.routing_mass + out.routing_mass
    return Caches(memory.pool, kv_pages), StepOutput(tokens, mass)
