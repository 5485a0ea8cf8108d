"""`transformers serve` under a fleet (`make test VLLM=1`): a server of OpenAI's API that is not made for Neuron."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.checkpoints import make_checkpoint
from tests.fleet import LiveFleet, until
from tests.orchestrator.clients import Admin

PYTHON = os.environ.get("COREWRIGHT_VLLM_PYTHON", "")
START_S = 300.0
GONE_S = 10.0  # with a grace of 5 s
SPEC = """\
hosts: {{emulate: inf2.48xlarge}}
models:
  served:
    engine: server
    source: {source}
    tp_degree: 2
    server:
      command: [{command}, serve, "{{model}}", --device, cpu, --host, 127.0.0.1, --port, "{{port}}"]
      env: {{HF_HUB_OFFLINE: "1"}}
      slots: 1
"""
ASKED = {"model": "served", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 12, "temperature": 0}

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not PYTHON, reason="set COREWRIGHT_VLLM_PYTHON, or use make test VLLM=1"),
]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveFleet]:
    source = make_checkpoint(tmp_path_factory.mktemp("llama"), "llama", eos=None)
    with LiveFleet(SPEC.format(source=source, command=Path(PYTHON).with_name("transformers"))) as fleet:
        yield fleet.wait_ready(START_S)
        fleet.stop()


def chat(fleet: LiveFleet, **fields: Any) -> Any:
    answer = fleet.http.post("/v1/chat/completions", json={**ASKED, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def text(fleet: LiveFleet) -> str:
    return str(chat(fleet)["choices"][0]["message"]["content"])


def processes(fleet: LiveFleet) -> list[psutil.Process]:
    actor = psutil.Process(Admin(fleet.home).replica("served/0")["pid"])
    return [actor, *actor.children(recursive=True)]


def until_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, GONE_S)
    assert not alive


def test_a_stream_has_the_text_of_the_whole_answer_and_its_usage(fleet: LiveFleet) -> None:
    whole = chat(fleet)
    body = {**ASKED, "stream": True, "stream_options": {"include_usage": True}}
    lines = fleet.http.post("/v1/chat/completions", json=body).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]

    pieces = [choice["delta"].get("content") or "" for event in events for choice in event["choices"]]
    assert "".join(pieces) == whole["choices"][0]["message"]["content"]
    assert lines[-2] == "data: [DONE]"
    assert events[-1]["usage"] == whole["usage"]
    assert whole["usage"]["completion_tokens"] == ASKED["max_tokens"]
    assert {whole["model"], *(event["model"] for event in events)} == {"served"}


def test_a_client_that_leaves_ends_its_request(fleet: LiveFleet) -> None:
    """The slot is free for the next one."""
    body = {**ASKED, "stream": True, "max_tokens": 400}
    with fleet.http.stream("POST", "/v1/chat/completions", json=body) as answer:
        next(answer.iter_lines())

    until(lambda: Admin(fleet.home).replica("served/0")["live"] == 0, GONE_S, "the slot is free")
    assert text(fleet)


def test_an_error_of_the_server_reaches_the_client(fleet: LiveFleet) -> None:
    answer = fleet.http.post("/v1/chat/completions", json={**ASKED, "x_unknown": 1})

    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "rejected_by_server")


def test_a_killed_server_returns_and_an_unloaded_one_has_no_process(fleet: LiveFleet) -> None:
    expected, before, admin = text(fleet), processes(fleet), Admin(fleet.home)

    before[2].send_signal(signal.SIGKILL)

    until_gone(before)
    until(lambda: admin.replica("served/0")["state"] == "ready", START_S, "the replica is ready again")
    assert text(fleet) == expected
    after = processes(fleet)
    assert fleet.corewright("unload", "served").returncode == 0
    until_gone(after)
