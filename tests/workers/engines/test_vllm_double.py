"""The double of vLLM's server answers as vLLM does (`make test VLLM=1`): both get the same questions."""

from __future__ import annotations

import contextlib
import errno
import http.client
import json
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.checkpoints import make_checkpoint
from tests.doubles.openai_server import make_vllm
from tests.fleet import until
from tests.replica_configs import replica_config
from workers.engines.server.server_metrics import NAMES
from workers.engines.server.server_process import CompletionServer
from workers.engines.vllm.engine import QUEUED, start_vllm

PYTHON = os.environ.get("COREWRIGHT_VLLM_PYTHON")
DEADLINE_S = 300.0
SLOTS, MAX_LEN = 2, 512
Body = dict[str, Any]
QUESTIONS: dict[str, Body] = {
    "answer": {},
    "text": {"prompt": "The quick"},
    "logprobs": {"logprobs": 2, "return_tokens_as_token_ids": True},
    "no ids": {"return_token_ids": False},
    "usage": {"stream_options": {"include_usage": True}},
    "stop id": {"stop_token_ids": [7], "logit_bias": {"7": 100}},
    "unknown field": {"no_repeat_ngram_size": 3, "priority": 4},
    "unknown model": {"model": "nobody"},
    "no model": {"model": None},
    "too long": {"prompt": [5] * MAX_LEN},
    "too many tokens": {"max_tokens": MAX_LEN, "ignore_eos": True},
    "outside the vocabulary": {"prompt": [10**6]},
    "negative id": {"prompt": [-1]},
    "biased outside the vocabulary": {"logit_bias": {"1000000": 1}},
    "no prompt": {"prompt": []},
    "no tokens": {"max_tokens": 0},
    "min above max": {"min_tokens": 9},
    "bad schema": {"structured_outputs": {"json": {"type": "odd"}}},
    "several greedy": {"n": 2},
    "temperature": {"temperature": -1},
    "top_p": {"top_p": 0},
    "top_k": {"top_k": -2},
    "min_p": {"min_p": 2},
    "repetition_penalty": {"repetition_penalty": 0},
    "presence_penalty": {"presence_penalty": 3},
    "logprobs beyond": {"logprobs": 100},
    "text for a number": {"max_tokens": "many"},
}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
CHATS: dict[str, Body] = {
    "answer": {},
    "usage": {"stream_options": {"include_usage": True}, "stream": True},
    "unknown model": {"model": "nobody"},
    "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]},
    "no tokens": {"max_tokens": 0},
    "bad schema": {"structured_outputs": {"json": {"type": "odd"}}},
}

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.skipif(PYTHON is None, reason="set COREWRIGHT_VLLM_PYTHON, or use make test VLLM=1"),
]


class Server:
    """One of both, and what connections were answered with while it was loading."""

    def __init__(self, source: Path, folder: Path, python: str, fifo: Path | None = None) -> None:
        """``fifo`` is what the double waits for."""
        config = replica_config(
            model="tiny",
            engine="vllm",
            dtype="fp32",
            slots=SLOTS,
            max_len=MAX_LEN,
            source=str(source),
            server_python=python,
            socket=str(folder / "r"),
        )
        started: list[CompletionServer] = []
        thread = threading.Thread(target=lambda: started.append(start_vllm(config)))
        if fifo is not None:
            os.mkfifo(fifo)
        thread.start()
        path = until(lambda: next(folder.glob("*/s"), None), DEADLINE_S, "the socket is bound")
        with socket.socket(socket.AF_UNIX) as client:
            self.while_loading = client.connect_ex(str(path))
        if fifo is not None:
            fifo.write_bytes(b"")
        thread.join(DEADLINE_S)
        (self.server,) = started
        here = [process for process in psutil.process_iter() if _cwd(process) == str(path.parent)]
        keeper = next(process for process in here if "keeper.py" in " ".join(process.cmdline()))
        (self.first,) = keeper.children()
        self.worker = self.first.children(recursive=True)[-1]

    def send(self, body: Body | str, route: str = "/v1/completions") -> http.client.HTTPResponse:
        connection = self.server.address.connection(DEADLINE_S)
        text = body if isinstance(body, str) else json.dumps(body)
        connection.request("POST", route, text, {"Content-Type": "application/json", "X-Request-Id": "r1"})
        return connection.getresponse()

    def answer(self, body: Body | str, route: str = "/v1/completions") -> Any:
        """Status, content type and shape; of a stream, those of its first and last events."""
        response = self.send(body, route)
        kind = (response.headers["content-type"] or "").partition(";")[0]
        text = response.read().decode()
        if kind != "text/event-stream":
            return response.status, kind, shape(json.loads(text))
        events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
        values = [event if event == "[DONE]" else shape(json.loads(event)) for event in events]
        return response.status, kind, values[:2], values[-3:]


def _cwd(process: psutil.Process) -> str:
    try:
        return process.cwd()
    except psutil.Error:
        return ""


def shape(value: Any) -> Any:
    """The names and types of a value. Errors keep their code, and choices their reason to end."""
    if isinstance(value, dict):
        kept = ("code", "finish_reason", "object")
        left_out = ("param", "type")  # not read, and different for each cause
        return {
            name.partition(":")[0]: item if name in kept and item is not None else shape(item)
            for name, item in value.items()
            if name not in left_out
        }
    if isinstance(value, list):
        return [shape(value[0])] if value else []
    return type(value).__name__


def is_part(small: Any, large: Any) -> bool:
    """Returns whether all of a shape is in another one; the double leaves out what nothing reads."""
    if isinstance(small, dict) and isinstance(large, dict):
        return all(name in large and is_part(item, large[name]) for name, item in small.items())
    if isinstance(small, list | tuple) and isinstance(large, list | tuple):
        return len(small) == len(large) and all(map(is_part, small, large))
    return bool(small == large)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Server]]:
    """vLLM, and its double."""
    folder = tmp_path_factory.mktemp("double")
    source = make_checkpoint(folder / "model", "llama", hidden=128)
    servers = []
    try:
        servers.append(Server(source, folder / "real", str(PYTHON)))
        python = str(make_vllm(folder / "env"))
        servers.append(Server(source, folder / "double", python, source.with_suffix(".loading")))
        yield servers[0], servers[1]
    finally:
        for server in servers:
            server.server.stop()


@pytest.fixture
def hung(both: tuple[Server, Server]) -> Iterator[tuple[Server, Server]]:
    """Both, while their workers are stopped."""
    for server in both:
        server.worker.suspend()
    yield both
    for server in both:
        server.worker.resume()


def question(**fields: Any) -> Body:
    return {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0, "return_token_ids": True, **fields}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("name", QUESTIONS)
def test_a_completion_is_answered_alike(both: tuple[Server, Server], name: str, stream: bool) -> None:
    fields = {key: value for key, value in QUESTIONS[name].items() if stream or key != "stream_options"}
    real, double = (server.answer(question(stream=stream, **fields)) for server in both)
    assert is_part(double, real), f"{double}\n{real}"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("name", CHATS)
def test_a_chat_is_answered_alike(both: tuple[Server, Server], name: str, stream: bool) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "stream": stream}
    real, double = (server.answer(body | CHATS[name], "/v1/chat/completions") for server in both)
    assert is_part(double, real), f"{double}\n{real}"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_model_that_reads_only_text_refuses_images(both: tuple[Server, Server], stream: bool) -> None:
    """vLLM's does; the double reads them."""
    messages = [{"role": "user", "content": [{"type": "text", "text": "Hi"}, IMAGE]}]
    real, _ = both
    body = {"model": "tiny", "messages": messages, "max_tokens": 4, "stream": stream}
    assert real.answer(body, "/v1/chat/completions")[0] == 400


def test_a_body_that_is_not_json_is_answered_alike(both: tuple[Server, Server]) -> None:
    real, double = (server.answer("{bad") for server in both)
    assert is_part(double, real), f"{double}\n{real}"


@pytest.mark.parametrize("route", ["/health", "/version", "/v1/models", "/nothing"])
def test_a_route_is_answered_alike(both: tuple[Server, Server], route: str) -> None:
    real, double = (server.server.address.get(route) for server in both)
    assert double[0] == real[0]
    if real[0] == 200 and real[1]:
        assert is_part(shape(json.loads(double[1])), shape(json.loads(real[1])))


def test_the_metrics_that_are_read_are_vllms(both: tuple[Server, Server]) -> None:
    """Those of the double have the names and labels of vLLM's."""
    real, double = (
        {
            (sample.name, *sorted(sample.labels))
            for family in text_string_to_metric_families(server.server.address.get("/metrics")[1].decode())
            for sample in family.samples
        }
        for server in both
    )
    assert double <= real
    assert NAMES.keys() <= {name for name, *_ in real}


def test_the_id_of_an_answer_is_that_of_its_request(both: tuple[Server, Server]) -> None:
    assert [json.loads(server.send(question()).read())["id"] for server in both] == ["cmpl-r1"] * 2


def test_a_server_that_loads_refuses_connections(both: tuple[Server, Server]) -> None:
    """Its socket is bound before."""
    assert [server.while_loading for server in both] == [errno.ECONNREFUSED] * 2


def test_a_full_queue_is_503_and_a_hung_engine_is_healthy(hung: tuple[Server, Server]) -> None:
    """The headers of a stream come while it waits."""
    for server in hung:
        streams = [server.send(question(stream=True)) for _ in range(SLOTS + QUEUED + 1)]
        assert [stream.status for stream in streams] == [200] * (SLOTS + QUEUED) + [503]
        assert server.server.address.get("/health")[0] == 200
        for stream in streams:
            stream.close()


def test_the_stream_of_a_stopped_server_is_no_success(both: tuple[Server, Server]) -> None:
    """vLLM ends it with an error event or leaves it open until it is killed. The last test of this file."""
    for server in both:
        stream = server.send(question(stream=True, max_tokens=MAX_LEN - 3, ignore_eos=True))
        events = [stream.readline()]
        server.worker.suspend()
        server.server.stop()
        with contextlib.suppress(OSError, http.client.HTTPException):
            events += stream.readlines()
        assert not any(b'"finish_reason":"' in event.replace(b" ", b"") for event in events)
