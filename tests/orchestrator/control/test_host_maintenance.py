"""Maintenance of host after host, as a script does it: drain, wait until empty, uncordon, wait until all is ready."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from orchestrator.api.schemas import OperationRefused
from orchestrator.messages.fleet_status import HostInFleet
from tests.orchestrator.fakes import Played, settled_fleet

HOSTS = ["inf2.48xlarge/0", "inf2.48xlarge/1"]
ROOMY = """\
version: 1
hosts: {emulate: inf2.48xlarge, count: 2}
models:
  a: {engine: echo, tp_degree: 4, replicas: 3}
  b: {engine: echo, tp_degree: 8}
"""
FULL = """\
version: 1
hosts: {emulate: inf2.48xlarge, count: 2}
models:
  a: {engine: echo, tp_degree: 24, replicas: 2}
"""


def host(played: Played, name: str) -> HostInFleet:
    return next(host for host in played.controller.status().hosts if host.name == name)


async def reached(played: Played, condition: Callable[[], bool], least: dict[str, int]) -> None:
    """Waits for it, while that many replicas of each model are ready."""
    for _ in range(2000):
        for model, number in least.items():
            assert len(played.ready(model)) >= number
        if condition():
            return
        await asyncio.sleep(0.2)
    raise AssertionError(played.controller.status())


@pytest.mark.parametrize(
    ("text", "deadline_s", "least"), [(ROOMY, None, {"a": 3, "b": 1}), (FULL, 60.0, {"a": 1})], ids=["roomy", "full"]
)
@settled_fleet(lambda text: text, load_s=20.0)
async def test_every_host_is_emptied_in_turn_while_each_model_serves(
    played: Played, text: str, deadline_s: float | None, least: dict[str, int]
) -> None:
    """With all replicas; or with one, where the other host has no room and the operator allows it."""
    for name in HOSTS:
        drained = await played.operator.drain(name, "tester", deadline_s, keep_served=True)
        assert isinstance(drained, HostInFleet)
        assert (drained.draining, drained.busy > 0) == (True, True)
        await reached(played, lambda: not host(played, name).busy, least)  # noqa: B023
        assert name not in {replica.config.place.host for replica in played.cluster.living()}
        await played.operator.cordon(name, None, False, "tester")
        assert not played.controller.status().settled, "its new plan is not made yet"
        await reached(played, lambda: played.controller.status().settled, least)
    for model, count in {"a": 3, "b": 1}.items() if text is ROOMY else {"a": 2}.items():
        assert len(played.ready(model)) == count


@settled_fleet(ROOMY.replace(", count: 2", ""), load_s=20.0)
async def test_a_host_without_another_place_is_refused(played: Played) -> None:
    """With a deadline only if `keep_served` is set, and a model would have no replica at all."""
    before = played.journal.state()
    for deadline_s in (None, 60.0):
        with pytest.raises(OperationRefused) as refused:
            await played.operator.drain(HOSTS[0], "tester", deadline_s, keep_served=True)
        assert refused.value.problem.id == "drain-no-room"
        assert "a/" in refused.value.problem.what
    assert played.journal.state() == before
    await played.operator.drain(HOSTS[0], "tester", 60.0)
    await played.until(lambda: not host(played, HOSTS[0]).busy, "empty", 100)


PRIORITIES = """\
version: 1
hosts: {emulate: inf2.48xlarge, count: 2}
models:
  high: {engine: echo, tp_degree: 24, priority: 10, cores: ["inf2.48xlarge/0:0-23", "inf2.48xlarge/1:0-23"]}
  low: {engine: echo, tp_degree: 24}
"""


@pytest.mark.parametrize("deadline_s", [None, 60.0])
@settled_fleet(PRIORITIES, load_s=20.0)
async def test_a_drain_that_would_cost_another_model_its_last_replica_is_refused(
    played: Played, deadline_s: float | None
) -> None:
    """A model of a higher priority would take its cores."""
    (lying,) = [replica["host"] for replica in played.ready("high")]
    with pytest.raises(OperationRefused) as refused:
        await played.operator.drain(lying, "tester", deadline_s, keep_served=True)
    assert (refused.value.problem.id, "low/0" in refused.value.problem.what) == ("drain-no-room", True)


@settled_fleet(ROOMY, load_s=20.0, tick_s=5.0)
async def test_replicas_stay_while_room_is_lost_during_a_drain(played: Played) -> None:
    """They serve where they are: to stop them would free no core for their successors."""
    await played.operator.drain(HOSTS[0], "tester")
    await played.cluster.lose(HOSTS[1])
    await asyncio.sleep(300)
    assert host(played, HOSTS[0]).busy
    assert (len(played.ready("a")), len(played.ready("b"))) == (3, 1)
    played.cluster.lost_now.clear()
    await reached(played, lambda: not host(played, HOSTS[0]).busy, {"a": 3, "b": 1})


@settled_fleet(ROOMY, load_s=20.0)
async def test_a_restarted_host_has_another_node(played: Played) -> None:
    """Also if its loss was never noticed."""
    before = host(played, HOSTS[0]).node
    assert before is not None
    played.cluster.nodes[HOSTS[0]] = "restarted"
    await played.until(lambda: host(played, HOSTS[0]).node == "restarted", "seen", 30)
    assert before != "restarted"
