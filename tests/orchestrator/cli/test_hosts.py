"""`drain --wait` and `hosts wait`: the steps of the maintenance of a host."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest

from orchestrator.cli import operate
from orchestrator.cli.main import run
from orchestrator.messages.fleet_status import FleetStatus
from tests.orchestrator.fakefleet import STATUS, TOKEN, LiveAdmin, status_of

HOST = "inf2.48xlarge/0"
Change = Callable[[dict[str, Any]], object]


@pytest.fixture
def fleet(admin: LiveAdmin, monkeypatch: pytest.MonkeyPatch) -> LiveAdmin:
    monkeypatch.setenv("COREWRIGHT_URL", admin.url)
    monkeypatch.setenv("COREWRIGHT_TOKEN", TOKEN)
    monkeypatch.setattr(operate, "POLL_S", 0.01)
    return admin


def tells(fleet: LiveAdmin, monkeypatch: pytest.MonkeyPatch, *changes: Change) -> None:
    """Each status has one change more than the one before; the last one stays."""
    statuses: list[FleetStatus] = []
    status = copy.deepcopy(STATUS)
    for change in changes:
        change(status)
        statuses.append(status_of(copy.deepcopy(status)))
    monkeypatch.setattr(fleet.fleet, "status", lambda: statuses.pop(0) if len(statuses) > 1 else statuses[0])


def host(**values: Any) -> Change:
    return lambda status: status["hosts"][0].update(values)


def test_drain_waits_until_the_host_is_empty(
    fleet: LiveAdmin, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And shows it as it is then, with the node that a restart replaces."""
    tells(fleet, monkeypatch, host(draining=True, busy=2), host(busy=1), host(busy=0))
    assert run(["drain", HOST, "--wait", "-o", "json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["name"], shown["busy"], shown["node"]) == (HOST, 0, "4a5c")


def test_drain_waits_until_a_replica_is_replaced(
    fleet: LiveAdmin, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is gone, and its successor is ready."""
    replicas = STATUS["models"][0]["replicas"]
    (first,) = [replica for replica in replicas if replica["id"] == "chat/0"]
    assert first["epoch"] == 1, "as the drain says"
    tells(
        fleet,
        monkeypatch,
        lambda status: status.update(settled=False),
        lambda status: status["models"][0]["replicas"][0].update(epoch=2),
        lambda status: status.update(settled=True),
    )
    assert run(["drain", "chat/0", "--wait"]) == 0
    assert capsys.readouterr().out == "chat/0: replaced\n"
    assert fleet.fleet.status().settled


@pytest.mark.parametrize(
    ("command", "changes", "id"),
    [
        (f"drain {HOST} --wait", (host(draining=True), host(draining=False)), "drain-ended"),
        (f"drain {HOST} --wait --timeout 0.05", (host(draining=True, busy=3),), "wait-late"),
        (f"hosts wait {HOST} --timeout 0.05", (host(lost=True),), "wait-late"),
        (f"hosts wait {HOST} --timeout 0.05", (lambda status: status.update(settled=False),), "wait-late"),
        (f"hosts wait {HOST} --timeout 0.05 --after 4a5c", (host(),), "wait-late"),
        (f"hosts wait {HOST} --timeout 0.05", (host(node=None),), "wait-late"),
        ("hosts wait other/1", (host(),), "host-unknown"),
    ],
)
def test_a_wait_that_fails_says_why(
    command: str,
    changes: tuple[Change, ...],
    id: str,
    fleet: LiveAdmin,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With exit code 1."""
    tells(fleet, monkeypatch, *changes)
    assert run(command.split()) == 1
    assert f"error: {id}: " in capsys.readouterr().err


def test_hosts_wait_ends_once_the_host_is_back_and_every_replica_is_ready(
    fleet: LiveAdmin, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A node that Ray has not missed yet is not taken for the new one."""
    tells(
        fleet,
        monkeypatch,
        host(),
        host(lost=True, node=None),
        host(lost=False, node="77aa"),
        lambda status: status.update(settled=False),
        lambda status: status.update(settled=True),
    )
    assert run(["hosts", "wait", HOST, "--after", "4a5c"]) == 0
    assert capsys.readouterr().out == f"{HOST}: ready\n"
