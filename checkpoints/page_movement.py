"""What moving pages is worth: the same texts while a second load comes and goes.

Two runs have equal pools. In "fixed", widths are chosen once so that the pages of the load's peak
stay free (`--no-page-movement`). In "moving", experts fill the pool, give pages to the load when it
comes and get them back when it has gone. The measured texts are given, not drawn, so that both runs
see the same tokens; a turn takes a few tokens of each. The load's sequences hold pages and compute
nothing: pages are all of them that the measured texts could notice.

Allocator, page table, planner and mover are those of the engine; the model multiplies at the
committed widths densely (`checkpoints.mixed_widths`).
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Int32

from checkpoints.engine import StoredExperts
from checkpoints.mixed_widths import MixedWidths, expert_layout, page_table
from checkpoints.store import Store
from pallas_kernels.attention import causal_mask, masked_attention
from pw_jax.engine.kv_cache import KvCache
from pw_jax.engine.precision import Precision
from pw_jax.engine.sequence import Request, Sequence
from pw_jax.models.latent import Latents
from pw_jax.paging.allocator import Owner, PageAllocator
from pw_jax.planner.config import PlannerConfig
from pw_jax.planner.initial import total_pages

PLANNER = PlannerConfig(bucket_floors=(3, 3, 3), raise_turns=1)
"""One floor for all, as in the comparison of planners; raises by count, to be repeatable."""

PHASES = ("before", "rising", "peak", "after")


@dataclass(frozen=True)
class Load:
    """A second load: sequences that come one a turn, stay, and go one a turn.

    Attributes:
        sequences: At the peak.
        tokens: Tokens of each when it comes; it grows with every turn.
        comes: Turn at which the first comes.
        goes: Turn at which the first goes.
    """

    sequences: int
    tokens: int
    comes: int
    goes: int

    def running(self, turn: int) -> range:
        """Numbers of the sequences that run in a turn."""
        first = min(max(turn - self.goes, 0), self.sequences)
        last = min(max(turn - self.comes + 1, 0), self.sequences)
        return range(first, max(first, last))

    def phase(self, turn: int) -> str:
        """Which of `PHASES` a turn belongs to; "after" begins when the first sequence goes."""
        if turn < self.comes:
            return PHASES[0]
        if turn >= self.goes:
            return PHASES[3]
        return PHASES[2] if len(self.running(turn)) == self.sequences else PHASES[1]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GrowingMemory:
    """Keys and values of B texts that are given T tokens at a time, all at the same place.

    Attributes:
        keys: For each layer ``[B, S, K, H]``.
        values: Likewise.
        start: Place of the first new token.
        count: T.
    """

    keys: Any
    values: Any
    start: Any
    count: int = dataclasses.field(metadata={"static": True})

    @property
    def token_mask(self) -> Array:
        """All tokens are real."""
        return jnp.ones((self.keys[0].shape[0], self.count), bool)

    def attend(
        self,
        layer: int,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B T K H"],
        v: Float[Array, "B T K H"],
        *,
        scale: float,
        window: int | None,
        soft_cap: float | None,
    ) -> tuple[Float[Array, "B T N H"], "GrowingMemory"]:
        """Writes the new keys and values and attends to all up to each query."""
        keys, values = (
            jax.lax.dynamic_update_slice_in_dim(old[layer], new, self.start, axis=1)
            for old, new in ((self.keys, k), (self.values, v))
        )
        places = self.start + jnp.arange(self.count)
        allowed = causal_mask(places, jnp.arange(keys.shape[1]), window)
        mask = jnp.broadcast_to(allowed, (q.shape[0], *allowed.shape))
        out = masked_attention(q, keys, values, mask, scale=scale, soft_cap=soft_cap)
        memory = dataclasses.replace(
            self,
            keys=(*self.keys[:layer], keys, *self.keys[layer + 1 :]),
            values=(*self.values[:layer], values, *self.values[layer + 1 :]),
        )
        return out, memory

    def attend_latents(
        self,
        layer: int,
        q: Float[Array, "B T N H"],
        latents: Latents,
        *,
        scale: float,
        window: int | None,
    ) -> tuple[Float[Array, "B T N Hv"], "GrowingMemory"]:
        """Keeps the heads that the latents make, and attends to them."""
        k, v = latents.heads()
        return self.attend(layer, q, k, v, scale=scale, window=window, soft_cap=None)


@dataclass(frozen=True)
class Turn:
    """One turn of one run.

    Attributes:
        moving: Which run.
        phase: Where the load stands.
        kl: Of each text, mean over the turn's tokens, nats.
        mean_bits: Mean committed width of a weight.
        weight_pages: Pages that the weights own.
        kv_pages: Pages of keys and values.
    """

    moving: bool
    phase: str
    kl: list[float]
    mean_bits: float
    weight_pages: int
    kv_pages: int


class PageMovement:
    """The experiment on one checkpoint.

    Args:
        store: A converted checkpoint with a calibration.
        load: The second load.
        turn_tokens: Tokens of each text a turn.
        fixed_bits: The pool is such that fixed widths come to about this many bits a weight.
        planner: Its constants; whether pages move is set by each run.
    """

    def __init__(
        self,
        store: Store,
        load: Load,
        turn_tokens: int,
        fixed_bits: float,
        planner: PlannerConfig = PLANNER,
    ):
        self._store = store
        self._planner = planner
        self._load = load
        self._tokens = turn_tokens
        self._bits = fixed_bits
        self._mixed = MixedWidths(store)
        self._layout = expert_layout(store)
        self._run = jax.jit(self._score)

    def run(
        self,
        tokens: Int32[np.ndarray, "B T"],
        reference: Float[np.ndarray, "B T V"],
        *,
        moving: bool,
    ) -> Iterator[Turn]:
        """Gives texts to the model while the load comes and goes.

        Args:
            tokens: Texts of equal length, whole turns.
            reference: The source's log probabilities after each token.
            moving: Whether pages move.
        """
        config = dataclasses.replace(self._planner, page_movement=moving)
        measured = [_sequence(number, tokens.shape[1]) for number in range(len(tokens))]
        pool_pages, fixed_pages, reserve = self._sizes(len(tokens), tokens.shape[1])
        allocator = PageAllocator(pool_pages)
        cache = KvCache(self._layout, allocator)
        pool = jnp.zeros((pool_pages, self._layout.page_words), jnp.uint32)
        experts = StoredExperts(self._store)
        precision = Precision.create(self._layout, allocator, experts, config, pool)
        pool = precision.load(pool, pool_pages - reserve if moving else fixed_pages)

        def grow(sequence: Sequence, count: int, pool: Array) -> Array:
            needed = cache.pages_needed(sequence, count)
            wanted = precision.pages_wanted(allocator.free - needed) if moving else 0
            if wanted:
                pool, _ = precision.relieve(pool, wanted)
            cache.grow(sequence, count)
            return pool

        for sequence in measured:  # their pages are there from the start
            pool = grow(sequence, tokens.shape[1], pool)
        others: dict[int, Sequence] = {}
        memory = self._memory(tokens.shape)
        mass, seen = 0.0, 0
        for turn, start in enumerate(range(0, tokens.shape[1], self._tokens)):
            running = self._load.running(turn)
            for number in set(others) - set(running):
                cache.release(others.pop(number))
            for number in running:
                sequence = others.setdefault(number, _sequence(number, tokens.shape[1]))
                age = turn - self._load.comes - number
                pool = grow(sequence, self._load.tokens + age * self._tokens, pool)
            chunk = slice(start, start + self._tokens)
            bits = precision.table.bits
            kl, new_mass, memory = self._run(
                self._mixed.leaves,
                self._mixed.stacks,
                self._mixed.index(bits.astype(np.int64)),
                tokens[:, chunk],
                reference[:, chunk],
                memory,
            )
            yield Turn(
                moving,
                self._load.phase(turn),
                np.asarray(kl).tolist(),
                self._mixed.mean_bits(bits),
                allocator.owned(Owner.WEIGHT),
                allocator.owned(Owner.KV),
            )
            mass, seen = mass + np.asarray(new_mass, np.float64), seen + tokens[:, chunk].size
            precision.observe(mass, seen)
            for _ in range(self._tokens):  # as many boundaries as decoding them one by one has
                pool = precision.advance(pool)

    def _sizes(self, texts: int, length: int) -> tuple[int, int, int]:
        """Pages of the pool, of fixed widths, and what moving pages keeps free at load time."""
        peak = self._load.tokens + self._load.goes * self._tokens
        kv = texts * self._layout.kv_pages(length)
        kv += self._load.sequences * self._layout.kv_pages(peak)
        blocks = (self._layout.moe_layers, self._layout.experts, 2)
        pages, low = page_table(self._layout), int(self._bits)
        ends = [total_pages(np.full(blocks, bits), pages) for bits in (low, low + 1)]
        fixed = int(ends[0] + (self._bits - low) * (ends[1] - ends[0]))
        block = sum(len(group.layers) for group in self._layout.kv_groups)
        return 1 + fixed + kv, fixed, 1 + (self._planner.release_watermark_blocks + 1) * block

    def _memory(self, shape: tuple[int, ...]) -> GrowingMemory:
        parts = tuple(
            jnp.zeros((*shape, kv.kv_heads, kv.head_dim), jnp.float32)
            for kv in self._store.model_config.kv_shapes
        )
        return GrowingMemory(parts, parts, jnp.zeros((), jnp.int32), self._tokens)

    def _score(
        self,
        leaves: Any,
        stacks: Any,
        index: Int[Array, "L E 2"],
        tokens: Int32[Array, "B C"],
        reference: Float[Array, "B C V"],
        memory: GrowingMemory,
    ) -> tuple[Array, Array, GrowingMemory]:
        model = self._mixed.at(leaves, stacks, index)
        places = memory.start + jnp.arange(tokens.shape[1], dtype=jnp.int32)
        positions = jnp.broadcast_to(places, tokens.shape)
        out = model(tokens, positions, memory)
        ours = jax.nn.log_softmax(model.logits(out.hidden))
        kl = jnp.sum(jnp.exp(reference) * (reference - ours), axis=-1).mean(axis=1)
        after = cast(GrowingMemory, out.memory)
        after = dataclasses.replace(after, start=after.start + self._tokens)
        return kl, out.routing_mass, after


def _sequence(number: int, tokens: int) -> Sequence:
    return Sequence(Request((0,), tokens), number)
