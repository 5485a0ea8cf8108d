"""The expected time of a start: from the phases of the model's last starts, without what only one of them had to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from orchestrator.control.decisions.replica_view import ReplicaView
from orchestrator.control.journal.journal_records import ReadyStart
from orchestrator.control.start_times import OLD_S, StartTimes, load_times, phases_again, ready_at
from orchestrator.messages.replica_states import State
from tests.orchestrator.fakes import Played, starting_fleet
from workers.artifacts.fetch.progress import FetchStatus
from workers.messages.status import Phase

SPEC = "version: 1\nhosts: {emulate: inf2.24xlarge}\nmodels: {m: {engine: echo}}\n"
WARM = {"actor": 0.5, "imports": 0.1, "weights": 1.0}


def ready(phases: dict[str, float], **fields: Any) -> ReplicaView:
    fields.setdefault("load_s", sum(phases.values()))
    return ReplicaView("m", 0, 1, "host", None, State.READY, 9.0, load_phases=phases, **fields)


def start(at: float, phases: dict[str, float]) -> ReadyStart:
    return ReadyStart(at=at, model="m", version="v", engine="cpu", host="host", phases=phases)


def times(*newest_first: ReadyStart) -> StartTimes:
    return StartTimes.of(newest_first, "cpu")


def test_a_first_start_that_compiled_does_not_count_its_compilation() -> None:
    """The next start finds the compiled code."""
    assert phases_again(ready({"actor": 1.0, "engine": 82.0}, compile_s=75.0)) == pytest.approx(
        {"actor": 1.0, "engine": 7.0}
    )


def test_a_start_that_waited_for_its_fetch_does_not_count_the_wait() -> None:
    """The process reports the wait in the phase of the weights; the controller does not count it."""
    assert phases_again(ready({"actor": 1.0, "weights": 40.0}, load_s=4.0)) == pytest.approx(
        {"actor": 1.0, "weights": 3.0}
    )


def test_a_slow_start_does_not_count_once_there_is_another() -> None:
    """A start on a busy machine, or with a cold page cache, says little about the next."""
    slow = {"actor": 0.5, "imports": 20.0, "weights": 9.0}

    assert times(start(99.0, WARM), start(10.0, slow)).expected_s == pytest.approx(1.6)


def test_slower_imports_count_after_two_starts() -> None:
    """The warm process is gone: the expectation follows."""
    cold = {**WARM, "imports": 4.0}

    assert times(start(30.0, cold), start(20.0, WARM), start(10.0, WARM)).expected_s == pytest.approx(1.6)
    assert times(start(40.0, cold), start(30.0, cold), start(20.0, WARM)).expected_s == pytest.approx(5.5)


def test_old_starts_are_forgotten_once_there_is_a_newer_one() -> None:
    """The newest start stays, however old it is."""
    fast, late = start(10.0, {"actor": 0.1}), start(20.0 + OLD_S, WARM)

    assert times(fast).expected_s == pytest.approx(0.1)
    assert times(late, fast).expected_s == pytest.approx(1.6)


def test_starts_on_another_engine_are_forgotten() -> None:
    """They tell nothing about the new engine."""
    assert StartTimes.of([start(10.0, WARM)], "vllm").expected_s is None


def test_the_part_before_the_weights_is_known_from_the_phases() -> None:
    """A process may be started so long before its fetch ends."""
    assert times(start(10.0, WARM)).before_weights_s == pytest.approx(0.6)
    assert times(start(10.0, {"engine": 7.0})).before_weights_s is None


@starting_fleet(SPEC, loads=False)
async def test_a_restarted_controller_knows_how_long_a_start_takes(first: Played, tmp_path: Path) -> None:
    """As measured by the previous one, also of a model whose replica runs no more."""
    await first.until(lambda: first.cluster.started, "it starts")
    await first.cluster.find("m/0").report(phase=Phase.READY, load_s=7.0, load_phases={"process": 7.0})
    await first.settled()
    expected = load_times(first.controller.state)["m"]
    await first.kill()
    await first.cluster.find("m/0").die("killed")
    async with Played(tmp_path, first.cluster, SPEC, journal=first.journal, restarted=True) as second:
        assert load_times(second.controller.state) == {"m": expected}


def test_what_has_passed_of_a_start_counts() -> None:
    """Begun at 100 s and expected to take 8 s: at 108 s, at whatever time this is asked."""
    view = ReplicaView("m", 0, 1, "host", None, State.LOADING, 101.0, begun=100.0)

    assert [ready_at(view, 8.0, now) for now in (101.0, 104.0, 120.0)] == [108.0] * 3


def test_the_rest_of_a_fetch_counts() -> None:
    """600 bytes are left at 100 a second, and the process comes after them."""
    fetch = FetchStatus(source="s3://b/m", phase="fetching", done=400, total=1000, rate=100.0)
    view = ReplicaView("m", 0, 1, "host", None, State.FETCHING, 100.0, begun=100.0, fetch=fetch)

    assert ready_at(view, 8.0, 104.0) == pytest.approx(104.0 + 6.0 + 8.0)


def test_a_replica_that_does_not_start_is_not_expected() -> None:
    """Ready, ending or failed ones have no expected end of a start."""
    states = set(State) - {State.PENDING, State.FETCHING, State.COMPILING, State.LOADING}

    assert {ready_at(ReplicaView("m", 0, 1, "h", None, state, 1.0), 8.0, 2.0) for state in states} == {None}
