"""docs/api.md describes each route, request field and answer."""

from __future__ import annotations

import ast
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from orchestrator.api.routes import ROUTES
from orchestrator.gateway.anthropic.requests import CountTokensRequest, MessagesRequest
from orchestrator.gateway.encoding.requests import KINDS_OF, EncodingFields
from orchestrator.gateway.openai.errors import ApiError
from orchestrator.gateway.openai.protocol import ChatRequest, CompletionRequest
from orchestrator.gateway.responses.requests import ResponsesRequest
from orchestrator.gateway.routes import ROUTES as GATEWAY_ROUTES
from orchestrator.messages.controller_settings import ADMIN_PATH
from tests.api_reference import TABLES, renewed
from tests.docs.pages import API, CLI, OVERVIEW, ROOT, SECURITY, example, rows, section, shape, words
from tests.orchestrator.gateways import LiveGateway, routes
from tests.served import Served
from workers.messages.requests import GenerateRequest


@pytest.fixture(scope="module")
def answers() -> Iterator[dict[str, Any]]:
    """What a gateway answers with an echo replica behind it."""
    gateway, replica = LiveGateway(), Served(max_len=64)
    try:
        gateway.serve(routes("m", replica, max_len=64))
        text, chat = {"model": "m", "prompt": "x"}, {"model": "m", "messages": [{"role": "user", "content": "x"}]}
        yield {
            "completion": gateway.http.post("/v1/completions", json=text).json(),
            "chat": gateway.http.post("/v1/chat/completions", json=chat).json(),
            "error": gateway.http.post("/v1/completions", json={**text, "max_tokens": 600}).json(),
            "message": gateway.http.post("/v1/messages", json={**chat, "max_tokens": 9}).json(),
            "message error": gateway.http.post("/v1/messages", json={**chat, "model": "x", "max_tokens": 9}).json(),
            "model": gateway.http.get("/v1/models/m").json(),
        }
    finally:
        gateway.close()
        replica.close()


@pytest.mark.parametrize(
    ("name", "page", "heading", "number"),
    [
        ("chat", OVERVIEW, "The demo", 0),
        ("model", API, "Routes", 0),
        ("completion", API, "Answers", 0),
        ("message", API, "Messages", 0),
        ("message error", API, "Messages", 1),
        ("error", API, "Errors", 0),
    ],
)
def test_a_shown_answer_has_the_gateways_keys(
    name: str, page: Path, heading: str, number: int, answers: dict[str, Any]
) -> None:
    """At every depth."""
    assert shape(example(page, heading, number)) == shape(answers[name])
    if name == "error":
        shown, real = example(page, heading, number)["error"], answers[name]["error"]
        assert {key: shown[key] for key in ("type", "param", "code")} == {k: real[k] for k in ("type", "param", "code")}


def routes_of(page: str) -> set[tuple[str, str]]:
    return {(m, p) for row in rows(page) for text in words(row[0]) for m, _, p in [text.partition(" ")] if p[:1] == "/"}


def test_every_route_is_described() -> None:
    """Of the gateway and of the admin API."""
    assert {(route.method, route.path) for route in GATEWAY_ROUTES} == routes_of(section(API, "Routes"))
    assert {(route.method, f"{ADMIN_PATH}{route.path}") for route in ROUTES} == routes_of(section(CLI, "The admin API"))


def test_the_routes_that_need_no_key_are_those_that_security_names() -> None:
    """In each row about somebody without a key that names routes; api.md has them in its last two rows."""
    without_key = {route.path for route in GATEWAY_ROUTES if route.scope is None}
    table = [row for row in rows(section(SECURITY, "Who can do what")) if "/livez" in row[1]]
    assert [{word for word in words(row[1]) if word.startswith("/")} for row in table] == [without_key, without_key]
    last_rows = rows(section(API, "Routes"))[-2:]
    assert {path for row in last_rows for word in words(row[0]) for path in word.split()[1:]} == without_key


def test_the_tables_of_the_admin_api_are_those_of_its_routes_and_types() -> None:
    """Generated from them: UPDATE_GOLDEN=1 writes them anew."""
    if os.environ.get("UPDATE_GOLDEN"):
        CLI.write_text(renewed(CLI.read_text()))
    page = CLI.read_text()
    assert re.findall(r"<!-- generated from the \w+: (\w+) -->", page) == list(TABLES)
    assert page == renewed(page)


def request_fields() -> set[str]:
    return {field.name for kind in (ChatRequest, CompletionRequest) for field in msgspec.structs.fields(kind)}


def listed(beginning: str, heading: str = "Request fields") -> set[str]:
    """The fields in the paragraph of that beginning; none when there is no such paragraph."""
    paragraphs = section(API, heading).split("\n\n")
    return {word for text in paragraphs if text.startswith(beginning) for word in words(text)} - {
        "unsupported_parameter"
    }


def test_every_request_field_is_described() -> None:
    """As served, ignored or refused, and nothing else is."""
    served = {word for row in rows(section(API, "Request fields")) for word in words(row[0])}
    assert served | listed("Fields that") == request_fields()
    assert served & (listed("Fields that are ignored") | listed("Fields that are rejected")) == set()


def test_every_field_of_a_messages_request_is_described() -> None:
    """As served or ignored, and nothing else is; those of its prompt are those of the count."""
    served = {word for row in rows(section(API, "Messages")) for word in words(row[0])}
    fields = {field.name for field in msgspec.structs.fields(MessagesRequest)}
    ignored = listed("Fields that are ignored", "Messages")
    assert (served | ignored, served & ignored) == (fields, set())
    assert {field.name for field in msgspec.structs.fields(CountTokensRequest)} < fields


def test_every_field_of_a_responses_request_is_described() -> None:
    """As served, ignored or refused, and nothing else is."""
    served = {word for row in rows(section(API, "Responses")) for word in words(row[0])}
    others = listed("Fields that", "Responses")
    fields = {field.name for field in msgspec.structs.fields(ResponsesRequest)}
    assert (served | others, served & others) == (fields, set())


def test_every_field_of_an_encoded_request_is_described() -> None:
    """In the table of all; the table of the routes has those that are not of all requests."""
    page = section(API, "Embeddings, scores and classes")
    own = {field for row in rows(page) if row[0].startswith("`/") for field in words(row[2])}
    described = {word for row in rows(page) if not row[0].startswith("`/") for word in words(row[0])}
    fields = {field.name for kind in KINDS_OF for field in msgspec.structs.fields(kind)}
    common = {field.name for field in msgspec.structs.fields(EncodingFields)}
    assert (own, described) == (fields - common, fields - {"user"})


def test_the_fields_that_change_nothing_yet_are_those_that_no_replica_reads() -> None:
    """A parameter that reaches the replica and is not read there must not look as if it were served."""
    read = {
        node.attr
        for path in (ROOT / "workers").rglob("*.py")
        if path.name != "requests.py"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
    }
    unread = {field.name for field in msgspec.structs.fields(GenerateRequest)} - read
    names: dict[str, set[str]] = {"guide": {"response_format"}, "logprobs": {"logprobs", "top_logprobs"}}
    assert listed("Fields that are checked") == {name for field in unread for name in names.get(field, {field})}


def test_the_refused_fields_are_refused() -> None:
    """With the code that the page names."""
    from orchestrator.gateway.openai import body_reader

    chat = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    for name in listed("Fields that are rejected"):
        body: dict[str, Any] = {"model": "m", "prompt": "x", name: "x"} if name == "suffix" else {**chat, name: [{}]}
        read = body_reader.read_completion if "prompt" in body else body_reader.read_chat
        with pytest.raises(ApiError) as refused:
            read(json.dumps(body).encode())
        assert (refused.value.code, refused.value.param) == ("unsupported_parameter", name)
