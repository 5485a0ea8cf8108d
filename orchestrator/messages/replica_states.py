"""The life cycle of a replica as one table, and the state of a model derived from its replicas.

pending   its needs are being determined, then Ray starts its process
fetching  its host fetches the artifacts that it loads; it has no process yet
compiling its host compiles ahead what is not in the cache; it has no process yet
loading   its process runs: environment, cores, weights, warm-up, a first generation
ready     serves
draining  accepts no new requests; its live requests continue
stopping  is being killed; its cores are held until the host confirms that the process is gone
failed    its process died or cannot serve; it is restarted or forgotten
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
    """An event in a replica's life. The controller sends FETCH, COMPILE, DRAIN and STOP; the others are observed."""

    FETCH = "fetch"
    FETCHED = "fetched"
    COMPILE = "compile"
    COMPILED = "compiled"
    STARTED = "started"
    LOADED = "loaded"
    DRAIN = "drain"
    STOP = "stop"
    FAILED = "failed"  # its process died or reported a failure


TRANSITIONS: Mapping[tuple[State, Signal], State] = MappingProxyType(
    {
        (State.PENDING, Signal.FETCH): State.FETCHING,
        (State.PENDING, Signal.COMPILE): State.COMPILING,
        (State.PENDING, Signal.STARTED): State.LOADING,
        (State.FETCHING, Signal.FETCHED): State.PENDING,
        (State.FETCHING, Signal.COMPILE): State.COMPILING,
        (State.COMPILING, Signal.COMPILED): State.PENDING,
        (State.LOADING, Signal.LOADED): State.READY,
        (State.READY, Signal.DRAIN): State.DRAINING,
        **{(state, Signal.STOP): State.STOPPING for state in State},
        **{(state, Signal.FAILED): State.FAILED for state in State},  # a failed one keeps its first cause
        (State.STOPPING, Signal.FAILED): State.STOPPING,  # it is being killed
    }
)


STARTING = frozenset({State.PENDING, State.FETCHING, State.COMPILING, State.LOADING})
"""The states before readiness."""

LEAVING = frozenset({State.DRAINING, State.STOPPING})
"""The states from which a replica does not serve again."""

ENDING = frozenset({State.STOPPING, State.FAILED})
"""The states in which the process is killed until its death is confirmed."""

AHEAD = frozenset({State.FETCHING, State.COMPILING})
"""The states with deadlines of their own, which do not count as start time."""


class IllegalTransition(Exception):
    """A signal that is not valid in this state: a bug in the controller, not a fault of the fleet."""


def advance(state: State, signal: Signal) -> State:
    """Returns the state after ``signal``. Raises IllegalTransition if the table has no entry."""
    try:
        return TRANSITIONS[state, signal]
    except KeyError:
        raise IllegalTransition(f"a {state.value} replica cannot take the signal {signal.value}") from None


class ModelState(str, Enum):
    READY = "ready"  # every wanted replica is ready
    DEGRADED = "degraded"  # some are
    LOADING = "loading"  # none is, but one is starting
    UNLOADED = "unloaded"  # none is wanted
    FAILED = "failed"  # none is ready or starting


def model_state(desired: int, states: Iterable[State]) -> ModelState:
    """Returns the state of a model with ``desired`` replicas, given the states of those that exist."""
    present = list(states)
    ready = present.count(State.READY)
    if desired == 0 and ready == 0:
        return ModelState.UNLOADED
    if ready >= desired:
        return ModelState.READY
    if ready > 0:
        return ModelState.DEGRADED
    coming = STARTING | LEAVING
    if not present or coming.intersection(present):
        return ModelState.LOADING
    return ModelState.FAILED
