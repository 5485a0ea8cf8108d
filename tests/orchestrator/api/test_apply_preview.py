"""The preview of an apply has exactly the replicas that the apply then starts, stops, restarts and moves.

On a fake cluster in virtual time, on which every start succeeds, and takes equally long for all replicas of a model.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from orchestrator.api.schemas import OperationRefused
from orchestrator.control.decisions import projection
from orchestrator.scaling.demand_report import DemandReport
from tests.orchestrator.fakes import FakeCluster, Played, virtually
from tests.searches import EXAMPLES, search
from tests.stubs import stub_checkpoint

CHECK_S = 1.0  # of a host before an old replica stops there
LOAD_S = {"a": 7.0, "b": 11.3, "c": 17.9, "new": 60.0, "m": 7.0}
QUIET_S = 100.0  # longer than between two relocations
HOST = "inf2.24xlarge/0"
SCALED = {"ScaledUp", "ScaledDown", "ScaledToZero", "Woken"}
SPEC = """\
version: 1
hosts: {emulate: inf2.24xlarge, count: %d}
defaults: {engine: echo}
models:
%s"""

Place = tuple[str, str | None]
Operation = Callable[[Played], Coroutine[Any, Any, Any]]


def spec(*models: str, hosts: int = 1) -> str:
    return SPEC % (hosts, "".join(f"  {model}\n" for model in models))


def running(fleet: Played) -> dict[str, tuple[int, Place]]:
    """The epoch and the place of each replica."""
    views = fleet.controller.state.views.values()
    return {view.id: (view.epoch, (view.host, None if view.cores is None else str(view.cores))) for view in views}


async def at_rest(fleet: Played) -> None:
    """Wait until nothing has happened to a replica for a while."""
    before: dict[str, tuple[int, Place]] | None = None
    while before != (before := running(fleet)):  # noqa: ASYNC110 - in virtual time
        await asyncio.sleep(QUIET_S)


@contextlib.asynccontextmanager
async def fleet_with_gateway(home: Path, text: str) -> AsyncIterator[Played]:
    """A fleet at rest whose gateway reports that no request arrives."""
    cluster = FakeCluster()
    cluster.loads_s, cluster.check_s = LOAD_S, CHECK_S
    async with Played(home, cluster, text, tick_s=30.0) as fleet:

        async def report() -> None:
            number = 0
            while True:
                number += 1
                await fleet.controller.demand(DemandReport(gateway="g", number=number, seconds=9.0))
                await asyncio.sleep(9.0)

        reporting = asyncio.get_running_loop().create_task(report())
        await at_rest(fleet)
        yield fleet
        reporting.cancel()
        assert cluster.violations == []


async def check_preview(fleet: Played, text: str, *, exact: bool = True) -> dict[str, str] | None:
    """Previews and applies a spec: what then happens is what the preview has. Returns its changes; None if the
    autoscaler has changed a number meanwhile. Unless ``exact``, replicas may start on other cores than shown."""
    before, starts, events = running(fleet), len(fleet.cluster.started), len(fleet.happened())
    preview = await fleet.operator.propose(text, "spec.yaml", str(fleet.home))
    changes = {change["replica"]: change["change"] for change in preview["changes"]}
    places = {
        f"{place['model']}/{place['replica']}": (place["host"], place["cores"]) for place in preview["placements"]
    }
    applied = (await fleet.apply(text, check_index=preview["index"]))["plan"]
    wanted = {model.name: model.wanted for model in fleet.controller.status().models}
    await at_rest(fleet)
    if not SCALED.isdisjoint(fleet.happened()[events:]):
        return None
    after = running(fleet)
    happened = changed(before, after)
    if exact:
        assert (changes, places) == (happened, {id: place for id, (_, place) in after.items()})
    else:
        assert _without_moves(changes) == _without_moves(happened)
    started = {f"{config.model.name}/{config.place.replica}" for config in fleet.cluster.started[starts:]}
    assert started & after.keys() == {id for id, change in changes.items() if change != "stop"}
    assert applied["changes"] == preview["changes"]
    assert {
        model["model"]: model["replicas"]["after"] for model in preview["models"] if model["action"] != "delete"
    } == wanted
    return changes


def changed(before: Mapping[str, tuple[int, Place]], after: Mapping[str, tuple[int, Place]]) -> dict[str, str]:
    """Returns what has happened to each replica."""
    changes = dict.fromkeys(before.keys() - after.keys(), "stop")
    for id, (epoch, place) in after.items():
        if id not in before:
            changes[id] = "start"
        elif before[id] != (epoch, place):
            changes[id] = "restart" if before[id][1] == place else "move"
    return changes


def _without_moves(changes: Mapping[str, str]) -> dict[str, str]:
    return {id: "restart" if change == "move" else change for id, change in changes.items()}


@dataclass(frozen=True)
class Kind:
    """A kind of change: two specs, an operation between them, and what happens."""

    before: tuple[str, ...]
    after: tuple[str, ...]
    changes: dict[str, str]
    hosts: int = 1
    first: Operation | None = None


PINNED = 'm: {tp_degree: 4, cores: ["%s"]}'
FULL = "full: {tp_degree: 8}"
KINDS = {
    "surge": Kind(("m: {}",), ("m: {max_batch: 2}",), {"m/1": "start", "m/0": "stop"}),
    "surge of several": Kind(
        ("m: {replicas: 2}",),
        ("m: {replicas: 2, max_batch: 2}",),
        {"m/2": "start", "m/1": "restart", "m/0": "stop"},
    ),
    "in place": Kind(
        ("m: {tp_degree: 8}",),
        ("m: {tp_degree: 8, max_batch: 2, update: {strategy: in_place}}",),
        {"m/0": "restart"},
    ),
    "in place, one at a time": Kind(
        (FULL, "m: {tp_degree: 2, replicas: 2}"),
        (FULL, "m: {tp_degree: 2, replicas: 2, max_batch: 2}"),
        {"m/0": "restart", "m/1": "restart"},
    ),
    "hold": Kind(
        ("m: {tp_degree: 8}",),
        ("m: {tp_degree: 8, max_batch: 2, update: {strategy: hold}}",),
        {"m/0": "restart"},
    ),
    "another engine": Kind(("m: {}",), ("m: {engine: cpu, source: ./model}",), {"m/1": "start", "m/0": "stop"}),
    "another pin": Kind((PINNED % "0-3",), (PINNED % "8-11",), {"m/1": "start", "m/0": "stop"}),
    "another pin that overlaps": Kind((PINNED % "0-3",), ('m: {tp_degree: 8, cores: ["0-7"]}',), {"m/0": "move"}),
    "more": Kind(("m: {replicas: 2}",), ("m: {replicas: 3}",), {"m/2": "start"}),
    "fewer": Kind(("m: {replicas: 3}",), ("m: {}",), {"m/1": "stop", "m/2": "stop"}),
    "no least number": Kind(("m: {replicas: 2}",), ("m: {replicas: {min: 0, max: 3}}",), {}),
    "no least number, not scaled automatically": Kind(
        ("m: {replicas: 2}",),
        ("m: {replicas: {min: 0, max: 3}, scaling: {auto: false}}",),
        {"m/0": "stop", "m/1": "stop"},
    ),
    "removed": Kind(("m: {replicas: 2}", "other: {}"), ("other: {}",), {"m/0": "stop", "m/1": "stop"}),
    "displaces": Kind(
        ("m: {tp_degree: 4, replicas: {min: 1, max: 3}}",),
        ("m: {tp_degree: 4, replicas: {min: 1, max: 3}}", "new: {tp_degree: 4, priority: 1}"),
        {"new/0": "start", "m/1": "stop"},
        first=lambda fleet: fleet.operator.scale("m", 3, "tester"),
    ),
    "does not fit": Kind(
        ("m: {tp_degree: 2}",),
        ("m: {tp_degree: 2}", "new: {tp_degree: 8}"),
        {},
        first=lambda fleet: fleet.operator.cordon(HOST, "0-3", True, "tester"),
    ),
    "relocates": Kind(
        ('m: {tp_degree: 4, cores: ["4-7"]}',),
        ("m: {tp_degree: 4}", "new: {tp_degree: 8}"),
        {"m/1": "start", "m/0": "stop", "new/0": "start"},
    ),
    "drained host": Kind(
        ("m: {replicas: 2}",),
        ("m: {replicas: 2, max_batch: 2}",),
        {"m/0": "start", "m/2": "restart", "m/1": "stop"},
        hosts=2,
        first=lambda fleet: fleet.operator.drain(HOST, "tester"),
    ),
    "scaled by an operator": Kind(
        ("m: {replicas: {min: 1, max: 3}}",),
        ("m: {replicas: {min: 2, max: 3}, max_batch: 2}",),
        {"m/3": "start", "m/0": "stop", "m/1": "restart", "m/2": "restart"},
        first=lambda fleet: fleet.operator.scale("m", 3, "tester"),
    ),
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_an_apply_does_what_its_preview_shows(kind: Kind, tmp_path: Path) -> None:
    stub_checkpoint(tmp_path / "model")

    async def story() -> None:
        async with fleet_with_gateway(tmp_path, spec(*kind.before, hosts=kind.hosts)) as fleet:
            if kind.first is not None:
                await kind.first(fleet)
                await at_rest(fleet)
            assert await check_preview(fleet, spec(*kind.after, hosts=kind.hosts)) == kind.changes

    virtually(story)


def test_replicas_beyond_the_decisions_that_are_followed_are_shown_as_restarted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the updated model only."""
    monkeypatch.setattr(projection, "MAX_DECISIONS", 2)

    async def story() -> None:
        async with fleet_with_gateway(tmp_path, spec("m: {replicas: 5}", "other: {replicas: 5}")) as fleet:
            text = spec("m: {replicas: 5, max_batch: 2}", "other: {replicas: 5}")
            preview = await fleet.operator.propose(text, "spec.yaml", str(fleet.home))
            changes = {change["replica"]: change["change"] for change in preview["changes"]}
            assert changes.keys() >= {"m/1", "m/2", "m/3", "m/4"}
            assert [id for id in changes if id.startswith("other/")] == []

    virtually(story)


NUMBERS = ["1", "2", "3", "{min: 0, max: 3}", "{min: 1, max: 3}", "{min: 2, max: 3}"]
STRATEGIES = ["auto", "surge", "in_place", "hold"]
OPERATIONS: list[Operation | None] = [
    None,
    lambda fleet: fleet.operator.scale("a", 1, "tester"),
    lambda fleet: fleet.operator.scale("a", 3, "tester"),
    lambda fleet: fleet.operator.unload("a", "tester"),
    lambda fleet: fleet.operator.drain(HOST, "tester"),
    lambda fleet: fleet.operator.cordon(HOST, "8-9", True, "tester"),
]


@st.composite
def models(draw: st.DrawFn) -> str:
    """The fields of a model."""
    degree = draw(st.sampled_from([1, 1, 2, 2, 4, 8]))
    replicas = draw(st.sampled_from(NUMBERS))
    strategy, priority = draw(st.sampled_from(STRATEGIES)), draw(st.sampled_from([0, 0, 1]))
    fields = f"tp_degree: {degree}, replicas: {replicas}, priority: {priority}, update: {{strategy: {strategy}}}"
    first = degree * draw(st.integers(0, 12 // degree - 1))
    pin = f', cores: ["{first}-{first + degree - 1}"]' if degree > 1 else ""
    return f"{{{fields}{pin if draw(st.integers(0, 5)) == 0 else ''}, max_batch: {draw(st.sampled_from([4, 8]))}}}"


@st.composite
def changes_of_specs(draw: st.DrawFn) -> tuple[str, str]:
    """A spec, and a change of it."""
    hosts = draw(st.sampled_from([1, 1, 2]))
    before = {name: draw(models()) for name in "abc"[: draw(st.integers(1, 3))]}
    after = dict(before)
    for name, fields in before.items():
        change = draw(
            st.sampled_from(["same", "version", "version", "version", "number", "number", "other", "removed"])
        )
        if change == "version":
            after[name] = fields.replace("max_batch: ", "max_batch: 1")
        elif change == "number":
            after[name] = re.sub(r"replicas: (\d|{.*?})", f"replicas: {draw(st.sampled_from(NUMBERS))}", fields)
        elif change == "other":
            after[name] = draw(models())
        elif change == "removed":
            del after[name]
    if draw(st.booleans()) or not after:
        after["new"] = draw(models())
    texts = [spec(*(f"{name}: {fields}" for name, fields in each.items()), hosts=hosts) for each in (before, after)]
    return texts[0], texts[1]


@search(25, cost=5, derandomize=not EXAMPLES)  # rare orders of events differ: only long runs look for new ones
@given(changes_of_specs(), st.sampled_from(OPERATIONS))
def test_any_apply_does_what_its_preview_shows(texts: tuple[str, str], first: Operation | None) -> None:
    """For any specs that are not refused, with an operator's change between them. The cores can depend on the order in
    which replicas end and become ready (docs/cli.md)."""

    async def story(home: Path) -> None:
        async with fleet_with_gateway(home, texts[0]) as fleet:
            if first is not None:
                await first(fleet)
                await at_rest(fleet)
            assume(await check_preview(fleet, texts[1], exact=False) is not None)

    with tempfile.TemporaryDirectory() as home:
        try:
            virtually(lambda: story(Path(home)))
        except OperationRefused:
            assume(False)
