"""Writes a parser's events as OpenAI's message, or as the deltas of a stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from orchestrator.gateway.openai.toolcalls.events import CallArguments, CallBegin, Content, Event


def message(events: Sequence[Event]) -> dict[str, Any]:
    """Returns the message for all events of an answer; without calls, the same as without a parser."""
    content = "".join(event.text for event in events if isinstance(event, Content))
    calls: list[dict[str, Any]] = []
    for event in events:
        if isinstance(event, CallBegin):
            calls.append({"id": event.id, "type": "function", "function": {"name": event.name, "arguments": ""}})
        elif isinstance(event, CallArguments):
            calls[-1]["function"]["arguments"] += event.text
    if not calls:
        return {"role": "assistant", "content": content}
    return {"role": "assistant", "content": content or None, "tool_calls": calls}


def delta(events: Sequence[Event]) -> dict[str, Any]:
    """Returns the delta for the events of one piece of text; empty without events."""
    fields: dict[str, Any] = {}
    content = "".join(event.text for event in events if isinstance(event, Content))
    if content:
        fields["content"] = content
    calls: list[dict[str, Any]] = []
    for event in events:
        if isinstance(event, CallBegin):
            function = {"name": event.name, "arguments": ""}
            calls.append({"index": event.index, "id": event.id, "type": "function", "function": function})
        elif isinstance(event, CallArguments):
            if not calls or calls[-1]["index"] != event.index:
                calls.append({"index": event.index, "function": {"arguments": ""}})
            calls[-1]["function"]["arguments"] += event.text
    if calls:
        fields["tool_calls"] = calls
    return fields
