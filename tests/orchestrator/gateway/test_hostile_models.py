"""A model whose folder is hostile harms its own requests, and no other model's."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from orchestrator.messages.replica_states import ModelState
from tests.checkpoints import CHAT_TEMPLATE, save_tokenizer
from tests.fleet import until
from tests.orchestrator.gateways import LiveGateway, routes
from workers.text import tokenizer_pool

ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
MEMORY = "{{ 'a' * 10 ** 10 }}"
CALL_S = 0.5  # of a call to a tokenizer here
MAX_DELAY_S = 2.0  # of the good model, much less than all calls of the others together
AT_ONCE = 4  # requests to each bad model, more than its threads


@pytest.fixture
def gateway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LiveGateway]:
    """One with a good model, and bad ones."""
    monkeypatch.setattr(tokenizer_pool, "CALL_S", CALL_S)
    templates = {"good": None, "endless": ENDLESS, "memory": MEMORY, "regex": None, "broken": None}
    for name, template in templates.items():
        save_tokenizer(tmp_path / name, *([] if template is None else [template]))
    (tmp_path / "broken" / "tokenizer.json").write_text("[" * 100_000)
    file = tmp_path / "regex" / "tokenizer.json"
    content = json.loads(file.read_text())
    pattern = {"Regex": "(a+)+[bc]"}
    content["pre_tokenizer"] = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
    file.write_text(json.dumps(content))
    models = [
        routes(name, state=ModelState.LOADING, engine="cpu", source=str(tmp_path / name), max_len=4096, holds=True)
        for name in templates
    ]
    live = LiveGateway(models=models)
    yield live
    live.close()


def chat(gateway: LiveGateway, model: str) -> httpx.Response:
    body: dict[str, Any] = {"model": model, "messages": [{"role": "user", "content": "a" * 40}]}
    return httpx.post(f"{gateway.url}/v1/chat/completions", json=body, timeout=60)


def outcome(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


def test_bad_folders_do_not_affect_other_models(gateway: LiveGateway, caplog: pytest.LogCaptureFixture) -> None:
    """While the chats of four bad models fail by their deadline, each with its own status and without a traceback, a
    good model tokenizes.
    """
    bad = {
        "endless": (500, "tokenizer_failed"),
        "memory": (400, "chat_template_failed"),
        "regex": (500, "tokenizer_failed"),
        "broken": (503, "tokenizer_unavailable"),
    }

    def tokenize() -> httpx.Response:
        return gateway.http.post("/tokenize", json={"model": "good", "prompt": "hello"})

    assert tokenize().status_code == 200
    outcomes: list[tuple[str, tuple[int, str]]] = []
    threads = [
        threading.Thread(target=lambda model=model: outcomes.append((model, outcome(chat(gateway, model)))))
        for model in bad
        for _ in range(AT_ONCE)
    ]
    with caplog.at_level(logging.WARNING):
        for thread in threads:
            thread.start()
        slowest, answered = 0.0, 0
        while any(thread.is_alive() for thread in threads):
            began = time.monotonic()
            assert tokenize().status_code == 200
            slowest = max(slowest, time.monotonic() - began)
            answered += 1
    assert sorted(outcomes) == sorted([*bad.items()] * AT_ONCE)
    assert slowest < MAX_DELAY_S, f"of {answered}"
    assert [record for record in caplog.records if record.exc_info] == []


@pytest.fixture
def idle_gateway(tmp_path: Path) -> Iterator[LiveGateway]:
    """One whose models `endless` and `good` are unloaded: they have tokenizers of their own."""
    models = []
    for name, template in {"endless": ENDLESS, "good": CHAT_TEMPLATE}.items():
        save_tokenizer(tmp_path / name, template)
        models.append(routes(name, state=ModelState.UNLOADED, engine="cpu", source=str(tmp_path / name), holds=True))
    live = LiveGateway(models=models)
    yield live
    live.close()


def tokenizer_processes(gateway: LiveGateway) -> int:
    return gateway._server.gateway._tokenizers._pool._processes()


def test_tokenizer_processes_start_with_a_request_and_end_with_the_model(idle_gateway: LiveGateway) -> None:
    before = tokenizer_processes(idle_gateway)
    for model in ("good", "endless"):
        assert idle_gateway.http.post("/tokenize", json={"model": model, "prompt": "hello"}).status_code == 200
    used = tokenizer_processes(idle_gateway)

    idle_gateway.controller.set()

    assert (before, used) == (0, 4)
    until(lambda: tokenizer_processes(idle_gateway) == 0, 10, "they have ended")


def test_a_client_may_retry_when_no_more_processes_may_start(
    idle_gateway: LiveGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """503 with Retry-After while another model's calls use all that there may be; then it is served."""
    monkeypatch.setattr(tokenizer_pool, "MAX_PROCESSES", 2)
    monkeypatch.setattr(tokenizer_pool, "ROOM_S", 0.1)
    monkeypatch.setattr(tokenizer_pool, "CALL_S", 4 * CALL_S)  # so that the other request meets the call
    busy = threading.Thread(target=chat, args=(idle_gateway, "endless"))
    busy.start()
    body = {"model": "good", "prompt": "hello"}

    def refused() -> httpx.Response | None:
        answer = idle_gateway.http.post("/tokenize", json=body)
        return None if answer.status_code == 200 else answer

    answer = until(refused, 20, "the other model's call uses all processes")  # between two of its calls there is room
    busy.join()
    assert (outcome(answer), answer.headers["retry-after"]) == ((503, "tokenizer_busy"), "2")
    until(lambda: refused() is None, 10, "it is served")  # the killed process may end after its request
