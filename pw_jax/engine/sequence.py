"""One prompt on its way through the engine. Host side."""

from dataclasses import dataclass, field

import numpy as np

from pw_jax.engine.sampling import GREEDY, Sampling


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
    pages: list[list[np.ndarray]] = field(default_factory=list)
    preemptions: int = 0
    stopped: bool = False

    @property
    def tokens(self) -> list[int]:
        """Prompt and generated tokens."""
        return [*self.request.prompt, *self.generated]

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
