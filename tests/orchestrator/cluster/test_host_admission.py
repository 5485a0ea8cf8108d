"""Machines of a joined cluster are judged by their first reply, however late it comes."""

from __future__ import annotations

import asyncio
import errno
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorUnavailableError, GetTimeoutError

from orchestrator.cluster import host_actor, hosts
from orchestrator.cluster.host_greeting import HostGreeting
from orchestrator.cluster.hosts import HostAdmission
from workers.artifacts.store.store import StoreSettings
from workers.host.facts.machine import Owner
from workers.messages.wire import PROTOCOL

DEADLINE_S = 10.0
NODE = SimpleNamespace(id="n1", label="10.0.0.2", instance="inf2.48xlarge", alive=True)
EMULATED = HostGreeting(version="1", folder="", devices=True, protocol=PROTOCOL)


class Actors:
    """Replies in turn; an exception is raised."""

    def __init__(self, *replies: Any) -> None:
        self.replies = list(replies)
        self.asked = asyncio.Event()

    async def ask(self, node: object, deadline_s: float, method: str) -> HostGreeting:
        assert method == "greeting"
        return await self._greeting()

    def forget(self, node: object) -> None:
        """The admission forgets the actor of a machine that it leaves out."""

    async def _greeting(self) -> HostGreeting:
        reply = self.replies.pop(0)
        self.asked.set()
        if isinstance(reply, Exception):
            raise reply
        return reply


async def judged(actors: Actors, nodes: SimpleNamespace) -> None:
    admission = HostAdmission(nodes, actors, {"inf2.48xlarge"})  # type: ignore[arg-type]
    admission.greet()
    admission.greet()  # a node is asked once
    await asyncio.wait_for(asyncio.gather(*admission._greeted.values()), DEADLINE_S)


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    monkeypatch.setattr(hosts, "GREETING_S", 0.01)
    return SimpleNamespace(labels={"inf2.48xlarge/0": NODE.label}, all=[NODE], unfit={})


def test_a_machine_that_cannot_be_reached_is_asked_again_and_not_left_out(nodes: SimpleNamespace) -> None:
    """Its first reply that arrives decides."""
    actors = Actors(ActorUnavailableError("cut off", None), GetTimeoutError("late"), EMULATED)
    asyncio.run(judged(actors, nodes))
    assert not actors.replies
    assert nodes.unfit == {"n1": "it has Neuron devices, and the spec emulates them"}


def test_a_machine_that_left_before_it_replied_is_not_asked_again(nodes: SimpleNamespace) -> None:
    actors = Actors(ActorUnavailableError("cut off", None), EMULATED)
    nodes.all = [SimpleNamespace(**vars(NODE))]

    async def story() -> None:
        asked = asyncio.get_running_loop().create_task(judged(actors, nodes))
        await asyncio.wait_for(actors.asked.wait(), DEADLINE_S)
        nodes.all[0].alive = False
        await asked

    asyncio.run(story())
    assert (actors.replies, nodes.unfit) == ([EMULATED], {})


def test_the_owners_of_cores_are_read_again_after_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as too many open files; otherwise owners would stay as they were until the actor restarts."""
    reads, again = iter([True, False]), threading.Event()

    def owners(facts: None) -> dict[int, Owner]:
        if next(reads):
            raise OSError(errno.EMFILE, "too many open files")
        again.set()
        return {}

    def read_host_facts() -> None:
        if again.is_set():
            threading.Event().wait()  # as long as the tests run

    monkeypatch.setattr(host_actor, "TOOLS_PERIOD_S", 0.0)
    monkeypatch.setattr(host_actor, "read_host_facts", read_host_facts)
    monkeypatch.setattr(host_actor, "owners", owners)
    actor = host_actor.HostActor.__ray_metadata__.modified_class  # type: ignore[attr-defined]
    host = actor(StoreSettings(root=str(tmp_path / "store")), str(tmp_path / "home"))
    threading.Thread(target=host._keep_reading, daemon=True).start()
    assert again.wait(10)


def test_a_host_whose_orphans_cannot_be_killed_says_so_instead_of_serving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process in uninterruptible sleep keeps its cores through SIGKILL."""
    monkeypatch.setattr(host_actor, "end_orphans", lambda mark, deadline_s: [71, 72])
    actor = host_actor.HostActor.__ray_metadata__.modified_class  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match=r"cannot be killed \(pids 71, 72\): restart the machine"):
        actor(StoreSettings(root=str(tmp_path / "store")), str(tmp_path / "home"), "fleet|10.0.0.2|n1")
