"""Steps that were dispatched and whose results the host has not read."""

import time
from collections import deque
from typing import NamedTuple

import numpy as np

from pw_jax.engine.precision import Precision
from pw_jax.engine.sequence import Sequence, TokenEvent
from pw_jax.engine.steps import StepOutput
from pw_jax.paging.observer import PromptStatistics


class PromptChunk(NamedTuple):
    """Statistics of one prefill chunk, on the device.

    Attributes:
        sequence: Whose prompt it is.
        statistics: Of the chunk.
        tokens: Real tokens in it.
        first: It is the first chunk.
    """

    sequence: Sequence
    statistics: PromptStatistics
    tokens: int
    first: bool


class Unread(NamedTuple):
    """A dispatched step whose tokens the host has not read.

    Attributes:
        output: On the device.
        slots: Which slots drew a token, and for whom; a slot may have a new owner when it is read.
        dispatched_tokens: Tokens that the engine had run when the step ended.
        prompt: Statistics of a prefill chunk, if they are collected.
    """

    output: StepOutput
    slots: list[tuple[int, Sequence]]
    dispatched_tokens: int
    prompt: PromptChunk | None = None


class UnreadSteps:
    """The steps whose results the host has not read, oldest first.

    Attributes:
        wait_seconds: Time spent waiting for the device; the caller sets it back.

    Args:
        precision: Is told what the steps saw of prompts and of routing; None without paged experts.
        routing_read_steps: Steps between two readings of the routing mass.
    """

    def __init__(self, precision: Precision | None, routing_read_steps: int):
        self.wait_seconds = 0.0
        self._precision = precision
        self._routing_read_steps = routing_read_steps
        self._steps: deque[Unread] = deque()
        self._reads = 0

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, step: Unread) -> None:
        """Takes in a step that has just been dispatched."""
        self._steps.append(step)

    def read(self) -> list[TokenEvent]:
        """Reads the oldest step: waits for it, and no longer.

        Returns:
            Its tokens, which their sequences have now as well.
        """
        step, began = self._steps.popleft(), time.perf_counter()
        step.output.tokens.block_until_ready()
        self.wait_seconds += time.perf_counter() - began
        precision = self._precision
        if precision is not None and step.prompt is not None and step.prompt.sequence.slot >= 0:
            sequence, statistics, count, first = step.prompt
            precision.prompts.add(sequence.number, statistics, count, first=first)
        if not step.slots:
            return []
        tokens = np.asarray(step.output.tokens).tolist()
        self._reads += 1
        if precision is not None and self._reads % self._routing_read_steps == 0:
            precision.observe(np.asarray(step.output.routing_mass), step.dispatched_tokens)
        events = []
        for slot, sequence in step.slots:
            if sequence.finished:  # the token after a stop token, drawn before it was read
                continue
            token = tokens[slot]
            sequence.generated.append(token)
            sequence.stopped = token in sequence.request.stop_token_ids
            events.append(TokenEvent(sequence, token))
        return events
