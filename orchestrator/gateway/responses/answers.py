"""The answers of the Responses API: their types, and the writer, complete or as server-sent events.

The gateway writes answers by hand; a test reads them as these types.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from orchestrator.gateway.http.exchange import Exchange
from orchestrator.gateway.openai.answers import (
    Call,
    Choice,
    Part,
    PartsWriter,
    Text,
    Thought,
    begun_part,
    whole_parts,
)
from orchestrator.gateway.openai.errors import ApiError
from orchestrator.gateway.reading.events import CallBegin, Event
from orchestrator.gateway.responses.requests import FunctionTool, ResponsesChat, ResponsesRequest
from workers.messages.requests import FinishReason, TokenEvent

_encode = msgspec.json.encode


class OutputText(msgspec.Struct):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[Any]


class OutputMessage(msgspec.Struct, tag_field="type", tag="message"):
    id: str
    status: Literal["in_progress", "completed", "incomplete"]
    role: Literal["assistant"]
    content: list[OutputText]


class ReasoningText(msgspec.Struct):
    type: Literal["reasoning_text"]
    text: str


class OutputReasoning(msgspec.Struct, tag_field="type", tag="reasoning"):
    """``summary`` is always empty: no summaries are made."""

    id: str
    status: Literal["in_progress", "completed", "incomplete"]
    summary: list[Any]
    content: list[ReasoningText]


class OutputCall(msgspec.Struct, tag_field="type", tag="function_call"):
    """``arguments`` is the text of a JSON object."""

    id: str
    status: Literal["in_progress", "completed", "incomplete"]
    call_id: str
    name: str
    arguments: str


class ResponseUsage(msgspec.Struct):
    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class ResponseFailure(msgspec.Struct):
    code: Literal["server_error"]
    message: str


class Response(msgspec.Struct):
    """The fields of the request are returned, of its tools only functions; ``usage`` is missing while the answer is
    generated, and if that fails."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: ResponseFailure | None
    incomplete_details: dict[str, str] | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputMessage | OutputReasoning | OutputCall]
    parallel_tool_calls: bool
    previous_response_id: None
    reasoning: dict[str, str | None]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, str]
    tools: list[dict[str, Any]]
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage | UnsetType = UNSET


class ResponsesAnswer(PartsWriter, eq=False):
    """Writes the answer of one choice."""

    suffix: str  # of the ids
    created: int  # seconds since the epoch
    chat: ResponsesChat
    _number: int = 0  # of the next event
    _parts: list[Part] = msgspec.field(default_factory=list)  # of the answer so far; the last is open
    _items: list[dict[str, Any]] = msgspec.field(default_factory=list)  # the complete ones

    def body(self, answers: Sequence[tuple[Choice, Sequence[TokenEvent]]]) -> bytes | list[bytes]:
        ((choice, events),) = answers
        cut = events[-1].finish is FinishReason.LENGTH
        parts = whole_parts(choice, events) or [Text()]
        items = [self._item(position, part) for position, part in enumerate(parts)]
        if cut:
            items[-1]["status"] = "incomplete"
        return _encode(self._response("incomplete" if cut else "completed", items))

    def opening(self, choice: Choice) -> bytes:
        response = self._response("in_progress", [])
        kinds = ("response.created", "response.in_progress")
        return b"".join([self._event(kind, {"response": response}) for kind in kinds])

    def ending(self, event: TokenEvent) -> Iterator[bytes]:
        if not self._parts:
            yield from self._begin(Text())
        status = "incomplete" if event.finish is FinishReason.LENGTH else "completed"
        yield from self._end(status)
        yield self._event(f"response.{status}", {"response": self._response(status, self._items)})

    def failure(self, error: ApiError) -> bytes:
        """Returns the last events of a stream that failed after its start. Before `response.created` there is no
        response that could have failed."""
        if not self._number:
            fields = {"code": error.code, "message": error.message, "param": error.param}
            return self._event("error", fields)
        ends = [*self._end("incomplete")]
        failed = {**self._response("failed", self._items), "error": ResponseFailure("server_error", error.message)}
        return b"".join([*ends, self._event("response.failed", {"response": failed})])

    # Events

    def _event(self, kind: str, fields: dict[str, Any]) -> bytes:
        number, self._number = self._number, self._number + 1
        return b"event: %b\ndata: %b\n\n" % (
            kind.encode(),
            _encode({"type": kind, "sequence_number": number, **fields}),
        )

    def written(self, read: Event) -> Iterator[bytes]:
        part = begun_part(read, self._parts[-1] if self._parts else None)
        if part is not None:
            yield from self._end("completed")
            yield from self._begin(part)
        if isinstance(read, CallBegin):
            return
        last, delta = self._parts[-1], {**self._position(), "delta": read.text}
        last.pieces.append(read.text)
        if isinstance(last, Call):
            yield self._event("response.function_call_arguments.delta", delta)
        elif isinstance(last, Thought):
            yield self._event("response.reasoning_text.delta", delta)
        else:
            yield self._event("response.output_text.delta", {**delta, "logprobs": []})

    def _begin(self, part: Part) -> Iterator[bytes]:
        self._parts.append(part)
        item = self._item(len(self._parts) - 1, part, "in_progress")
        position = self._position()
        if isinstance(part, Text):
            item["content"] = []
        yield self._event("response.output_item.added", {"output_index": position["output_index"], "item": item})
        if isinstance(part, Text):
            yield self._event("response.content_part.added", {**position, "part": _content(type(part)())})

    def _end(self, status: str) -> Iterator[bytes]:
        """Ends the open item, if there is one."""
        if len(self._items) == len(self._parts):
            return
        part, position = self._parts[-1], self._position()
        if isinstance(part, Text):
            done = {**position, "text": part.text}
            if isinstance(part, Thought):
                yield self._event("response.reasoning_text.done", done)
            else:
                yield self._event("response.output_text.done", {**done, "logprobs": []})
            yield self._event("response.content_part.done", {**position, "part": _content(part)})
        else:
            fields = {**position, "name": part.name, "arguments": part.arguments}
            yield self._event("response.function_call_arguments.done", fields)
        item = self._item(len(self._parts) - 1, part, status)
        self._items.append(item)
        yield self._event("response.output_item.done", {"output_index": position["output_index"], "item": item})

    def _position(self) -> dict[str, Any]:
        """Returns the fields that say what an event of the last item is about."""
        index = len(self._parts) - 1
        position: dict[str, Any] = {"item_id": self._id(index, self._parts[-1]), "output_index": index}
        return {**position, "content_index": 0} if isinstance(self._parts[-1], Text) else position

    # Values

    def _id(self, index: int, part: Part) -> str:
        kind = "fc" if isinstance(part, Call) else "rs" if isinstance(part, Thought) else "msg"
        return f"{kind}{self.suffix}-{index}"

    def _item(self, index: int, part: Part, status: str = "completed") -> dict[str, Any]:
        id = self._id(index, part)
        if isinstance(part, Thought):
            return {"id": id, "type": "reasoning", "status": status, "summary": [], "content": [_content(part)]}
        if isinstance(part, Text):
            content = [_content(part)]
            return {"id": id, "type": "message", "status": status, "role": "assistant", "content": content}
        head = {"id": id, "type": "function_call", "status": status, "call_id": part.id}
        return {**head, "name": part.name, "arguments": part.arguments}

    def _response(self, status: str, items: list[dict[str, Any]]) -> dict[str, Any]:
        chat, request = self.chat, self.chat.request
        usage = {"usage": self._usage()} if status in ("completed", "incomplete") else {}
        return {
            "id": f"resp{self.suffix}",
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "model": request.model,
            "output": items,
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": chat.reasoning_effort, "summary": None},
            "store": False,
            "temperature": 1.0 if chat.temperature is None else chat.temperature,
            "text": {"format": {"type": "text"}} if request.text is None else _text(request),
            "tool_choice": request.tool_choice or "auto",
            "tools": [_tool(tool) for tool in request.tools or () if tool.type == "function"],
            "top_p": 1.0 if chat.top_p is None else chat.top_p,
            "truncation": "disabled",
            **usage,
        }

    def _usage(self) -> dict[str, Any]:
        prompt, answer = self.prompt_tokens, self.choice.tokens
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": answer,
            "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
            "total_tokens": prompt + answer,
        }


def responses_answer(
    exchange: Exchange, body: ResponsesChat, choices: Sequence[Choice], suffix: str
) -> ResponsesAnswer:
    """Returns the writer of an answer; ``suffix`` is that of its ids."""
    return ResponsesAnswer(suffix, int(time.time()), body, choices=choices)


def _content(part: Text) -> dict[str, Any]:
    if isinstance(part, Thought):
        return {"type": "reasoning_text", "text": part.text}
    return {"type": "output_text", "text": part.text, "annotations": [], "logprobs": []}


def _tool(tool: FunctionTool) -> dict[str, Any]:
    fields = {"name": tool.name, "description": tool.description, "parameters": tool.parameters or {}}
    return {"type": "function", **fields, "strict": bool(tool.strict)}


def _text(request: ResponsesRequest) -> dict[str, Any]:
    format = None if request.text is None else request.text.format
    if format is None or format.type != "json_schema":
        return {"format": {"type": "text" if format is None else format.type}}
    named = {"name": format.name or "answer", "schema": format.schema, "strict": format.strict}
    return {"format": {"type": "json_schema", **named}}
