"""Answers and requests are valid by OpenAI's own OpenAPI document. ``OPENAI_OPENAPI`` is the path of its file,
openapi.json or openapi.yaml in a checkout of openai/openai-openapi. The tests skip if it is not set."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from orchestrator.gateway.openai import body_reader
from orchestrator.gateway.openai.errors import ApiError
from orchestrator.gateway.routes import ROUTES
from tests.orchestrator.gateway.event_streams import read_events
from tests.orchestrator.gateway.test_embeddings import served as served
from tests.orchestrator.gateway.test_embeddings import shared as shared
from tests.orchestrator.gateway.test_messages import CALLS, Place
from tests.orchestrator.gateway.test_responses import Choice, answer, event, whole
from tests.orchestrator.gateways import LiveGateway
from workers.messages.requests import FinishReason

Json = dict[str, Any]
FUNCTION: Json = {"name": "now", "description": "The time.", "parameters": {"type": "object"}}
TOOLS = [{"type": "function", "function": FUNCTION}]


@functools.cache
def document() -> Json:
    """The document in the terms of JSON Schema 2020-12, in which a schema of OpenAPI 3.0 is not `nullable`."""
    path = os.environ.get("OPENAI_OPENAPI")
    if not path:
        pytest.skip("set OPENAI_OPENAPI to openapi.json or openapi.yaml of a checkout of openai/openai-openapi")
    text = Path(path).read_text()
    if path.endswith(".json"):
        loaded = json.loads(text)
    else:
        import yaml

        loaded = yaml.safe_load(text)
    nulled: Json = _with_nulls(loaded)
    return nulled


def _with_nulls(value: Any) -> Any:
    if isinstance(value, list):
        return [_with_nulls(part) for part in value]
    if not isinstance(value, dict):
        return value
    schema = {name: _with_nulls(part) for name, part in value.items()}
    return {"anyOf": [schema, {"type": "null"}]} if schema.get("nullable") is True else schema


def problems(kind: str, value: Any) -> list[str]:
    """Returns the errors of a value by a schema of the document."""
    schema = {"$ref": f"#/components/schemas/{kind}", "components": document()["components"]}
    errors = jsonschema.Draft202012Validator(schema).iter_errors(value)
    return [f"{kind}{error.json_path[1:]}: {_deepest(error).message[:300]}" for error in errors]


def _deepest(error: Any) -> Any:
    while error.context:
        error = max(error.context, key=lambda part: len(part.absolute_path))
    return error


def chunks(text: str) -> list[Any]:
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    document()
    built = Place(tmp_path_factory.mktemp("model"))
    yield built
    built.close()


CHATS: list[Json] = [{}, {"tools": TOOLS}, {"n": 2}, {"max_tokens": 3, "tools": TOOLS}]


@pytest.mark.parametrize("fields", CHATS)
@pytest.mark.parametrize("says", ["Hello.", "", CALLS])
def test_chats_are_valid(place: Place, says: str, fields: Json) -> None:
    """Whole and streamed, with calls and with usage."""
    path = "/v1/chat/completions"
    stream = {"stream": True, "stream_options": {"include_usage": True}}

    assert problems("CreateChatCompletionResponse", place.ask(says, path, **fields).json()) == []
    parts = chunks(place.ask(says, path, **fields, **stream).text)
    assert [problems("CreateChatCompletionStreamResponse", part) for part in parts] == [[]] * len(parts)


@pytest.mark.parametrize("fields", [{}, {"echo": True}, {"n": 2}])
def test_completions_are_valid(place: Place, fields: Json) -> None:
    """They are whole and streamed. The document has no schema for the parts of a stream, of which only the last has a
    finish reason."""
    text: Json = {"messages": None, "prompt": "x", **fields}

    assert problems("CreateCompletionResponse", place.ask("Hello.", "/v1/completions", **text).json()) == []
    parts = chunks(place.ask("Hello.", "/v1/completions", **text, stream=True).text)
    for part in parts[:-1]:
        part["choices"][0]["finish_reason"] = part["choices"][0]["finish_reason"] or "stop"
    assert [problems("CreateCompletionResponse", part) for part in parts] == [[]] * len(parts)


@pytest.mark.parametrize("chat", [True, False])
def test_logprobs_are_valid(chat: bool) -> None:
    """Whole and streamed."""
    body, choice = whole(chat, (Choice(0, [1]), [event("aé", 5, FinishReason.STOP)])), Choice(0, [1])
    writer = answer(chat, [choice])
    streamed = chunks((writer.opening(choice) + writer.events(choice, [event("aé", 5, FinishReason.STOP)])).decode())
    for each in streamed if not chat else ():
        each["choices"][0]["finish_reason"] = "stop"

    assert problems("CreateChatCompletionResponse" if chat else "CreateCompletionResponse", body) == []
    part = "CreateChatCompletionStreamResponse" if chat else "CreateCompletionResponse"
    assert [problem for each in streamed for problem in problems(part, each)] == []


RESPONSES: list[Json] = [
    {},
    {"tools": [{"type": "function", **FUNCTION}, {"type": "web_search"}], "instructions": "x", "metadata": {"a": "b"}},
    {"max_output_tokens": 3},
    {"text": {"format": {"type": "text"}}},
    {"tools": [{"type": "function", "name": "now"}], "tool_choice": "none"},
    {"tools": [{"type": "function", "name": "now"}], "max_output_tokens": 16},
]


@pytest.mark.parametrize("fields", RESPONSES)
@pytest.mark.parametrize("says", ["Hello.", CALLS, '{"a": 1}'])
def test_responses_are_valid(place: Place, says: str, fields: Json) -> None:
    """Whole, and each event of a stream."""
    body: Json = {"messages": None, "max_tokens": None, "input": "x", **fields}

    assert problems("Response", place.ask(says, "/v1/responses", **body).json()) == []
    events = read_events(place.ask(says, "/v1/responses", **body, stream=True).text)
    assert [problem for each in events for problem in problems("ResponseStreamEvent", each)] == []


def test_embeddings_are_valid(served: LiveGateway) -> None:
    """They are sent as numbers, since the document has no schema of base64."""
    answer = served.http.post("/v1/embeddings", json={"model": "e", "input": ["a", "b"]}).json()
    assert problems("CreateEmbeddingResponse", answer) == []


WRONG: list[Json] = [{"model": "x"}, {"messages": []}, {"max_tokens": 10**6}, {"audio": {}}, {"temperature": "x"}]


def test_models_and_errors_are_valid(place: Place) -> None:
    """Errors of each status that a client can cause."""
    get = place.gateway.http.get
    assert problems("ListModelsResponse", get("/v1/models").json()) == []
    assert problems("Model", get("/v1/models/m").json()) == []
    errors = [place.ask(path="/v1/chat/completions", **fields) for fields in WRONG]
    errors += [get("/nowhere"), get("/v1/completions")]
    assert {response.status_code for response in errors} == {400, 404, 405}
    assert [problems("ErrorResponse", response.json()) for response in errors] == [[]] * len(errors)


PLAIN: dict[str, tuple[str, Json]] = {
    "CreateChatCompletionRequest": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
    "CreateCompletionRequest": ("/v1/completions", {"prompt": "x"}),
    "CreateResponse": ("/v1/responses", {"input": "x"}),
    "CreateEmbeddingRequest": ("/v1/embeddings", {"input": "x"}),
}


def properties(schema: Json) -> Json:
    if "$ref" in schema:
        schema = document()["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    found: Json = dict(schema.get("properties", {}))
    for part in (part for key in ("allOf", "anyOf", "oneOf") for part in schema.get(key, ())):
        found |= properties(part)
    return found


def defaults(schema: Json) -> Iterator[Any]:
    """Returns the defaults of a property, including those of its references."""
    if "$ref" in schema:
        yield from defaults(document()["components"]["schemas"][schema["$ref"].rpartition("/")[2]])
    if "default" in schema:
        yield schema["default"]
    for part in (part for key in ("allOf", "anyOf", "oneOf") for part in schema.get(key, ())):
        yield from defaults(part)


@pytest.mark.parametrize("kind", PLAIN)
def test_no_field_is_refused_as_null_or_with_its_default(kind: str) -> None:
    """The test covers all fields of the document, except the required ones."""
    path, plain = PLAIN[kind]
    reads = next(route.reads for route in ROUTES if route.path == path)
    assert reads is not None
    fields = properties({"$ref": f"#/components/schemas/{kind}"})
    assert len(fields) > 4
    refused = []
    for name in fields.keys() - {"model", *plain}:
        for value in (None, *defaults(fields[name])):
            beside = {"n": value} if name == "best_of" else {}
            try:
                body_reader.read(reads, json.dumps({"model": "m", **plain, **beside, name: value}).encode())
            except ApiError as error:
                refused.append((name, value, error.message))
    assert refused == []
