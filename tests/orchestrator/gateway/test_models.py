"""The list of models: in OpenAI's shape, and in Anthropic's to clients that send its version."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest

from orchestrator.gateway.anthropic.answers import MessageError, ModelInfo, ModelPage
from tests.orchestrator.gateways import LiveGateway, routes
from tests.served import Served

VERSION = {"anthropic-version": "2023-06-01"}
NAMES = ["a", "other-a", "b", "c"]


@pytest.fixture(scope="module")
def gateway() -> Iterator[LiveGateway]:
    replica = Served()
    live = LiveGateway()
    live.serve(
        msgspec.structs.replace(routes("a", replica, max_len=64), aliases=["other-a"]),
        routes("vectors", kind="embedding"),
        routes("b"),
        routes("own", engine="server"),
        routes("c"),
    )
    yield live
    live.close()
    replica.close()


def ask(gateway: LiveGateway, path: str = "/v1/models", **query: Any) -> httpx.Response:
    return gateway.http.get(path, params=query, headers=VERSION)


def page(gateway: LiveGateway, **query: Any) -> ModelPage:
    return msgspec.json.decode(ask(gateway, **query).content, type=ModelPage)


def test_a_client_of_anthropics_api_gets_the_models_that_answer_messages(gateway: LiveGateway) -> None:
    """Also by their aliases; neither encoders nor models with a server of their own."""
    listed = page(gateway)

    assert [model.id for model in listed.data] == NAMES
    assert (listed.first_id, listed.last_id, listed.has_more) == ("a", "c", False)


def test_without_the_header_the_list_has_openais_shape(gateway: LiveGateway) -> None:
    answer = gateway.http.get("/v1/models").json()

    assert answer["object"] == "list"
    assert [model["object"] for model in answer["data"]] == ["model"] * 6


def test_a_model_has_anthropics_shape(gateway: LiveGateway) -> None:
    """Alone as in the list, with the length of the model."""
    listed = page(gateway).data[1]

    assert msgspec.json.decode(ask(gateway, "/v1/models/other-a").content, type=ModelInfo) == listed
    assert (listed.type, listed.display_name, listed.max_tokens) == ("model", "other-a", 64)
    assert listed.created_at.endswith("Z")


def test_an_unknown_model_is_an_error_in_anthropics_shape(gateway: LiveGateway) -> None:
    response = ask(gateway, "/v1/models/zzz")

    assert response.status_code == 404
    assert msgspec.json.decode(response.content, type=MessageError).error.type == "not_found_error"


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 5])
def test_pages_forward_and_backward_have_each_model_once(gateway: LiveGateway, limit: int) -> None:
    """As a client pages, until there is no more."""
    forward, backward = [page(gateway, limit=limit)], [page(gateway, limit=limit, before_id="c")]
    while forward[-1].has_more:
        forward.append(page(gateway, limit=limit, after_id=forward[-1].last_id))
    while backward[-1].has_more:
        backward.append(page(gateway, limit=limit, before_id=backward[-1].first_id))

    assert [model.id for each in forward for model in each.data] == NAMES
    assert [model.id for each in reversed(backward) for model in each.data] == NAMES[:-1]


@pytest.mark.parametrize(
    "query", [{"limit": 0}, {"limit": 1001}, {"limit": "x"}, {"after_id": "zzz"}, {"before_id": "zzz"}]
)
def test_an_impossible_page_is_refused(gateway: LiveGateway, query: dict[str, Any]) -> None:
    response = ask(gateway, **query)

    assert response.status_code == 400
    assert next(iter(query)) in msgspec.json.decode(response.content, type=MessageError).error.message
