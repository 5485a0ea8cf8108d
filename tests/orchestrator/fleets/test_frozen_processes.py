"""Processes of a fleet that hang are replaced: they are stopped here, which no thread of their own could notice.

Then it loses its journal and its home.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from orchestrator.cli.app import DEMO
from tests.fleet import LiveFleet, until
from tests.orchestrator.clients import Streamed

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]

SPEC = f"""\
version: 1
hosts: {{emulate: inf2.48xlarge}}
defaults: {{engine: echo}}
models:
  a: {{tp_degree: 2, engine_options: {{step_ms: 20}}}}
  b: {{tp_degree: 2, max_len: 4096, engine_options: {{step_ms: 20}}}}
  text: {{source: {DEMO.parent / "models" / "tiny"}, engine: cpu, max_len: 128}}
"""
STALLED_S = 3.0  # between two tokens of a stream, on a busy machine; frozen processes have stalled some for 5 to 19 s
REPLACED_S = 30.0
SLACK_S = 15.0  # of a busy machine


@pytest.fixture(scope="module")
def fleet() -> Iterator[LiveFleet]:
    with LiveFleet(SPEC, spare=True) as fleet:
        yield fleet.wait_ready()
        fleet.stop()


def answers(fleet: LiveFleet, model: str) -> bool:
    with contextlib.suppress(Exception):
        body = {"model": model, "prompt": "x", "max_tokens": 2}
        return fleet.http.post("/v1/completions", json=body, timeout=5.0).status_code == 200
    return False


def test_frozen_tokenizers_are_replaced_and_no_running_stream_stalls(fleet: LiveFleet) -> None:
    """Replicas make text of tokens by themselves, and requests for other models need no tokenizer of this one."""
    assert answers(fleet, "text")  # its tokenizer runs
    streams = [Streamed(fleet, "b", "undisturbed", 500) for _ in range(2)]
    assert all(stream.begun.wait(20) for stream in streams)
    for pid in fleet.named_pids("tokenizer_process"):
        os.kill(pid, signal.SIGSTOP)

    until(lambda: answers(fleet, "text"), REPLACED_S, "another tokenizer works")
    assert all(stream.done.wait(60) for stream in streams)
    assert [stream.error for stream in streams] == [None, None]
    assert max(stream.longest_gap_s for stream in streams) < STALLED_S


def test_a_frozen_warm_process_keeps_no_replica_from_its_start(fleet: LiveFleet) -> None:
    """It starts as a fresh process."""
    for pid in until(lambda: fleet.named_pids("fork_server"), 30, "the warm process runs"):
        os.kill(pid, signal.SIGSTOP)
    before = fleet.replica("text/0")["pid"]
    os.kill(before, signal.SIGKILL)
    until(lambda: fleet.replica("text/0")["pid"] not in (before, None), REPLACED_S, "another process")
    until(lambda: answers(fleet, "text"), REPLACED_S + SLACK_S, "the replica is back")


def test_requests_wait_for_a_replica_however_often_it_was_killed(fleet: LiveFleet) -> None:
    """The third kill in a row makes its start pause, for less than requests are held."""
    statuses: list[int] = []
    over = threading.Event()

    def ask() -> None:
        while not over.is_set():
            body = {"model": "a", "prompt": "x", "max_tokens": 2}
            statuses.append(fleet.http.post("/v1/completions", json=body).status_code)
            over.wait(0.05)

    client = threading.Thread(target=ask)
    client.start()
    try:
        for _ in range(3):
            before = fleet.replica("a/0")["pid"]
            os.kill(before, signal.SIGKILL)
            until(
                lambda: (replica := fleet.replica("a/0"))["state"] == "ready" and replica["pid"] != before,  # noqa: B023
                REPLACED_S + SLACK_S,
                "the replica is back",
            )
    finally:
        over.set()
        client.join(60)
    assert set(statuses) == {200}


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


# The journal, then the home folder, is taken away


def test_a_controller_that_finds_a_link_in_place_of_its_journal_serves_and_says_so(fleet: LiveFleet) -> None:
    """It is restarted after a kill, and adopts the replicas."""
    journal = fleet.home / "journal"
    journal.rename(fleet.home / "moved")
    journal.symlink_to("moved")
    before = fleet.controller_pid()
    os.kill(before, signal.SIGKILL)
    until(lambda: "journal-lost" in fleet.corewright("status").stdout, 60, "the new controller reports it")

    assert fleet.controller_pid() != before
    assert fleet.http.post("/v1/completions", json={"model": "a", "prompt": "a"}).status_code == 200
    assert fleet.process.poll() is None


def test_a_fleet_without_its_home_serves_refuses_an_apply_and_can_be_ended(fleet: LiveFleet) -> None:
    """`status` says why, and `down` leaves no process. The last test."""
    spec = fleet.home.with_name(f"{fleet.home.name}.yaml")
    spec.write_text(SPEC.replace("a: {tp_degree: 2", "a: {tp_degree: 4"))

    def removed() -> bool:
        shutil.rmtree(fleet.home, ignore_errors=True)  # processes still write to it
        return not fleet.home.exists()

    until(removed, 10, "the home is gone")
    try:
        until(lambda: "journal-lost" in fleet.corewright("status").stdout, 30, "the status says so")
        applied = fleet.corewright("apply", "--yes", str(spec))
        answer = fleet.http.post("/v1/completions", json={"model": "a", "prompt": "a b", "max_tokens": 2})
        ended = fleet.corewright("down")
    finally:
        spec.unlink()

    assert (applied.returncode, "journal-lost" in applied.stderr) == (1, True)
    assert answer.status_code == 200
    assert (ended.returncode, ended.stdout + ended.stderr) == (0, "draining\nstopped\n")
    assert fleet.process.wait(30) == 0
    assert fleet.processes() == []
