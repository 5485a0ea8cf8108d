"""How a fleet ends: in order, in a hurry, by kill -9, and before it was ready. Each test has a fleet of its own."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from orchestrator.process.home import Home
from tests.fleet import LiveFleet, until
from tests.orchestrator.clients import Streamed, complete
from tests.stubs import stub_checkpoint
from workers.host.core_claims import held_cores

SPEC = """\
version: 1
name: echoes
hosts: {emulate: inf2.48xlarge}
defaults: {engine: echo, max_len: 4096, engine_options: {step_ms: 5}}
models:
  alpha: {tp_degree: 8, cores: ["0-7"]}
  beta: {tp_degree: 2, replicas: 2, max_batch: 8}
"""


@pytest.mark.live
def test_after_kill_9_of_the_daemon_the_next_up_removes_the_leftovers(home: Path) -> None:
    """Within 10 s of the next `up` no process and no claim of the old fleet is left, and the new one becomes ready."""
    first = LiveFleet(SPEC, home=home).wait_ready()
    old = [psutil.Process(pid) for pid in first.processes()]
    assert old
    first.process.kill()
    first.process.wait()

    began = time.monotonic()
    second = LiveFleet(SPEC, home=home)
    until(lambda: not any(process.is_running() for process in old), 10, "the old processes are gone")
    assert time.monotonic() - began < 10
    second.wait_ready()
    claims = held_cores(Home(home).claims(0))
    assert not set(claims.values()) & {process.pid for process in old}
    assert len(claims) == 12
    assert second.stop(signal.SIGINT) == 0
    assert second.processes() == []


@pytest.mark.live
def test_a_replica_that_cannot_start_shows_the_reason_while_others_serve(home: Path, tmp_path: Path) -> None:
    """`status` reports weights that do not match their config.json, with the last log lines."""
    live = LiveFleet(
        "hosts: {emulate: inf2.xlarge}\n"
        "models:\n"
        "  good: {engine: echo}\n"
        f"  bad: {{source: {stub_checkpoint(tmp_path / 'weightless')}, engine: cpu}}\n",
        home=home,
    )

    def failed() -> Any:
        result = live.corewright("status", "-o", "json")
        models = json.loads(result.stdout)["models"] if result.returncode == 0 else []
        return next((r for m in models for r in m["replicas"] if r["id"] == "bad/0" and r["log"]), None)

    def serves() -> bool:
        try:
            return bool(complete(live, "good", max_tokens=2).status_code == 200)
        except httpx.ConnectError:  # the gateway is still starting: the replica failed sooner
            return False

    replica = until(failed, 60, "the cause is told")
    assert "weights-mismatch" in replica["reason"]
    assert "weightless" in replica["reason"]
    assert any("weights-mismatch" in line for line in replica["log"])
    until(serves, 30, "the other model serves")
    refused = complete(live, "bad", max_tokens=2)
    assert (refused.status_code, refused.json()["error"]["type"]) == (503, "service_unavailable")
    assert live.http.get("/readyz").status_code == 503
    assert live.stop() == 1  # it never was ready
    assert live.processes() == []


@pytest.mark.live
def test_a_second_signal_ends_at_once(home: Path) -> None:
    """With a stream that would prolong the drain, the second signal ends the fleet within seconds, completely."""
    live = LiveFleet(SPEC, home=home).wait_ready()
    stream = Streamed(live, "beta", "never ends", 4000)
    assert stream.begun.wait(20)
    live.process.send_signal(signal.SIGTERM)
    until(lambda: "draining" in live.output(), 10, "the drain has begun")
    until(lambda: (record := Home(home).read_record()) and record.ending, 10, "its record says so, to `down`")

    began = time.monotonic()
    live.process.send_signal(signal.SIGTERM)

    assert live.process.wait(15) == 1
    assert time.monotonic() - began < 10
    assert "stopping immediately" in live.output()
    until(lambda: live.processes() == [], 5, "nothing is left")
    assert held_cores(Home(home).claims(0)) == {}


@pytest.mark.live
def test_a_signal_during_the_start_of_the_fleet_ends_it_and_leaves_nothing(home: Path, tmp_path: Path) -> None:
    """Ctrl-C before ready: exit code 1, no process, no record. The fleet never becomes ready, since one model does not
    start.
    """
    gone = f"  gone: {{source: {stub_checkpoint(tmp_path / 'weightless')}, engine: cpu, engine_options: {{}}}}\n"
    live = LiveFleet(SPEC + gone, home=home)
    until(lambda: "starting the controller" in live.output(), 60, "it starts")

    assert live.stop(signal.SIGINT) == 1

    assert "SIGINT: ended before the fleet was ready" in live.output()
    assert live.processes() == []
    assert not Home(home).record_file.exists()


@pytest.mark.live
def test_down_ends_a_fleet_whose_controller_has_not_started(home: Path) -> None:
    """It waits until nothing is left."""
    live = LiveFleet(SPEC, home=home)
    until(lambda: "starting Ray" in live.output(), 60, "it starts")

    assert live.corewright("down").returncode == 0

    assert live.process.wait(10) == 1
    assert "SIGTERM: ended before the fleet was ready" in live.output()
    assert live.processes() == []
    assert not Home(home).record_file.exists()
