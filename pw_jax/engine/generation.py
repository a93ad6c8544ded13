"""Texts in, texts out: what :meth:`Engine.generate` takes and gives."""

from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from pw_jax.engine.sampling import Sampling
from pw_jax.engine.sequence import Request, Sequence
from pw_jax.errors import UserError

Prompt = str | Many[int]


@runtime_checkable
class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that the engine uses."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, special tokens added as the tokenizer is made to."""
        ...

    def decode(self, token_ids: list[int], skip_special_tokens: bool = ...) -> str:
        """The text of token ids."""
        ...


@dataclass(frozen=True)
class Generation:
    """A prompt with what followed it.

    Attributes:
        prompt_tokens: Tokens of the prompt.
        tokens: Generated tokens, a stop token included.
        text: Their text without special tokens; empty if the engine has no tokenizer.
        stopped: Ended by a stop token rather than by the length.
        preemptions: How often the sequence lost its pages and was computed again.
    """

    prompt_tokens: tuple[int, ...]
    tokens: tuple[int, ...]
    text: str
    stopped: bool
    preemptions: int


def make_requests(
    prompts: Many[Prompt],
    max_new_tokens: int,
    sampling: Sampling,
    seed: int,
    stop_token_ids: tuple[int, ...],
    tokenizer: Tokenizer | None,
) -> list[Request]:
    """Turns prompts into requests; each prompt draws from a seed of its own.

    Raises:
        UserError: A text prompt and no tokenizer, or a prompt without tokens.
    """
    requests = []
    for number, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            if tokenizer is None:
                raise UserError("a prompt is text and the engine has no tokenizer: give token ids")
            tokens = tuple(tokenizer.encode(prompt))
        else:
            tokens = tuple(prompt)
        if not tokens:
            raise UserError(f"prompt {number} is empty: give at least one token")
        own_seed = int(np.random.SeedSequence((seed, number)).generate_state(1)[0])
        requests.append(Request(tokens, max_new_tokens, sampling, own_seed, stop_token_ids))
    return requests


def finish(sequence: Sequence, tokenizer: Tokenizer | None) -> Generation:
    """The result of a finished sequence."""
    tokens = list(sequence.generated)
    return Generation(
        sequence.request.prompt,
        tuple(tokens),
        tokenizer.decode(tokens, skip_special_tokens=True) if tokenizer is not None else "",
        sequence.stopped,
        sequence.preemptions,
    )
