"""The events that the text of an answer is read as, piece by piece."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of the model's reasoning, which is not part of the content."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """The start of a call; ``index`` counts from 0, ``name`` is the function."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """Another piece of the JSON text of a call's arguments."""

    index: int
    text: str


Event = Content | Reasoning | CallBegin | CallArguments


class AnswerReader(Protocol):
    """Reads one answer. The joined events do not depend on how the text is cut into pieces."""

    @property
    def in_reasoning(self) -> bool:
        """Returns whether the next text is reasoning, unless it begins with the mark that ends reasoning."""
        ...

    def push(self, text: str) -> list[Event]:
        """Returns the new events that this piece makes certain."""
        ...

    def flush(self) -> list[Event]:
        """Returns the last events at the end of the text. An incomplete or invalid call becomes content."""
        ...

    def finish_reason(self, reason: str) -> str:
        """Returns OpenAI's finish reason; ``reason`` is that of an answer without calls. Call it after ``flush``."""
        ...
