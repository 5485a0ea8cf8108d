"""SageMaker's requests to a container: invocations, and loads and unloads of models."""

from __future__ import annotations

import importlib
import json
import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
from openapi_spec_validator import validate

from orchestrator.access.keys import KeyFile
from orchestrator.gateway.controller_client import ControllerFailed
from orchestrator.gateway.lmi import LmiAnswer, content_types, read_lmi
from orchestrator.gateway.openai.answers import Choice
from orchestrator.gateway.openapi import openapi
from orchestrator.gateway.routes import CONTAINER_ROUTES, ROUTES
from orchestrator.gateway.sagemaker import LoadedModel, LoadedModels
from orchestrator.messages.controller_replies import Hosting
from orchestrator.process.home import Home
from tests.fleet import until
from tests.orchestrator.gateways import LiveGateway, routes
from tests.served import Served
from workers.messages.requests import FinishReason, TokenEvent, TokenLogprobs

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


def test_only_models_of_the_key_count(served: Served, tmp_path: Path) -> None:
    """And their names alone are shown."""
    keys = KeyFile(Home(tmp_path).keys)
    one, two = (keys.create(str(len(models)), models=models)[1] for models in (["a"], ["a", "b"]))
    live = LiveGateway(home=tmp_path).serve(routes("a", served), routes("b", served), routes("secret", served))
    try:
        answers = [live.http.post("/invocations", json=CHAT, headers={"x-api-key": key}) for key in (one, two)]
        assert answers[0].json()["model"] == "a"
        assert answers[1].status_code == 400
        assert "secret" not in answers[1].text
    finally:
        live.close()


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


def test_a_load_is_over_once_the_routes_have_the_model(
    gateway: LiveGateway, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The controller has it first."""
    monkeypatch.setattr("orchestrator.gateway.sagemaker.ROUTED_S", 600.0)
    gateway.serve(routes("other", served))
    gateway.controller.load_replies = [LOADED]
    with ThreadPoolExecutor(1) as pool:
        load = pool.submit(gateway.http.post, "/models", json={"model_name": "a", "url": "/m"})
        until(lambda: gateway.controller.loads, 10, "the controller is asked")
        assert status(gateway.http.post("/models/a/invoke", json=CHAT)) == (404, "model_not_found")
        assert not load.done()
        gateway.serve(routes("a", served))
        assert load.result(20).status_code == 200


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


def test_without_the_controller_no_model_is_listed_or_unloaded(gateway: LiveGateway) -> None:
    gateway.controller.answers = False
    for method, path in (("GET", "/models"), ("GET", "/models/a"), ("DELETE", "/models/a")):
        assert status(gateway.http.request(method, path)) == (503, "controller_away")


def test_an_exception_of_the_controller_is_an_internal_error_at_once(
    gateway: LiveGateway, caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged, and the request is not repeated."""
    gateway.controller.failure = ControllerFailed("KeyError: 'm'")
    load = gateway.http.post("/models", json={"model_name": "a", "url": "/m"})
    assert (status(load), gateway.controller.loads) == ((500, "model_failed"), [("a", False)])
    assert status(gateway.http.delete("/models/a")) == (500, "model_failed")
    assert "KeyError: 'm'" in caplog.text
    assert "KeyError" not in load.text


def test_a_deeply_nested_load_is_refused(gateway: LiveGateway) -> None:
    answer = gateway.http.post("/models", content=b'{"x":' + b"[" * 200_000)
    assert status(answer) == (400, None)


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
    [("PUT", "/models", "GET, POST"), ("POST", "/models/a", "GET, DELETE"), ("GET", "/models/a/invoke", "POST")],
)
def test_another_method_is_refused(method: str, path: str, allowed: str, gateway: LiveGateway) -> None:
    answer = gateway.http.request(method, path)
    assert (answer.status_code, answer.headers["allow"]) == (405, allowed)


@pytest.mark.parametrize("path", ["/models//invoke", "/models/a/other", "/models/a/invoke/b", "/modelsx"])
def test_other_paths_do_not_exist(path: str, gateway: LiveGateway) -> None:
    assert gateway.http.post(path, json={}).status_code == 404


def test_only_containers_of_sagemaker_load_models(served: Served) -> None:
    """Anyone who may send requests could else change the fleet."""
    live = LiveGateway().serve(routes("a", served))
    try:
        assert live.http.post("/models").json()["error"]["message"] == "POST is not allowed for /v1/models; use GET."
        assert live.http.delete("/models/a").status_code == 404
        assert live.http.post("/invocations", json=CHAT).status_code == 200
    finally:
        live.close()


def test_ping_succeeds_without_models_and_while_one_loads(gateway: LiveGateway) -> None:
    gateway.serve()
    until(lambda: gateway.http.get("/ping").status_code == 200, 10, "the first routes have arrived")
    gateway.serve(routes("a"))
    assert gateway.http.get("/ping").status_code == 200


def test_ping_fails_while_the_container_stops(gateway: LiveGateway) -> None:
    """And before it has started."""
    assert gateway.http.get("/ping").status_code == 503
    gateway.serve()
    gateway.controller.set(stopping=True)
    until(lambda: gateway.http.get("/ping").status_code == 503, 10, "the ping fails")


@pytest.mark.parametrize(("sagemaker", "code"), [(True, 504), (False, 200)])
def test_sagemaker_gets_no_answer_after_its_own_limit(
    sagemaker: bool, code: int, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other clients of /invocations wait as long as they like, here for a model that is held."""
    monkeypatch.setattr("orchestrator.gateway.sagemaker.ANSWER_MS", b"200")
    live = LiveGateway(sagemaker=sagemaker).serve(routes("a", holds=True))
    try:
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(live.http.post, "/invocations", json=CHAT)
            until(lambda: live.queue("a").waiting == 1, 10, "the request waits")
            if sagemaker:
                assert answer.result(10).status_code == code
            live.serve(routes("a", served))
            assert answer.result(10).status_code == code
    finally:
        live.close()


DOCUMENT = openapi(needs_key=False, routes=CONTAINER_ROUTES)


def test_the_containers_openapi_document_has_its_routes(gateway: LiveGateway, served: Served) -> None:
    """Each responds, and has no other method. Gateways elsewhere do not list them."""
    validate(DOCUMENT)
    gateway.serve(routes("only", served))
    assert gateway.http.get("/openapi.json").json() == DOCUMENT
    others = openapi(needs_key=False, routes=ROUTES)["paths"]
    own = {path: methods for path, methods in DOCUMENT["paths"].items() if path not in others}
    assert own.keys() == {"/invocations", "/models", "/models/{model}", "/models/{model}/invoke"}
    gateway.controller.load_replies = [Hosting(400, "no model")]
    for path, methods in own.items():
        for method in ("GET", "PUT", "POST", "DELETE"):
            response = gateway.http.request(method, path.replace("{model}", "a"), json={"model_name": "a", "url": "/m"})
            assert (response.status_code != 405) == (method.lower() in methods), (method, path)


def invocation_schema() -> dict[str, Any]:
    body = DOCUMENT["paths"]["/invocations"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    return {**body, "components": DOCUMENT["components"]}


@pytest.mark.parametrize(
    ("body", "good"),
    [
        (CHAT, True),
        ({**CHAT, "model": "only"}, True),
        ({"prompt": "hello", "max_tokens": 4}, True),
        ({"inputs": "hello"}, True),
        ({"inputs": ["hello", "other"], "parameters": {"details": False, "max_new_tokens": 4}}, True),
        ({"inputs": ""}, False),
        ({"inputs": "hello", "parameters": {"top_p": "x"}}, False),
        ({"model": "only"}, False),
        ({"messages": []}, False),
    ],
)
def test_the_document_says_of_invocations_what_the_gateway_does(
    body: dict[str, Any], good: bool, gateway: LiveGateway, served: Served
) -> None:
    gateway.serve(routes("only", served))
    assert jsonschema.Draft202012Validator(invocation_schema()).is_valid(body) is good
    assert (gateway.http.post("/invocations", json=body).status_code == 200) is good


def test_the_answers_about_models_are_those_of_the_document(gateway: LiveGateway) -> None:
    gateway.controller.hosting = {f"m{i:03}": "/m" for i in range(101)}
    page = msgspec.json.decode(gateway.http.get("/models").content, type=LoadedModels)
    assert (len(page.models), page.next_page_token) == (100, "m099")
    card = msgspec.json.decode(gateway.http.get("/models/m007").content, type=LoadedModel)
    assert card == LoadedModel("m007", "/m")


needs_djl = pytest.mark.skipif(
    "DJL_SOURCE" not in os.environ, reason="DJL_SOURCE names no checkout of djl-serving 0.28"
)


@pytest.mark.real
@needs_djl
@pytest.mark.parametrize("parameters", [{}, {"details": True}])
@pytest.mark.parametrize("kind", ["json", "jsonlines", "sse"])
def test_the_answers_are_those_of_lmis_own_code(
    kind: str, parameters: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(Path(os.environ["DJL_SOURCE"]) / "engines/python/setup")
    formatters = importlib.import_module("djl_python.output_formatter")
    djl = importlib.import_module("djl_python.request_io")
    events = [event("a", 5), event(' é\n"', 6), event("c", 7, FinishReason.LENGTH)]

    write, _ = formatters.get_output_formatter(kind, kind != "json", False)
    output = djl.TextGenerationOutput(0, djl.TextInput(0, parameters=parameters, input_text="hi"))
    theirs = ""
    for each in events:
        (token,) = each.token_ids
        output.set_next_token(djl.Token(token, each.text, -0.5), is_last_token=each.finish is not None)
        if each.finish is not None:
            output.set_finish_reason("length")
        theirs += write(output)

    sent = read_lmi(json.dumps({"model": "m", "inputs": "hi", "parameters": parameters}).encode()).sent
    answer = LmiAnswer(sent, content_types(b"text/event-stream" if kind == "sse" else b""), choices=[Choice(0, [1])])
    (choice,) = answer.choices
    ours = answer.whole([(choice, events)]) if kind == "json" else answer.events(choice, events)
    assert isinstance(ours, bytes)
    lines = [[line for line in text.splitlines() if line] for text in (ours.decode(), theirs)]
    assert [json.loads(line.removeprefix("data: ")) for line in lines[0]] == [
        json.loads(line.removeprefix("data: ")) for line in lines[1]
    ]


def lmi(gateway: LiveGateway, **body: Any) -> Any:
    return gateway.http.post("/invocations", json={"inputs": "hello", **body})


def test_lmis_request_gets_lmis_answer(gateway: LiveGateway, served: Served) -> None:
    """Greedy and at most 30 tokens, unless the parameters say otherwise."""
    gateway.serve(routes("a", served))
    plain = gateway.http.post("/v1/completions", json={"prompt": "hello", "model": "a", "max_tokens": 30}).json()
    assert lmi(gateway).json() == {"generated_text": plain["choices"][0]["text"]}
    full = lmi(gateway, parameters={"return_full_text": True}).json()
    assert full == {"generated_text": "hello" + plain["choices"][0]["text"]}


def event(text: str, id: int, finish: FinishReason | None = None, stop: str = "") -> TokenEvent:
    logprobs = [TokenLogprobs(id=id, logprob=-0.5, text=text, bytes=list(text.encode()), top=[])]
    return TokenEvent(id="r", text=text, token_ids=[id], logprobs=logprobs, finish=finish, stop=stop)


def details_of(last: TokenEvent, **parameters: Any) -> tuple[Any, list[Any]]:
    """The whole answer of two tokens, and the lines of its stream."""
    request = {"model": "m", "inputs": "hi", "parameters": {"details": True, **parameters}}
    sent = read_lmi(json.dumps(request).encode()).sent
    whole, stream = (LmiAnswer(sent, frozenset(), choices=[Choice(0, [1])]) for _ in range(2))
    events = [event("a", 5), last]
    lines = stream.events(stream.choices[0], events).splitlines()
    body = whole.whole([(whole.choices[0], events)])
    assert isinstance(body, bytes)
    return json.loads(body), [json.loads(line) for line in lines]


def test_details_have_each_token_with_its_logarithm() -> None:
    whole, lines = details_of(event("b", 6, FinishReason.LENGTH))
    tokens = [{"id": 5, "text": "a", "log_prob": -0.5}, {"id": 6, "text": "b", "log_prob": -0.5}]
    details = {"finish_reason": "length", "generated_tokens": 2, "inputs": "hi"}
    assert whole == {"generated_text": "ab", "details": {**details, "tokens": tokens}}
    assert lines == [{"token": tokens[0]}, {"token": tokens[1], "generated_text": "ab", "details": details}]


@pytest.mark.parametrize(("stop", "reason"), [("x", "stop_sequence"), ("", "eos_token")])
def test_the_reason_of_an_end_is_lmis(stop: str, reason: str) -> None:
    whole, lines = details_of(event("b", 6, FinishReason.STOP, stop))
    assert whole["details"]["finish_reason"] == lines[-1]["details"]["finish_reason"] == reason


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({}, (0.0, None, 30)),
        ({"temperature": 0.5}, (0.0, None, 30)),
        ({"do_sample": True}, (1.0, None, 30)),
        ({"do_sample": True, "temperature": 0.5, "top_k": 0, "max_new_tokens": 7}, (0.5, 0, 7)),
        ({"do_sample": True, "top_k": 9}, (1.0, 9, 30)),
    ],
)
def test_defaults_are_lmis(parameters: dict[str, Any], expected: tuple[Any, ...]) -> None:
    read = read_lmi(json.dumps({"model": "m", "inputs": "hi", "parameters": parameters}).encode())
    assert (read.temperature, read.top_k, read.max_tokens or read.default_tokens) == expected


def test_several_inputs_get_a_list(gateway: LiveGateway, served: Served) -> None:
    gateway.serve(routes("a", served))
    answer = lmi(gateway, inputs=["hello", "other"], parameters={"max_new_tokens": 4}).json()
    one = [lmi(gateway, inputs=each, parameters={"max_new_tokens": 4}).json() for each in ("hello", "other")]
    assert answer == one


@pytest.mark.parametrize(
    ("accept", "kind"), [("application/json", "application/jsonlines"), ("text/event-stream", "text/event-stream")]
)
def test_a_stream_is_lines_whose_last_has_the_whole_text(
    accept: str, kind: str, gateway: LiveGateway, served: Served
) -> None:
    gateway.serve(routes("a", served))
    whole = lmi(gateway, parameters={"max_new_tokens": 5}).json()["generated_text"]
    body = {"inputs": "hello", "parameters": {"max_new_tokens": 5}, "stream": True}
    answer = gateway.http.post("/invocations", json=body, headers={"accept": accept})
    assert answer.headers["content-type"].startswith(kind)
    lines = [json.loads(line.removeprefix("data: ")) for line in answer.text.splitlines() if line]
    assert "".join(line["token"]["text"] for line in lines) == whole == lines[-1]["generated_text"]
    assert all("generated_text" not in line for line in lines[:-1])


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"parameters": {"max_new_tokens": 0}}, "max_new_tokens"),
        ({"parameters": {"max_new_tokens": 100_000}}, "max_new_tokens"),
        ({"parameters": {"stop_sequences": "a" * 20_000}}, "stop_sequences"),
        ({"inputs": "long " * 5000}, "inputs"),
        ({"inputs": ["a"] * 3000}, "inputs"),
        ({"parameters": {"top_p": 2}}, "top_p"),
        ({"parameters": {"num_beams": 2}}, "parameters.num_beams"),
        ({"inputs": ""}, "inputs"),
        ({"inputs": []}, "inputs"),
        ({"inputs": ["a", "b"], "stream": True}, "stream"),
    ],
)
def test_a_wrong_parameter_is_named_as_lmi_names_it(
    body: dict[str, Any], param: str, gateway: LiveGateway, served: Served
) -> None:
    gateway.serve(routes("a", served))
    answer = lmi(gateway, **body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert not re.search(r"\bmax_tokens\b|\bstop\b|^prompt", error["message"])


def lines(gateway: LiveGateway, body: str, accept: str = "*/*") -> Any:
    headers = {"content-type": "application/jsonlines; charset=utf-8", "accept": accept}
    return gateway.http.post("/invocations", content=body.encode(), headers=headers)


PARAMETERS = {"max_new_tokens": 4}
ONE = json.dumps({"inputs": "hello", "parameters": PARAMETERS})
TWO = json.dumps({"parameters": PARAMETERS, "inputs": ["other", "last"]})


def test_json_lines_are_inputs_of_one_request(gateway: LiveGateway, served: Served) -> None:
    """The answer is a list, or a line for each input if the client accepts lines only."""
    gateway.serve(routes("a", served))
    one = [lmi(gateway, inputs=each, parameters=PARAMETERS).json() for each in ("hello", "other", "last")]
    body = f"{ONE}\n\n{TWO}\r\n"
    listed, rows = lines(gateway, body), lines(gateway, body, "application/jsonlines")
    assert (listed.headers["content-type"], listed.json()) == ("application/json", one)
    assert rows.headers["content-type"] == "application/jsonlines"
    assert [json.loads(row) for row in rows.text.splitlines()] == one
    assert rows.text.endswith("\n")


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        ("application/jsonlines", "application/jsonlines"),
        ("application/jsonlines, application/json;q=0.5", "application/json"),
        ("text/plain", "application/json"),
    ],
)
def test_one_json_line_is_a_request_of_json(accept: str, expected: str, gateway: LiveGateway, served: Served) -> None:
    gateway.serve(routes("a", served))
    answer = lines(gateway, ONE + "\n", accept)
    assert answer.headers["content-type"] == expected
    assert answer.json() == lmi(gateway, parameters=PARAMETERS).json()
    assert lines(gateway, json.dumps(CHAT)).json()["object"] == "chat.completion"


@pytest.mark.parametrize(
    ("second", "param", "part"),
    [
        (json.dumps({"inputs": "x", "parameters": {"max_new_tokens": 5}}), "parameters", "line 2"),
        (json.dumps({"inputs": "x"}), "parameters", "line 2"),
        (json.dumps({"inputs": "x", "parameters": PARAMETERS, "stream": None}), "stream", "line 2"),
        (json.dumps({"prompt": "x"}), "inputs", "line 2"),
        ("{", None, "line 2"),
        ("[]", None, "line 2"),
        ("\xff", None, "line 2"),
        (json.dumps({"inputs": 1, "parameters": PARAMETERS}), "inputs", "inputs"),
    ],
)
def test_lines_that_are_no_one_request_are_refused(
    second: str, param: str | None, part: str, gateway: LiveGateway, served: Served
) -> None:
    """LMI's batches, too, have the same parameters."""
    gateway.serve(routes("a", served))
    answer = lines(gateway, f"{ONE}\n{second}")
    error = answer.json()["error"]
    assert (answer.status_code, (error["param"] or "").partition("[")[0] or None) == (400, param)
    assert part in error["message"]


@pytest.mark.parametrize("kind", ["text/plain", "text/csv; charset=utf-8"])
def test_lmis_requests_are_json_or_json_lines(kind: str, gateway: LiveGateway, served: Served) -> None:
    """Texts and CSV, which DJL Serving takes too, are refused with the types that are taken."""
    gateway.serve(routes("a", served))
    answer = gateway.http.post("/invocations", content=b"inputs\nhello\n", headers={"content-type": kind})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (415, "unsupported_media_type")
    assert "'application/json' or 'application/jsonlines'" in error["message"]


def test_only_invocations_take_json_lines(gateway: LiveGateway, served: Served) -> None:
    gateway.serve(routes("a", served))
    headers = {"content-type": "application/jsonlines"}
    answer = gateway.http.post("/v1/completions", content=b'{"model": "a", "prompt": "x"}', headers=headers)
    assert answer.status_code == 415
