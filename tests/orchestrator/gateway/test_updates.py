"""Requests that wait while an update swaps their model's replica: they are read for the version that answers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import httpx
import msgspec.structs
import pytest

from orchestrator.gateway.serving import tokenizers
from orchestrator.messages.replica_states import ModelState
from orchestrator.messages.route_table import ModelRoutes
from tests.fleet import until
from tests.orchestrator.gateway.test_routing import Asked, filled, waiting
from tests.orchestrator.gateways import LiveGateway, routes
from tests.served import Served
from workers.messages.engine_protocol import EngineLoadError
from workers.messages.requests import GenerateRequest
from workers.text.tokenizer import ByteTokenizer

Make = Callable[..., Served]
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


class Marked(ByteTokenizer):
    """Begins each text with the mark of its version."""

    def __init__(self, mark: str) -> None:
        self._mark = mark

    def encode(self, text: str, add_special_tokens: bool = True, *, most: int | None = None) -> list[int]:
        return super().encode(self._mark + text, most=most)


@pytest.fixture(autouse=True)
def marked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokenizer of a folder is marked with its name; that of "broken" cannot be read."""

    def load(_: object, engine: str, source: str | None, **__: object) -> ByteTokenizer:
        if source == "broken":
            raise EngineLoadError("bad-tokenizer", "it cannot be read")
        return Marked(source or "")

    monkeypatch.setattr(tokenizers, "load_apart", load)


def version(source: str, *replicas: Served, **fields: Any) -> ModelRoutes:
    """The routes while an update holds requests, and the tokenizer is that of ``source``."""
    state = fields.pop("state", ModelState.READY if replicas else ModelState.LOADING)
    table = routes("m", *replicas, engine="cpu", source=source, state=state, max_len=fields.pop("max_len", 4096))
    return msgspec.structs.replace(table, tokenizer=source, holds=True, **fields)


def prompts_of(served: Served) -> list[str]:
    """What the replica is given from now on."""
    given: list[str] = []
    submit = served.batcher.submit

    def noted(request: GenerateRequest) -> None:
        given.append(bytes(request.prompt_ids).decode())
        submit(request)

    served.batcher.submit = noted  # type: ignore[method-assign]
    return given


def chat(gateway: LiveGateway, body: dict[str, Any], answers: list[httpx.Response]) -> threading.Thread:
    def ask() -> None:
        answers.append(httpx.post(f"{gateway.url}/v1/chat/completions", json=body, timeout=30))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    return thread


def test_a_waiting_prompt_is_tokenized_for_the_version_that_answers(gateway: LiveGateway, replica: Make) -> None:
    """All choices of all its prompts; usage and echo are those of the new tokens."""
    gateway.serve(version("old"))
    request = Asked(gateway, prompt=["one", "three"], n=2, echo=True)
    waiting(gateway, 4)
    served = replica()
    prompts = prompts_of(served)
    gateway.serve(version("newer", served))
    answer = request.answer()
    assert answer.status_code == 200
    assert prompts == ["newerone", "newerone", "newerthree", "newerthree"]
    assert answer.json()["usage"]["prompt_tokens"] == len("newerone") + len("newerthree")
    assert [
        choice["text"].startswith(text)
        for text, choice in zip(("one", "one", "three", "three"), answer.json()["choices"], strict=True)
    ] == [True] * 4


def test_a_chat_that_waits_is_rendered_by_the_new_template(gateway: LiveGateway, replica: Make) -> None:
    """Likewise, and a long one, which is read off the event loop."""
    gateway.serve(version("old"))
    answers: list[httpx.Response] = []
    long = {**CHAT, "messages": [{"role": "user", "content": "x" * 3000}]}
    threads = [chat(gateway, body, answers) for body in (CHAT, long)]
    waiting(gateway, 2)
    served = replica()
    prompts = prompts_of(served)
    gateway.serve(version("new", served))
    for thread in threads:
        thread.join(30)
    assert [answer.status_code for answer in answers] == [200, 200]
    assert sorted(prompts, key=len) == ["newuser: hi\nassistant:", f"newuser: {'x' * 3000}\nassistant:"]


def test_a_prompt_too_long_for_the_new_version_gets_400(gateway: LiveGateway, replica: Make) -> None:
    """The maximum output of a fitting prompt follows the new length; the queue space of both is free."""
    gateway.serve(version("old"))
    long, short = Asked(gateway, prompt="x" * 60), Asked(gateway, prompt="x", max_tokens=None)
    waiting(gateway, 2)
    gateway.serve(version("new", replica(max_len=16), max_len=16))
    assert (long.answer().status_code, long.code()) == (400, "context_length_exceeded")
    assert short.answer().json()["usage"] == {"prompt_tokens": 4, "completion_tokens": 12, "total_tokens": 16}
    assert [line.bytes for line in gateway.queue("m").dispatcher.lines] == [0]


def test_a_request_returned_by_a_draining_replica_is_tokenized_again(gateway: LiveGateway, replica: Make) -> None:
    """It was sent, had no token, and its replica is lost while the tokenizer changes."""
    before, after = replica(slots=1, stepped=True), replica()
    prompts = prompts_of(after)
    gateway.serve(version("old", before))
    request = Asked(gateway, prompt="again")
    until(lambda: before.in_step, 10, "it is sent")
    gateway.serve(version("new", after))
    before.kill()
    assert request.answer().status_code == 200
    assert prompts == ["newagain"]


def test_requests_wait_while_starts_of_the_new_version_fail(gateway: LiveGateway, replica: Make) -> None:
    """Up to `scaling.hold_s`: the update is rolled back earlier, and the old version answers."""
    gateway.serve(version("old"))
    held = Asked(gateway)
    waiting(gateway, 1)
    gateway.controller.set(version("new", state=ModelState.FAILED, reason="weights-broken: cut off"))
    until(lambda: gateway.queue("m").routes.state is ModelState.FAILED, 10, "it has failed")
    late = Asked(gateway)
    waiting(gateway, 2)
    gateway.serve(version("old", replica()))
    assert [request.answer().status_code for request in (held, late)] == [200, 200]


def test_a_request_is_held_no_longer_than_the_spec_says(gateway: LiveGateway) -> None:
    """`scaling.hold_s`; the response has the cause."""
    gateway.serve(version("new", state=ModelState.FAILED, reason="weights-broken: cut off", hold_s=0.2))
    held = Asked(gateway)
    assert (held.answer().status_code, held.code()) == (503, "model_unavailable")
    assert "it is not ready after 0 s, weights-broken: cut off" in held.answer().json()["error"]["message"]


def test_requests_wait_for_a_tokenizer_that_cannot_be_loaded(gateway: LiveGateway, replica: Make) -> None:
    """Earlier and new ones; if no other version replaces it in time, 503 has the cause."""
    gateway.serve(version("old"))
    before = Asked(gateway, prompt="before")
    waiting(gateway, 1)
    gateway.serve(version("broken"))
    meanwhile = Asked(gateway, prompt="meanwhile")
    served = replica()
    prompts = prompts_of(served)
    until(lambda: gateway.connections >= 2, 10, "both are there")
    gateway.serve(version("old", served))
    assert [request.answer().status_code for request in (before, meanwhile)] == [200, 200]
    assert sorted(prompts) == ["oldbefore", "oldmeanwhile"]
    gateway.serve(version("broken", hold_s=0.1))
    assert Asked(gateway).code() == "tokenizer_unavailable"


def test_requests_behind_an_outdated_one_keep_their_turn(gateway: LiveGateway, replica: Make) -> None:
    """A slot that becomes free while prompts are tokenized again goes to the first waiting request."""
    served = replica(slots=1, stepped=True)
    gateway.serve(version("old", served))
    with filled(gateway, served, prompt="first"):
        prompts = prompts_of(served)
        requests = []
        for number, prompt in enumerate("abc", start=1):
            requests.append(Asked(gateway, prompt=prompt))
            waiting(gateway, number)
        gateway.controller.set(version("new", served))
        until(
            lambda: gateway.queue("m").dispatcher.blocked is None and gateway.queue("m").routes.source == "new",
            10,
            "all are read",
        )
    assert [request.answer().status_code for request in requests] == [200] * 3
    assert prompts == ["newa", "newb", "newc"]
