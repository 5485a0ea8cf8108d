"""Hosts that end: by notices of the cloud and of Ray, or by an operator's deadline."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.api.schemas import OperationRefused
from orchestrator.control.decisions.departures import SAME_S, STOP_S, noticed_departures
from orchestrator.control.journal.journal_records import Departure
from tests.orchestrator.fakes import Played, settled_fleet
from workers.messages.status import Notice, earliest

FIRST, SECOND = "inf2.48xlarge/0", "inf2.48xlarge/1"
ROOMY = """\
version: 1
hosts: {emulate: inf2.48xlarge, count: 2}
models:
  a: {engine: echo, tp_degree: 4, replicas: 3}
"""
FULL = """\
version: 1
hosts: {emulate: inf2.48xlarge, count: 2}
models:
  low: {engine: echo, tp_degree: 24, priority: 1}
  high: {engine: echo, tp_degree: 24, priority: 9}
"""


def now(played: Played) -> float:
    return played.controller.state.wall()


def hosts_of(played: Played, model: str) -> list[str]:
    return [replica["host"] for replica in played.ready(model)]


def give_notice(played: Played, host: str, seconds: float | None, cause: str = "spot interruption") -> None:
    played.cluster.notices[host] = Notice(cause=cause, until=None if seconds is None else now(played) + seconds)


@pytest.mark.parametrize("cause", ["spot interruption", "drain by Ray"])
@settled_fleet(ROOMY, load_s=40.0)
async def test_replicas_move_all_at_once_before_their_host_ends(played: Played, cause: str) -> None:
    """Three replicas that load for 40 s have moved within the two minutes of a notice, without an outage."""
    home = hosts_of(played, "a")[0]
    assert hosts_of(played, "a") == [home] * 3
    give_notice(played, home, 120.0, cause)
    began, least = now(played), 3
    while home in [replica["host"] for replica in played.model("a")["replicas"]]:
        await asyncio.sleep(0.5)
        least = min(least, len(played.ready("a")))
        assert now(played) - began < 60.0
    assert (least, len(played.ready("a"))) == (3, 3)
    host = next(host for host in played.controller.status().hosts if host.name == home)
    assert host.leaving is not None
    assert (host.cordoned, host.draining, host.leaving.cause) == ("all", True, cause)
    assert "HostLeaving" in played.happened()
    assert "NotMoved" not in played.happened()


@settled_fleet(FULL, load_s=5.0)
async def test_what_cannot_be_moved_serves_until_its_drain_must_begin_and_is_stopped_in_time(played: Played) -> None:
    """The more important model takes the other host; the other one serves for half of the notice, then drains."""
    (home,), (other,) = hosts_of(played, "high"), hosts_of(played, "low")
    until = now(played) + 120.0
    give_notice(played, home, 120.0)
    await played.until(lambda: hosts_of(played, "high") == [other], "moved", 60.0)
    await played.until(lambda: played.host(0 if home == FIRST else 1)["leased"] == 0, "empty", 100.0)
    assert now(played) <= until - STOP_S
    assert played.ready("low") == []


@settled_fleet(
    FULL.replace(", count: 2", "").replace("  low: {engine: echo, tp_degree: 24, priority: 1}\n", ""), drain_s=1000.0
)
async def test_a_host_without_another_is_empty_before_its_end(played: Played) -> None:
    """Even if requests do not end: they have half of the notice, then the process is stopped."""
    until = now(played) + 60.0
    give_notice(played, FIRST, 60.0)
    await played.until(lambda: not played.ready("high"), "drained", 30.0)
    assert until - 45.0 < now(played) < until - 30.0
    await played.until(lambda: played.host()["leased"] == 0, "empty", 60.0)
    assert now(played) <= until
    assert "NotMoved" in played.happened()


@settled_fleet(ROOMY, load_s=5.0)
async def test_a_notice_without_a_deadline_moves_replicas_one_by_one(played: Played) -> None:
    """A recommendation to rebalance; when it is over, the host is used again."""
    home = hosts_of(played, "a")[0]
    give_notice(played, home, None, "rebalance recommendation")
    await played.until(lambda: home not in hosts_of(played, "a") and played.is_settled(), "moved", 60.0)
    with pytest.raises(OperationRefused) as refused:
        await played.operator.cordon(home, None, False, "tester")
    assert refused.value.problem.id == "host-leaving"
    played.cluster.notices.clear()
    await played.until(lambda: "HostStays" in played.happened(), "over", 10.0)
    host = next(host for host in played.controller.status().hosts if host.name == home)
    assert (host.cordoned, host.leaving) == ([], None)


@settled_fleet(ROOMY)
async def test_a_host_that_ends_stays_cordoned_until_another_machine_replaces_it(played: Played) -> None:
    """A lost host has no report, so nothing is decided for it."""
    give_notice(played, SECOND, 30.0)
    await played.until(lambda: "HostLeaving" in played.happened(), "leaving", 10.0)
    await played.cluster.lose(SECOND)
    await played.until(lambda: played.host(1)["lost"], "lost", 10.0)
    played.cluster.notices.clear()
    await played.until(lambda: now(played) > 60.0, "later", 100.0)
    assert played.host(1)["cordoned"] == "all"
    played.cluster.lost_now.clear()
    await played.until(lambda: played.host(1)["cordoned"] == [], "used again", 10.0)


@settled_fleet(FULL)
async def test_an_operators_deadline_empties_a_host_that_has_no_other(played: Played) -> None:
    """Without one it is refused. `uncordon` ends it."""
    (home,) = hosts_of(played, "low")
    with pytest.raises(OperationRefused) as refused:
        await played.operator.drain(home, "tester")
    assert refused.value.problem.id == "drain-no-room"
    with pytest.raises(OperationRefused) as refused:
        await played.operator.drain("low/0", "tester", 60.0)
    assert refused.value.problem.id == "deadline-of-replica"
    await played.operator.drain(home, "tester", 60.0)
    await played.until(lambda: not played.model("low")["replicas"], "empty", 60.0)
    await played.operator.cordon(home, None, False, "tester")
    await played.settled()


UNTIL = st.none() | st.floats(0.0, 1e4)
NOTICES = st.none() | st.builds(Notice, cause=st.sampled_from(["spot", "ray"]), until=UNTIL)
RECORDED = st.builds(
    Departure, host=st.just("h"), on=st.just(True), cause=st.just("x"), until=UNTIL, noticed=st.booleans()
)


@given(st.none() | RECORDED, NOTICES)
def test_notices_are_recorded_once_and_never_delay_an_end(recorded: Departure | None, notice: Notice | None) -> None:
    """A second look at the same notice changes nothing; an operator's departure is never removed or made later."""
    before = {} if recorded is None else {"h": recorded}
    notices = {"h": notice}
    changes = list(noticed_departures(before, notices))
    after = before if not changes else {change.host: change for change in changes if change.on}

    assert list(noticed_departures(after, notices)) == []
    assert ("h" in after) == (notice is not None or (recorded is not None and not recorded.noticed))
    if recorded is not None and not recorded.noticed and recorded.until is not None:
        assert after["h"].until is not None
        assert after["h"].until <= recorded.until
    if notice is not None and notice.until is not None:
        assert after["h"].until is not None
        assert after["h"].until <= notice.until + SAME_S


@given(st.lists(NOTICES))
def test_the_earliest_end_of_all_notices_counts(notices: list[Notice | None]) -> None:
    first = earliest(notices)
    deadlines = [notice.until for notice in notices if notice is not None and notice.until is not None]
    assert (first is None) == (not any(notice is not None for notice in notices))
    if deadlines:
        assert first is not None
        assert first.until == min(deadlines)
