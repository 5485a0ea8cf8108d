"""All APIs apply one rule to unknown fields, at every depth: docs/api.md, "Unknown fields"."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.gateway.openai import body_reader
from orchestrator.gateway.openai.errors import ApiError
from orchestrator.gateway.telemetry.gateway_metrics import MAX_FIELDS, OTHER, GatewayMetrics
from tests.orchestrator.gateway.test_openapi import READERS
from tests.orchestrator.gateways import LiveGateway, routes
from tests.searches import search
from tests.served import Served

Json = dict[str, Any]
FUNCTION: Json = {"type": "function", "function": {"name": "f", "x_new": 1}, "x_tool": 1}


@pytest.fixture(scope="module")
def gateway() -> Iterator[LiveGateway]:
    live, replica = LiveGateway(), Served(max_len=400)
    live.serve(routes("m", replica, max_len=400))
    yield live
    live.close()
    replica.close()


def read(kind: str, fields: Json, *, strict: bool = False) -> tuple[Any, list[str]]:
    reads, plain = READERS[kind]
    request, unknown = body_reader.read(reads, json.dumps({**plain, **fields}).encode(), strict=strict)
    return request, sorted(unknown)


TEXT: Json = {"type": "text", "text": "a", "x_part": {"text": 1}}
NESTED: list[tuple[str, Json, list[str]]] = [
    (
        "ChatRequest",
        {"messages": [{"role": "user", "content": [TEXT, TEXT], "x_message": []}], "tools": [FUNCTION], "x_new": [[1]]},
        ["messages.content.x_part", "messages.x_message", "tools.function.x_new", "tools.x_tool", "x_new"],
    ),
    ("CompletionRequest", {"stream": True, "stream_options": {"x_new": 1}}, ["stream_options.x_new"]),
    (
        "MessagesRequest",
        {
            "messages": [{"role": "user", "content": [TEXT, {"type": "tool_result", "tool_use_id": "c", "x_new": 1}]}],
            "system": [TEXT],
            "tool_choice": {"type": "none", "x_new": 1},
        },
        ["messages.content.x_new", "messages.content.x_part", "system.x_part", "tool_choice.x_new"],
    ),
    ("CountTokensRequest", {"thinking": {"type": "adaptive", "x_new": 1}, "x_new": 1}, ["thinking.x_new", "x_new"]),
    (
        "ResponsesRequest",
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a", "x_new": 1}], "x_new": 1}]},
        ["input.content.x_new", "input.x_new"],
    ),
    ("TokenizeChatRequest", {"tools": [FUNCTION]}, ["tools.function.x_new", "tools.x_tool"]),
    *((kind, {"x_new": {"x": 1}}, ["x_new"]) for kind in ("EmbeddingRequest", "RerankRequest", "DetokenizeRequest")),
]


@pytest.mark.parametrize(("kind", "fields", "names"), NESTED)
def test_an_unknown_field_is_left_out_and_reported_by_its_path(kind: str, fields: Json, names: list[str]) -> None:
    """The path has no places in lists, and is reported once. With ``strict``, the field is an error with its place."""
    request, unknown = read(kind, fields)

    assert unknown == names
    assert request.model == "m"
    with pytest.raises(ApiError, match=r"^Unrecognized request argument supplied: \S+$") as refused:
        read(kind, fields, strict=True)
    assert refused.value.param


@given(st.dictionaries(st.text(max_size=4), st.none() | st.integers() | st.text(max_size=3) | st.just({"x": [{}]})))
@search()
def test_unknown_fields_do_not_change_a_request(fields: Json) -> None:
    """Names and values are arbitrary. A field that happens to be known may be refused."""
    try:
        request, unknown = read("ChatRequest", {"messages": [{**fields, "role": "user", "content": "x"}]})
    except ApiError:
        return
    assert request.messages[0].for_template(0)["content"] == "x"
    assert {name.removeprefix("messages.") for name in unknown} <= fields.keys()


def test_unknown_fields_of_very_many_objects_are_refused() -> None:
    """Leaving them out would block the other clients."""
    messages = [{"role": "user", "content": "x", "x_new": 1}] * (body_reader.MAX_UNKNOWN_OBJECTS + 1)
    with pytest.raises(ApiError, match="unknown fields in more than"):
        read("ChatRequest", {"messages": messages})


def test_unknown_fields_far_inside_nested_objects_are_refused() -> None:
    """Each level reads the text again: 46 levels around 6 MB took a second."""
    part: Json = {"type": "text", "text": "x", "x_new": 1}
    for levels in range(10):
        message = {"role": "assistant", "content": [part]}
        if levels < 4:
            assert read("ChatRequest", {"messages": [message]})[1]
        part = {"type": "thinking", "thinking": [part]}
    with pytest.raises(ApiError, match="levels of objects"):
        read("ChatRequest", {"messages": [message]})


IMAGINED = [
    *(
        ("ChatRequest", name)
        for name in ("audio", "prediction", "web_search_options", "guided_whitespace_pattern", "use_beam_search")
    ),
    *(("MessagesRequest", name) for name in ("container", "mcp_servers", "stop", "response_format")),
    *(("ResponsesRequest", name) for name in ("messages", "logprobs", "context_management", "max_tokens")),
]


@pytest.mark.parametrize(("kind", "name"), IMAGINED)
def test_what_would_change_the_answer_is_refused_unless_it_is_empty(kind: str, name: str) -> None:
    """The error has its path and its replacement."""
    empty: Any
    for empty in (None, False, [], ""):
        assert read(kind, {name: empty})[1] == []
    with pytest.raises(ApiError, match=rf"^{name} is not supported; here: .+") as refused:
        read(kind, {name: {"x": 1}})
    assert (refused.value.code, refused.value.param) == ("unsupported_parameter", name)


def test_a_value_that_is_the_default_is_accepted() -> None:
    """These fields are refused with another value, also inside a message."""
    message = {"role": "assistant", "content": "a", "audio": None}
    given = {"modalities": ["text"], "best_of": 1, "length_penalty": 1.0, "spaces_between_special_tokens": True}
    assert read("ChatRequest", {**given, "messages": [message]})[1] == []
    with pytest.raises(ApiError) as refused:
        read("ChatRequest", {"messages": [message, {**message, "audio": {"id": "a"}}]})
    assert refused.value.param == "messages[1].audio"


def test_the_fields_are_counted_by_name_up_to_a_limit() -> None:
    """Clients may send any name. Long names, unusual ones, and those over the limit share one series."""
    metrics = GatewayMetrics()
    metrics.unknown(["a", "x" * 65, 'b"}\n'])
    metrics.unknown(["a", *(f"f{number}" for number in range(100))])

    (family,) = [each for each in metrics.families([]) if each.name == "corewright_unknown_fields"]
    counts = {point.labels[0]: point.value for point in family.points}
    assert (counts["a"], len(counts) <= MAX_FIELDS + 1) == (2, True)
    assert sum(counts.values()) == 104
    assert counts[OTHER] == 104 - sum(count for name, count in counts.items() if name != OTHER)


def test_the_gateway_counts_and_with_a_header_refuses(gateway: LiveGateway) -> None:
    """`x-corewright-strict` is 1 or 0."""

    def status(strict: str | None) -> int:
        body = {"model": "m", "prompt": "x", "max_tokens": 1, "x_counted": 1}
        headers = {} if strict is None else {"x-corewright-strict": strict}
        return gateway.http.post("/v1/completions", json=body, headers=headers).status_code

    assert [status(strict) for strict in (None, "0", "1", "maybe")] == [200, 200, 400, 400]
    assert 'corewright_unknown_fields_total{field="x_counted"} 2' in gateway.http.get("/metrics").text


def test_tools_that_do_not_run_here_are_named_in_a_header(gateway: LiveGateway) -> None:
    """The header is ASCII, even if their names are not."""
    tools = [{"type": "web_search"}, {"type": "custom", "name": "é\r\nx: y"}]

    answer = gateway.http.post("/v1/responses", json={"model": "m", "input": "x", "tools": tools})

    assert (answer.status_code, answer.json()["tools"]) == (200, [])
    assert answer.headers["x-corewright-ignored-tools"] == "web_search, ???x: y"


@pytest.mark.parametrize("path", ["/chat/completions", "//v1/chat//completions/", "/v1/v1/chat/completions"])
def test_a_byte_order_mark_and_a_wrong_base_url_change_nothing(gateway: LiveGateway, path: str) -> None:
    """PowerShell and .NET send the mark."""
    body = b'\xef\xbb\xbf{"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}'
    answer = gateway.http.post(path, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 200, answer.text
