"""The life of a replica as one table, and what the states of its replicas make of a model.

pending   asked for: it is found out what it needs; then Ray has not started its process yet
fetching  its host brings the artifacts that it will load; there is no process yet
compiling its host compiles ahead what would not be found compiled; there is no process yet
loading   the process is up: environment, cores, weights, warm-up, a first generation
ready     serves
draining  takes nothing new; its live requests go on
stopping  told to end; its cores are held until the host has seen the process gone
failed    its process died, or cannot serve; it is started again, or forgotten
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from types import MappingProxyType


class State(str, Enum):
    PENDING = "pending"
    FETCHING = "fetching"
    COMPILING = "compiling"
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    STOPPING = "stopping"
    FAILED = "failed"


class Signal(str, Enum):
    """What can happen to a replica. The controller gives FETCH, COMPILE, DRAIN and STOP; the others are observed."""

    FETCH = "fetch"
    FETCHED = "fetched"
    COMPILE = "compile"
    COMPILED = "compiled"
    STARTED = "started"
    LOADED = "loaded"
    DRAIN = "drain"
    STOP = "stop"
    FAILED = "failed"  # its process died, or said that it cannot serve


TRANSITIONS: Mapping[tuple[State, Signal], State] = MappingProxyType(
    {
        (State.PENDING, Signal.FETCH): State.FETCHING,
        (State.PENDING, Signal.COMPILE): State.COMPILING,
        (State.PENDING, Signal.STARTED): State.LOADING,
        (State.PENDING, Signal.STOP): State.STOPPING,
        (State.PENDING, Signal.FAILED): State.FAILED,
        (State.FETCHING, Signal.FETCHED): State.PENDING,
        (State.FETCHING, Signal.COMPILE): State.COMPILING,
        (State.FETCHING, Signal.STOP): State.STOPPING,
        (State.FETCHING, Signal.FAILED): State.FAILED,
        (State.COMPILING, Signal.COMPILED): State.PENDING,
        (State.COMPILING, Signal.STOP): State.STOPPING,
        (State.COMPILING, Signal.FAILED): State.FAILED,
        (State.LOADING, Signal.LOADED): State.READY,
        (State.LOADING, Signal.STOP): State.STOPPING,
        (State.LOADING, Signal.FAILED): State.FAILED,
        (State.READY, Signal.DRAIN): State.DRAINING,
        (State.READY, Signal.STOP): State.STOPPING,
        (State.READY, Signal.FAILED): State.FAILED,
        (State.DRAINING, Signal.STOP): State.STOPPING,
        (State.DRAINING, Signal.FAILED): State.FAILED,
        (State.STOPPING, Signal.FAILED): State.STOPPING,  # it was told to die
        (State.STOPPING, Signal.STOP): State.STOPPING,
        (State.FAILED, Signal.STOP): State.STOPPING,
        (State.FAILED, Signal.FAILED): State.FAILED,  # the first cause stays the cause
    }
)


STARTING = frozenset({State.PENDING, State.FETCHING, State.COMPILING, State.LOADING})
"""On its way to be ready."""

AHEAD = frozenset({State.FETCHING, State.COMPILING})
"""What has a deadline of its own, and is not counted to the start."""


class IllegalTransition(Exception):
    """A signal that cannot come in this state: a bug in the controller, not a fault of the fleet."""


def advance(state: State, signal: Signal) -> State:
    """The state after ``signal``. Raises IllegalTransition where the table has no entry."""
    try:
        return TRANSITIONS[state, signal]
    except KeyError:
        raise IllegalTransition(f"a {state.value} replica cannot take the signal {signal.value}") from None


def diagram() -> str:
    """The table as a Mermaid state diagram, an arrow for each pair of states; docs/architecture.md holds it."""
    arrows: dict[tuple[State, State], list[str]] = {}
    for (before, signal), after in TRANSITIONS.items():
        arrows.setdefault((before, after), []).append(signal.value)
    lines = [f"    {before.value} --> {after.value} : {', '.join(names)}" for (before, after), names in arrows.items()]
    return "\n".join(["stateDiagram-v2", f"    [*] --> {State.PENDING.value}", *lines]) + "\n"


class ModelState(str, Enum):
    READY = "ready"  # every wanted replica is ready
    DEGRADED = "degraded"  # some are
    LOADING = "loading"  # none is, but one is on its way
    UNLOADED = "unloaded"  # none is wanted
    FAILED = "failed"  # none is ready, and none on its way


def model_state(wanted: int, states: Iterable[State]) -> ModelState:
    """What a model with ``wanted`` replicas is, given the states of those that exist."""
    present = list(states)
    ready = present.count(State.READY)
    if wanted == 0 and ready == 0:
        return ModelState.UNLOADED
    if ready >= wanted:
        return ModelState.READY
    if ready > 0:
        return ModelState.DEGRADED
    coming = {*STARTING, State.DRAINING, State.STOPPING}
    if not present or coming.intersection(present):
        return ModelState.LOADING
    return ModelState.FAILED
