"""An upgrade as the controller of the new version sees it: replicas of the old one are adopted, then replaced."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from collections.abc import Awaitable, Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec.structs
import pytest

from orchestrator.api.refused import Refused
from orchestrator.records.journal import Journal
from tests.orchestrator.fakes import FakeCluster, Played, virtually
from workers.host.interpreter import FOLDERS, Interpreter
from workers.messages.build import Build
from workers.messages.status import Failure

OLD = Build("0.0.9", "/opt/corewright-0.0.9/bin/python")
NEW = Build("0.1.0", "/opt/corewright-0.1.0/bin/python")
SPEC = """\
hosts: {emulate: inf2.48xlarge, count: 2}
models:
  a: {engine: echo, tp_degree: 8, replicas: 2}
"""


def upgraded(home: Path, story: Callable[[Played, FakeCluster], Awaitable[None]]) -> None:
    """Plays ``story`` with a controller of the new version, which has adopted two replicas of the old one."""

    async def live() -> None:
        cluster, journal = FakeCluster(), Journal(None, clock=asyncio.get_running_loop().time)
        async with Played(home, cluster, SPEC, journal=journal, build=OLD) as before:
            await before.settled()
        async with Played(home, cluster, SPEC, journal=journal, build=NEW, restarted=True) as played:
            await played.settled()
            assert len(cluster.started) == 2, "they are adopted, and stay"
            await story(played, cluster)
        assert cluster.violations == []

    virtually(live)


async def up(played: Played) -> Any:
    return await played.operator.apply(SPEC, "spec.yaml", str(played.home), by="up", cause="up")


def test_up_replaces_the_replicas_of_another_build_while_the_model_serves(tmp_path: Path) -> None:
    """As a new revision of the same spec; another `apply` of the spec would change nothing."""

    async def story(played: Played, cluster: FakeCluster) -> None:
        assert played.controller.status().versions == {
            "controller": "0.1.0",
            "host_actors": {},
            "gateways": {},
            "replicas": {"a/0": "0.0.9", "a/1": "0.0.9"},
            "problem": None,
        }
        assert not (await played.apply(SPEC))["changed"]
        assert (await up(played))["changed"]
        while len(cluster.started) < 4 or not await is_settled(played):
            assert played.ready("a"), "the model serves"
            await asyncio.sleep(0.05)
        assert played.controller.status().versions is None
        assert [config.python for config in cluster.started] == [None] * 4, "each in its controller's interpreter"
        assert not (await up(played))["changed"]

    upgraded(tmp_path, story)


async def is_settled(played: Played) -> bool:
    return bool(played.controller.status().rollout.state == "complete" and len(played.ready("a")) == 2)


def test_replicas_of_the_old_build_stay_if_the_new_one_fails(tmp_path: Path) -> None:
    """The rollout is rolled back. A replica that dies is started again in the old interpreter."""

    async def story(played: Played, cluster: FakeCluster) -> None:
        old = cluster.started[0].version
        cluster.interpreters[OLD.python] = interpreter(OLD)
        before = set(cluster.replicas)
        cluster.broken[version_of_up(played)] = Failure("load-failed", "it does not start")
        await up(played)
        await played.until(lambda: played.controller.state.current.revision.cause == "rollback", "rolled back", 900.0)
        await played.settled()
        assert {f"{r.config.model}/{r.config.replica}.{r.config.epoch}" for r in cluster.living()} <= before
        assert {replica.config.version for replica in cluster.living()} == {old}
        await cluster.find("a/0").die("killed")
        await played.until(lambda: len(played.ready("a")) == 2, "repaired", 60.0)
        assert cluster.find("a/0").config.python == OLD.python

    upgraded(tmp_path, story)


def version_of_up(played: Played) -> str:
    """Returns the version of the model in a revision of the new build."""
    current = played.controller.state.current
    revision = msgspec.structs.replace(current.revision, build=NEW)
    return dataclasses.replace(current, revision=revision).versions["a"]


def interpreter(build: Build) -> Interpreter:
    return Interpreter(
        python=build.python,
        version=".".join(map(str, sys.version_info[:3])),
        ray=version("ray"),
        corewright=build.version,
        folders=dict.fromkeys(FOLDERS, "/opt"),
    )


def test_a_maintenance_of_hosts_waits_for_the_end_of_an_upgrade(tmp_path: Path) -> None:
    async def story(played: Played, cluster: FakeCluster) -> None:
        with pytest.raises(Refused) as refused:
            await played.operator.roll_hosts([], "none", None, "tester")
        assert refused.value.problem.id == "upgrade-in-progress"

    upgraded(tmp_path, story)
