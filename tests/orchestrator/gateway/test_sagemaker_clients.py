"""Clients of AWS's SDK, through a stand-in for SageMaker's runtime to a container's own web server."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from botocore.exceptions import ClientError, EventStreamError, ParamValidationError  # type: ignore[import-untyped]

from orchestrator.cli.serve_sagemaker import MAX_BODY_BYTES
from orchestrator.messages.controller_replies import Hosting
from tests.fleet import until
from tests.orchestrator.gateways import LiveGateway, routes
from tests.sagemaker_runtime import ENDPOINT, MAX_PAYLOAD_BYTES, NO_ANSWER, SageMakerRuntime
from tests.served import Served

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
LMI: dict[str, Any] = {"inputs": "hello", "parameters": {"max_new_tokens": 4}}
JSON = "application/json"


@pytest.fixture
def served(replica: Callable[..., Served]) -> Served:
    return replica()


@pytest.fixture
def gateway() -> Iterator[LiveGateway]:
    live = LiveGateway(sagemaker=True, max_body_bytes=MAX_BODY_BYTES)
    yield live
    live.close()


@pytest.fixture
def runtime(gateway: LiveGateway) -> Iterator[SageMakerRuntime]:
    started = SageMakerRuntime(gateway.url)
    yield started
    started.close()


def invoke(runtime: SageMakerRuntime, body: Any, **options: Any) -> Any:
    sent = body if isinstance(body, bytes) else json.dumps(body).encode()
    return runtime.client().invoke_endpoint(EndpointName=ENDPOINT, Body=sent, **{"ContentType": JSON, **options})


def streamed(runtime: SageMakerRuntime, body: Any, **options: Any) -> tuple[str, str]:
    """Returns the content type and the text of a streamed answer."""
    answer = runtime.client().invoke_endpoint_with_response_stream(
        EndpointName=ENDPOINT, ContentType=JSON, Body=json.dumps({**body, "stream": True}), **options
    )
    return answer["ContentType"], b"".join(event["PayloadPart"]["Bytes"] for event in answer["Body"]).decode()


def refused(runtime: SageMakerRuntime, body: Any, **options: Any) -> dict[str, Any]:
    with pytest.raises(ClientError) as error:
        invoke(runtime, body, **options)
    response: dict[str, Any] = error.value.response
    return response


def test_an_invocation_is_answered(runtime: SageMakerRuntime, gateway: LiveGateway, served: Served) -> None:
    """In the shape of its body. A container returns no custom attributes."""
    gateway.serve(routes("only", served))
    answers = [invoke(runtime, body, CustomAttributes="trace=1", Accept=JSON) for body in (CHAT, LMI)]
    chat, lmi = (json.load(answer["Body"]) for answer in answers)
    assert lmi == {"generated_text": gateway.http.post("/invocations", json=LMI).json()["generated_text"]}
    assert (chat["object"], chat["model"]) == ("chat.completion", "only")
    assert [(answer["ContentType"], "CustomAttributes" in answer) for answer in answers] == [(JSON, False)] * 2


def test_without_a_content_type_the_body_is_json(
    runtime: SageMakerRuntime, gateway: LiveGateway, served: Served
) -> None:
    """The SDK sets none by itself."""
    gateway.serve(routes("only", served))
    answer = runtime.client().invoke_endpoint(EndpointName=ENDPOINT, Body=json.dumps(CHAT))
    assert json.load(answer["Body"])["object"] == "chat.completion"


@pytest.mark.parametrize(
    ("body", "accept", "kind"),
    [
        (CHAT, "*/*", "text/event-stream"),
        (LMI, JSON, "application/jsonlines"),
        (LMI, "text/event-stream", "text/event-stream"),
    ],
)
def test_a_stream_arrives_in_parts(
    body: dict[str, Any], accept: str, kind: str, runtime: SageMakerRuntime, gateway: LiveGateway, served: Served
) -> None:
    """Its bytes are those that the container has sent, whatever the parts are."""
    gateway.serve(routes("only", served))
    content_type, text = streamed(runtime, body, Accept=accept)
    assert content_type.startswith(kind)
    if body is CHAT:
        assert text.endswith("data: [DONE]\n\n")
    else:
        lines = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line]
        assert "".join(line["token"]["text"] for line in lines) == lines[-1]["generated_text"]


def begun(runtime: SageMakerRuntime, stepped: Served) -> Iterator[Any]:
    """Returns the parts of a stream whose first token was generated."""
    body = {**CHAT, "ignore_eos": True, "stream": True}
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(
            runtime.client().invoke_endpoint_with_response_stream,
            EndpointName=ENDPOINT,
            ContentType=JSON,
            Body=json.dumps(body),
        )
        until(lambda: stepped.in_step, 10, "the request has arrived")
        stepped.turn()
        return iter(answer.result(10)["Body"])


def test_the_parts_arrive_while_the_answer_is_generated(
    runtime: SageMakerRuntime, gateway: LiveGateway, replica: Callable[..., Served]
) -> None:
    stepped = replica(stepped=True)
    gateway.serve(routes("only", stepped))
    parts = begun(runtime, stepped)
    assert next(parts)["PayloadPart"]["Bytes"]
    assert gateway.queue("only").links.live == 1
    stepped.run_free()
    assert b"".join(part["PayloadPart"]["Bytes"] for part in parts).endswith(b"data: [DONE]\n\n")


def test_a_stream_that_breaks_off_is_an_error(
    runtime: SageMakerRuntime, gateway: LiveGateway, replica: Callable[..., Served]
) -> None:
    """The container's process dies: the parts before do not look like a whole answer."""
    stepped = replica(stepped=True)
    gateway.serve(routes("only", stepped))
    parts = begun(runtime, stepped)
    next(parts)
    gateway.abort_connections()
    with pytest.raises(EventStreamError, match="ModelStreamError"):
        list(parts)


@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_is_a_model_error_with_its_status_and_body(
    stream: bool, runtime: SageMakerRuntime, gateway: LiveGateway, served: Served
) -> None:
    """Also that of a stream, before its first part."""
    gateway.serve(routes("only", served))
    with pytest.raises(ClientError) as error:
        (streamed if stream else invoke)(runtime, {**CHAT, "model": "other"})
    response = error.value.response
    assert (response["Error"]["Code"], response["OriginalStatusCode"]) == ("ModelError", 404)
    assert json.loads(response["OriginalMessage"])["error"]["code"] == "model_not_found"


def test_a_model_that_has_not_started_is_a_model_error_503(runtime: SageMakerRuntime, gateway: LiveGateway) -> None:
    """Headers of errors, such as Retry-After, do not arrive."""
    gateway.serve(routes("only"))
    response = refused(runtime, CHAT)
    assert (response["Error"]["Code"], response["OriginalStatusCode"]) == ("ModelError", 503)


def test_the_largest_payload_reaches_the_container(
    runtime: SageMakerRuntime, gateway: LiveGateway, served: Served
) -> None:
    """Whose own limit it does not exceed; SageMaker refuses what is longer."""
    gateway.serve(routes("only", served))
    frame = json.dumps({**CHAT, "user": ""}).encode()
    body = frame.replace(b'"user": "', b'"user": "' + b"x" * (MAX_PAYLOAD_BYTES - len(frame)))
    assert len(body) == MAX_PAYLOAD_BYTES
    assert json.load(invoke(runtime, body)["Body"])["object"] == "chat.completion"
    assert refused(runtime, body + b" ")["Error"]["Code"] == "ValidationError"


def test_a_request_that_sagemaker_gives_up_leaves_the_queue(gateway: LiveGateway) -> None:
    """Here of a model that is held."""
    runtime = SageMakerRuntime(gateway.url, answer_s=0.3)
    gateway.serve(routes("only", holds=True))
    try:
        response = refused(runtime, CHAT)
        assert (response["OriginalStatusCode"], response["OriginalMessage"]) == (0, NO_ANSWER)
        until(lambda: gateway.queue("only").waiting == 0, 10, "the request is cancelled")
    finally:
        runtime.close()


def test_a_request_gets_the_containers_reason_before_sagemaker_gives_up(
    runtime: SageMakerRuntime, gateway: LiveGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.gateway.sagemaker.ANSWER_MS", b"200")
    gateway.serve(routes("only", holds=True))
    response = refused(runtime, CHAT)
    assert response["OriginalStatusCode"] == 504
    assert json.loads(response["OriginalMessage"])["error"]["code"] == "deadline_exceeded"


def test_a_target_needs_a_multi_model_endpoint(runtime: SageMakerRuntime, gateway: LiveGateway, served: Served) -> None:
    """Elsewhere SageMaker refuses it, and streams have none: such clients name the model in the body."""
    gateway.serve(routes("a", served), routes("b", served))
    assert refused(runtime, CHAT, TargetModel="a")["Error"]["Code"] == "ValidationError"
    with pytest.raises(ParamValidationError, match="TargetModel"):
        streamed(runtime, CHAT, TargetModel="a")
    assert json.load(invoke(runtime, {**CHAT, "model": "b"})["Body"])["model"] == "b"


def test_the_first_request_of_a_target_loads_its_model(gateway: LiveGateway, served: Served) -> None:
    """After a 507 SageMaker unloads the model that was not used for longest."""
    runtime = SageMakerRuntime(gateway.url, folder_of=lambda target: f"/opt/ml/models/{target}/model")
    room = 2

    def host(name: str, folder: str) -> Hosting:
        hosting = gateway.controller.hosting
        if len(hosting) == room:
            return Hosting(507, "no room")
        hosting[name] = folder
        gateway.controller.set(*(routes(each, served) for each in hosting))
        return Hosting(200, "loaded")

    gateway.controller.hosts = host
    try:
        for target in ("a", "b", "a", "c/d.tar.gz"):
            answer = json.load(invoke(runtime, CHAT, TargetModel=target)["Body"])
            assert answer["object"] == "chat.completion"
        assert list(gateway.controller.hosting.values()) == [
            "/opt/ml/models/a/model",
            "/opt/ml/models/c/d.tar.gz/model",
        ]
        assert refused(runtime, CHAT)["Error"]["Code"] == "ValidationError"
    finally:
        runtime.close()


def test_a_model_that_cannot_be_loaded_is_a_model_error(gateway: LiveGateway) -> None:
    runtime = SageMakerRuntime(gateway.url, folder_of=lambda target: f"/opt/ml/models/{target}/model")
    gateway.controller.load_replies = [Hosting(400, "the folder has no model")]
    try:
        response = refused(runtime, CHAT, TargetModel="a")
        assert response["OriginalStatusCode"] == 400
        assert "the folder has no model" in response["OriginalMessage"]
    finally:
        runtime.close()
