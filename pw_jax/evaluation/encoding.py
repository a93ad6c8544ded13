"""Texts into tokens, and which of them are scored."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int32

from pw_jax.errors import UserError
from pw_jax.evaluation.tasks import Pair


def begin_tokens(tokenizer: Any) -> list[int]:
    """What a tokenizer puts before every text: its begin token, or nothing.

    Models trained with a begin token have tokenizers that set one (Gemma does, SmolLM2 not).
    """
    begin = tokenizer.bos_token_id
    probe = list(tokenizer("a")["input_ids"])
    return [begin] if begin is not None and probe[:1] == [begin] else []


class Encoded(NamedTuple):
    """One sequence to score.

    Attributes:
        tokens: int32, context and continuation.
        scored: How many tokens at the end are scored, each given all before it.
    """

    tokens: Int32[np.ndarray, " T"]
    scored: int


class Encoder:
    """Encodes pairs as lm-eval does.

    Both parts are encoded together, since a tokenizer may join them, and spaces at the end of the
    context go to the continuation. Without a context the continuation follows one special token:
    the tokenizer's begin token, or its end token where there is none.

    Args:
        tokenizer: As from transformers.
        max_tokens: What the model takes at once; longer sequences lose tokens at the front.
    """

    def __init__(self, tokenizer: Any, max_tokens: int):
        self._tokenizer = tokenizer
        self.max_tokens = max_tokens
        begin, end = tokenizer.bos_token_id, tokenizer.eos_token_id
        first = begin if begin is not None else end
        self._first: list[int] = [] if first is None else [first]
        self._always_first = bool(begin_tokens(tokenizer))

    def text(self, text: str) -> list[int]:
        """Tokens of a text alone, without special tokens."""
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens."""
        return self._tokenizer.decode(list(tokens))

    def pair(self, pair: Pair) -> Encoded:
        """Encodes a context and its continuation.

        Raises:
            UserError: The continuation has no tokens, or more than fit.
        """
        context = pair.context.rstrip()
        continuation = pair.context[len(context) :] + pair.continuation
        whole = self.text(context + continuation)
        split = len(self.text(context)) if context else 0
        return self._sequence(whole[:split], whole[split:], pair.continuation)

    def rolling(self, text: str) -> list[Encoded]:
        """A text of any length, every token scored once.

        Windows hold as many tokens as the model takes and every token is given all before it in
        its window (lm-eval's rolling windows with a context of one token): only the last window,
        which would be short, reaches back over tokens that are scored already.
        """
        tokens, most = self.text(text), self.max_tokens
        windows = []
        for start in range(0, len(tokens), most):
            end = min(start + most, len(tokens))
            window = tokens[end - most - 1 : end] if start else self._first + tokens[:end]
            # Where there is no special token, nothing predicts the very first one.
            scored = min(end - start, len(window) - 1)
            if scored:
                windows.append(Encoded(np.asarray(window, np.int32), scored))
        return windows

    def _sequence(self, context: list[int], continuation: list[int], shown: str) -> Encoded:
        if not continuation:
            raise UserError(f"the continuation {shown[:60]!r} has no tokens of its own")
        if self._always_first or not context:
            context = self._first + context
        if not context:
            raise UserError("this tokenizer has no begin or end token, so a context is needed")
        if len(continuation) > self.max_tokens:
            raise UserError(
                f"the continuation {shown[:60]!r}... has {len(continuation)} tokens, and the "
                f"model takes {self.max_tokens} at once"
            )
        tokens = (context + continuation)[-self.max_tokens - 1 :]  # the last one is not run
        return Encoded(np.asarray(tokens, np.int32), len(continuation))
