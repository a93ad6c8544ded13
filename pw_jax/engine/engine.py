"""Batch generation with continuous batching over one page pool."""

import dataclasses
import time
from bisect import insort
from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Many

import jax

from pw_jax.engine.cache_choice import latents_of
from pw_jax.engine.compiled import CompiledSteps, first_state
from pw_jax.engine.config import EngineConfig
from pw_jax.engine.dispatch import Dispatch
from pw_jax.engine.expert_source import ExpertSource
from pw_jax.engine.generation import Generation, Prompt, Tokenizer, finish, make_requests
from pw_jax.engine.kv_cache import KvCache, check_pages
from pw_jax.engine.memory_plan import check_experts, column_weight_bytes, plan_memory
from pw_jax.engine.precision import Precision
from pw_jax.engine.sampling import GREEDY, Sampling
from pw_jax.engine.sequence import Request, Sequence, TokenEvent, check_request
from pw_jax.engine.steps import Caches, Steps
from pw_jax.engine.trace import StepRecord
from pw_jax.engine.unread import PromptChunk, Unread, UnreadSteps
from pw_jax.errors import UserError
from pw_jax.models.decoder import CausalLm
from pw_jax.paging.allocator import Owner, PageAllocator
from pw_jax.tensor_parallel.model import ParallelModel
from sharding.placement import Placement, bytes_on_a_device


class Engine:
    """Runs one model on one device, or over those of a mesh.

    Every turn (:meth:`step`) admits waiting sequences, makes room for the keys and values to come,
    dispatches at most one prefill chunk and one decode step, and then reads the tokens of the turn
    before: the host is always one step behind, and the device never waits for it.

    Args:
        model: A model with weights; paged experts if ``experts`` is given.
        config: Sizes and budget.
        experts: Where paged experts come from.
        tokenizer: Turns prompts into tokens and back; None if all prompts are token ids.

    Raises:
        UserError: The budget is too small for the weights and one sequence.
    """

    def __init__(
        self,
        model: CausalLm | ParallelModel,
        config: EngineConfig,
        experts: ExpertSource | None = None,
        tokenizer: Tokenizer | None = None,
    ):
        self.config = config
        self.tokenizer = tokenizer
        self.model_config = model.config
        placement, leaves = Placement.on_one_device(), jax.tree.leaves(model)
        if isinstance(model, ParallelModel):
            placement = Placement.over(model.mesh)
        else:
            leaves = jax.device_put(leaves, placement.whole)
        array_bytes = sum(bytes_on_a_device(leaf) for leaf in leaves)
        if experts is not None:
            array_bytes += column_weight_bytes(model.config, config.planner)
        check_experts(config, experts, placement.devices)
        on_device = dataclasses.replace(model.config, kv_shapes=model.kv_shapes)
        latents = latents_of(model, config)
        self.plan = plan_memory(on_device, config, experts, array_bytes, latents, placement.devices)
        self.layout = self.plan.layout
        self.allocator = PageAllocator(self.plan.pool_pages)
        self._kv = KvCache(self.layout, self.allocator, sharing=config.shares_prefixes)
        caches, output = first_state(self.plan, model.config, config.slots, placement)
        self.precision: Precision | None = None
        column_weight: jax.Array | None = None
        if experts is not None:
            self.precision = Precision.create(
                self.layout,
                self.allocator,
                experts,
                config.planner,
                caches.pool,
                placement,
            )
            pool = self.precision.load(caches.pool, self.plan.weight_pages)
            caches = Caches(pool, caches.kv_pages)
            if self.precision.prompts.column_weight is not None:
                column_weight = jax.device_put(
                    self.precision.prompts.column_weight, placement.whole
                )
        observe = experts is not None and config.planner.prompt_statistics != "off"
        compiled = CompiledSteps(
            Steps(jax.tree.structure(model), self.layout, config.implementation, observe),
            config,
            leaves,
            caches,
            output,
            self._expert_pages(),
            column_weight,
            placement,
            model.config.vocab_size,
        )
        self._device = Dispatch(compiled, leaves, caches, output, column_weight)
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []  # by age
        self._unread = UnreadSteps(self.precision, config.routing_read_steps)
        self._arrivals = 0
        self._turns = 0
        self._dispatched_tokens = 0
        self._preemptions = 0
        self._reused_tokens = 0
        self._started = time.perf_counter()
        self.trace: list[StepRecord] = []

    @property
    def temporary_bytes(self) -> int:
        """Bytes that XLA needs for temporary values during a step, on top of the budget."""
        return self._device.temporary_bytes

    @property
    def idle(self) -> bool:
        """True when no sequence waits or runs and every token has been read."""
        return not (self._waiting or self._running or self._unread)

    def submit(self, request: Request) -> Sequence:
        """Queues a request.

        Raises:
            UserError: See :meth:`check`.
        """
        self.check(request)
        sequence = Sequence(request, self._arrivals)
        self._arrivals += 1
        self._waiting.append(sequence)
        return sequence

    def check(self, request: Request) -> None:
        """Refuses a request that could never run; see :func:`check_request`.

        Raises:
            UserError: Says what is wrong with it.
        """
        check_request(
            request,
            vocab_size=self.model_config.vocab_size,
            max_tokens=self.config.max_sequence_tokens,
            pages_of=self.layout.kv_pages,
            pages=self.allocator.pages - 1 - self._floor_pages(),
        )

    def generate(
        self,
        prompts: Many[Prompt],
        max_new_tokens: int,
        sampling: Sampling = GREEDY,
        seed: int = 0,
        stop_token_ids: tuple[int, ...] | None = None,
    ) -> list[Generation]:
        """Generates for a batch of prompts, in the order given.

        Args:
            prompts: Texts, or token ids.
            max_new_tokens: Most tokens a prompt.
            sampling: How tokens are chosen.
            seed: Makes all random draws; a prompt's draws do not depend on the others.
            stop_token_ids: Tokens that end a text; None takes those of the model's config.

        Raises:
            UserError: See :meth:`submit`; nothing runs unless all prompts are good.
        """
        stops = self.model_config.eos_token_ids if stop_token_ids is None else stop_token_ids
        requests = make_requests(prompts, max_new_tokens, sampling, seed, stops, self.tokenizer)
        for request in requests:
            self.check(request)
        sequences = [self.submit(request) for request in requests]
        for _ in self.run():
            pass
        return [finish(sequence, self.tokenizer) for sequence in sequences]

    def run(self) -> Iterator[TokenEvent]:
        """Steps until idle, giving tokens as they are read."""
        while not self.idle:
            yield from self.step()

    def step(self) -> list[TokenEvent]:
        """One turn of the loop.

        Returns:
            Tokens read in this turn.
        """
        began = time.perf_counter()
        self._unread.wait_seconds = 0.0
        events: list[TokenEvent] = []
        if self._waiting:
            self._admit()
        with jax.profiler.TraceAnnotation("prefill"):
            prefilled = self._prefill_step(events)
        with jax.profiler.StepTraceAnnotation("decode", step_num=self._turns):
            decoded = self._decode_step(events)
        just_dispatched = bool(prefilled) + bool(decoded)
        self._plan_ahead()
        with jax.profiler.TraceAnnotation("read tokens"):
            while len(self._unread) > just_dispatched:
                events += self._read()
        self._record(prefilled, decoded, time.perf_counter() - began)
        return events

    def check_pages(self) -> None:
        """Accounts for every page of the pool.

        Raises:
            AssertionError: A page is lost, or has two owners.
        """
        table = self.precision.table if self.precision is not None else None
        check_pages(self.allocator, self._kv, self._running, table)

    def _expert_pages(self):
        return self.precision.table.snapshot() if self.precision is not None else None

    def _floor_pages(self) -> int:
        return self.precision.floor_pages if self.precision is not None else 0

    def _admit(self) -> None:
        taken = {sequence.slot for sequence in self._running}
        free_slots = [slot for slot in range(self.config.slots) if slot not in taken]
        while free_slots and self._waiting:
            sequence = self._waiting[0]
            available = self.allocator.free
            if self.precision is not None:
                available += self.precision.releasable_pages
            # Besides its own tokens, one block for everybody: else it would be preempted at once.
            wanted = self.layout.kv_pages(len(sequence.tokens))
            wanted -= self._kv.pages_in_use(sequence.tokens)
            wanted += (len(self._running) + 1) * self._kv.block_pages
            if self._running and wanted > available:
                return
            self._waiting.popleft()
            sequence.slot = free_slots.pop(0)
            sequence.to_prefill = len(sequence.tokens)
            insort(self._running, sequence, key=lambda s: s.number)
            request = sequence.request
            self._device.set_sampling(sequence.slot, request.sampling, request.seed)

    def _prefill_step(self, events: list[TokenEvent]) -> int:
        sequence = next((s for s in self._running if not s.prefilled), None)
        if sequence is None:
            return 0
        if not sequence.cached:
            self._reuse(sequence)
        start = sequence.cached
        count = min(self.config.prefill_chunk, sequence.to_prefill - start)
        grown = self._grow(sequence, start + count, events)
        if grown is None:
            return 0
        statistics = self._device.prefill(sequence, count, grown, self._expert_pages())
        sequence.cached += count
        self._kv.offer(sequence)
        self._dispatched_tokens += count
        drawn = []
        if sequence.prefilled:
            sequence.dispatched += 1
            drawn.append((sequence.slot, sequence))
        prompt = None
        if statistics is not None:
            prompt = PromptChunk(sequence, statistics, count, first=start == 0)
        self._unread.add(Unread(self._device.output, drawn, self._dispatched_tokens, prompt))
        return count

    def _reuse(self, sequence: Sequence) -> None:
        """Lets a sequence begin behind what others have computed of its text."""
        copies = self._kv.reuse(sequence, self._relieve)
        if sequence.cached:
            self._device.reuse(sequence, copies)
            self._reused_tokens += sequence.cached

    def _decode_step(self, events: list[TokenEvent]) -> int:
        wanting = [s for s in self._running if s.prefilled and s.wants_token]
        short = [s for s in wanting if s.cached >= s.room]
        if short:  # one plan for all: it costs much more than what it decides on
            self._relieve(sum(self._kv.pages_needed(s, s.cached + 1) for s in short))
        grown = {s: self._grow(s, s.cached + 1, events) for s in short}
        # Making room for one may have preempted or finished another.
        ready = [s for s in wanting if s.cached < s.room and s.wants_token] if short else wanting
        if not ready:
            return 0
        self._device.decode(ready, grown, self._expert_pages())
        for sequence in ready:
            sequence.cached += 1
            sequence.dispatched += 1
        self._dispatched_tokens += len(ready)
        drawn = [(sequence.slot, sequence) for sequence in ready]
        self._unread.add(Unread(self._device.output, drawn, self._dispatched_tokens))
        return len(ready)

    def _grow(self, sequence: Sequence, tokens: int, events: list[TokenEvent]):
        """Gives a sequence pages for ``tokens`` tokens, at the cost of precision, then of others.

        Returns:
            Its new blocks, or None if the sequence itself finished or was preempted.
        """
        while sequence.slot >= 0:
            needed = self._kv.pages_needed(sequence, tokens)
            if needed:
                self._relieve(needed)
            if needed <= self.allocator.free:
                return self._kv.grow(sequence, tokens)
            if self._unread:  # reading may finish a sequence, and a preemption must lose no token
                events += self._read()
            else:
                self._preempt(self._running[-1])
        return None

    def _plan_ahead(self) -> None:
        """Plans and moves for the next turn, while the device works on this one."""
        if self.precision is None:
            return
        needed = self._kv.needed_next(self._running, self.config.prefill_chunk)
        pool, restore = self._device.caches.pool, not self._waiting
        self._device.set_pool(self.precision.advance(pool, needed=needed, restore=restore))

    def _relieve(self, needed: int) -> None:
        """Frees pages that are lacking now: what planning ahead did not foresee."""
        if self.precision is None or needed <= self.allocator.free:
            return
        wanted = self.precision.pages_wanted(self.allocator.free - needed)
        self._device.set_pool(self.precision.relieve(self._device.caches.pool, wanted)[0])

    def _preempt(self, sequence: Sequence) -> None:
        if len(self._running) == 1:
            raise UserError(
                f"sequence {sequence.number} does not fit the pool any more at "
                f"{len(sequence.tokens)} tokens, alone and with every expert at its floor: raise "
                f"the memory budget"
            )
        self._leave(sequence)
        sequence.preemptions += 1
        self._preemptions += 1
        self._waiting.appendleft(sequence)

    def _leave(self, sequence: Sequence) -> None:
        self._kv.release(sequence)
        self._running.remove(sequence)
        self._device.set_sampling(sequence.slot)
        sequence.slot = -1
        if self.precision is not None:
            self.precision.prompts.forget(sequence.number)

    def _read(self) -> list[TokenEvent]:
        """Reads the oldest unread step; who has its last token leaves."""
        events = self._unread.read()
        for event in events:
            if event.sequence.finished and event.sequence.slot >= 0:
                self._leave(event.sequence)
        return events

    def _record(self, prefilled: int, decoded: int, seconds: float) -> None:
        self._turns += 1
        self.trace.append(
            StepRecord(
                step=self._turns,
                seconds=time.perf_counter() - self._started,
                running=len(self._running),
                waiting=len(self._waiting),
                prefilled_tokens=prefilled,
                decoded_tokens=decoded,
                free_pages=self.allocator.free,
                kv_pages=self.allocator.owned(Owner.KV),
                weight_pages=self.allocator.owned(Owner.WEIGHT),
                preemptions=self._preemptions,
                reused_tokens=self._reused_tokens,
                kept_pages=self.allocator.owned(Owner.KEPT),
                step_seconds=seconds,
                wait_seconds=self._unread.wait_seconds,
                **(self.precision.counters() if self.precision is not None else {}),
            )
        )
