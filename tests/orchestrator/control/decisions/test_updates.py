"""Updates on a fake cluster with a virtual clock: who serves at each moment, and where each update ends."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.api.schemas import OperationRefused
from orchestrator.control.decisions.replica_view import ReplicaView
from orchestrator.control.decisions.rollout_step import STEPS, DesiredModel, FormerVersion, StepCase, step
from orchestrator.control.journal.journal import Journal, JournalUnwritable
from orchestrator.messages.replica_states import ModelState, State
from placements.spec.parse import parse
from placements.spec.schema import ModelSpec
from tests.orchestrator.fakes import FakeCluster, Played, play, settled_fleet, virtual
from tests.stubs import stub_checkpoint
from workers.messages.status import Failure

BASE = """\
version: 1
name: test
hosts: {{emulate: inf2.48xlarge}}
defaults: {{engine: echo}}
models:
  a: {{tp_degree: 8, max_batch: {a_batch}{a}}}
  b: {{tp_degree: 2, replicas: {b_replicas}, max_batch: {b_batch}{b}}}
"""


def spec(a_batch: int = 4, b_batch: int = 4, b_replicas: int = 2, a: str = "", b: str = "", more: str = "") -> str:
    return BASE.format(a_batch=a_batch, b_batch=b_batch, b_replicas=b_replicas, a=a, b=b) + more


PINNED = ', cores: ["0-7"]'
NO_ROLLBACK = ", update: {rollback: false}"
TWO = spec().replace("emulate: inf2.48xlarge", "emulate: inf2.48xlarge, count: 2")


def pinned(update: str) -> str:
    return f"{PINNED}, update: {{{update}}}"


async def watched(played: Played, model: str, settled: Callable[[], bool]) -> list[int]:
    """How many replicas of the model were ready at each change, until ``settled``."""
    seen, counts = 0, []
    for _ in range(2000):
        seen = await played.controller.change(seen, 5.0)
        counts.append(len(played.ready(model)))
        if settled():
            return counts
    raise AssertionError(f"never settled: {played.controller.status()}")


@settled_fleet(spec(), load_s=30.0)
async def test_with_free_cores_the_new_replica_is_ready_before_the_old_one_stops(played: Played) -> None:
    """Surge: a replica serves at every moment, and the old process is stopped in the end."""
    before = played.replica("a/0")["version"]
    result = await played.apply(spec(a_batch=8))
    (change,) = [model for model in result["plan"]["models"] if model["model"] == "a"]
    assert (change["tag"], change["strategy"], change["outage_s"]) == ("restart", "surge", 0.0)
    assert change["fields"] == [{"field": "max_batch", "before": 4, "after": 8}]
    counts = await watched(played, "a", played.is_settled)
    assert min(counts) >= 1
    (replica,) = played.ready("a")
    assert replica["version"] != before
    assert replica["restarts"] == 0
    assert played.controller.status().revision == 2


def test_a_plan_distinguishes_create_update_replace_and_delete(tmp_path: Path) -> None:
    """For each model, also those that have no replica for lack of requests; history repeats it."""
    text = "version: 1\nhosts: {emulate: inf2.48xlarge}\ndefaults: {engine: echo}\nmodels:\n"
    first = text + "  same: {}\n  live: {}\n  new_process: {}\n  gone: {}\n  idle_gone: {replicas: {min: 0}}\n"
    first += "  idle_changed: {replicas: {min: 0}}\n"
    second = text + "  same: {}\n  live: {priority: 2}\n  new_process: {max_batch: 2}\n  created: {}\n"
    second += "  idle_created: {replicas: {min: 0}}\n  idle_changed: {replicas: {min: 0}, max_batch: 2}\n"

    async def story(played: Played) -> None:
        await played.settled()
        proposal = await played.operator.propose(second, "spec.yaml", str(tmp_path))
        assert {model["model"]: model["action"] for model in proposal["models"]} == {
            "same": "none",
            "live": "update",
            "new_process": "replace",
            "created": "create",
            "idle_created": "create",
            "idle_changed": "update",
            "gone": "delete",
            "idle_gone": "delete",
        }
        await played.apply(second)
        (row,) = [row for row in played.operator.revisions()["revisions"] if row["revision"] == 2]
        assert row["changes"] == (
            "live: update; new_process: replace by surge; created: create; idle_created: create; idle_changed: update; "
            "gone: delete; idle_gone: delete"
        )

    play(tmp_path, first, story)


def test_new_defaults_of_an_alias_reach_gateways_and_restart_no_replica(tmp_path: Path) -> None:
    """They are a part of the routes, without the names that have none."""

    def aliases(temperature: float) -> str:
        return f", aliases: {{small: {{temperature: {temperature}, stop: [X]}}, other: }}"

    async def story(played: Played) -> None:
        await played.settled()
        processes = [(replica["id"], replica["epoch"]) for replica in played.ready("a")]
        result = await played.apply(spec(a=aliases(0.5)))
        (change,) = [model for model in result["plan"]["models"] if model["model"] == "a"]
        assert (change["action"], change["tag"]) == ("update", "reconfigure")
        await played.settled()
        assert [(replica["id"], replica["epoch"]) for replica in played.ready("a")] == processes
        (routes,) = [model for model in played.controller.routes().models if model.name == "a"]
        assert routes.aliases == ["small", "other"]
        assert routes.request_defaults == {"small": {"temperature": 0.5, "stop": ["X"]}}

    play(tmp_path, spec(a=aliases(0.25)), story)


@settled_fleet(spec(b_replicas=3), load_s=5.0, drain_s=3.0)
async def test_the_header_of_a_rollout_and_its_table_agree(played: Played) -> None:
    """At each moment of an update, a canary, a restart, a pause and a removal."""
    headers = set()

    def consistent() -> bool:
        rollout = played.operator.rollout()
        rows = {row.model: row for row in rollout.models}
        headers.add(rollout.state)
        assert {row.state for row in rows.values()} <= {"complete", rollout.state}, rollout
        assert all(row.updated + row.old >= row.ready for row in rows.values())
        for name, row in rows.items():
            if row.state == "progressing":
                progress = f"{name}: {row.ready} of {row.wanted} ready, {row.old} old"
                assert progress in rollout.reason, rollout
        return played.is_settled()

    await played.apply(spec(b_batch=8, b_replicas=3))
    await watched(played, "b", consistent)
    await played.operator.restart("b", "tester")
    assert [row.updated for row in played.operator.rollout().models] == [1, 0]
    await watched(played, "b", consistent)
    await played.apply(spec(b_batch=4, b_replicas=3), canary=0.5)
    await watched(played, "b", lambda: consistent() or played.operator.rollout().state == "canary")
    await played.operator.pause("tester")
    consistent()
    await played.operator.resume("tester")
    await played.operator.promote("tester")
    await watched(played, "b", consistent)
    without = "\n".join(line for line in spec(b_batch=4, b_replicas=3).splitlines() if "b:" not in line)
    await played.apply(without)
    rows = played.operator.rollout().models
    assert [(row.model, row.wanted, row.old) for row in rows] == [("a", 1, 0), ("b", 0, 3)]
    await watched(played, "a", consistent)
    assert headers == {"progressing", "complete", "canary", "paused"}


@settled_fleet(spec(b_replicas=8), load_s=5.0)
async def test_several_replicas_are_replaced_one_at_a_time(played: Played) -> None:
    """In place: with no free cores and two replicas, one always serves, and no outage is predicted."""
    result = await played.apply(spec(a_batch=4, b_batch=8, b_replicas=8))
    (change,) = [model for model in result["plan"]["models"] if model["model"] == "b"]
    assert (change["strategy"], change["outage_s"]) == ("in_place", 0.0)
    counts = await watched(played, "b", played.is_settled)
    assert min(counts) >= 7
    assert len(played.ready("b")) == 8


@settled_fleet(spec(a=PINNED), load_s=10.0)
async def test_a_single_replica_on_full_cores_is_swapped_while_requests_wait(played: Played) -> None:
    """Hold: the predicted swap is short, so the gateway lets requests wait."""
    result = await played.apply(spec(a_batch=8, a=PINNED))
    (change,) = [model for model in result["plan"]["models"] if model["model"] == "a"]
    assert change["strategy"] == "hold"
    assert 10.0 <= change["outage_s"] <= 15.0
    unheld = 0

    def settled() -> bool:
        nonlocal unheld
        route = next(m for m in played.controller.routes().models if m.name == "a")
        unheld += not route.replicas and not route.holds
        return played.is_settled()

    counts = await watched(played, "a", settled)
    assert min(counts) == 0
    assert unheld == 0
    assert not next(m for m in played.controller.routes().models if m.name == "a").holds


@pytest.mark.parametrize("strategy", ["auto", "hold"])
@settled_fleet(lambda strategy: spec(a=pinned(f"strategy: {strategy}")), load_s=10.0)
async def test_requests_are_held_until_a_failed_swap_is_rolled_back(played: Played, strategy: str) -> None:
    """Its starts fail on the cores, and the old version loads again: meanwhile the gateway lets requests wait."""
    text = spec(a_batch=8, a=pinned(f"strategy: {strategy}"))
    played.cluster.broken[await version_of(played, text, "a")] = Failure("out-of-memory", "no HBM")
    await played.apply(text)
    unheld, failed = 0, 0

    def settled() -> bool:
        nonlocal unheld, failed
        route = next(m for m in played.controller.routes().models if m.name == "a")
        unheld += not route.replicas and not route.holds
        failed += route.state is ModelState.FAILED
        return played.controller.status().revision == 3 and played.is_settled()

    assert min(await watched(played, "a", settled)) == 0
    assert (unheld, failed > 0) == (0, True)
    assert not next(m for m in played.controller.routes().models if m.name == "a").holds


@virtual
async def test_a_controller_restarted_during_a_swap_continues_holding(tmp_path: Path) -> None:
    """The spec has `hold`: that is all that it knows of the update."""
    cluster = FakeCluster()
    cluster.load_s = 10.0
    async with Played(tmp_path, cluster, spec(a=pinned("strategy: hold"))) as played:
        await played.settled()
        await played.apply(spec(a_batch=8, a=pinned("strategy: hold")))
        await played.until(lambda: len(cluster.started) == 4, "the new one starts", 60)
        await played.kill()
        journal = played.journal
    async with Played(tmp_path, cluster, spec(a=pinned("strategy: hold")), journal=journal) as played:
        await played.controller.settled()
        route = next(m for m in played.controller.routes().models if m.name == "a")
        assert (route.replicas, route.holds) == ([], True)
        await played.settled()
        assert not next(m for m in played.controller.routes().models if m.name == "a").holds


@settled_fleet(spec(a=pinned("strategy: hold, rollback: false")), load_s=2.0)
async def test_without_a_rollback_no_request_is_held_for_a_failed_swap(played: Played) -> None:
    """`rollback: false`: nothing will start, so requests are rejected at once."""
    text = spec(a_batch=8, a=pinned("strategy: hold, rollback: false"))
    played.cluster.broken[await version_of(played, text, "a")] = Failure("out-of-memory", "no HBM")
    await played.apply(text)
    await played.until(lambda: played.operator.rollout().state == "failed", "failed", 600)
    assert not next(m for m in played.controller.routes().models if m.name == "a").holds


@settled_fleet(spec(a=PINNED), load_s=300.0)
async def test_a_plan_shows_a_long_outage(played: Played, tmp_path: Path) -> None:
    """In place with one replica: the plan has the seconds of the outage, from the last measured start."""
    proposal = await played.operator.propose(spec(a_batch=8, a=PINNED), "spec.yaml", str(tmp_path))
    (change,) = [model for model in proposal["models"] if model["model"] == "a"]
    assert change["strategy"] == "in_place"
    assert 300.0 <= change["outage_s"] <= 305.0
    assert played.controller.status().revision == 1


@settled_fleet(spec(), load_s=5.0)
async def test_a_broken_version_is_rolled_back_while_the_old_one_serves(played: Played, tmp_path: Path) -> None:
    """The new replica fails three times; no replica was drained; the former text is a new revision."""
    good = played.replica("a/0")
    broken = Failure("weights-broken", "model.safetensors is truncated")
    result = await played.operator.read(spec(a_batch=8), "spec.yaml", str(tmp_path), by="x", cause="apply")
    played.cluster.broken[result[1].versions["a"]] = broken
    await played.apply(spec(a_batch=8))
    counts = await watched(played, "a", lambda: played.controller.status().revision == 3 and played.is_settled())
    assert min(counts) == 1
    assert {key: played.replica("a/0")[key] for key in ("pid", "epoch", "version")} == {
        key: good[key] for key in ("pid", "epoch", "version")
    }
    history = played.operator.revisions()["revisions"]
    assert [(row["revision"], row["cause"], row["state"]) for row in history] == [
        (3, "rollback", "complete"),
        (2, "apply", "rolled_back"),
        (1, "up", "complete"),
    ]
    assert "weights-broken" in next(e.message for e in played.journal.events() if e.reason == "RolloutFailed")


@settled_fleet(spec(a=NO_ROLLBACK), load_s=5.0)
async def test_without_rollback_a_failed_update_stops(played: Played, tmp_path: Path) -> None:
    """`rollback: false`: the old replica serves, the rollout is failed, and undo ends it."""
    _, generation = await played.operator.read(spec(a_batch=8, a=NO_ROLLBACK), "s", str(tmp_path), by="", cause="apply")
    played.cluster.broken[generation.versions["a"]] = Failure("x", "broken")
    await played.apply(spec(a_batch=8, a=NO_ROLLBACK))
    await played.until(lambda: played.operator.rollout().state == "failed", "failed", 600)
    assert len(played.ready("a")) == 1
    await played.operator.undo(None, "tester")
    await played.settled()
    assert [replica["id"] for replica in played.model("a")["replicas"]] == ["a/0"]


@settled_fleet(spec(b_replicas=4), load_s=5.0)
async def test_pause_stops_an_update_between_two_replicas_and_resume_continues(played: Played) -> None:
    """While paused, no step begins, but replicas are still repaired."""
    await played.apply(spec(b_batch=8, b_replicas=4))
    new = played.controller.state.current.versions["b"]

    def updated() -> int:
        return sum(replica["version"] == new for replica in played.ready("b"))

    await played.until(lambda: updated() == 1, "one is new", 100)
    await played.operator.pause("tester")
    for _ in range(100):
        await played.controller.change(10**9, 1.0)
    assert 1 <= updated() <= 2
    assert played.operator.rollout().state == "paused"
    await played.operator.resume("tester")
    await played.settled()
    assert updated() == 4


@settled_fleet(spec(), load_s=5.0)
async def test_a_canary_gets_its_share_until_it_is_promoted(played: Played) -> None:
    """One new replica beside all old ones; the gateway gets the share; promote replaces the rest."""
    await played.apply(spec(b_batch=8), canary=0.25)
    await played.until(lambda: played.operator.rollout().state == "canary", "canary", 100)
    route = next(model for model in played.controller.routes().models if model.name == "b")
    assert (route.canary, len(route.canaries), len(route.replicas)) == (0.25, 1, 3)
    await played.operator.promote("tester")
    await played.settled()
    route = next(model for model in played.controller.routes().models if model.name == "b")
    assert (route.canary, route.canaries, len(route.replicas)) == (None, [], 2)


@settled_fleet(spec())
async def test_the_same_text_is_not_a_new_revision(played: Played) -> None:
    """Applying the running spec changes nothing, so that a script may apply at each run."""
    index = played.controller.status().index
    result = await played.apply(spec())
    assert (result["changed"], result["revision"], result["index"]) == (False, 1, index)


@settled_fleet(spec())
async def test_the_plan_of_a_spec_with_another_name_has_a_warning(played: Played, tmp_path: Path) -> None:
    """It may be the spec of another fleet."""
    own = await played.operator.propose(spec(), "spec.yaml", str(tmp_path))
    other = await played.operator.propose(spec().replace("name: test", "name: other"), "spec.yaml", str(tmp_path))
    warnings = [[problem["id"] for problem in plan["problems"]] for plan in (own, other)]
    assert [warning.count("fleet-name-differs") for warning in warnings] == [0, 1]


@settled_fleet(spec())
async def test_an_outdated_index_rejects_the_apply(played: Played, tmp_path: Path) -> None:
    """A plan for another state of the fleet is not applied."""
    index = (await played.operator.propose(spec(a_batch=8), "spec.yaml", str(tmp_path)))["index"]
    await played.operator.cordon("inf2.48xlarge/0", "23", True, "someone else")
    with pytest.raises(OperationRefused) as refused:
        await played.apply(spec(a_batch=8), check_index=index)
    assert refused.value.problem.id == "index-changed"
    assert played.controller.status().revision == 1
    await played.apply(spec(a_batch=8), check_index=played.controller.status().index)
    assert played.controller.status().revision == 2


@pytest.mark.parametrize(
    ("text", "id"),
    [
        ("version: 1\nmodels: {a: {engine: echo, tp: 99}}", "spec-invalid"),
        ("version: 1\nhosts: {emulate: inf2.xlarge}\nmodels: {a: {engine: echo}}", "hosts-changed"),
        ("version: 1\nhosts: {instance: inf2.xlarge, count: 2}\nmodels: {a: {source: org/a}}", "hosts-changed"),
        (spec(b_replicas=9), "never-fits"),
        (spec(a_batch=8, a=', cores: ["0-7"], update: {strategy: surge}'), "update-impossible"),
    ],
)
@settled_fleet(spec(a=', cores: ["0-7"]'))
async def test_a_rejected_apply_changes_nothing(played: Played, text: str, id: str) -> None:
    """It leaves no record and no revision."""
    before = played.journal.state()
    with pytest.raises(OperationRefused) as refused:
        await played.apply(text)
    assert refused.value.problem.id == id
    assert played.journal.state() == before


@settled_fleet(TWO, load_s=5.0)
async def test_a_drained_host_is_emptied_after_its_replicas_start_elsewhere(played: Played) -> None:
    """Two hosts: everything moves without an outage, and the host gets no replica until it is uncordoned."""
    home = played.replica("a/0")["host"]
    await played.operator.drain(home, "tester")
    counts = await watched(
        played, "a", lambda: all(r["host"] != home for m in ("a", "b") for r in played.model(m)["replicas"])
    )
    assert min(counts) >= 1
    host = next(h for h in played.controller.status().hosts if h.name == home)
    assert (host.leased, host.cordoned, host.draining) == (0, "all", True)


THREE_PRIORITIES = """\
version: 1
hosts: {emulate: inf2.48xlarge, count: 2}
models:
  low: {engine: echo, tp_degree: 12, priority: 1, cores: ["inf2.48xlarge/0:0-11"]}
  other: {engine: echo, tp_degree: 12, priority: 9, cores: ["inf2.48xlarge/1:12-23"]}
  high: {engine: echo, tp_degree: 12, priority: 5}
"""


@settled_fleet(THREE_PRIORITIES, load_s=5.0)
async def test_replicas_of_a_lost_host_start_elsewhere_the_highest_priority_first(played: Played) -> None:
    """Two hosts, one dies, and the other has room for one of its two large replicas: the more important one gets it."""
    (high,) = played.ready("high")
    assert high["host"] == "inf2.48xlarge/0"
    await played.cluster.lose("inf2.48xlarge/0")
    await played.until(lambda: [r["host"] for r in played.ready("high")] == ["inf2.48xlarge/1"], "high", 60)
    status = played.controller.status()
    assert [host.lost for host in status.hosts] == [True, False]
    assert played.ready("low") == []
    assert "HostLost" in played.happened()
    played.cluster.lost_now.clear()
    await played.until(lambda: all(played.ready(m) for m in ("low", "other", "high")), "all", 60)


@settled_fleet(spec(), load_s=5.0)
async def test_a_drained_replica_is_replaced_by_a_new_process(played: Played) -> None:
    """`drain a/0`: the same version, another process, without an outage."""
    before = played.replica("a/0")["pid"]
    await played.operator.drain("a/0", "tester")
    counts = await watched(
        played, "a", lambda: [r["pid"] for r in played.ready("a")] not in ([], [before]) and played.is_settled()
    )
    assert min(counts) >= 1
    assert len(played.model("a")["replicas"]) == 1


@settled_fleet(spec(b=", cores: []").replace("replicas: 2", "replicas: {min: 1, max: 3}"))
async def test_scale_load_and_unload_apply_until_they_are_reverted(played: Played) -> None:
    """A manual change survives a restart of the controller, and requests do not override it."""
    await played.operator.scale("b", 3, "tester")
    await played.until(lambda: len(played.ready("b")) == 3, "three")
    with pytest.raises(OperationRefused) as refused:
        await played.operator.scale("b", 4, "tester")
    assert refused.value.problem.id == "scale-over-max"
    await played.operator.unload("b", "tester")
    await played.until(lambda: not played.model("b")["replicas"], "none")
    await played.controller.wake("b")
    assert played.model("b")["wanted"] == 0
    await played.operator.load("b", "tester")
    await played.until(lambda: len(played.ready("b")) == 1, "one")


@settled_fleet(spec(b=", cores: []"))
async def test_only_operators_see_who_stopped_a_model_and_how_to_start_it(played: Played) -> None:
    """A client sees that it was done manually; `status` has the command that reverts it."""

    async def reasons() -> tuple[str | None, str | None]:
        await played.until(lambda: not played.model("b")["replicas"], "none")
        routes = played.controller.routes().models
        return played.model("b")["reason"], next(route.reason for route in routes if route.name == "b")

    await played.operator.scale("b", 0, "tester")
    assert await reasons() == ("scaled to 0 by hand: corewright scale b auto", "scaled to 0 by hand")
    await played.operator.load("b", "tester")
    await played.until(lambda: bool(played.ready("b")), "loaded")
    await played.operator.unload("b", "tester")
    assert await reasons() == ("unloaded by hand: corewright load b", "by hand")


@settled_fleet(spec())
async def test_a_log_is_by_default_that_of_the_first_running_replica(played: Played) -> None:
    """Not of one that ends."""
    assert (await played.operator.logs("b", None, None, 0.0))["replica"] == "b/0"
    state = played.controller.state
    state.views["b/0"] = replace(state.views["b/0"], state=State.DRAINING)
    assert (await played.operator.logs("b", None, None, 0.0))["replica"] == "b/1"


async def version_of(played: Played, text: str, model: str) -> str:
    """The version that replicas of the model would have under a text."""
    _, generation = await played.operator.read(text, "spec.yaml", str(played.home), by="x", cause="apply")
    return generation.versions[model]


async def roll_back(played: Played, text: str, model: str) -> None:
    """Apply a text whose replicas of the model cannot start, and see it rolled back."""
    played.cluster.broken[await version_of(played, text, model)] = Failure("weights-broken", "truncated")
    await played.apply(text)
    await played.until(lambda: "RolledBack" in played.happened(), "rolled back", 600)
    await played.settled()


@settled_fleet(spec(), load_s=2.0)
async def test_undo_never_returns_to_a_revision_that_failed(played: Played) -> None:
    """After 1, a failed 2 and its rollback, undo finds no other revision that worked; after a good 4 it finds the
    first.
    """
    await roll_back(played, spec(a_batch=8), "a")
    with pytest.raises(OperationRefused) as refused:
        await played.operator.undo(None, "tester")
    assert refused.value.problem.id == "nothing-to-undo"
    await played.apply(spec(a_batch=2))
    await played.settled()
    report = played.operator.rollout()
    assert (report.undo, report.undo_skips) == (3, [])
    await played.operator.undo(None, "tester")
    assert played.controller.state.current.revision.text == spec()


@settled_fleet(spec(), load_s=20.0)
async def test_undo_of_a_canary_returns_to_what_served_before_it(played: Played) -> None:
    """Although that revision had not completed; an older complete one is not what the operator means."""
    await played.apply(spec(a_batch=2))
    await played.settled()
    await played.apply(spec(a_batch=8))
    await played.until(lambda: bool(played.operator.rollout().models[0].ready), "its first replica", 60)
    await played.apply(spec(a_batch=16), canary=0.5)
    report = played.operator.rollout()
    assert (report.canary, report.undo, report.undo_skips) == (0.5, 3, [])
    await played.operator.undo(None, "tester")
    assert played.controller.state.current.revision.text == spec(a_batch=8)


@settled_fleet(spec(), load_s=2.0)
async def test_undo_names_the_failed_revisions_that_it_skips(played: Played) -> None:
    """The newest one first: 3 failed without a rollback, so 4 goes back to 2."""
    broken = spec(a_batch=8, a=", update: {rollback: false}")
    await played.apply(spec(a_batch=2))
    await played.settled()
    played.cluster.broken[await version_of(played, broken, "a")] = Failure("weights-broken", "truncated")
    await played.apply(broken)
    await played.until(lambda: played.operator.rollout().state == "failed", "failed", 3700)
    await played.apply(spec(a_batch=16))
    report = played.operator.rollout()
    assert (report.undo, report.undo_skips) == (2, [3])


@settled_fleet(spec(), load_s=5.0)
async def test_a_rollback_keeps_later_changes_of_other_models(played: Played) -> None:
    """Another model's update, and manual scaling; only the failed update is reverted."""
    before = played.replica("a/0")
    played.cluster.broken[await version_of(played, spec(a_batch=8), "a")] = Failure("x", "broken")
    await played.apply(spec(a_batch=8))
    await played.apply(spec(a_batch=8, b_batch=8))
    await played.operator.scale("b", 1, "tester")
    new = played.controller.state.current.versions["b"]
    await played.until(lambda: "RolledBack" in played.happened(), "rolled back", 600)
    await played.settled()
    assert {key: played.replica("a/0")[key] for key in ("pid", "version")} == {
        key: before[key] for key in ("pid", "version")
    }
    assert [replica["version"] for replica in played.ready("b")] == [new]
    rows = [
        (row["revision"], row["cause"], row["of"], row["state"]) for row in played.operator.revisions()["revisions"]
    ]
    assert rows[:2] == [(4, "rollback", None, "complete"), (3, "apply", None, "rolled_back")]
    messages = [event.message for event in played.journal.events() if event.reason == "RolledBack"]
    assert messages == ["revision 4 is revision 3 without the changes of 2"]


@settled_fleet(spec(), load_s=2.0)
async def test_a_kept_update_that_fails_too_is_rolled_back_in_turn(played: Played, tmp_path: Path) -> None:
    """Then only the complete revision is left, and there is no loop."""
    text = spec(a_batch=8, b_batch=8)
    for model in ("a", "b"):
        played.cluster.broken[await version_of(played, text, model)] = Failure("x", "broken")
    await played.apply(spec(a_batch=8))
    await played.apply(text)
    await played.until(lambda: played.happened().count("RolledBack") == 2, "both", 3600)
    await played.settled()
    assert played.controller.state.current.revision.number == 5
    assert played.controller.state.current.spec == parse(spec(), "spec.yaml", str(tmp_path)).spec
    for _ in range(20):
        await played.controller.change(10**9, 60.0)
    assert played.happened().count("RolledBack") == 2


@settled_fleet(spec(a=NO_ROLLBACK), load_s=2.0)
async def test_the_rollback_setting_of_the_failing_model_counts(played: Played) -> None:
    """`rollback: false` of the failing model, regardless of other models."""
    text = spec(a_batch=8, a=NO_ROLLBACK, b_batch=8)
    played.cluster.broken[await version_of(played, text, "a")] = Failure("x", "broken")
    await played.apply(text)
    await played.until(lambda: played.operator.rollout().state == "failed", "failed", 600)
    assert played.controller.status().revision == 2


@settled_fleet(spec(a=NO_ROLLBACK), load_s=2.0)
async def test_a_failed_rollout_continues_when_its_cause_is_fixed_and_it_is_resumed(played: Played) -> None:
    """Earlier failures do not count any more."""
    text = spec(a_batch=8, a=NO_ROLLBACK)
    played.cluster.broken[await version_of(played, text, "a")] = Failure("x", "broken")
    await played.apply(text)
    await played.until(lambda: played.operator.rollout().state == "failed", "failed", 600)
    played.cluster.broken.clear()
    await played.operator.resume("tester")
    await played.settled()
    assert played.ready("a")[0]["version"] == played.controller.state.current.versions["a"]


@settled_fleet(spec(b_replicas=4), load_s=2.0)
async def test_models_are_scaled_while_an_update_is_paused(played: Played) -> None:
    """Versions do not change, but numbers do; a drain, which would replace nothing, is rejected."""
    await played.apply(spec(b_batch=8, b_replicas=4))
    await played.operator.pause("tester")
    await played.operator.unload("a", "tester")
    await played.operator.scale("b", 2, "tester")
    await played.until(lambda: not played.model("a")["replicas"], "unloaded", 60)
    await played.until(lambda: len(played.model("b")["replicas"]) == 2, "fewer", 60)
    await played.operator.scale("b", 4, "tester")
    await played.until(lambda: len(played.ready("b")) == 4, "more", 60)
    with pytest.raises(OperationRefused) as refused:
        await played.operator.drain("b/0", "tester")
    assert refused.value.problem.id == "rollout-paused"


@settled_fleet(spec(), load_s=5.0)
async def test_a_canary_that_dies_after_an_hour_restarts_as_a_canary(played: Played) -> None:
    """The time in which it only waited for an operator is not a lack of progress."""
    await played.apply(spec(b_batch=8), canary=0.25)
    await played.until(lambda: played.operator.rollout().state == "canary", "canary", 100)
    for _ in range(60):
        await played.controller.change(10**9, 60.0)
    new = played.controller.state.current.versions["b"]
    (canary,) = [r.config for r in played.cluster.living() if r.config.run.version == new]
    await played.cluster.find(f"b/{canary.place.replica}").die("killed")
    await played.until(lambda: played.replica(f"b/{canary.place.replica}")["state"] != "ready", "it died")
    await played.until(lambda: played.operator.rollout().state == "canary", "canary", 100)
    assert "RolledBack" not in played.happened()


@settled_fleet(spec())
async def test_a_host_whose_replicas_have_no_other_place_is_not_drained(played: Played) -> None:
    """The model would have an outage: the drain is rejected, with what does not fit."""
    before = played.journal.state()
    with pytest.raises(OperationRefused) as refused:
        await played.operator.drain("inf2.48xlarge/0", "tester")
    assert refused.value.problem.id == "drain-no-room"
    problems = [problem.what for problem in (*refused.value.problems, refused.value.problem)]
    assert sum("a/0 needs" in what for what in problems) == 1
    assert played.journal.state() == before


@settled_fleet(TWO)
async def test_an_unresponsive_host_does_not_block_repairs_of_others(played: Played) -> None:
    """Its report of cores never arrives; a replica elsewhere dies and is restarted."""
    report = played.cluster.held_cores

    async def held_cores(claims: str | None, host: str | None = None) -> Any:
        if host == "inf2.48xlarge/1":
            raise OSError("no route")
        return await report(claims, host)

    played.cluster.held_cores = held_cores  # type: ignore[method-assign]
    await played.cluster.find("a/0").die("killed")
    await played.until(lambda: played.replica("a/0")["restarts"] == 1 and played.ready("a"), "again", 60)
    assert "HostSilent" in played.happened()


@settled_fleet(spec())
async def test_a_drain_whose_call_fails_ends_at_its_deadline(played: Played) -> None:
    """The replica is stopped although its drain never returns."""

    async def drain(name: str, timeout_s: float) -> bool:
        raise OSError("no route")

    played.cluster.drain = drain  # type: ignore[method-assign]
    await played.apply(spec(a_batch=8))
    await played.settled()
    assert len(played.model("a")["replicas"]) == 1


@virtual
async def test_manual_scaling_applies_to_one_fleet_only(tmp_path: Path) -> None:
    """The next `up` starts from its spec, and becomes ready; cordons are about the machine, and stay."""
    journal = Journal(None)
    async with Played(tmp_path, FakeCluster(), spec(), journal=journal) as played:
        await played.settled()
        await played.operator.unload("a", "tester")
        await played.operator.cordon("inf2.48xlarge/0", "23", True, "tester")
    async with Played(tmp_path, FakeCluster(), spec(), journal=journal, fleet="next") as played:
        await played.settled()
        assert played.controller.status().ready
        assert len(played.ready("a")) == 1
        assert played.host()["cordoned"] == ["23"]


@virtual
async def test_with_a_full_disk_repairs_go_on_and_verbs_are_refused(tmp_path: Path) -> None:
    """Nothing is lost either: what was done meanwhile is in the journal once there is room."""
    journal = Journal(tmp_path / "journal")
    async with Played(tmp_path, FakeCluster(), spec(), journal=journal) as played:
        await played.settled()
        append = journal.append

        def full(record: Any) -> Any:
            raise JournalUnwritable(28, "No space left on device")

        journal.append = full  # type: ignore[method-assign]
        await played.cluster.find("a/0").die("killed")
        await played.until(lambda: played.replica("a/0")["restarts"] == 1 and played.ready("a"), "again", 60)
        with pytest.raises(OperationRefused) as refused:
            await played.apply(spec(a_batch=8))
        assert (refused.value.problem.id, refused.value.status) == ("journal-unwritable", 507)
        conditions = {c.type: c.status for c in played.controller.status().conditions}
        assert conditions["JournalWritable"] is False
        journal.append = append  # type: ignore[method-assign]
        await played.apply(spec(a_batch=8))
        await played.settled()
        assert played.journal.state().epochs["a/0"] >= 2
    journal.close()


@settled_fleet(spec())
async def test_a_condition_has_the_time_of_its_change(played: Played) -> None:
    """Not that of the first request after it."""
    cluster = played.cluster
    cluster.held = dict.fromkeys(cluster.find("a/0").config.place.cores, 4711)
    before = played.controller.state.wall()
    await cluster.find("a/0").die("killed")
    await played.operator.cordon("inf2.48xlarge/0", None, True, "tester")
    for _ in range(5):
        await played.controller.change(10**9, 60.0)
    conditions = {c["type"]: c for c in played.model("a")["conditions"]}
    assert conditions["Placed"]["status"] is False
    assert conditions["Placed"]["since"] <= before + 60.0 < played.controller.state.wall()


TOKENIZED = """\
version: 1
hosts: {{emulate: inf2.48xlarge}}
models:
  m: {{engine: cpu, source: ./{source}, max_len: 64, tp_degree: {tp}, replicas: {replicas}{more}}}
"""


def tokenizers(folder: Path, **texts: str) -> None:
    """Model folders of which only the tokenizer matters here."""
    for name, text in texts.items():
        stub_checkpoint(folder / name, tokenizer=f'{{"version": {text}}}')


async def routed_together(played: Played, settled: Callable[[], bool]) -> list[tuple[str, set[str]]]:
    """Returns at each change the tokenizer of the routes, and those of their replicas."""
    seen, changes = 0, []
    while not settled():
        seen = await played.controller.change(seen, 5.0)
        (model,) = played.controller.routes().models
        changes.append(
            (model.tokenizer, {played.controller.state.configs[route.id].run.tokenizer for route in model.replicas})
        )
    return changes


@pytest.mark.parametrize(("tp", "strategy"), [(2, "surge"), (8, "in_place")])
def test_versions_with_different_tokenizers_are_never_routed_together(tmp_path: Path, tp: int, strategy: str) -> None:
    """A prompt is tokenized once, before its replica is selected: all routed replicas need the same tokenizer."""
    tokenizers(tmp_path, one="1", two="2")

    async def story(played: Played) -> None:
        await played.settled()
        (before,) = played.controller.routes().models
        result = await played.apply(TOKENIZED.format(source="two", tp=tp, replicas=3, more=""))
        assert result["plan"]["models"][0]["strategy"] == strategy
        changes = await routed_together(played, played.is_settled)
        assert all(of_replicas <= {tokenizer} for tokenizer, of_replicas in changes)
        assert len({tokenizer for tokenizer, _ in changes} | {before.tokenizer}) == 2
        if strategy == "surge":
            assert all(of_replicas for _, of_replicas in changes), "no replica served for a moment"

    first = TOKENIZED.format(source="one", tp=tp, replicas=3, more="")
    play(tmp_path, first, story, load_s=400.0, drain_s=3.0)


@virtual
async def test_replicas_of_a_lost_revision_are_routed_by_their_own_tokenizer(tmp_path: Path) -> None:
    """It is unknown whether the model was loaded again: running replicas continue, and get prompts in their own
    tokens.
    """
    tokenizers(tmp_path, one="1", two="2")
    before, after = (TOKENIZED.format(source=source, tp=2, replicas=1, more="") for source in ("one", "two"))
    cluster, path = FakeCluster(), tmp_path / "journal"
    journal = Journal(path)
    async with Played(tmp_path, cluster, before, journal=journal) as played:
        await played.settled()
        await played.operator.unload("m", "tester")
        known = path.stat().st_size
        await played.apply(after)
        await played.operator.load("m", "tester")
        await played.settled()
    journal.close()
    data = path.read_bytes()
    path.write_bytes(data[:known] + data[known:].replace(b'"by":', b'"bx":'))
    journal = Journal(path)
    async with Played(tmp_path, cluster, before, journal=journal, restarted=True) as played:
        assert played.controller.state.counts.is_unloaded("m")
        await played.controller.settled()
        (model,) = played.controller.routes().models
        (route,) = model.replicas
        assert model.tokenizer == played.controller.state.configs[route.id].run.tokenizer
    journal.close()


def test_a_canary_with_another_tokenizer_is_rejected(tmp_path: Path) -> None:
    """The two versions could not share requests. The same tokenizer in another folder is accepted."""
    tokenizers(tmp_path, one="1", two="2", same="1")

    async def story(played: Played) -> None:
        await played.settled()
        with pytest.raises(OperationRefused) as refused:
            await played.apply(TOKENIZED.format(source="two", tp=2, replicas=2, more=""), canary=0.5)
        assert refused.value.problem.id == "canary-impossible"
        await played.apply(TOKENIZED.format(source="same", tp=2, replicas=2, more=""), canary=0.5)
        await played.until(lambda: played.operator.rollout().state == "canary", "canary", 100)
        (model,) = played.controller.routes().models
        assert (len(model.replicas), len(model.canaries)) == (3, 1)

    play(tmp_path, TOKENIZED.format(source="one", tp=2, replicas=2, more=""), story, load_s=2.0)


FLEET = "inf2.48xlarge"


async def canary_beside(played: Played, text: str, model: str) -> tuple[str, str]:
    """Bring a canary up on the second of two hosts, all else is on the first; gives the old and the new version."""
    before = played.controller.state.current.versions[model]
    await played.operator.cordon(f"{FLEET}/0", None, True, "tester")
    await played.apply(text, canary=0.25)
    await played.until(lambda: played.operator.rollout().state == "canary", "canary", 600)
    await played.operator.cordon(f"{FLEET}/0", None, False, "tester")
    after = played.controller.state.current.versions[model]
    places = {(replica["host"], replica["version"]) for replica in played.ready(model)}
    assert places == {(f"{FLEET}/0", before), (f"{FLEET}/1", after)}
    return before, after


def versions_ready(played: Played, model: str) -> Counter[str]:
    return Counter(replica["version"] for replica in played.ready(model))


@virtual
async def test_old_replicas_that_a_canary_loses_with_their_host_restart_elsewhere(tmp_path: Path) -> None:
    """In the old version: the canary stays one replica with its share of the requests, also after a restart of the
    controller.
    """
    journal, cluster = Journal(None), FakeCluster()
    cluster.load_s = 5.0
    async with Played(tmp_path, cluster, TWO, journal=journal) as played:
        await played.settled()
        old, new = await canary_beside(played, TWO.replace("max_batch: 4}", "max_batch: 8}"), "b")
        await cluster.lose(f"{FLEET}/0")
        await played.until(lambda: versions_ready(played, "b") == {old: 2, new: 1}, "restored", 60)
        (_, route) = played.controller.routes().models
        assert (route.canary, len(route.canaries), len(route.replicas)) == (0.25, 1, 3)
        assert "FormerVersionLost" in played.happened()
        dying = next(replica["id"] for replica in played.ready("b") if replica["version"] == old)
        await cluster.find(dying).die("killed")
        await played.until(lambda: versions_ready(played, "b") == {old: 1, new: 1}, "died")
        await played.until(lambda: versions_ready(played, "b") == {old: 2, new: 1}, "again", 60)
    async with Played(tmp_path, cluster, TWO, journal=journal) as played:
        await played.until(lambda: versions_ready(played, "b") == {old: 2, new: 1}, "adopted", 60)
        assert played.operator.rollout().state == "canary"
        await played.operator.promote("tester")
        await played.until(lambda: versions_ready(played, "b") == {new: 2}, "promoted", 600)
    assert cluster.violations == []


def test_a_canary_whose_old_version_finds_no_place_serves_alone_with_a_report(tmp_path: Path) -> None:
    """No other replica could serve; undo ends it on the canary's own cores."""
    text = TWO.replace("b: {tp_degree: 2, replicas: 2", "b: {tp_degree: 24, replicas: 1").replace(
        "a: {", "a: {tp_degree: 1, "
    )
    text = text.replace("tp_degree: 1, tp_degree: 8", "tp_degree: 1, replicas: {min: 0}")

    async def story(played: Played) -> None:
        await played.settled()
        old, new = await canary_beside(played, text.replace("max_batch: 4}", "max_batch: 8}"), "b")
        await played.cluster.lose(f"{FLEET}/0")
        await played.until(lambda: "FormerVersionLost" in played.happened(), "lost", 60)
        for _ in range(20):
            await played.controller.change(10**9, 60.0)
        assert versions_ready(played, "b") == {new: 1}
        rollout = played.operator.rollout()
        assert rollout.state == "canary"
        assert "b: 1 of the former version is missing" in rollout.reason
        await played.operator.undo(None, "tester")
        await played.until(lambda: versions_ready(played, "b") == {old: 1}, "undone", 600)

    play(tmp_path, text, story, load_s=5.0)


def test_a_failed_update_restores_lost_replicas_in_the_working_version(tmp_path: Path) -> None:
    """`rollback: false`: it stops, and replicas of a lost host do not restart in the broken version."""
    two = spec(b=NO_ROLLBACK).replace("emulate: inf2.48xlarge", "emulate: inf2.48xlarge, count: 2")

    async def story(played: Played) -> None:
        await played.settled()
        text = two.replace(f"max_batch: 4{NO_ROLLBACK}", f"max_batch: 8{NO_ROLLBACK}")
        assert text != two
        old = played.controller.state.current.versions["b"]
        played.cluster.broken[await version_of(played, text, "b")] = Failure("x", "broken")
        await played.apply(text)
        await played.until(lambda: played.operator.rollout().state == "failed", "failed", 600)
        await played.cluster.lose(played.ready("b")[0]["host"])
        await played.until(lambda: len(played.ready("b")) < 2, "lost", 60)
        await played.until(lambda: versions_ready(played, "b") == {old: 2}, "restored", 600)

    play(tmp_path, two, story, load_s=2.0)


MODEL = ModelSpec(name="m", source="echo", engine="echo")


def lying(number: int, version: str, state: State = State.READY) -> ReplicaView:
    return ReplicaView(
        model="m", replica=number, epoch=1, host="h", cores=None, state=state, since=0.0, version=version
    )


def test_a_canary_without_a_former_version_replaces_lost_old_replicas() -> None:
    """No revision was ever complete: of four, three were lost, and only the version under test is available."""
    old = lying(0, "old")
    wish = DesiredModel(MODEL, 4, "new", canary=True)
    assert (step(StepCase(wish, [], [old])).keep, step(StepCase(wish, [], [old])).count) == ((old,), 3)
    assert step(StepCase(wish, [], [old] * 4)).count == 1


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("strategy", ["surge", "in_place", "hold"])
@pytest.mark.parametrize("count", [0, 1, 2, 4])
@pytest.mark.parametrize("left", [0, 1, 4])
@pytest.mark.parametrize("alive", [0, 1])
def test_a_canary_is_never_more_than_one_and_never_alone(
    frozen: bool, strategy: Any, count: int, left: int, alive: int
) -> None:
    """Whatever is lost: old replicas stay or restart, as many as the strategy promises."""
    wish = DesiredModel(MODEL, count, "new", strategy, canary=True, frozen=frozen, former=FormerVersion(MODEL, "old"))
    next_step = step(StepCase(wish, [lying(9, "new")] * alive, [lying(n, "old") for n in range(left)]))
    canaries = min(1, count) if not frozen else min(alive, count)
    assert next_step.count == canaries
    spare = canaries if strategy in ("in_place", "hold") else 0
    assert len(next_step.keep) + next_step.lost == max(count - spare, min(1, count))


def test_the_docs_have_the_rows_of_the_steps() -> None:
    """With the same numbers and conditions."""
    page = (Path(__file__).parents[4] / "docs" / "updates.md").read_text()
    rows = re.findall(r"^\| (\d) \| ([^|]+) \|", page, re.MULTILINE)
    assert rows == [(str(row.number), row.when) for row in STEPS]
