"""Errors on threads of `up`, and absences of the controller."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from orchestrator.cluster import follower as follower_module
from orchestrator.cluster.follower import CONTROLLER_AWAY_S, CONTROLLER_RETRY_S, ControllerFollower
from orchestrator.cluster.up import watched
from orchestrator.process.awake_clock import LATE_S
from orchestrator.process.failure import Failed
from workers.host.lifetime import Process


@pytest.mark.parametrize(
    ("raised", "id", "what"),
    [
        (Failed("port-in-use", "port 8000 is taken", ""), "port-in-use", "port 8000 is taken"),
        (KeyError("models"), "up-failed", "KeyError: 'models'"),
    ],
)
def test_an_error_on_a_thread_ends_the_fleet(raised: Exception, id: str, what: str) -> None:
    """A fleet that is no longer monitored must not look alive."""

    def work() -> None:
        raise raised

    failures: list[Failed] = []
    watched(work, failures.append)
    assert [(failure.problem.id, failure.problem.what) for failure in failures] == [(id, what)]


def test_a_thread_that_ends_normally_ends_nothing() -> None:
    """Nor does the end of the fleet, which all threads see."""
    failures: list[Failed] = []
    watched(lambda: None, failures.append)
    assert failures == []


class Absence:
    """A controller that never replies, and a clock that only `time.sleep` and the test advance."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, pauses: dict[int, float]) -> None:
        self.now, self.calls, self._pauses = 0.0, 0, pauses
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setattr(time, "sleep", self._sleep)

    def _sleep(self, seconds: float) -> None:
        self.now += seconds + self._pauses.get(self.calls, 0.0)

    def __call__(self) -> Any:
        self.calls += 1
        raise ray.exceptions.RayError("gone")


@pytest.mark.parametrize("pauses", [{}, {2: 3600.0}, {2: 60.0, 9: 60.0}])
def test_a_pause_of_up_is_not_an_absence_of_the_controller(
    monkeypatch: pytest.MonkeyPatch, pauses: dict[int, float]
) -> None:
    """It is called as often as without the pause, up to the length of one long gap, before the fleet is given up."""
    follower = ControllerFollower(print, Path("/nowhere"))
    absence = Absence(monkeypatch, pauses)
    with pytest.raises(Failed, match="controller-failed"):
        follower.ask(absence)
    allowed = CONTROLLER_AWAY_S / CONTROLLER_RETRY_S
    assert absence.calls == pytest.approx(allowed - len(pauses) * LATE_S / CONTROLLER_RETRY_S, abs=6)


@pytest.mark.parametrize("hangs", [False, True])
def test_a_controller_is_killed_only_if_it_does_not_reply_to_a_ping(
    monkeypatch: pytest.MonkeyPatch, hangs: bool
) -> None:
    """Its status waits for the replicas that it adopts, which takes half a minute on a cluster if one hangs."""
    process, killed = Process(4711, 1.0, "here"), list[Process]()
    monkeypatch.setattr(follower_module, "end_process", killed.append)
    monkeypatch.setattr(ray, "get", lambda reply, timeout: reply)
    replies = iter([late, late, lambda: "status"])
    follower = ControllerFollower(print, Path("/nowhere"))
    follower._process = process
    follower.controller = SimpleNamespace(process=SimpleNamespace(remote=late if hangs else lambda: process))

    assert follower.ask(lambda: next(replies)(), 12.0) == "status"
    assert killed == [process] * hangs


def late() -> Any:
    """A call of a controller that does not reply in time."""
    raise ray.exceptions.GetTimeoutError("late")
