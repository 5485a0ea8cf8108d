"""A preview of a manual change shows what the change then does, on a fake cluster in virtual time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from orchestrator.api import queries
from orchestrator.api.schemas import OperationRefused
from orchestrator.scaling.demand_report import DemandReport, LiveRequest
from tests.orchestrator.fakes import FakeCluster, Played, virtually

SPEC = """\
version: 1
hosts: {emulate: inf2.24xlarge, count: 2}
defaults: {engine: echo}
models:
  chat: {tp_degree: 8, replicas: {min: 1, max: 2}}
  small: {replicas: 2}
"""
CHANGES: list[tuple[dict[str, Any], str, dict[str, Any]]] = [
    ({"action": "scale", "target": "chat", "count": 2}, "scale", {"model": "chat", "count": 2}),
    ({"action": "scale", "target": "small", "count": 1}, "scale", {"model": "small", "count": 1}),
    ({"action": "unload", "target": "small"}, "unload", {"model": "small"}),
    ({"action": "restart", "target": "small"}, "restart", {"model": "small"}),
    ({"action": "drain", "target": "small/1"}, "drain", {"target": "small/1"}),
    ({"action": "drain", "target": "inf2.24xlarge/0"}, "drain", {"target": "inf2.24xlarge/0"}),
]


def held(fleet: Played) -> dict[str, tuple[str, str | None]]:
    """Host and cores of each replica that exists."""
    return {replica.id: (replica.host, replica.cores) for replica in fleet.controller.status().replicas}


def epochs(fleet: Played) -> dict[str, int]:
    return {view.id: view.epoch for view in fleet.controller.state.views.values()}


@pytest.mark.parametrize(("asked", "verb", "fields"), CHANGES, ids=lambda value: str(value))
def test_a_preview_is_what_the_change_does(
    asked: dict[str, Any], verb: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    """The placements after the change are those of the preview; the replicas that differ are its changes."""

    async def story() -> None:
        async with Played(tmp_path, FakeCluster(), SPEC) as fleet:
            await fleet.settled()
            before = epochs(fleet)
            preview = await fleet.operator.preview(**asked)
            assert preview["refusal"] is None
            await getattr(fleet.operator, verb)(**fields, by="me", check_index=preview["index"])
            expected = {
                f"{each['model']}/{each['replica']}": (each["host"], each["cores"]) for each in preview["placements"]
            }
            await fleet.until(lambda: held(fleet) == expected, "the fleet is as previewed")
            after = epochs(fleet)
            differing = {id for id in before.keys() | after.keys() if before.get(id) != after.get(id)}
            assert {change["replica"] for change in preview["changes"]} == differing != set()

    virtually(story)


def test_the_preview_of_a_drain_has_every_replica_elsewhere(tmp_path: Path) -> None:
    """As its successor, which starts before it stops, or with its own number."""

    async def story() -> None:
        async with Played(tmp_path, FakeCluster(), SPEC) as fleet:
            await fleet.settled()
            moved = {id for id, (host, _) in held(fleet).items() if host == "inf2.24xlarge/0"}
            preview = await fleet.operator.preview("drain", "inf2.24xlarge/0")
            assert {(each["model"], each["host"]) for each in preview["placements"]} == {
                (id.partition("/")[0], "inf2.24xlarge/1") for id in moved
            }
            changes = {change["replica"]: change["change"] for change in preview["changes"]}
            assert {id: changes[id] for id in moved} == {"chat/0": "stop", "small/0": "stop", "small/1": "move"}
            assert {id for id, change in changes.items() if change == "start"} == {"chat/1", "small/2"}

    virtually(story)


def test_a_drain_without_room_is_refused_in_the_preview(tmp_path: Path) -> None:
    """With the reason that the drain itself would give."""

    async def story() -> None:
        async with Played(tmp_path, FakeCluster(), SPEC.replace("min: 1, max: 2", "min: 2, max: 2")) as fleet:
            await fleet.settled()
            preview = await fleet.operator.preview("drain", "inf2.24xlarge/0")
            assert "contiguous cores" in preview["refusal"]
            with pytest.raises(OperationRefused, match="cannot be drained"):
                await fleet.operator.drain("inf2.24xlarge/0", by="me")

    virtually(story)


@pytest.mark.parametrize(
    ("action", "target", "problem"),
    [("restart", "chat", "rollout-paused"), ("drain", "chat/0", "rollout-paused"), ("drain", "none", "target-unknown")],
)
def test_a_preview_is_refused_as_the_change_is(action: str, target: str, problem: str, tmp_path: Path) -> None:
    """In a paused rollout nothing is replaced; an unknown target gets the names of hosts and replicas."""

    async def story() -> None:
        async with Played(tmp_path, FakeCluster(), SPEC) as fleet:
            await fleet.settled()
            if problem == "rollout-paused":
                await fleet.operator.apply(SPEC.replace("min: 1, max: 2", "min: 2, max: 2"), "s.yaml", "/", by="me")
                await fleet.operator.pause(by="me")
            operation = fleet.operator.restart if action == "restart" else fleet.operator.drain
            refusals = []
            for attempt in (fleet.operator.preview(action, target), operation(target, by="me")):
                with pytest.raises(OperationRefused) as refused:
                    await attempt
                refusals.append(refused.value.problem)
            assert refusals[0] == refusals[1]
            assert refusals[0].id == problem

    virtually(story)


def test_a_restart_shows_its_strategy_and_outage(tmp_path: Path) -> None:
    async def story() -> None:
        async with Played(tmp_path, FakeCluster(), SPEC) as fleet:
            await fleet.settled()
            preview = await fleet.operator.preview("restart", "chat")
            changes = {change["replica"]: change["change"] for change in preview["changes"]}
            assert changes == {"chat/1": "start", "chat/0": "stop"}
            (strategy,) = preview["strategies"]
            assert (strategy["model"], strategy["strategy"], strategy["outage_s"]) == ("chat", "surge", 0.0)

    virtually(story)


def test_a_change_after_another_one_is_refused(tmp_path: Path) -> None:
    """By its index: what was previewed is no longer what would happen."""

    async def story() -> None:
        async with Played(tmp_path, FakeCluster(), SPEC) as fleet:
            await fleet.settled()
            index = (await fleet.operator.preview("scale", "small", 1))["index"]
            await fleet.operator.scale("chat", 2, by="other")
            with pytest.raises(OperationRefused, match="has changed since the preview"):
                await fleet.operator.scale("small", 1, by="me", check_index=index)

    virtually(story)


def test_only_a_request_that_a_gateway_reports_can_be_cancelled(tmp_path: Path) -> None:
    """By the gateway that has it, with the reply to its next report."""

    async def story() -> None:
        async with Played(tmp_path, FakeCluster(), SPEC) as fleet:
            await fleet.settled()
            assert queries.requests(fleet.fleet).requests == []
            live = LiveRequest(request="r-1", model="chat")
            reply = await fleet.controller.demand(DemandReport(gateway="g", number=1, seconds=1.0, requests=[live]))
            assert (reply.watched, reply.cancelled) == (True, [])
            with pytest.raises(OperationRefused, match="no request r-2") as refused:
                await fleet.operator.cancel_request("r-2", by="me")
            assert refused.value.problem.id == "request-unknown"
            await fleet.operator.cancel_request("r-1", by="me")
            others = await fleet.controller.demand(DemandReport(gateway="h", number=1, seconds=1.0))
            reply = await fleet.controller.demand(DemandReport(gateway="g", number=2, seconds=1.0, requests=[live]))
            assert (others.cancelled, reply.cancelled) == ([], ["r-1"])

    virtually(story)


def test_a_page_gets_links_to_every_living_replica_in_ray(tmp_path: Path) -> None:
    async def story() -> None:
        async with Played(tmp_path, FakeCluster(), SPEC) as fleet:
            await fleet.settled()
            links = queries.live(fleet.fleet, with_requests=False).links
            assert links.dashboard is None
            assert links.replicas.keys() == held(fleet).keys()
            assert links.replicas["chat/0"].log == "replica-chat-0.log"

    virtually(story)
