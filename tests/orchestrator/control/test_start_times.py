"""The expected time of a start: from the phases of the model's last starts, without what only one of them had to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from orchestrator.fleet.replica_states import State
from orchestrator.fleet.snapshot import ReplicaView
from orchestrator.fleet.start_times import OLD_S, StartTimes, ready_at
from workers.artifacts.fetch.progress import FetchStatus

ENGINES = {"m": "cpu"}
WARM = {"actor": 0.5, "imports": 0.1, "weights": 1.0}


def ready(since: float, phases: dict[str, float], epoch: int = 1, **fields: Any) -> ReplicaView:
    fields.setdefault("load_s", sum(phases.values()))
    return ReplicaView("m", 0, epoch, "host", None, State.READY, since, load_phases=phases, **fields)


def only(*views: ReplicaView) -> Callable[[str], list[ReplicaView]]:
    return lambda model: list(views)


def times(*views: ReplicaView) -> StartTimes:
    known = StartTimes()
    for view in views:
        known = known.after(only(view), ENGINES)
    return known


def test_a_first_start_that_compiled_does_not_count_its_compilation() -> None:
    """The next start finds the compiled code."""
    known = times(ready(90.0, {"actor": 1.0, "engine": 82.0}, compile_s=75.0))

    assert known.of("m").expected_s == pytest.approx(8.0)


def test_a_start_that_waited_for_its_fetch_does_not_count_the_wait() -> None:
    """The process reports the wait in the phase of the weights; the controller does not count it."""
    known = times(ready(90.0, {"actor": 1.0, "weights": 40.0}, load_s=4.0))

    assert known.of("m").phases == pytest.approx({"actor": 1.0, "weights": 3.0})


def test_a_slow_start_does_not_count_once_there_is_another() -> None:
    """A start on a busy machine, or with a cold page cache, says little about the next."""
    slow = {"actor": 0.5, "imports": 20.0, "weights": 9.0}

    assert times(ready(10.0, slow), ready(99.0, WARM, 2)).of("m").expected_s == pytest.approx(1.6)


def test_slower_imports_count_after_two_starts() -> None:
    """The warm process is gone: the expectation follows."""
    cold = {**WARM, "imports": 4.0}
    views = [ready(10.0 * epoch, phases, epoch) for epoch, phases in enumerate((WARM, WARM, cold, cold))]

    assert times(*views[:3]).of("m").expected_s == pytest.approx(1.6)
    assert times(*views).of("m").expected_s == pytest.approx(5.5)


def test_old_starts_are_forgotten_once_there_is_a_newer_one() -> None:
    """The newest start stays, however old it is."""
    fast = ready(10.0, {"actor": 0.1})
    late = ready(20.0 + OLD_S, WARM, 2)

    assert times(fast).after(only(), ENGINES).of("m").expected_s == pytest.approx(0.1)
    assert times(fast, late).of("m").expected_s == pytest.approx(1.6)


def test_starts_on_another_engine_are_forgotten() -> None:
    """They tell nothing about the new engine."""
    assert times(ready(10.0, WARM)).after(only(), {"m": "vllm"}).of("m").expected_s is None


def test_a_start_is_measured_once() -> None:
    """The controller reads the same replica in each round."""
    view = ready(10.0, WARM)
    known = times(view, view)

    assert len(known.of("m").starts) == 1
    assert known.after(only(view), ENGINES).of("m") is known.of("m")


def test_the_part_before_the_weights_is_known_from_the_phases() -> None:
    """A process may be started so long before its fetch ends."""
    assert times(ready(10.0, WARM)).of("m").before_weights_s == pytest.approx(0.6)
    assert times(ready(10.0, {}, load_s=7.0)).of("m").before_weights_s is None


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
