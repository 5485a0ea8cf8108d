"""Anthropic's Messages API of the gateway: its requests reach the model as chats, and its answers have its shape."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from orchestrator.gateway.anthropic.answers import Message, MessageError
from orchestrator.gateway.anthropic.requests import read_messages
from tests.fleet import until
from tests.orchestrator.gateway.event_streams import joined_message, read_events, without_ids
from tests.orchestrator.gateways import LiveGateway, routes
from tests.orchestrator.hostile import Wire, request
from tests.orchestrator.scripted import ScriptedEngine, ScriptedReplica, save_tools_tokenizer
from tests.served import Served

HELLO = [{"role": "user", "content": "Hi"}]
WEATHER = {"city": "Paris", "days": 2}
CALLS = (
    f"Wait. <tool_call>\n{json.dumps({'name': 'get_weather', 'arguments': WEATHER})}\n</tool_call>\n"
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [
    {"name": "get_weather", "description": "The weather of a city.", "input_schema": SCHEMA},
    {"name": "now", "input_schema": {"type": "object"}},
]

SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 3}


class Place:
    """A gateway with a model that says what a test sets."""

    def __init__(self, folder: Path) -> None:
        self.gateway = LiveGateway()
        tokenizer = save_tools_tokenizer(folder, "<tool_call>")
        self.engine = ScriptedEngine(tokenizer, max_len=4096)
        self._replica = ScriptedReplica(self.engine, tokenizer)
        self.gateway.serve(routes("m", self._replica, engine="cpu", source=str(folder)))  # type: ignore[arg-type]

    def ask(self, says: str = "Hello.", path: str = "/v1/messages", **fields: Any) -> httpx.Response:
        self.engine.says = says
        body: dict[str, Any] = {"model": "m", "messages": HELLO, "max_tokens": 999, **fields}
        return self.gateway.http.post(path, json={name: value for name, value in body.items() if value is not None})

    def prompt_of(self, **fields: Any) -> str:
        response = self.ask(**fields)
        assert response.status_code == 200, response.text
        return self.engine.prompts[-1].removeprefix("<|bos|>")

    def close(self) -> None:
        self.gateway.close()
        self._replica.close()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    built = Place(tmp_path_factory.mktemp("model"))
    yield built
    built.close()


def events(response: httpx.Response) -> list[dict[str, Any]]:
    return read_events(response.text)


# Answers


def test_an_answer_has_anthropics_shape(place: Place) -> None:
    """Text is one block; the usage counts the end-of-sequence token."""
    response = place.ask("Hello.")

    message = response.json()
    assert msgspec.convert(message, Message).id.startswith("msg-")
    assert message == {
        "id": message["id"],
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [{"type": "text", "text": "Hello."}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": message["usage"],
    }
    assert message["usage"]["output_tokens"] == 6
    assert response.headers["request-id"] == response.headers["x-request-id"]


def test_a_streamed_text_has_the_documented_sequence_of_events(place: Place) -> None:
    """message_start, a ping, one block with its deltas, message_delta, message_stop."""
    stream = events(place.ask("Hey", stream=True))

    usage = {"input_tokens": stream[0]["message"]["usage"]["input_tokens"], "output_tokens": 4}
    start = {"type": "message", "role": "assistant", "model": "m", "content": []}
    stop: dict[str, Any] = {"stop_reason": None, "stop_sequence": None}
    delta = {"type": "content_block_delta", "index": 0}
    assert stream == [
        {
            "type": "message_start",
            "message": {"id": stream[0]["message"]["id"], **start, **stop, "usage": {**usage, "output_tokens": 0}},
        },
        {"type": "ping"},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        *({**delta, "delta": {"type": "text_delta", "text": letter}} for letter in "Hey"),
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn", "stop_sequence": None}, "usage": usage},
        {"type": "message_stop"},
    ]


def test_calls_are_blocks_of_their_own(place: Place) -> None:
    """With their inputs as objects, after the text before them."""
    message = place.ask(CALLS, tools=TOOLS).json()

    assert without_ids(message)["content"] == [
        {"type": "text", "text": "Wait."},
        {"type": "tool_use", "name": "get_weather", "input": WEATHER},
        {"type": "tool_use", "name": "now", "input": {}},
    ]
    assert message["stop_reason"] == "tool_use"


@pytest.mark.parametrize("says", ["Hello.", "", CALLS, "a <tool_call>x", "<tool_call>{}"])
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_joined_events_equal_the_answer_that_is_not_streamed(place: Place, says: str, tools: Any) -> None:
    """Also for an empty answer, and for text that only looks like a call."""
    whole = place.ask(says, tools=tools).json()
    stream = events(place.ask(says, tools=tools, stream=True))

    assert without_ids(joined_message(stream)) == without_ids(whole)


def test_each_stop_reason_is_reported(place: Place) -> None:
    """A limit, a full context, a stop sequence by its text, and the end."""

    def stop(**fields: Any) -> tuple[str, str | None]:
        message = place.ask("Hello, world.", **fields).json()
        last = events(place.ask("Hello, world.", stream=True, **fields))[-2]["delta"]
        assert last == {name: message[name] for name in ("stop_reason", "stop_sequence")}
        return message["stop_reason"], message["stop_sequence"]

    assert stop() == ("end_turn", None)
    assert stop(max_tokens=3) == ("max_tokens", None)
    assert stop(stop_sequences=["?", ", w"]) == ("stop_sequence", ", w")
    long = place.ask("Hello, world. " * 2000, max_tokens=9999).json()
    assert long["stop_reason"] == "model_context_window_exceeded"
    assert sum(long["usage"].values()) == 4096


# Requests


def test_the_system_prompt_is_a_text_or_blocks(place: Place) -> None:
    """Hints about caching are ignored, and the template clears thinking by itself."""
    hint = {"cache_control": {"type": "ephemeral"}}
    blocks = [{"type": "text", "text": "Be ", **hint}, {"type": "text", "text": "brief."}]

    assert place.prompt_of(system="Be brief.") == "system: Be brief.\nuser: Hi\nassistant:"
    clearing = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    assert (
        place.prompt_of(system=blocks, **hint, context_management=clearing) == "system: Be brief.\nuser: Hi\nassistant:"
    )


def test_calls_and_results_go_back_to_the_model(place: Place) -> None:
    """Each result is a message of the tool. Thinking of earlier answers comes along, except what cannot be read."""
    messages = [
        *HELLO,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "Wait."},
                {"type": "tool_use", "id": "t1", "name": "now", "input": {"a": [1]}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "noon"}]},
                {"type": "text", "text": "Go on."},
            ],
        },
    ]

    prompt = place.prompt_of(messages=messages, tools=TOOLS)

    turns = 'user: Hi\nassistant: <Hm.> Wait. now({"a": [1]})\ntool: noon\nuser: Go on.\nassistant:'
    assert prompt.partition("\n")[2] == turns


@pytest.mark.parametrize(
    ("thinking", "shown"),
    [
        (None, False),
        ({"type": "disabled"}, False),
        ({"type": "enabled", "budget_tokens": 31999}, True),
        ({"type": "adaptive", "display": "summarized"}, True),
        ({"type": "adaptive", "display": "omitted"}, False),
    ],
)
def test_thinking_is_in_the_answer_if_it_was_requested(thinking: Any, shown: bool) -> None:
    """Other clients may take the first block for the text."""
    body = {"model": "m", "messages": HELLO, "max_tokens": 32000, "thinking": thinking}

    assert read_messages(msgspec.json.encode(body)).shows_reasoning is shown


def test_an_assistants_text_at_the_end_begins_the_answer(place: Place) -> None:
    """As Anthropic's API does it."""
    messages = [*HELLO, {"role": "assistant", "content": "The answer is"}]

    assert place.prompt_of(messages=messages) == "user: Hi\nassistant: The answer is"


def test_successive_messages_of_one_role_are_one(place: Place) -> None:
    """Many chat templates reject them."""
    assert place.prompt_of(messages=[*HELLO, *HELLO]) == "user: HiHi\nassistant:"


def test_a_system_message_and_a_budget_are_accepted_and_tools_of_the_server_left_out(place: Place) -> None:
    """As Claude Code sends them."""
    messages = [*HELLO, {"role": "system", "content": "Skills are below."}]
    thinking = {"type": "enabled", "budget_tokens": 31999}

    prompt = place.prompt_of(messages=messages, thinking=thinking, tools=[SEARCH], tool_choice={"type": "auto"})

    assert prompt == "user: Hi\nsystem: Skills are below.\nassistant:"


def test_the_counted_tokens_are_those_of_the_answers_usage(place: Place) -> None:
    """With a system prompt and tools."""
    fields: dict[str, Any] = {"system": "Be brief.", "tools": TOOLS}

    counted = place.ask(path="/v1/messages/count_tokens", max_tokens=None, **fields).json()

    assert counted == {"input_tokens": place.ask(**fields).json()["usage"]["input_tokens"]}


def test_tools_that_may_not_be_called_are_hidden(place: Place) -> None:
    """The answer is text, whatever it looks like."""
    message = place.ask(CALLS, tools=TOOLS, tool_choice={"type": "none"}).json()

    assert message["content"] == [{"type": "text", "text": CALLS}]
    assert "get_weather" not in place.engine.prompts[-1]


def test_without_parallel_calls_there_is_at_most_one(place: Place) -> None:
    """`disable_parallel_tool_use` keeps the first."""
    message = place.ask(CALLS, tools=TOOLS, tool_choice={"type": "auto", "disable_parallel_tool_use": True}).json()

    assert [block["type"] for block in message["content"]] == ["text", "tool_use"]


# Errors


REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"messages": []}, "messages: at least one message is required"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": []}]}, "messages: none has text, a tool use or a tool result"),
    ({"messages": [{"role": "critic", "content": "x"}]}, "messages[0].role"),
    ({"thinking": {"type": "often"}}, "thinking.type: Invalid enum value 'often'"),
    ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management.edits[0].type"),
    ({"mcp_servers": [{}]}, "mcp_servers is not supported; here: tools"),
    ({"stop": "x"}, "stop is not supported; here: stop_sequences"),
    ({"temperature": 3}, "temperature: 3 is out of range"),
    ({"tools": [*TOOLS, SEARCH], "tool_choice": {"type": "tool", "name": "web_search"}}, "server cannot run"),
    ({"tools": [SEARCH], "tool_choice": {"type": "any"}}, "this server cannot run web_search"),
    ({"tool_choice": {"type": "any"}}, "tool_choice requires tools"),
    ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "x"}}, "'x' is not one of the tools"),
    (
        {"output_config": {"format": {"type": "json_schema", "schema": {"items": {"not": {"type": "null"}}}}}},
        "output_config.format.schema.items.not: is not supported",
    ),
    (
        {"tools": [*TOOLS, {"name": "x", "input_schema": {"if": {}}}], "tool_choice": {"type": "any"}},
        f"tools[{len(TOOLS)}].input_schema.if: is not supported",
    ),
    ({"stop_sequences": ["x" * 20_000]}, "the characters of stop_sequences: 20000"),
]


@pytest.mark.parametrize(("fields", "says"), REFUSALS)
def test_an_unsupported_field_is_named_in_anthropics_error(place: Place, fields: dict[str, Any], says: str) -> None:
    """400 `invalid_request_error`."""
    response = place.ask(**fields)

    error = msgspec.json.decode(response.content, type=MessageError)
    assert (response.status_code, error.error.type) == (400, "invalid_request_error")
    assert says in error.error.message
    assert error.request_id == response.headers["request-id"]


def test_a_prompt_that_is_too_long_is_refused_in_anthropics_words(place: Place) -> None:
    """Clients read the numbers: Claude Code compacts the chat."""
    message = place.ask(messages=[{"role": "user", "content": "x" * 4200}]).json()["error"]["message"]

    assert re.match(r"prompt is too long: 4\d\d\d tokens > 4095 maximum", message), message


def test_an_unknown_model_is_not_found(place: Place) -> None:
    """404, also when tokens are counted."""
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        response = place.ask(path=path, model="zzz", max_tokens=9 if path == "/v1/messages" else None)
        assert (response.status_code, response.json()["error"]["type"]) == (404, "not_found_error")


def test_an_anthropic_key_is_read_from_its_own_header(tmp_path: Path) -> None:
    """`x-api-key`, as Anthropic's clients send it, or `authorization`; without one the error has Anthropic's shape."""
    from orchestrator.access.keys import KeyFile
    from orchestrator.process.home import Home

    key = KeyFile(Home(tmp_path).keys).create("good", scopes=("inference",))[1]
    gateway, replica = LiveGateway(home=tmp_path), Served()
    try:
        gateway.serve(routes("m", replica))
        body = {"model": "m", "messages": HELLO, "max_tokens": 2}
        for headers in ({"x-api-key": key, "anthropic-version": "2023-06-01"}, {"authorization": f"Bearer {key}"}):
            assert gateway.http.post("/v1/messages", json=body, headers=headers).status_code == 200
        refused = gateway.http.post("/v1/messages", json=body)
        assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
    finally:
        gateway.close()
        replica.close()


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens?beta=true"])
def test_an_error_before_the_body_is_read_has_anthropics_shape(place: Place, path: str) -> None:
    """As one of a body that is too long; the errors of other routes keep OpenAI's."""
    with Wire(place.gateway.port) as wire:
        wire.send(request("POST", path, content_length="999999999999"))
        refused = wire.answer()
    with Wire(place.gateway.port) as wire:
        wire.send(request("POST", "/v1/completions", content_length="999999999999"))
        other = wire.answer()

    assert (refused.status, refused.json["error"]["type"]) == (413, "request_too_large")
    assert refused.json["request_id"] == refused.headers["x-request-id"]
    assert other.code == "body_too_large"


def test_a_model_with_a_server_of_its_own_has_no_messages(place: Place) -> None:
    """Its server gets OpenAI's requests as they are."""
    table_of = place.gateway.controller.table.models
    place.gateway.serve(*table_of, routes("own", engine="server"))
    try:
        response = place.ask(model="own")
    finally:
        place.gateway.serve(*table_of)

    assert response.status_code == 400
    assert "/v1/chat/completions" in response.json()["error"]["message"]


# Streams that end early

ASKS: dict[str, Any] = {"model": "m", "messages": HELLO, "max_tokens": 4000, "stream": True}


@pytest.fixture
def slow() -> Iterator[tuple[LiveGateway, Served]]:
    """A gateway with a replica of one slot, whose answers take minutes."""
    gateway, replica = LiveGateway(keep_alive_s=0.05), Served(slots=1, step_ms=50)
    yield gateway.serve(routes("m", replica)), replica
    gateway.close()
    replica.close()


def test_a_client_that_disconnects_cancels_its_request(slow: tuple[LiveGateway, Served]) -> None:
    """The slot is free again."""
    gateway, _ = slow
    with gateway.http.stream("POST", "/v1/messages", json=ASKS) as response:
        assert next(response.iter_lines()) == "event: message_start"

    until(lambda: gateway.queue("m").links.live == 0, 10, "the request is cancelled")


def test_a_lost_replica_ends_a_begun_stream_with_an_error_event(slow: tuple[LiveGateway, Served]) -> None:
    """In Anthropic's shape, and with nothing behind it."""
    gateway, replica = slow
    with gateway.http.stream("POST", "/v1/messages", json=ASKS) as response:
        lines = response.iter_lines()
        assert next(lines) == "event: message_start"
        replica.kill()
        rest = [line for line in lines if line]

    assert rest[-2] == "event: error"
    assert json.loads(rest[-1].removeprefix("data: "))["error"]["type"] == "overloaded_error"


def test_a_waiting_stream_gets_pings(slow: tuple[LiveGateway, Served]) -> None:
    """In place of the comments of OpenAI's streams."""
    gateway, _ = slow
    with (
        gateway.http.stream("POST", "/v1/messages", json=ASKS),
        gateway.http.stream("POST", "/v1/messages", json=ASKS) as response,
    ):
        lines = response.iter_lines()
        assert [next(lines) for _ in range(2)] == ["event: ping", 'data: {"type":"ping"}']
