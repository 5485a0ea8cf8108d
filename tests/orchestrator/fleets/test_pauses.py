"""Processes of a running fleet that stand still for a while, one by one and all together, and sockets that vanish."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator

import psutil
import pytest

from orchestrator.access.audit_log import Audit
from orchestrator.gateway.telemetry.peers import HUNG_S
from orchestrator.process.home import Home
from tests.fleet import LiveFleet, until
from tests.orchestrator.fleets.test_two_gateways import all_stand_by

pytestmark = [pytest.mark.soak, pytest.mark.timeout(500)]

SPEC = """\
version: 1
hosts: {emulate: inf2.48xlarge}
defaults: {engine: echo}
models:
  m: {tp_degree: 2, replicas: 2, deadlines: {step_s: 10}, engine_options: {step_ms: 20}}
"""
PAUSE_S = 20.0
LATE_S = 20.0  # in which what was taken for dead would be ended


@pytest.fixture(scope="module")
def fleet() -> Iterator[LiveFleet]:
    with LiveFleet(SPEC, spare=True) as fleet:
        yield fleet.wait_ready()


def answers(fleet: LiveFleet, timeout: float = 5.0) -> bool:
    body = {"model": "m", "prompt": "x", "max_tokens": 2}
    with contextlib.suppress(Exception):
        return fleet.http.post("/v1/completions", json=body, timeout=timeout).status_code == 200
    return False


def stop_for(pids: list[int], seconds: float) -> None:
    try:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        threading.Event().wait(seconds)
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def ready_pids(fleet: LiveFleet) -> list[int]:
    (model,) = fleet.status()["models"]
    return [replica["pid"] for replica in model["replicas"] if replica["state"] == "ready"]


def everything(fleet: LiveFleet) -> list[int]:
    """Every process of the fleet, `up` and its child first."""
    up = psutil.Process(fleet.process.pid)
    return list(dict.fromkeys([up.pid, *(child.pid for child in up.children(recursive=True)), *fleet.processes()]))


def listening(fleet: LiveFleet) -> int:
    """The gateway's process."""
    pids = [
        net_connection.pid
        for net_connection in psutil.net_connections("tcp")
        if net_connection.status == "LISTEN" and net_connection.laddr.port == fleet.port  # type: ignore[union-attr]
    ]
    return next(pid for pid in pids if pid)


@pytest.mark.parametrize("paused", ["controller", "all"])
def test_a_pause_of_20_seconds_ends_nothing(fleet: LiveFleet, paused: str) -> None:
    """Neither a replica nor a gateway, and a running stream continues to its end."""
    before, gateway = ready_pids(fleet), listening(fleet)
    assert len(before) == 2
    text: list[str] = []

    def stream() -> None:
        body = {"model": "m", "prompt": "p", "max_tokens": 300, "stream": True}
        with fleet.http.stream("POST", "/v1/completions", json=body, timeout=120) as answer:
            text.extend(answer.iter_lines())

    reader = threading.Thread(target=stream)
    reader.start()
    stop_for(everything(fleet) if paused == "all" else [fleet.controller_pid()], PAUSE_S)
    reader.join(60)
    assert text[-2:] == ["data: [DONE]", ""]
    until(lambda: "Paused" in fleet.corewright("events", "--since", "0").stdout, 30, "the pause is told")
    deadline = time.monotonic() + LATE_S
    while time.monotonic() < deadline:
        assert ready_pids(fleet) == before
        threading.Event().wait(1.0)
    assert listening(fleet) == gateway
    assert answers(fleet)


def test_a_raylet_that_stalls_for_20_seconds_has_no_effect(fleet: LiveFleet) -> None:
    """It used to end the fleet."""
    before = ready_pids(fleet)
    stop_for([fleet.raylet_pid(0)], PAUSE_S)
    deadline = time.monotonic() + LATE_S
    while time.monotonic() < deadline:
        assert fleet.process.poll() is None, fleet.output()
        threading.Event().wait(1.0)
    assert ready_pids(fleet) == before
    assert answers(fleet)


def test_a_gateway_that_hangs_is_replaced_within_seconds(fleet: LiveFleet) -> None:
    """The spare one kills it and takes the port."""
    until(lambda: all_stand_by(fleet, 1), 60, "one gateway listens, and one stands by")
    hung = listening(fleet)
    began = time.monotonic()
    os.kill(hung, signal.SIGSTOP)
    until(lambda: answers(fleet, 1.0), 30, "another one answers")
    took = time.monotonic() - began
    assert listening(fleet) != hung
    assert took < HUNG_S + 5.0
    print(f"a hung gateway: {took:.1f} s")  # noqa: T201


def test_removed_sockets_cost_no_answer(fleet: LiveFleet) -> None:
    """Nor those of a gateway that starts after that."""
    sockets = Home(fleet.home).sockets
    for path in list(sockets.rglob("*")):
        if path.is_socket() and "ray" not in path.parts:
            path.unlink()
    assert answers(fleet)
    until(lambda: all_stand_by(fleet, 1), 60, "one gateway listens, and one stands by")
    os.kill(listening(fleet), signal.SIGKILL)
    until(lambda: answers(fleet), 30, "another gateway answers")
    until(lambda: fleet.http.get("/readyz").status_code == 200, 30, "ready")


def test_a_raylet_that_dies_ends_the_fleet_with_a_report_and_leaves_nothing(fleet: LiveFleet) -> None:
    """On the terminal and in the audit log, with an exit code that makes systemd restart it. Runs last."""
    os.kill(fleet.raylet_pid(0), signal.SIGKILL)
    assert fleet.process.wait(90) == 1
    last = Audit(Home(fleet.home).audit).entries(1)[0]
    assert last.action == "end"
    assert last.arguments["reason"] in ("controller-failed", "up-died")
    assert f"error: {last.arguments['reason']}: " in fleet.output()
    assert not Home(fleet.home).record_file.exists()
    assert fleet.processes() == []
