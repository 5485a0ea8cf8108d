"""What a parser of tool calls makes of an answer's text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Content:
    """Text that is no part of a call."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """The call of this number, from 0 on, is of that function."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the JSON text of a call's arguments."""

    index: int
    text: str


Event = Content | CallBegin | CallArguments


class ToolParser(Protocol):
    """Reads one answer. However its text is cut into pieces, the events joined are the same."""

    def push(self, text: str) -> list[Event]:
        """What is certain with this piece, and was not told before."""
        ...

    def flush(self) -> list[Event]:
        """The rest, when nothing more comes. A call that is incomplete, or is none, becomes content."""
        ...

    def finish_reason(self, reason: str) -> str:
        """OpenAI's finish reason for an answer that would end by ``reason`` without calls. After ``flush``."""
        ...
