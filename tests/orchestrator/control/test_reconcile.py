"""From plan and observation to actions, as values; and that they converge."""

from __future__ import annotations

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.control.decisions.reconcile import (
    DRAIN_GRACE_S,
    Action,
    Drain,
    Fail,
    Forget,
    Release,
    Start,
    Stop,
    reconcile,
)
from orchestrator.control.decisions.replica_view import BREAKER_PAUSE_S, Observed, ReplicaView
from orchestrator.control.decisions.rollout_step import ReplicaTarget
from orchestrator.messages.replica_states import Signal, State, advance
from placements.facts.core_range import CoreRange
from placements.planner.plan import Placement
from placements.spec.sections import Deadlines
from tests.searches import search

HOST = "inf2.48xlarge/0"
DEADLINE_S = 100.0
RANGE = CoreRange(0, 7)


def target(model: str = "chat", replica: int = 0, cores: CoreRange | None = RANGE) -> ReplicaTarget:
    return ReplicaTarget(model, replica, HOST, cores, "v", Placement(model, replica, HOST, cores, threads=1))


def view(state: State, **changes: object) -> ReplicaView:
    seen = ReplicaView(
        model="chat",
        replica=0,
        epoch=1,
        host=HOST,
        cores=CoreRange(0, 7),
        state=state,
        since=10.0,
        begun=10.0,
        pid=7,
        started=1.0,
        version="v",
        deadlines=Deadlines(start_s=DEADLINE_S),
    )
    return dataclasses.replace(seen, **changes)  # type: ignore[arg-type]


def decide(wanted: list[ReplicaTarget], *seen: ReplicaView, now: float = 10.0) -> list[Action]:
    return reconcile(wanted, Observed(now, {replica.id: replica for replica in seen}))


def test_a_placement_without_a_replica_is_started() -> None:
    assert decide([target()]) == [Start(target(), None)]


def test_replicas_that_match_the_plan_are_not_changed() -> None:
    """At the fixed point there is nothing to do."""
    assert decide([target()], view(State.READY)) == []
    assert decide([target()], view(State.LOADING)) == []


def test_a_dead_replica_is_released_before_it_is_restarted() -> None:
    """A replica restarts only when its host has confirmed the end of the old process."""
    failed = view(State.FAILED)
    gone = dataclasses.replace(failed, gone=True)

    assert decide([target()], failed) == [Release(failed)]
    assert decide([target()], gone) == [Start(target(), gone)]


def test_a_replica_that_cannot_start_is_tried_later_and_later() -> None:
    """The pause doubles with each failure in a row."""
    failed = view(State.FAILED, gone=True, failures=3)

    assert decide([target()], failed, now=13.9) == []
    assert decide([target()], failed, now=14.0) == [Start(target(), failed)]


def test_the_breaker_opens_after_six_failed_starts() -> None:
    """A cause that does not go away is tried seldom, and a replica that has served starts afresh."""
    pauses = [view(State.FAILED, failures=n).pause_s for n in range(8)]

    assert pauses == [0, 1, 2, 4, 8, 16, BREAKER_PAUSE_S, BREAKER_PAUSE_S]
    assert not view(State.FAILED, failures=5).breaker_open


def test_an_unplanned_replica_drains_then_is_removed() -> None:
    """A ready replica that leaves the plan completes its requests first."""
    ready, stopping = view(State.READY), view(State.STOPPING)
    gone = dataclasses.replace(stopping, gone=True)

    assert decide([], ready) == [Drain(ready)]
    assert decide([], view(State.DRAINING)) == []
    assert decide([], stopping) == [Release(stopping)]
    assert decide([], gone) == [Forget(gone)]


def test_a_start_beyond_its_deadline_is_a_failure() -> None:
    """A hanging start becomes an error with its reason."""
    loading = view(State.LOADING)

    assert decide([target()], loading, now=110.0) == []
    assert decide([target()], loading, now=110.1) == [Fail(loading, "start-deadline: not ready after 100 s")]


def test_the_start_deadline_counts_from_the_start_and_not_from_the_last_state() -> None:
    """A process that took most of the time to come up has only the rest of it to load."""
    loading = view(State.LOADING, since=109.0)

    assert decide([target()], loading, now=110.1) == [Fail(loading, "start-deadline: not ready after 100 s")]


def test_compiling_has_a_separate_deadline() -> None:
    """It does not count as starting, and endless compiling is ended too."""
    loading = view(State.LOADING, compile_s=500.0)

    assert decide([target()], loading, now=610.0) == []
    late = "start-deadline: not ready after 100 s, 500 s of fetching and compiling not counted"
    assert decide([target()], loading, now=610.1) == [Fail(loading, late)]
    endless = view(State.LOADING, compile_s=14_400.1)
    ended = "compile-deadline: it has compiled for more than 14400 s"
    assert decide([target()], endless, now=14_410.0) == [Fail(endless, ended)]


def test_cores_of_another_replica_are_waited_for() -> None:
    """A placement starts only when no replica that may still live holds one of its cores."""
    old = view(State.DRAINING, model="old", cores=CoreRange(6, 7))

    assert decide([target()], old) == []
    assert decide([target()], dataclasses.replace(old, state=State.STOPPING, gone=True)) == [
        Forget(dataclasses.replace(old, state=State.STOPPING, gone=True)),
        Start(target(), None),
    ]


states = st.sampled_from(State)
ranges = st.sampled_from([CoreRange(0, 7), CoreRange(6, 7), CoreRange(8, 9)])
views = st.builds(
    view, states, model=st.sampled_from(["a", "b"]), replica=st.integers(0, 1), cores=ranges, gone=st.booleans()
)


@search(100)
@given(seen=st.lists(views, max_size=4), planned=st.lists(st.tuples(st.sampled_from("ab"), ranges), max_size=3))
def test_from_any_fleet_the_plan_is_reached_and_no_core_is_held_twice_by_a_start(
    seen: list[ReplicaView], planned: list[tuple[str, CoreRange]]
) -> None:
    """Carrying out the actions leads to a state in which every placement is ready and nothing is left to do."""
    wanted: list[ReplicaTarget] = []
    for model, cores in planned:
        if not any(cores.overlap(other.cores) or model == other.model for other in wanted if other.cores):
            wanted.append(target(model, 0, cores))
    fleet = {
        replica.id: replica for replica in seen if replica.state in (State.STOPPING, State.FAILED) or not replica.gone
    }
    now = 10.0
    for _ in range(30):
        now += 1.0
        actions = reconcile(wanted, Observed(now, dict(fleet)))
        for action in actions:
            _carry_out(action, fleet, now)
        fleet = {id: _settle(replica, now) for id, replica in fleet.items()}

    assert reconcile(wanted, Observed(now, dict(fleet))) == []
    ready = {(r.id, r.cores) for r in fleet.values() if r.state is State.READY}
    assert ready == {(f"{p.model}/{p.replica}", p.cores) for p in wanted}


def _carry_out(action: Action, fleet: dict[str, ReplicaView], now: float) -> None:
    """As the controller does, each effect taking no time."""
    if isinstance(action, Start):
        cores = action.target.cores
        assert cores is not None
        for other in fleet.values():
            held = other.cores is not None and not other.gone and other.id != f"{action.target.model}/0"
            assert not (held and other.cores is not None and cores.overlap(other.cores)), "a held core was given away"
        new = view(
            State.PENDING, model=action.target.model, replica=action.target.replica, cores=cores, since=now, begun=now
        )
        fleet[new.id] = new
    elif isinstance(action, Drain):
        fleet[action.replica.id] = _signalled(action.replica, Signal.DRAIN, now)
    elif isinstance(action, Stop):
        fleet[action.replica.id] = _signalled(action.replica, Signal.STOP, now)
    elif isinstance(action, Fail):
        fleet[action.replica.id] = _signalled(action.replica, Signal.FAILED, now)
    elif isinstance(action, Release):
        fleet[action.replica.id] = dataclasses.replace(action.replica, gone=True)
    else:
        del fleet[action.replica.id]


def _settle(replica: ReplicaView, now: float) -> ReplicaView:
    """What a process does by itself: it is fetched, it starts, it loads, it ends its drain."""
    ahead = {State.FETCHING: Signal.FETCHED, State.COMPILING: Signal.COMPILED}
    own = {**ahead, State.PENDING: Signal.STARTED, State.LOADING: Signal.LOADED, State.DRAINING: Signal.STOP}
    signal = own.get(replica.state)
    return replica if signal is None else _signalled(replica, signal, now)


def _signalled(replica: ReplicaView, signal: Signal, now: float) -> ReplicaView:
    return dataclasses.replace(replica, state=advance(replica.state, signal), since=now)


def test_fetching_and_compiling_ahead_have_separate_deadlines() -> None:
    """Neither counts as starting, during it or afterwards; endless ones are ended."""
    fetching = view(State.FETCHING, since=20.0, deadlines=Deadlines(start_s=100.0, fetch_s=500.0))
    assert decide([target()], fetching, now=520.0) == []
    late = "fetch-deadline: the fetch did not end within 500 s"
    assert decide([target()], fetching, now=520.1) == [Fail(fetching, late)]

    compiling = view(State.COMPILING, since=20.0, aside_s=90.0, deadlines=Deadlines(start_s=100.0, compile_s=500.0))
    assert decide([target()], compiling, now=520.0) == []
    late = "compile-deadline: it has compiled ahead for more than 500 s"
    assert decide([target()], compiling, now=520.1) == [Fail(compiling, late)]

    loading = view(State.LOADING, aside_s=590.0)
    assert decide([target()], loading, now=700.0) == []
    late = "start-deadline: not ready after 100 s, 590 s of fetching and compiling not counted"
    assert decide([target()], loading, now=700.1) == [Fail(loading, late)]


def test_another_version_or_a_requested_new_process_is_drained_first() -> None:
    """Same place, other version; or the same version with a requested restart."""
    ready = view(State.READY)
    newer = dataclasses.replace(target(), version="w")

    assert decide([newer], ready) == [Drain(ready)]
    assert reconcile([target()], Observed(10.0, {"chat/0": ready}), frozenset({("chat/0", 1)})) == [Drain(ready)]
    assert reconcile([target()], Observed(10.0, {"chat/0": ready}), frozenset({("chat/0", 0)})) == []


def test_a_step_over_its_deadline_is_a_failure_while_serving_and_while_draining() -> None:
    """A blocked engine responds but generates no token: the watchdog ends it."""
    for state in (State.READY, State.DRAINING):
        stuck = view(state, step_s=61.0, deadlines=Deadlines(step_s=60.0))
        what = "step-stuck: one engine step has run for 61 s, the deadline is 60 s"
        assert decide([target()], stuck) == [Fail(stuck, what)]
        assert Fail not in {type(action) for action in decide([target()], dataclasses.replace(stuck, step_s=60.0))}


def test_a_replica_that_outlives_its_drain_deadline_is_stopped() -> None:
    """With the grace that an unresponsive replica gets, and not a moment earlier."""
    draining = view(State.DRAINING, since=10.0, deadlines=Deadlines(drain_s=30.0))
    end = 10.0 + 30.0 + DRAIN_GRACE_S

    assert decide([], draining, now=end) == []
    assert decide([], draining, now=end + 0.1) == [Stop(draining, "its drain deadline has passed")]
