"""Every mistake of a client: status, code, the parameter, and a message with the offending value or the numbers."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.checkpoints import save_tokenizer
from tests.fleet import until
from tests.orchestrator.gateways import LiveGateway, routes
from tests.served import Served

Make = Callable[..., Served]
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
MAX_BODY = 8 * 2**20  # bytes; the default of the setting
HELLO = [{"role": "user", "content": "hi"}]

# route, body (bytes are sent as they are), status, code, param, and what the message says
MATRIX: list[tuple[str, Any, int, str | None, str | None, str]] = [
    (TEXT, b"", 400, "invalid_json", None, "not JSON"),
    (TEXT, b"{", 400, "invalid_json", None, "not JSON"),
    (TEXT, b'{"model": "m", "prompt": "\xff"}', 400, "invalid_json", None, "not JSON"),
    (TEXT, b'{"model": ' + b"[" * 5000, 400, "invalid_json", None, "lists and objects in more than 100 levels"),
    (TEXT, [], 400, None, None, "the body: Expected object, got array"),
    (TEXT, {"prompt": "x"}, 400, None, "model", "you must provide 'model'"),
    (TEXT, {"model": 3, "prompt": "x"}, 400, None, "model", "model: Expected str, got int"),
    (
        TEXT,
        {"model": "zzz", "prompt": "x"},
        404,
        "model_not_found",
        "model",
        "'zzz' does not exist. Models: bare, broken, m.",
    ),
    (TEXT, {"model": "m", "prompt": "x", "audio": {}}, 400, "unsupported_parameter", "audio", "audio is not supported"),
    (TEXT, {"model": "m"}, 400, None, "prompt", "you must provide 'prompt'"),
    (TEXT, {"model": "m", "prompt": None}, 400, None, "prompt", "prompt: Expected str | array, got null"),
    (TEXT, {"model": "m", "prompt": ""}, 400, None, "prompt", "prompt is empty"),
    (TEXT, {"model": "m", "prompt": []}, 400, None, "prompt", "prompt is empty"),
    (TEXT, {"model": "m", "prompt": ["x", ""]}, 400, None, "prompt", "prompt[1] is empty"),
    (
        TEXT,
        {"model": "m", "prompt": ["x", None]},
        400,
        None,
        "prompt",
        "prompt[1]: expected a string or a list of token ids, got null",
    ),
    (
        TEXT,
        {"model": "m", "prompt": [[1, True]]},
        400,
        None,
        "prompt",
        "prompt[0]: expected a string or a list of token ids, got list",
    ),
    (TEXT, {"model": "m", "prompt": [999]}, 400, None, "prompt", "999 is not a token id of this model (0 to 256)"),
    (TEXT, {"model": "m", "prompt": [5, -1]}, 400, None, "prompt", "-1 is not a token id"),
    (TEXT, b'{"model": "m", "prompt": "\\ud800"}', 400, "invalid_json", None, "not JSON"),
    (TEXT, {"model": "m", "prompt": "x", "max_tokens": "9"}, 400, None, "max_tokens", "Expected int | null, got str"),
    (TEXT, {"model": "m", "prompt": "x", "max_tokens": 1.5}, 400, None, "max_tokens", "Expected int | null, got float"),
    (TEXT, {"model": "m", "prompt": "x", "max_tokens": 0}, 400, None, "max_tokens", "max_tokens: 0 requires echo"),
    (TEXT, {"model": "m", "prompt": "x", "max_tokens": 4, "min_tokens": 5}, 400, None, "min_tokens", "at most 4"),
    (TEXT, {"model": "m", "prompt": "x", "temperature": 3}, 400, None, "temperature", "at least 0 and at most 2"),
    (TEXT, b'{"model": "m", "prompt": "x", "temperature": NaN}', 400, "invalid_json", None, "not JSON"),
    (TEXT, b'{"model": "m", "prompt": "x", "temperature": Infinity}', 400, "invalid_json", None, "not JSON"),
    (TEXT, b'{"model": "m", "prompt": "x", "temperature": 1e999}', 400, None, "temperature", "temperature: "),
    (TEXT, {"model": "m", "prompt": "x", "top_p": 0}, 400, None, "top_p", "above 0 and at most 1"),
    (TEXT, {"model": "m", "prompt": "x", "top_k": -2}, 400, None, "top_k", "at least -1"),
    (TEXT, {"model": "m", "prompt": "x", "min_p": 1.1}, 400, None, "min_p", "at least 0 and at most 1"),
    (TEXT, {"model": "m", "prompt": "x", "repetition_penalty": 0}, 400, None, "repetition_penalty", "at least 0.01"),
    (TEXT, {"model": "m", "prompt": "x", "repetition_penalty": 0.005}, 400, None, "repetition_penalty", "at most 10"),
    (TEXT, {"model": "m", "prompt": "x", "min_tokens": 9999}, 400, None, "min_tokens", "min_tokens must be from 0 to"),
    (TEXT, {"model": "m", "prompt": "x", "stop_token_ids": [10**6]}, 400, None, "stop_token_ids", "the vocabulary of"),
    (TEXT, {"model": "m", "prompt": "x", "presence_penalty": 2.1}, 400, None, "presence_penalty", "at most 2"),
    (TEXT, {"model": "m", "prompt": "x", "frequency_penalty": -3}, 400, None, "frequency_penalty", "at least -2"),
    (TEXT, {"model": "m", "prompt": "x", "no_repeat_ngram_size": -1}, 400, None, "no_repeat_ngram_size", "at least 0"),
    (TEXT, {"model": "m", "prompt": "x", "logit_bias": {"a": 1}}, 400, None, "logit_bias", "'a' is not a token id"),
    (TEXT, {"model": "m", "prompt": "x", "logit_bias": {"5": 101}}, 400, None, "logit_bias", "at most 100"),
    (TEXT, {"model": "m", "prompt": "x", "logit_bias": {"999": 1}}, 400, None, "logit_bias", "999 is not a token id"),
    (TEXT, {"model": "m", "prompt": "x", "seed": 2**63}, 400, None, "seed", "does not fit in 64 bits"),
    (TEXT, {"model": "m", "prompt": "x", "stop": [""]}, 400, None, "stop", "an empty string is not allowed"),
    (TEXT, {"model": "m", "prompt": "x", "stop": ["a"] * 17}, 400, None, "stop", "17 strings exceed the limit of 16"),
    (TEXT, {"model": "m", "prompt": "x", "n": 0}, 400, None, "n", "at least 1 and at most 128"),
    (TEXT, {"model": "m", "prompt": "x", "best_of": 2}, 400, None, "best_of", "2 must equal n"),
    (TEXT, {"model": "m", "prompt": "x", "logprobs": 21}, 400, None, "logprobs", "at most 20"),
    (TEXT, {"model": "m", "prompt": "x", "prompt_logprobs": 21}, 400, None, "prompt_logprobs", "at most 20"),
    (
        TEXT,
        {"model": "m", "prompt": "x", "logprobs": 1, "echo": True},
        400,
        "unsupported_parameter",
        "echo",
        "does not compute the logprobs of prompts, which echo requests; send the request to a model with the engine",
    ),
    (TEXT, {"model": "m", "prompt": "x", "suffix": "y"}, 400, "unsupported_parameter", "suffix", "suffix"),
    (TEXT, {"model": "m", "prompt": "x", "stream_options": {}}, 400, None, "stream_options", "requires stream: true"),
    (TEXT, {"model": "m", "prompt": "x", "response_format": {"type": "xml"}}, 400, None, "response_format", "'xml' is"),
    (
        TEXT,
        {"model": "m", "prompt": "x", "response_format": {"type": "json_schema"}},
        400,
        None,
        "response_format",
        "needs a schema",
    ),
    (
        TEXT,
        {"model": "m", "prompt": "x" * 65},
        400,
        "context_length_exceeded",
        "prompt",
        "at most 64 tokens; this one has 65",
    ),
    (
        TEXT,
        {"model": "m", "prompt": "x" * 60, "max_tokens": 5},
        400,
        "context_length_exceeded",
        "max_tokens",
        "is 64 tokens; you requested 65 (60 in the prompt, 5 to generate)",
    ),
    (CHAT, {"model": "m"}, 400, None, "messages", "you must provide 'messages'"),
    (
        CHAT,
        {"model": "m", "messages": HELLO, "tool_choice": {"type": "x"}},
        400,
        None,
        "tool_choice.type",
        "Invalid enum value 'x'",
    ),
    (CHAT, {"model": "m", "messages": []}, 400, None, "messages", "at least one message"),
    (CHAT, {"model": "m", "messages": [{"content": "x"}]}, 400, None, "messages[0].role", "you must provide"),
    (CHAT, {"model": "m", "messages": [{"role": "user", "content": 3}]}, 400, None, "messages[0].content", "got int"),
    (
        CHAT,
        {"model": "m", "messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        400,
        None,
        "messages",
        "'image_url' is not supported",
    ),
    (
        CHAT,
        {"model": "m", "messages": HELLO, "max_tokens": 4, "max_completion_tokens": 5},
        400,
        None,
        "max_tokens",
        "max_tokens (4) and max_completion_tokens (5) differ",
    ),
    (
        CHAT,
        {"model": "m", "messages": HELLO, "max_completion_tokens": 0},
        400,
        None,
        "max_completion_tokens",
        "0 is out",
    ),
    (CHAT, {"model": "m", "messages": HELLO, "top_logprobs": 2}, 400, None, "top_logprobs", "requires logprobs: true"),
    (
        CHAT,
        {"model": "m", "messages": HELLO, "logprobs": True, "top_logprobs": 21},
        400,
        None,
        "top_logprobs",
        "at most 20",
    ),
    (
        CHAT,
        {"model": "m", "messages": HELLO, "functions": [{}]},
        400,
        "unsupported_parameter",
        "functions",
        "send tools",
    ),
    (
        CHAT,
        {"model": "m", "messages": [{"role": "user", "content": "x" * 80}]},
        400,
        "context_length_exceeded",
        "messages",
        "at most 64 tokens; this one has",
    ),
    (CHAT, {"model": "bare", "messages": HELLO}, 400, "no_chat_template", "messages", "no chat template"),
    (
        CHAT,
        {"model": "broken", "messages": HELLO},
        400,
        "chat_template_failed",
        "messages",
        "this template is broken",
    ),
]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tokenizers: one without a chat template, one whose template raises."""
    folder = tmp_path_factory.mktemp("tokenizers")
    for name, template in (("bare", None), ("broken", "{{ raise_exception('this template is broken') }}")):
        (folder / name).mkdir()
        save_tokenizer(folder / name, template)
    return folder


@pytest.fixture
def served(gateway: LiveGateway, replica: Make, tokenizers: Path) -> LiveGateway:
    """Three models of 64 tokens: `m` in bytes, `bare` and `broken` with tokenizers of their own."""
    others = [
        routes(name, replica(max_len=64), max_len=64, engine="cpu", source=str(tokenizers / name))
        for name in ("bare", "broken")
    ]
    return gateway.serve(routes("m", replica(max_len=64), max_len=64), *others)


def error_of(response: httpx.Response) -> dict[str, Any]:
    body: dict[str, Any] = response.json()
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"message", "type", "param", "code"}
    error: dict[str, Any] = body["error"]
    return error


def leftovers(gateway: LiveGateway) -> dict[str, int]:
    """What a request may leave behind in this process."""
    queues = gateway.queues.values()
    return {
        "waiting": sum(queue.waiting for queue in queues),
        "live": sum(queue.links.live for queue in queues),
        "files": len(list(Path("/proc/self/fd").iterdir())),
        "threads": threading.active_count(),
    }


@pytest.mark.parametrize(("route", "body", "status", "code", "param", "says"), MATRIX)
@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
def test_an_invalid_request_gets_status_code_parameter_and_message(
    served: LiveGateway,
    route: str,
    body: Any,
    status: int,
    code: str | None,
    param: str | None,
    says: str,
    stream: bool,
) -> None:
    """One error object in OpenAI's format, with or without streaming."""
    if stream and isinstance(body, dict) and "stream_options" not in body:
        body = {**body, "stream": True}
    content = body if isinstance(body, bytes) else json.dumps(body).encode()

    response = served.http.post(route, content=content, headers={"content-type": "application/json"})

    error = error_of(response)
    assert (response.status_code, error["code"], error["param"]) == (status, code, param)
    assert error["type"] == "invalid_request_error"
    assert says in error["message"]


def test_invalid_requests_leave_nothing_behind(served: LiveGateway) -> None:
    """After every error, and disconnects in queue, prefill and decode: no slot, queue entry, descriptor or thread."""
    assert served.http.post(TEXT, json={"model": "m", "prompt": "x", "max_tokens": 2}).status_code == 200
    until(lambda: any((served.home / "traces").glob("*.csv")), 5, "the trace's file is open")
    before = leftovers(served)

    for route, body, *_ in MATRIX:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        assert served.http.post(route, content=content).status_code in (400, 404)
    assert served.http.post(TEXT, content=b"x" * (MAX_BODY + 1)).status_code == 413

    assert served.http.post(TEXT, json={"model": "m", "prompt": "x", "max_tokens": 2}).status_code == 200

    def no_more() -> bool:
        return all(count <= before[what] for what, count in leftovers(served).items())

    until(no_more, 10, f"no more is left than before: {before}")


def test_a_body_over_the_limit_is_413(served: LiveGateway) -> None:
    """The message has the limit, and the connection does not wait for the rest."""
    response = served.http.post(TEXT, content=b"x" * (MAX_BODY + 1))

    assert (response.status_code, error_of(response)["code"]) == (413, "body_too_large")
    assert str(MAX_BODY) in error_of(response)["message"]


def test_a_form_is_415(served: LiveGateway) -> None:
    """`curl -d` without a header sends a form; the answer names the content type that is needed."""
    response = served.http.post(TEXT, data={"model": "m"})

    assert (response.status_code, error_of(response)["code"]) == (415, "unsupported_media_type")
    assert "application/x-www-form-urlencoded" in error_of(response)["message"]


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nope", 404, "route_not_found"),
        ("GET", TEXT, 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("GET", "/v1/models/zzz", 404, "model_not_found"),
    ],
)
def test_a_wrong_route_or_method_has_openais_error_format(
    served: LiveGateway, method: str, path: str, status: int, code: str
) -> None:
    """Also if no handler is called."""
    response = served.http.request(method, path)

    assert (response.status_code, error_of(response)["code"]) == (status, code)


def send_raw(gateway: LiveGateway, **fields: Any) -> socket.socket:
    """A request whose answer has not been read yet."""
    body = json.dumps({"model": "m", "prompt": "hello", "max_tokens": 4000, **fields}).encode()
    peer = socket.create_connection(("127.0.0.1", gateway.port), timeout=10)
    peer.sendall(f"POST {TEXT} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
    return peer


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize("when", ["in the queue", "in prefill", "in decode"])
def test_a_disconnected_client_frees_its_resources(
    gateway: LiveGateway, replica: Make, when: str, stream: bool
) -> None:
    """In any state of its request; the next request is served."""
    served = replica(slots=1, step_ms=30)
    gateway.serve(routes("m", served))
    assert gateway.http.post(TEXT, json={"model": "m", "prompt": "x", "max_tokens": 1}).status_code == 200
    until(lambda: any((gateway.home / "traces").glob("*.csv")), 5, "the trace's file is open")
    before, steps = leftovers(gateway), served.batcher.stats.steps
    first = send_raw(gateway, stream=stream)
    leaving = first
    if when == "in the queue":
        until(lambda: served.batcher.stats.live == 1, 10, "the slot is taken")
        leaving = send_raw(gateway, stream=stream)
        until(lambda: gateway.queue("m").waiting == 1, 10, "one waits")
    elif when == "in prefill":
        until(lambda: served.batcher.stats.prefilling == 1, 10, "its prompt is read")
    else:
        until(lambda: served.batcher.stats.steps >= steps + 3, 10, "it decodes")

    leaving.close()
    if leaving is not first:
        until(lambda: gateway.queue("m").waiting == 0, 10, "it left the queue")
        first.close()

    until(lambda: served.batcher.stats.live == 0, 10, "the slot is free")
    assert gateway.http.post(TEXT, json={"model": "m", "prompt": "x", "max_tokens": 1}).status_code == 200
    until(lambda: leftovers(gateway) == before, 10, "nothing is left")


def test_a_client_that_stops_reading_does_not_affect_others(gateway: LiveGateway, replica: Make) -> None:
    """Its answer is generated and buffered; its slot is free at the end, and others are served meanwhile."""
    served = replica(slots=2)
    gateway.serve(routes("m", served))
    silent = send_raw(gateway, stream=True, return_token_ids=True)

    for _ in range(5):
        assert gateway.http.post(TEXT, json={"model": "m", "prompt": "x", "max_tokens": 50}).status_code == 200
    until(lambda: served.batcher.stats.live == 0, 20, "the slot of the silent client is free")
    silent.close()
