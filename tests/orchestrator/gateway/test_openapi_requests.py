"""Requests that are made from the OpenAPI document, good ones and bad ones, against a gateway in this process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given
from hypothesis.errors import Unsatisfiable

from orchestrator.gateway.encoding.requests import KINDS_OF
from orchestrator.gateway.openapi import openapi
from orchestrator.gateway.routes import ROUTES
from placements.facts.encoders import KINDS
from tests.orchestrator.encoded import EncoderReplica
from tests.orchestrator.gateways import LiveGateway, routes
from tests.searches import search
from tests.served import Served

pytestmark = pytest.mark.slow  # thousands of requests, and a slow import
MODEL_OF = {kind.__name__: name for kind, (name, *_) in KINDS_OF.items()}


@pytest.fixture(scope="module")
def live() -> Iterator[LiveGateway]:
    gateway, replica = LiveGateway(), Served(max_len=64, slots=8)
    encoders = {kind: EncoderReplica() for kind in KINDS[1:]}
    gateway.serve(
        msgspec.structs.replace(routes("m", replica, max_len=64), aliases=["0", "org/model"]),
        *(routes(kind, encoder, kind=kind, max_len=64) for kind, encoder in encoders.items()),
    )
    yield gateway
    gateway.close()
    replica.close()
    for encoder in encoders.values():
        encoder.close()


def document() -> dict[str, Any]:
    """The gateway's own, where a model is one that is there: else there would be little to see but 404."""
    schema = openapi(needs_key=False, routes=ROUTES)
    for name, kind in schema["components"]["schemas"].items():
        if name.endswith("Request"):
            kind["properties"]["model"] = {"enum": [MODEL_OF.get(name, "m"), "0", "org/model"]}
    return schema


def excluded() -> list[Any]:
    """What two fields may be together is not in the document."""
    import schemathesis

    return [schemathesis.checks.CHECKS.get_one("positive_data_acceptance")]


@pytest.mark.parametrize("label", [f"{route.method} {route.path}" for route in ROUTES if route.streams])
def test_streams_match_the_document(live: LiveGateway, label: str) -> None:
    """Each event, of requests with `stream: true`."""
    import schemathesis

    schema = document()
    for name in ("ChatRequest", "CompletionRequest", "MessagesRequest", "ResponsesRequest"):
        kind = schema["components"]["schemas"][name]
        kind["properties"]["stream"] = {"enum": [True]}
        kind["required"] = [*kind.get("required", ()), "stream"]
    operations = (operations.ok() for operations in schemathesis.openapi.from_dict(schema).get_all_operations())  # type: ignore[union-attr]
    operation = next(candidate for candidate in operations if candidate.label == label)
    streams: list[str] = []

    @given(case=operation.as_strategy(generation_mode=schemathesis.GenerationMode.POSITIVE))  # type: ignore[arg-type]
    @search(12, suppress_health_check=list(HealthCheck))
    def asks(case: Any) -> None:
        answer = case.call_and_validate(base_url=live.url, timeout=20, excluded_checks=excluded())
        streams.extend(answer.headers.get("content-type", ()))

    asks()
    assert any(kind.startswith("text/event-stream") for kind in streams)


@pytest.mark.parametrize("mode", ["POSITIVE", "NEGATIVE"])
@pytest.mark.parametrize("label", [f"{route.method} {route.path}" for route in ROUTES])
def test_the_gateway_behaves_as_documented(live: LiveGateway, label: str, mode: str) -> None:
    """Only documented statuses, responses of the documented form, every invalid body rejected, and never a 500. Not
    required: that each valid body is accepted.
    """
    import schemathesis

    assert live.http.get("/openapi.json").json() == openapi(needs_key=False, routes=ROUTES)
    operations = (operations.ok() for operations in schemathesis.openapi.from_dict(document()).get_all_operations())  # type: ignore[union-attr]
    operation = next(candidate for candidate in operations if candidate.label == label)

    @given(case=operation.as_strategy(generation_mode=schemathesis.GenerationMode[mode]))  # type: ignore[misc]
    @search(12, suppress_health_check=list(HealthCheck))
    def asks(case: Any) -> None:
        case.call_and_validate(base_url=live.url, timeout=20, excluded_checks=excluded())

    try:
        asks()
    except Unsatisfiable:
        assert mode == "NEGATIVE", "nothing can be asked"
        pytest.skip("nothing about it can be wrong")


def test_the_documented_requests_leave_nothing_behind(live: LiveGateway) -> None:
    """After all of them every slot is free, and the next request is answered."""
    answer = live.http.post("/v1/completions", json={"model": "m", "prompt": "x", "max_tokens": 3})
    assert answer.json()["usage"]["completion_tokens"] == 3
    assert (live.queue("m").waiting, live.queue("m").links.live) == (0, 0)
