"""What goes wrong around the controller: hosts whose answers are errors, calls that fail once, clocks that turn."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from orchestrator.control.decisions.replica_view import ReplicaView
from orchestrator.control.effects import HostLost, LogText
from tests.orchestrator import fakes
from tests.orchestrator.elsewhere import forbid_remote_sources
from tests.orchestrator.fakes import FakeCluster, Played, virtual, virtually
from tests.replica_configs import changed
from workers.artifacts.fetch.artifact_fetcher import FetchedArtifact, WantedArtifact
from workers.artifacts.fetch.progress import FetchStatus
from workers.messages.replica_config import ReplicaConfig
from workers.messages.status import Failure, ReplicaStatus

SPEC = """\
version: 1
hosts: {emulate: inf2.48xlarge}
models:
  m: {engine: echo, replicas: {min: %d, max: 2}%s}
"""
UNREADABLE = PermissionError(13, "Permission denied")


def play(
    tmp_path: Path, cluster: FakeCluster, story: Callable[[Played], Coroutine[Any, Any, None]], *, least: int = 1
) -> None:
    async def live() -> None:
        async with Played(tmp_path, cluster, SPEC % (least, "")) as fleet:
            await fleet.settled()
            await story(fleet)

    virtually(live)


class DeafLogs(FakeCluster):
    """Its hosts cannot read a log."""

    def __init__(self) -> None:
        super().__init__()
        self.questions = 0

    async def read_log(
        self, path: str, lines: int, host: str | None = None, offset: int | None = None, *, ended: bool = False
    ) -> LogText:
        self.questions += 1
        raise UNREADABLE


def test_an_unreadable_log_holds_no_cores(tmp_path: Path) -> None:
    """The dead replica is restarted, and its host is queried once for each death."""
    cluster = DeafLogs()

    async def story(fleet: Played) -> None:
        await cluster.find("m/0").die("killed")
        await fleet.settled()
        assert len(cluster.started) == 2
        assert cluster.questions == 1

    play(tmp_path, cluster, story)


@pytest.mark.parametrize("error", [OSError("no room"), asyncio.CancelledError()], ids=["an error", "a cancelled call"])
def test_cores_become_free_although_the_step_after_a_confirmed_death_fails_once(
    tmp_path: Path, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next round has the death confirmed again, and the replica is restarted on its cores."""
    cluster, failures = FakeCluster(), [error]

    async def story(fleet: Played) -> None:
        note_death = fleet.controller.hosts.note_death

        def failing(view: ReplicaView) -> None:
            if failures:
                raise failures.pop()
            note_death(view)

        monkeypatch.setattr(fleet.controller.hosts, "note_death", failing)
        await cluster.find("m/0").die("killed")
        await fleet.settled()
        assert (len(cluster.started), failures) == (2, [])

    play(tmp_path, cluster, story)


def test_unreadable_last_words_do_not_hide_a_death(tmp_path: Path) -> None:
    """AWS's engines leave messages behind; a death counts without them, too."""
    cluster = DeafLogs()

    async def story(fleet: Played) -> None:
        configs = fleet.controller.state.configs
        configs["m/0"] = changed(configs["m/0"], engine="transformers-neuronx")
        await cluster.find("m/0").die("killed")
        await fleet.until(lambda: fleet.replica("m/0")["state"] != "ready", "its death is seen", 10.0)

    play(tmp_path, cluster, story)


class NotStillDead(FakeCluster):
    """A process that its host cannot see dead."""

    def __init__(self) -> None:
        super().__init__()
        self.questions = 0

    async def end(self, name: str, pid: int | None, started: float | None, host: str | None = None) -> bool:
        self.questions += 1
        return False


def test_the_death_of_a_process_is_checked_once_a_second(tmp_path: Path) -> None:
    """And not as fast as the host responds."""
    cluster = NotStillDead()

    async def story(fleet: Played) -> None:
        await cluster.find("m/0").die("killed")
        await asyncio.sleep(30.0)
        assert 10 <= cluster.questions <= 32

    play(tmp_path, cluster, story)


class OneBadAnswer(FakeCluster):
    """The next watch fails with an unexpected error."""

    def __init__(self) -> None:
        super().__init__()
        self.bad = False

    async def watch(self, name: str, seen: int) -> ReplicaStatus:
        if self.bad:
            self.bad = False
            raise ValueError("once")
        return await super().watch(name, seen)


def test_a_replica_is_watched_again_after_an_unexpected_error(tmp_path: Path) -> None:
    """Its later death is detected."""
    cluster = OneBadAnswer()

    async def story(fleet: Played) -> None:
        cluster.bad = True
        await cluster.find("m/0").report(live=1)
        await fleet.until(lambda: not cluster.bad, "the bad answer")
        await asyncio.sleep(5.0)
        await cluster.find("m/0").die("killed")
        await fleet.until(lambda: len(cluster.started) == 2, "another start", 60.0)

    play(tmp_path, cluster, story)


class SlowStarts(FakeCluster):
    """A request for a process takes a while, as when a node seems to be lost."""

    async def start(self, config: ReplicaConfig) -> None:
        await asyncio.sleep(2.0)
        await super().start(config)


def test_a_process_that_is_stopped_while_it_is_requested_is_ended(tmp_path: Path) -> None:
    """Otherwise it would hold cores unnoticed."""
    cluster = SlowStarts()

    async def story(fleet: Played) -> None:
        await fleet.operator.load("m", by="tester")
        await fleet.until(lambda: fleet.model("m")["replicas"], "a replica that is asked for")
        await fleet.operator.unload("m", by="tester")
        await asyncio.sleep(30.0)
        assert cluster.started
        assert not cluster.living()
        assert not fleet.controller.state.views

    play(tmp_path, cluster, story, least=0)


class HeldStarts(FakeCluster):
    """Requests for processes wait until ``released`` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.released = asyncio.Event()

    async def start(self, config: ReplicaConfig) -> None:
        await self.released.wait()
        await super().start(config)


@virtual
async def test_a_process_whose_start_fails_while_it_is_requested_is_ended(tmp_path: Path) -> None:
    """Otherwise it would hold the cores of the next start."""
    cluster = HeldStarts()
    async with Played(tmp_path, cluster, SPEC % (1, ", deadlines: {start_s: 10}")) as fleet:
        await fleet.until(
            lambda: any(view.gone for view in fleet.controller.state.views.values()), "a failed start", 30
        )
        cluster.released.set()
        await fleet.settled()
        assert cluster.violations == []
        assert [replica.config.run.epoch for replica in cluster.living()] == [2]


TWO_HOSTS = """\
version: 1
hosts: {emulate: inf2.48xlarge, count: 2}
models:
  m: {%s}
"""


class LostAtStart(FakeCluster):
    """The node of the first start's host dies after the round that has planned it."""

    async def start(self, config: ReplicaConfig) -> None:
        if not self.started:
            await self.lose("inf2.48xlarge/0")
        await super().start(config)


class LostAtFetch(FakeCluster):
    """As above, during the fetch of what the replica loads."""

    async def fetch(
        self, wanted: WantedArtifact, host: str
    ) -> AsyncGenerator[FetchStatus | FetchedArtifact | Failure, None]:
        await self.lose("inf2.48xlarge/0")
        if host in self.lost_now:
            raise HostLost(host)
        async for reply in super().fetch(wanted, host):
            yield reply


@pytest.mark.parametrize(
    ("cluster", "model"), [(LostAtStart, "engine: echo"), (LostAtFetch, 'engine: cpu, source: "s3://models/one"')]
)
def test_a_replica_whose_host_is_lost_before_its_process_starts_elsewhere(
    cluster: type[FakeCluster],
    model: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The loss is an event; that start is neither a failure of the replica nor an error."""
    forbid_remote_sources(monkeypatch, tmp_path)

    async def story(fleet: Played) -> None:
        await fleet.settled()
        replica = fleet.replica("m/0")
        assert (replica["host"], replica["epoch"], replica["restarts"]) == ("inf2.48xlarge/1", 2, 0)
        assert fleet.happened().count("HostLost") == 1
        assert "Failed" not in fleet.happened()
        assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []

    fakes.play(tmp_path, TWO_HOSTS % model, story, cluster=cluster())


@virtual
async def test_routes_follow_the_schedules(tmp_path: Path) -> None:
    """An idle model that a schedule forbids to start, and then no longer, changes nothing but the routes."""
    schedules = ', scaling: {schedules: [{start: "10 * * * *", end: "20 * * * *", max: 0}]}'
    async with Played(tmp_path, FakeCluster(), SPEC % (0, schedules)) as fleet:
        await fleet.settled()
        controller, routes = fleet.controller, []
        version, stale = 0, 0
        for _ in range(1320):  # the schedule is over
            await asyncio.sleep(1.0)
            seen = await controller.change(version - 1, 0.0)
            if seen != version:  # what a gateway takes over
                version = seen
                routes.append(controller.routes().models[0].loads_on_request)
            stale = stale + 1 if routes[-1] != controller.routes().models[0].loads_on_request else 0
            assert stale <= 2  # seconds: a round of the controller
        assert {True, False} <= set(routes)
