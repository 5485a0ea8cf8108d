"""The events that a parser of tool calls makes from an answer's text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Content:
    """Text that is not part of a call."""

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


Event = Content | CallBegin | CallArguments


class ToolParser(Protocol):
    """Reads one answer. The joined events do not depend on how the text is cut into pieces."""

    def push(self, text: str) -> list[Event]:
        """Returns the new events that are certain with this piece."""
        ...

    def flush(self) -> list[Event]:
        """Returns the last events at the end of the text. An incomplete or invalid call becomes content."""
        ...

    def finish_reason(self, reason: str) -> str:
        """Returns OpenAI's finish reason; ``reason`` is that of an answer without calls. After ``flush``."""
        ...
