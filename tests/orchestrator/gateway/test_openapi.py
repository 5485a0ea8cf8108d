"""The gateway's OpenAPI document says of requests what the gateway does with them."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
from pathlib import Path
from typing import Any, get_args

import httpx
import jsonschema
import pytest
from openapi_spec_validator import validate

from orchestrator.access.keys import Allowance, KeyFile, Scope
from orchestrator.gateway.openai import body_reader, errors, protocol
from orchestrator.gateway.openai.errors import ApiError
from orchestrator.gateway.openai.protocol import MAX_COUNT, MAX_ENTRIES, MAX_PROMPTS, MAX_STOPS, MAX_TOOLS
from orchestrator.gateway.openapi import REFUSED, openapi
from orchestrator.gateway.routes import ROUTES
from orchestrator.process.home import Home
from tests.fleet import until
from tests.orchestrator.gateways import LiveGateway, routes
from tests.served import Served

DOCUMENT = openapi(needs_key=True, routes=ROUTES)
HELLO = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f"}}
CHAT: dict[str, Any] = {"model": "m", "messages": HELLO}
TEXT: dict[str, Any] = {"model": "m", "prompt": "x"}
PLAIN: dict[str, dict[str, Any]] = {  # the least of a body
    "ChatRequest": CHAT,
    "CompletionRequest": TEXT,
    "TokenizeTextRequest": TEXT,
    "TokenizeChatRequest": CHAT,
    "DetokenizeRequest": {"model": "m", "tokens": [1]},
    "MessagesRequest": {**CHAT, "max_tokens": 9},
    "ResponsesRequest": {"model": "m", "input": "x"},
    "CountTokensRequest": CHAT,
    "EmbeddingRequest": {"model": "m", "input": "x"},
    "RerankRequest": {"model": "m", "query": "x", "documents": ["y"]},
    "ScoreRequest": {"model": "m", "text_1": "x", "text_2": "y"},
    "ClassifyRequest": {"model": "m", "input": "x"},
}
READERS = {
    kind.__name__: (route.reads, PLAIN[kind.__name__])
    for route in ROUTES
    if route.reads is not None
    for kind in route.body
}


def schema_of(kind: str) -> dict[str, Any]:
    """With all components at hand."""
    schema = copy.deepcopy(DOCUMENT["components"]["schemas"][kind])
    schema["components"] = DOCUMENT["components"]
    return schema


def says(kind: str, body: dict[str, Any]) -> bool:
    return jsonschema.Draft202012Validator(schema_of(kind)).is_valid(body)


def takes(kind: str, body: dict[str, Any]) -> bool:
    try:
        request, _ = body_reader.read(READERS[kind][0], json.dumps(body).encode())
        if isinstance(request, protocol.Chat):
            assert [message.for_template(place) for place, message in enumerate(request.messages)]
        elif isinstance(request, protocol.CompletionRequest):
            assert request.prompts()
    except ApiError:
        return False
    return True


@pytest.mark.parametrize("needs_key", [True, False])
def test_the_document_is_openapi_3_1(needs_key: bool) -> None:
    """By the validator of the specification; with and without keys."""
    document = openapi(needs_key=needs_key, routes=ROUTES)
    validate(document)
    assert document["openapi"] == "3.1.0"
    assert bool(document["security"]) == needs_key
    assert json.loads(json.dumps(document)) == document


def test_every_route_is_listed_with_every_possible_status() -> None:
    """The statuses are those of the errors' module, and no others."""
    listed = {(route.method, route.path) for route in ROUTES}
    assert listed == {(method.upper(), path) for path, methods in DOCUMENT["paths"].items() for method in methods}
    used = {int(status) for status in re.findall(r"\b(4\d\d|5\d\d)\b", Path(errors.__file__).read_text())}
    assert used == set(REFUSED)
    for route in ROUTES:
        responses = DOCUMENT["paths"][route.path][route.method.lower()]["responses"]
        assert {int(status) for status in responses} <= {200, *REFUSED}


NUMBERS = [
    (kind, name, branch)
    for kind in READERS
    for name, field in DOCUMENT["components"]["schemas"][kind]["properties"].items()
    for branch in field.get("anyOf", [field])
    if "maximum" in branch
]


BESIDE = {("ChatRequest", "top_logprobs"): {"logprobs": True}, ("CompletionRequest", "max_tokens"): {"echo": True}}


@pytest.mark.parametrize(("kind", "name", "bounds"), NUMBERS)
def test_the_bounds_of_a_number_are_those_of_the_gateway(kind: str, name: str, bounds: dict[str, Any]) -> None:
    """At the bounds themselves, and on both sides of each."""
    plain, whole = READERS[kind][1], bounds["type"] == "integer"
    lowest, highest = bounds["minimum" if "minimum" in bounds else "exclusiveMinimum"], bounds["maximum"]
    step = 1 if whole else 1e-6
    beside = BESIDE.get((kind, name), {})
    for value in (lowest - step, lowest, lowest + step, highest, highest + step, 10**30):
        body = {**plain, **beside, name: int(value) if whole else value}
        assert says(kind, body) == takes(kind, body), value


OTHERS: list[tuple[str, dict[str, Any], bool]] = [
    ("ChatRequest", {"messages": []}, False),
    ("ChatRequest", {"messages": [{"role": "function", "content": "x"}]}, False),
    ("ChatRequest", {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]}, True),
    ("ChatRequest", {"frob": 1}, True),
    ("ChatRequest", {"user": {"any": "thing"}}, True),
    ("ChatRequest", {"tools": [TOOL]}, True),
    ("ChatRequest", {"tools": [{"type": "custom"}]}, True),
    ("ChatRequest", {"tools": [{"type": "function", "function": {"name": ""}}]}, False),
    (
        "ChatRequest",
        {"tools": [{"type": "function", "function": {"name": f"f{i}"}} for i in range(MAX_TOOLS + 1)]},
        False,
    ),
    ("ChatRequest", {"tools": [TOOL], "tool_choice": "sometimes"}, False),
    ("ChatRequest", {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}}, True),
    ("ChatRequest", {"functions": []}, True),
    ("ChatRequest", {"functions": [{}]}, False),
    ("ChatRequest", {"function_call": "auto"}, False),
    ("ChatRequest", {"function_call": ""}, False),
    ("ChatRequest", {"response_format": {"type": "xml"}}, False),
    ("ChatRequest", {"response_format": {"type": "json_object"}}, True),
    ("ChatRequest", {"stop": ""}, False),
    ("ChatRequest", {"stop": ["a"] * MAX_STOPS}, True),
    ("ChatRequest", {"stop": ["a"] * (MAX_STOPS + 1)}, False),
    ("ChatRequest", {"stop": ["a", ""]}, False),
    ("ChatRequest", {"stop_token_ids": [0, MAX_COUNT]}, True),
    ("ChatRequest", {"stop_token_ids": [-1]}, False),
    ("ChatRequest", {"stop_token_ids": [MAX_COUNT + 1]}, False),
    ("ChatRequest", {"seed": 2**63 - 1}, True),
    ("ChatRequest", {"seed": 2**63}, False),
    ("ChatRequest", {"seed": -(2**63) - 1}, False),
    ("ChatRequest", {"logit_bias": {"5": 100, "6": -100}}, True),
    ("ChatRequest", {"logit_bias": {"5": 100.5}}, False),
    ("ChatRequest", {"logit_bias": {"٣": 1}}, False),
    ("ChatRequest", {"logit_bias": {"9" * 5000: 1}}, False),
    ("ChatRequest", {"logit_bias": {str(i): 1 for i in range(MAX_ENTRIES + 1)}}, False),
    ("ChatRequest", {"stop_token_ids": [1] * (MAX_ENTRIES + 1)}, False),
    ("CompletionRequest", {"prompt": ""}, False),
    ("CompletionRequest", {"prompt": []}, False),
    ("CompletionRequest", {"prompt": [1, 2]}, True),
    ("CompletionRequest", {"prompt": ["x", [1]]}, True),
    ("CompletionRequest", {"prompt": ["x", ""]}, False),
    ("CompletionRequest", {"prompt": ["x", None]}, False),
    ("CompletionRequest", {"prompt": [[]]}, False),
    ("CompletionRequest", {"prompt": ["x"] * (MAX_PROMPTS + 1)}, False),
    ("CompletionRequest", {"suffix": ""}, True),
    ("CompletionRequest", {"suffix": "x"}, False),
    ("TokenizeTextRequest", {"prompt": ""}, True),
    ("TokenizeTextRequest", {"prompt": 3}, False),
    ("TokenizeChatRequest", {"messages": []}, False),
    ("TokenizeChatRequest", {"tools": [TOOL], "add_generation_prompt": False, "add_special_tokens": True}, True),
    ("TokenizeTextRequest", {"messages": None}, True),
    ("DetokenizeRequest", {"tokens": []}, True),
    ("DetokenizeRequest", {"tokens": [-1]}, False),
    ("DetokenizeRequest", {"tokens": [MAX_COUNT + 1]}, False),
    ("MessagesRequest", {"messages": []}, False),
    ("MessagesRequest", {"messages": [{"role": "system", "content": "x"}]}, True),
    ("MessagesRequest", {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]}, True),
    ("MessagesRequest", {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, False),
    ("MessagesRequest", {"system": [{"type": "text", "text": "x"}], "metadata": {}, "service_tier": "auto"}, True),
    ("MessagesRequest", {"tools": [{"name": "f", "input_schema": {}}], "tool_choice": {"type": "any"}}, True),
    ("MessagesRequest", {"tools": [{"name": "f", "type": "bash_20250124"}]}, True),
    ("MessagesRequest", {"tool_choice": {"type": "required"}}, False),
    ("MessagesRequest", {"thinking": {"type": "enabled", "budget_tokens": 1024}}, True),
    ("MessagesRequest", {"thinking": {"type": "often"}}, False),
    ("ChatRequest", {"reasoning_effort": "max", "thinking": {"type": "disabled"}, "thinking_token_budget": 0}, True),
    ("ChatRequest", {"reasoning_effort": "some"}, False),
    ("MessagesRequest", {"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}}, True),
    ("MessagesRequest", {"output_config": {"format": {"type": "json_schema", "schema": {}}}}, True),
    ("MessagesRequest", {"output_config": {"frob": 1}}, True),
    ("MessagesRequest", {"stop_sequences": [""]}, False),
    ("MessagesRequest", {"stop_sequences": ["x"] * (MAX_STOPS + 1)}, False),
    ("MessagesRequest", {"n": 1}, True),
    ("CountTokensRequest", {"max_tokens": 9}, True),
    ("EmbeddingRequest", {"input": ""}, False),
    ("EmbeddingRequest", {"input": []}, False),
    ("EmbeddingRequest", {"input": ["x", [1]]}, True),
    ("EmbeddingRequest", {"input": ["x", ""]}, False),
    ("EmbeddingRequest", {"input": [[]]}, False),
    ("EmbeddingRequest", {"input": ["x"] * (MAX_PROMPTS + 1)}, False),
    ("EmbeddingRequest", {"encoding_format": "base64", "user": {}}, True),
    ("EmbeddingRequest", {"encoding_format": "int8"}, False),
    ("EmbeddingRequest", {"frob": 1}, True),
    ("RerankRequest", {"documents": []}, False),
    ("RerankRequest", {"documents": ["a", {"text": "b", "title": "c"}]}, True),
    ("RerankRequest", {"documents": [{"title": "c"}]}, False),
    ("RerankRequest", {"documents": ["a"] * (MAX_PROMPTS + 1)}, False),
    ("ScoreRequest", {"text_1": []}, False),
    ("ScoreRequest", {"text_1": "a", "text_2": ["b", "c"]}, True),
    ("ScoreRequest", {"text_1": ["a"] * MAX_PROMPTS, "text_2": ["b"] * MAX_PROMPTS}, True),
    ("ClassifyRequest", {"input": ["a"] * MAX_PROMPTS}, True),
    ("ClassifyRequest", {"input": ["a"] * (MAX_PROMPTS + 1)}, False),
    ("ClassifyRequest", {"input": [1]}, False),
]


@pytest.mark.parametrize(("kind", "fields", "good"), OTHERS)
def test_the_document_and_the_gateway_agree_on_a_field(kind: str, fields: dict[str, Any], good: bool) -> None:
    """Both accept it, or both reject it."""
    body = {**READERS[kind][1], **fields}

    assert (says(kind, body), takes(kind, body)) == (good, good)


def test_the_admin_api_has_a_separate_document() -> None:
    """By the same rules: no route is in both."""
    assert not any(path.startswith("/admin") for path in DOCUMENT["paths"])


def test_a_route_of_the_table_needs_no_other_edit() -> None:
    """A new path is routed, documented, limited and refused to keys of another scope, by its record alone."""
    chat = next(route for route in ROUTES if route.path == "/v1/chat/completions")
    added = dataclasses.replace(chat, path="/v9/{version}/chat", summary="New.")
    free = dataclasses.replace(added, path="/v9/free", charged=False)
    gateway, replica = LiveGateway(http_routes=(*ROUTES, added, free)), Served()
    try:
        gateway.serve(routes("m", replica))
        keys = KeyFile(Home(gateway.home).keys)
        texts = [
            keys.create(scope, scopes=(scope,), allowance=Allowance(tokens_per_minute=10**6))[1]
            for scope in get_args(Scope)
        ]
        until(lambda: gateway.http.get("/version").status_code == 401, 5, "the keys are known")
        inference, admin = ({"authorization": f"Bearer {text}"} for text in texts)

        def post(path: str, headers: dict[str, str]) -> httpx.Response:
            return gateway.http.post(path, json={**CHAT, "max_tokens": 2}, headers=headers)

        answer = post("/v9/1/chat", inference)
        assert answer.json()["object"] == "chat.completion"
        assert "x-ratelimit-limit-tokens" in answer.headers
        assert "x-ratelimit-limit-tokens" not in post("/v9/free", inference).headers
        assert post("/v9/1/chat", admin).json()["error"]["code"] == "key_not_allowed"
        assert gateway.http.get("/v9/1/chat", headers=inference).headers["allow"] == "POST"
        document = gateway.http.get("/openapi.json", headers=inference).json()
        assert document["paths"]["/v9/{version}/chat"]["post"]["summary"] == "New."
    finally:
        gateway.close()
        replica.close()
