"""One prompt on its way through the engine. Host side."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from pw_jax.engine.sampling import GREEDY, Sampling
from pw_jax.errors import UserError
from pw_jax.paging.prefix_tree import GroupPages, TextBlock


@dataclass(frozen=True)
class Request:
    """A prompt and how to go on from it.

    Attributes:
        prompt: Token ids, at least one.
        max_new_tokens: Most tokens to generate, at least 1.
        sampling: How tokens are chosen.
        seed: Makes the random draws; unused when greedy.
        stop_token_ids: Any of these ends the text; it is kept as the last token.
    """

    prompt: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling = GREEDY
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()


def check_request(
    request: Request,
    *,
    vocab_size: int,
    max_tokens: int,
    pages_of: Callable[[int], int],
    pages: int,
) -> None:
    """Refuses a request that could never run.

    Args:
        request: What was asked.
        vocab_size: Tokens that the model knows.
        max_tokens: Most tokens of a sequence, prompt and generated.
        pages_of: Pages that a number of tokens needs.
        pages: Pages that a sequence could have at most.

    Raises:
        UserError: An empty prompt, a token outside the vocabulary, or a sequence that is too long
            for the engine or for its pool.
    """
    prompt = request.prompt
    if not prompt:
        raise UserError("a prompt is empty: give at least one token")
    if request.max_new_tokens < 1:
        raise UserError(f"max_new_tokens must be at least 1, got {request.max_new_tokens}")
    outside = [token for token in prompt if not 0 <= token < vocab_size]
    if outside:
        raise UserError(
            f"a prompt has token {outside[0]} outside the vocabulary of {vocab_size}: is this the "
            f"model's own tokenizer?"
        )
    total = len(prompt) + request.max_new_tokens
    if total > max_tokens:
        raise UserError(
            f"a prompt of {len(prompt)} tokens and {request.max_new_tokens} new ones make {total}, "
            f"more than the maximum of {max_tokens}: shorten it or raise max_sequence_tokens"
        )
    if pages_of(total) > pages:
        raise UserError(
            f"a sequence of {total} tokens needs {pages_of(total)} pages, and with every expert at "
            f"its floor the pool has {pages} for keys and values: raise the memory budget or ask "
            f"for fewer tokens"
        )


@dataclass(eq=False)
class Sequence:
    """A request with its state.

    Attributes:
        request: What was asked.
        number: Order of arrival.
        generated: Tokens that the host has read.
        slot: Slot while it is running, else -1.
        to_prefill: Tokens that its prefill runs: the prompt, and after a preemption what it had
            generated.
        cached: Tokens whose keys and values are in pages, once all dispatched steps have run.
        dispatched: Generated tokens, those included that the host has not read yet.
        pages: For each KV group, the pages of each block: a list of int32 ``[layers]``.
        blocks: The full blocks that it shares, or would; ``pages`` begins with theirs.
        room: Tokens that these pages hold.
        preemptions: How often its pages were taken away.
        stopped: A stop token has been read.
    """

    request: Request
    number: int
    generated: list[int] = field(default_factory=list)
    slot: int = -1
    to_prefill: int = 0
    cached: int = 0
    dispatched: int = 0
    pages: list[GroupPages] = field(default_factory=list)
    blocks: list[TextBlock] = field(default_factory=list)
    room: int = 0
    preemptions: int = 0
    stopped: bool = False

    @property
    def tokens(self) -> list[int]:
        """Prompt and generated tokens."""
        return [*self.request.prompt, *self.generated]

    @property
    def samples(self) -> bool:
        """True if its tokens are drawn, not just the most likely."""
        return self.request.sampling.temperature > 0

    @property
    def prefilled(self) -> bool:
        """True when only decoding is left: all tokens but the last drawn one are cached."""
        return self.cached >= self.to_prefill

    @property
    def finished(self) -> bool:
        """True when every token that will be drawn has been read."""
        return self.stopped or len(self.generated) >= self.request.max_new_tokens

    @property
    def wants_token(self) -> bool:
        """True while another token is to be dispatched."""
        return not self.stopped and self.dispatched < self.request.max_new_tokens


class TokenEvent(NamedTuple):
    """A token that the host has read.

    Attributes:
        sequence: Its sequence.
        token: Token id.
    """

    sequence: Sequence
    token: int
