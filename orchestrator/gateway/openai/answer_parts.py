"""An answer as text and calls in their order, for APIs whose answers are lists of both."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from orchestrator.gateway.openai.answers import Choice
from orchestrator.gateway.openai.toolcalls.events import CallBegin, Content, Event
from workers.messages.requests import TokenEvent


@dataclass
class Text:
    """Text between calls; its pieces are not joined yet."""

    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)


@dataclass
class Call:
    """A call of a tool; ``pieces`` are those of the JSON text of its arguments."""

    id: str
    name: str
    pieces: list[str] = field(default_factory=list)

    @property
    def arguments(self) -> str:
        return "".join(self.pieces)


Part = Text | Call


def events_of(choice: Choice, event: TokenEvent) -> list[Event]:
    """Returns what an event adds to the answer; after one with a finish there is nothing to come."""
    parser = choice.parser
    if parser is None:
        return [Content(event.text)] if event.text else []
    read = parser.push(event.text) if event.text else []
    return read if event.finish is None else [*read, *parser.flush()]


def whole_parts(choice: Choice, events: Sequence[TokenEvent]) -> list[Part]:
    """Returns the parts of a complete answer."""
    text = "".join([event.text for event in events])
    return joined_parts(events_of(choice, TokenEvent(id="", text=text, finish=events[-1].finish)))


def joined_parts(events: Iterable[Event]) -> list[Part]:
    parts: list[Part] = []
    for event in events:
        last = parts[-1] if parts else None
        if isinstance(event, CallBegin):
            parts.append(Call(event.id, event.name))
        elif isinstance(event, Content) and not isinstance(last, Text):
            parts.append(Text([event.text]))
        else:
            assert last is not None
            last.pieces.append(event.text)
    return parts
