"""Processes of a fleet that hang are replaced: they are stopped here, which no thread of their own could notice."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator

import pytest

from tests.fleet import LiveFleet, until

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]

SPEC = """\
version: 1
hosts: {emulate: inf2.48xlarge}
defaults: {engine: echo}
models:
  a: {tp_degree: 2}
  b: {tp_degree: 2}
"""
REPLACED_S = 30.0
SLACK_S = 15.0  # of a busy machine


@pytest.fixture(scope="module")
def fleet() -> Iterator[LiveFleet]:
    fleet = LiveFleet(SPEC, spare=True)
    try:
        yield fleet.wait_ready()
    finally:
        for pid in fleet.processes():  # a stopped process ends with SIGKILL only
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        fleet.stop()
        fleet.clean()


def answers(fleet: LiveFleet, model: str) -> bool:
    with contextlib.suppress(Exception):
        body = {"model": model, "prompt": "x", "max_tokens": 2}
        return fleet.http.post("/v1/completions", json=body, timeout=5.0).status_code == 200
    return False


def test_a_host_actor_that_hangs_is_replaced_and_a_replica_killed_meanwhile_returns(fleet: LiveFleet) -> None:
    """The other model is served throughout."""
    (actor,) = fleet.named_pids("HostActor")
    os.kill(actor, signal.SIGSTOP)
    began = time.monotonic()
    os.kill(next(pid for pid in fleet.named_pids("Replica[a]")), signal.SIGKILL)

    assert answers(fleet, "b")
    until(lambda: answers(fleet, "a"), REPLACED_S + SLACK_S, "the killed replica is back")
    assert fleet.named_pids("HostActor") != [actor]
    assert time.monotonic() - began < REPLACED_S + SLACK_S
    assert answers(fleet, "b")


def test_a_controller_that_hangs_is_replaced(fleet: LiveFleet) -> None:
    """`up` reports it, and the new one adopts the replicas."""
    replicas = fleet.replica_pids()
    hung = fleet.controller_pid()
    os.kill(hung, signal.SIGSTOP)

    until(lambda: "the controller hangs" in fleet.output(), REPLACED_S + SLACK_S, "up notices")
    until(lambda: fleet.named_pids("ControllerActor") not in ([], [hung]), 15, "Ray has started another one")
    until(lambda: fleet.corewright("status").returncode == 0, 20, "it replies")
    assert fleet.replica_pids() == replicas
    assert answers(fleet, "a")


def test_a_replica_that_hangs_while_its_controller_is_killed_is_replaced_on_its_cores(fleet: LiveFleet) -> None:
    """The new controller cannot ask it for its process; its cores are not taken for those of somebody else."""
    (stopped,) = fleet.named_pids("Replica[a]")
    os.kill(stopped, signal.SIGSTOP)
    os.kill(fleet.controller_pid(), signal.SIGKILL)
    began = time.monotonic()

    until(lambda: answers(fleet, "a"), REPLACED_S + SLACK_S, "the replica is replaced")
    took_s = time.monotonic() - began
    assert fleet.named_pids("Replica[a]") != [stopped]
    quarantined = [host["quarantine"] for host in fleet.status()["hosts"]]
    assert quarantined == [[]], took_s


def test_all_gateways_of_a_machine_that_are_killed_together_are_back_soon(fleet: LiveFleet) -> None:
    """The spare one, too: Ray Serve starts others."""
    gateways = until(lambda: len(pids := fleet.named_pids("ServeReplica:")) == 2 and pids, 30, "both have started")
    for pid in gateways:
        os.kill(pid, signal.SIGKILL)
    began = time.monotonic()
    until(lambda: answers(fleet, "a"), 60, "it answers")
    assert time.monotonic() - began < SLACK_S, f"{time.monotonic() - began:.1f} s"
