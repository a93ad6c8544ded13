"""What a model is asked."""

import dataclasses
from typing import Literal, NamedTuple

Kind = Literal["choice", "answer"]


class Pair(NamedTuple):
    """A text and what follows it.

    Attributes:
        context: May be empty.
        continuation: What is scored; starts with the space that parts the two, if there is one.
    """

    context: str
    continuation: str


@dataclasses.dataclass(frozen=True)
class Question:
    """One item of a task.

    Attributes:
        pairs: The answers to choose from, each behind its context. Mostly the contexts are the
            same; Winogrande's differ and its continuations are the same.
        gold: Index of the right one.
    """

    pairs: tuple[Pair, ...]
    gold: int

    def __post_init__(self):
        if not 0 <= self.gold < len(self.pairs):
            raise ValueError(f"gold {self.gold} is none of {len(self.pairs)} answers")


@dataclasses.dataclass(frozen=True)
class Task:
    """Questions of one kind.

    Attributes:
        name: What tables call it.
        kind: ``choice``: which answer is likeliest. ``answer``: one answer only, whose likelihood
            is measured, and whether greedy decoding would give it.
        questions: In their order.
        source: Where they come from.
    """

    name: str
    kind: Kind
    questions: tuple[Question, ...]
    source: str

    def first(self, count: int | None) -> "Task":
        """The first questions only; None keeps all."""
        return dataclasses.replace(self, questions=self.questions[:count])
