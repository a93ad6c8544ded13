"""Retrieval from long contexts, built out of real text.

* passkey (Mohtashami and Jaggi 2023): a five-digit number stands in one sentence somewhere in the
  text and is asked for at the end.
* passages: the text is cut into numbered passages; the end quotes the beginning of one and asks
  for its number.

Both are asked as continuations, so that likelihood and greedy decoding can be measured alike, and
both have the length in tokens that is wanted.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from pw_jax.errors import UserError
from pw_jax.evaluation.tasks import Pair, Question, Task

Tokens = Sequence[int]
OPENING = "There is important information hidden in the text below. Remember it.\n\n"
KEY_SENTENCE = "\n\nThe pass key is {key}. Remember it. {key} is the pass key.\n\n"
KEY_QUESTION = "\n\nWhat is the pass key? The pass key is"
QUOTED_WORDS = 12
LEAST_PASSAGES, PASSAGE_TOKENS = 4, 96


@dataclass(frozen=True)
class Filler:
    """Real text that hides what is asked for.

    Attributes:
        tokens: One long text, already tokens, so that lengths can be met.
        decode: Tokens to text.
        encode: Text to tokens.
    """

    tokens: Tokens
    decode: Callable[[Tokens], str]
    encode: Callable[[str], Tokens]

    def cut(self, generator: np.random.Generator, count: int) -> Tokens:
        """A passage of so many tokens, from a random place.

        Raises:
            UserError: The text is shorter.
        """
        if count > len(self.tokens):
            raise UserError(
                f"the text for long contexts has {len(self.tokens)} tokens, fewer than {count}"
            )
        start = int(generator.integers(len(self.tokens) - count + 1))
        return self.tokens[start : start + count]


def passkey(filler: Filler, length: int, count: int, seed: int = 0) -> Task:
    """Pass keys at evenly spread depths.

    Args:
        filler: The text.
        length: Tokens of each question, within a few.
        count: Questions; the first key is at the beginning, the last at the end.
        seed: Of keys and places.
    """
    generator = np.random.default_rng((seed, length))
    questions = []
    for number in range(count):
        key = str(generator.integers(10_000, 100_000))
        frame = OPENING + KEY_SENTENCE.format(key=key) + KEY_QUESTION + f" {key}"
        room = length - len(filler.encode(frame))
        _check_room(room, length)
        before = round(room * (number / max(1, count - 1)))
        tokens = filler.cut(generator, room)
        parts = filler.decode(tokens[:before]), filler.decode(tokens[before:])
        context = OPENING + parts[0] + KEY_SENTENCE.format(key=key) + parts[1] + KEY_QUESTION
        questions.append(Question((Pair(context, f" {key}"),), 0))
    return Task(f"passkey_{length}", "answer", tuple(questions), "real text, keys drawn")


def passages(filler: Filler, length: int, count: int, seed: int = 0) -> Task:
    """Which numbered passage starts with these words?

    As in LongBench the number is to be written, not chosen: a choice would run the whole context
    once for each passage. There are at most 20, so that guessing is right once in as many.

    Args:
        filler: The text.
        length: Tokens of each question, within a few per cent.
        count: Questions.
        seed: Of texts and choices.
    """
    generator = np.random.default_rng((seed, length, 1))
    parts = max(LEAST_PASSAGES, min(length // PASSAGE_TOKENS, 20))
    questions = []
    for _ in range(count):
        room = length // parts - len(filler.encode(f"Passage {parts}: \n\n"))
        room -= -(-3 * QUOTED_WORDS // parts)  # the quotation at the end, shared out
        _check_room(room, length)
        cuts = [filler.decode(filler.cut(generator, room)) for _ in range(parts)]
        texts = [" ".join(text.split()) for text in cuts]
        gold = int(generator.integers(parts))
        quoted = " ".join(texts[gold].split(" ")[:QUOTED_WORDS])
        body = "".join(f"Passage {n + 1}: {text}\n\n" for n, text in enumerate(texts))
        context = f'{body}The words "{quoted}" are the beginning of passage'
        questions.append(Question((Pair(context, f" {gold + 1}."),), 0))
    return Task(f"passages_{length}", "answer", tuple(questions), "real text")


def _check_room(room: int, length: int) -> None:
    if room < 1:
        raise UserError(f"{length} tokens are too few for a long-context question")
