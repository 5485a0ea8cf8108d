"""SageMaker's requests to a container: invocations, and loads and unloads of models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from orchestrator.fleet.hosting import Hosting
from tests.fleet import until
from tests.orchestrator.gateways import LiveGateway, routes
from tests.served import Served

LOADED = Hosting(200, "loaded")
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
TARGET = "X-Amzn-SageMaker-Target-Model"


@pytest.fixture
def served(replica: Callable[..., Served]) -> Served:
    return replica()


@pytest.fixture
def gateway() -> Iterator[LiveGateway]:
    live = LiveGateway(sagemaker=True)
    yield live
    live.close()


def status(answer: Any) -> tuple[int, str | None]:
    return answer.status_code, answer.json()["error"]["code"]


@pytest.mark.parametrize(
    ("body", "kind"),
    [(CHAT, "chat.completion"), ({"prompt": "hello", "max_tokens": 4}, "text_completion")],
)
def test_an_invocation_is_answered_by_the_kind_of_its_body(
    body: dict[str, Any], kind: str, gateway: LiveGateway, served: Served
) -> None:
    gateway.serve(routes("only", served))
    answer = gateway.http.post("/invocations", json=body)
    assert (answer.status_code, answer.json()["object"], answer.json()["model"]) == (200, kind, "only")


def test_an_invocation_is_streamed(gateway: LiveGateway, served: Served) -> None:
    gateway.serve(routes("only", served))
    answer = gateway.http.post("/invocations", json={**CHAT, "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize(
    ("model", "header", "answers"),
    [(None, "b", "b"), ("a", None, "a"), ("a", "b", "a"), ("b", "unknown", "b")],
)
def test_the_model_of_the_body_precedes_the_header(
    model: str | None, header: str | None, answers: str, gateway: LiveGateway, served: Served
) -> None:
    gateway.serve(routes("a", served), routes("b", served))
    body = CHAT if model is None else {**CHAT, "model": model}
    answer = gateway.http.post("/invocations", json=body, headers={} if header is None else {TARGET: header})
    assert answer.json()["model"] == answers


def test_without_a_name_several_models_are_ambiguous(gateway: LiveGateway, served: Served) -> None:
    gateway.serve(routes("a", served), routes("b", served))
    answer = gateway.http.post("/invocations", json=CHAT)
    assert (answer.status_code, "a, b" in answer.json()["error"]["message"]) == (400, True)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"x"', b"{}", b'{"model": "a"}', b"\xff"])
def test_an_invocation_of_no_kind_is_refused(body: bytes, gateway: LiveGateway, served: Served) -> None:
    gateway.serve(routes("a", served))
    answer = gateway.http.post("/invocations", content=body)
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")


def test_a_model_is_invoked_by_its_path(gateway: LiveGateway, served: Served) -> None:
    """The name in the body is that of another place."""
    gateway.serve(routes("a", served), routes("b", served))
    answer = gateway.http.post("/models/b/invoke", json={**CHAT, "model": "a"})
    assert answer.json()["model"] == "b"
    assert status(gateway.http.post("/models/c/invoke", json=CHAT)) == (404, "model_not_found")


def test_a_load_is_answered_when_the_gateway_can_serve_the_model(gateway: LiveGateway, served: Served) -> None:
    """The controller is asked again while the model loads."""
    gateway.controller.load_replies = [Hosting(202, "loading"), Hosting(202, "loading"), LOADED]
    gateway.serve(routes("a", served))
    answer = gateway.http.post("/models", json={"model_name": "a", "url": "/opt/ml/models/a/model"})
    assert (answer.status_code, answer.json()) == (200, {"modelName": "a", "modelUrl": "/opt/ml/models/a/model"})
    assert gateway.controller.loads == [("a", False), ("a", True), ("a", True)]


def test_a_load_survives_a_restart_of_the_controller(gateway: LiveGateway, served: Served) -> None:
    gateway.controller.load_replies = [LOADED]
    gateway.serve(routes("a", served))
    gateway.controller.away_for = 2
    answer = gateway.http.post("/models", json={"model_name": "a", "url": "/m"})
    assert answer.status_code == 200


@pytest.mark.parametrize(
    ("code", "expected"),
    [(400, "model_refused"), (409, "model_loaded"), (500, "model_failed"), (507, "no_room")],
)
def test_a_refused_load_has_the_status_of_the_contract(code: int, expected: str, gateway: LiveGateway) -> None:
    gateway.controller.load_replies = [Hosting(code, "the reason")]
    answer = gateway.http.post("/models", json={"model_name": "a", "url": "/m"})
    assert status(answer) == (code, expected)
    assert answer.json()["error"]["message"] == "the reason"


@pytest.mark.parametrize("body", [{}, {"model_name": "a"}, {"model_name": 1, "url": "/m"}, []])
def test_a_load_without_its_fields_is_refused(body: Any, gateway: LiveGateway) -> None:
    assert gateway.http.post("/models", json=body).status_code == 400


def test_a_model_is_listed_shown_and_unloaded(gateway: LiveGateway) -> None:
    gateway.controller.hosting = {"a/b": "/opt/ml/models/x/model"}
    card = {"modelName": "a/b", "modelUrl": "/opt/ml/models/x/model"}
    assert gateway.http.get("/models").json() == {"models": [card]}
    assert gateway.http.get("/models/a%2Fb").json() == card
    assert gateway.http.delete("/models/a%2Fb").status_code == 200
    assert status(gateway.http.get("/models/a%2Fb")) == (404, "model_not_found")
    assert status(gateway.http.delete("/models/a%2Fb")) == (404, "model_not_found")


@pytest.mark.parametrize("count", [0, 99, 100, 101, 250])
def test_the_pages_of_a_list_have_each_model_once(count: int, gateway: LiveGateway) -> None:
    gateway.controller.hosting = {f"m{i:03}": "/m" for i in range(count)}
    listed: list[str] = []
    token: str | None = ""
    while token is not None:
        page = gateway.http.get("/models", params={"next_page_token": token} if token else {}).json()
        listed += [row["modelName"] for row in page["models"]]
        token = page.get("nextPageToken")
    assert listed == sorted(gateway.controller.hosting)


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [("PUT", "/models", "GET"), ("POST", "/models/a", "GET"), ("GET", "/models/a/invoke", "POST")],
)
def test_another_method_is_refused(method: str, path: str, allowed: str, gateway: LiveGateway) -> None:
    answer = gateway.http.request(method, path)
    assert (answer.status_code, answer.headers["allow"]) == (405, allowed)


@pytest.mark.parametrize("path", ["/models/", "/models//invoke", "/models/a/other", "/models/a/invoke/b", "/modelsx"])
def test_other_paths_do_not_exist(path: str, gateway: LiveGateway) -> None:
    assert gateway.http.post(path, json={}).status_code == 404


def test_only_containers_of_sagemaker_load_models(served: Served) -> None:
    """Anyone who may send requests could else change the fleet."""
    live = LiveGateway().serve(routes("a", served))
    try:
        for method, path in (("GET", "/models"), ("POST", "/models"), ("DELETE", "/models/a")):
            assert live.http.request(method, path).status_code == 404
        assert live.http.post("/invocations", json=CHAT).status_code == 200
    finally:
        live.close()


def test_ping_succeeds_without_models_and_while_one_loads(gateway: LiveGateway) -> None:
    gateway.serve()
    assert gateway.http.get("/ping").status_code == 200
    gateway.serve(routes("a"))
    assert gateway.http.get("/ping").status_code == 200


def test_ping_fails_while_the_container_stops(gateway: LiveGateway) -> None:
    """And before it has started."""
    assert gateway.http.get("/ping").status_code == 503
    gateway.serve()
    gateway.controller.set(stopping=True)
    until(lambda: gateway.http.get("/ping").status_code == 503, 10, "the ping fails")
