"""A pinned model on full cores, and updates of it that fail: what its clients see meanwhile."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.fleet import LiveFleet, until
from tests.stubs import stub_checkpoint

pytestmark = [pytest.mark.soak, pytest.mark.timeout(400)]

TINY = Path(__file__).parents[3] / "placements" / "examples" / "models" / "tiny"
SPEC = """\
version: 1
hosts: {{emulate: inf2.xlarge}}
models:
  m: {{source: {source}, engine: cpu, tp_degree: 2, cores: ["0-1"], max_len: 256, update: {{strategy: {strategy}}}}}
"""
OVER_S = 180.0


class Clients:
    """Three that ask one question after the other until the end of the block; what each answer was."""

    def __init__(self, live: LiveFleet) -> None:
        self.codes: list[int | str] = []
        self._ended = threading.Event()
        self._url = f"{live.url}/v1/chat/completions"
        self._threads = [threading.Thread(target=self._ask, daemon=True) for _ in range(3)]

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        until(lambda: len(self.codes) > 3, 60.0, "they are answered")
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join(OVER_S)

    def _ask(self) -> None:
        body = {"model": "m", "messages": [{"role": "user", "content": "What is a NeuronCore?"}], "max_tokens": 8}
        while not self._ended.is_set():
            answer = httpx.post(self._url, json=body, timeout=OVER_S)
            self.codes.append(200 if answer.status_code == 200 else answer.text)
            time.sleep(0.1)  # a client's pace


@pytest.fixture
def live(tmp_path: Path) -> Iterator[LiveFleet]:
    with LiveFleet(SPEC.format(source=TINY, strategy="hold")) as fleet:
        yield fleet.wait_ready()


def applied(live: LiveFleet, source: Path | str, strategy: str = "hold") -> str:
    """What the apply printed, of whatever exit code."""
    live.spec.write_text(SPEC.format(source=source, strategy=strategy))
    done = live.corewright("apply", str(live.spec), "--yes")
    return f"{done.returncode} {done.stdout}{done.stderr}"


def rolled_back(live: LiveFleet, revision: int) -> bool:
    status = live.status()
    return bool(status["revision"] == revision and status["rollout"]["state"] == "complete")


def test_failing_updates_cost_no_request(live: LiveFleet, tmp_path: Path) -> None:
    """A missing folder is rejected; a tokenizer that does not load is detected before the only replica drains, whose
    process stays; and with `hold`, requests wait during an update whose weights only fail at the start.
    """
    pid = live.replica("m/0")["pid"]
    with Clients(live) as clients:
        outcome = applied(live, "./nowhere")
        assert outcome.startswith("1 ")
        assert "model-not-found" in outcome

        unreadable = shutil.copytree(TINY, tmp_path / "unreadable")
        (unreadable / "tokenizer.json").write_text("{}")
        assert applied(live, unreadable, "in_place").startswith("0 ")
        until(lambda: rolled_back(live, 3), OVER_S, "the second is rolled back")
        assert live.replica("m/0")["pid"] == pid

        weightless = shutil.copytree(TINY, tmp_path / "weightless")
        (weightless / "model.safetensors").write_bytes(
            (stub_checkpoint(tmp_path / "stub") / "model.safetensors").read_bytes()
        )
        assert applied(live, weightless).startswith("0 ")
        until(lambda: rolled_back(live, 5), OVER_S, "the third is rolled back")
        assert live.replica("m/0")["pid"] != pid
    assert [code for code in clients.codes if code != 200] == []
    events = json.loads(live.corewright("events", "--since", "0", "-o", "json").stdout)
    failed = [event["message"] for event in events["events"] if event["reason"] == "RolloutFailed"]
    assert ["bad-tokenizer" in failed[0], "weights-mismatch" in failed[1]] == [True, True]
