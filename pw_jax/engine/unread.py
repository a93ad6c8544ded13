"""Steps that were dispatched and whose results the host has not read."""

from typing import NamedTuple

from pw_jax.engine.sequence import Sequence
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
