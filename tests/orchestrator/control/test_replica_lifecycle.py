"""The table of a replica's life, and what a model is."""

from __future__ import annotations

import pytest

from orchestrator.messages.replica_states import (
    TRANSITIONS,
    IllegalTransition,
    ModelState,
    Signal,
    State,
    advance,
    model_state,
)


def test_every_state_is_reachable_from_pending_and_can_end() -> None:
    """No state lacks a way in or a way to stopping."""
    reached = {State.PENDING}
    while more := {to for (state, _), to in TRANSITIONS.items() if state in reached} - reached:
        reached |= more

    assert reached == set(State)
    for state in State:
        assert (state, Signal.STOP) in TRANSITIONS


def test_an_impossible_signal_is_a_bug() -> None:
    """A stopping replica does not become ready."""
    with pytest.raises(IllegalTransition, match="a stopping replica cannot take the signal loaded"):
        advance(State.STOPPING, Signal.LOADED)


@pytest.mark.parametrize(
    ("wanted", "states", "expected"),
    [
        (0, [], ModelState.UNLOADED),
        (1, [], ModelState.LOADING),
        (1, [State.LOADING], ModelState.LOADING),
        (1, [State.READY], ModelState.READY),
        (2, [State.READY, State.FAILED], ModelState.DEGRADED),
        (2, [State.LOADING, State.FAILED], ModelState.LOADING),
        (2, [State.FAILED, State.FAILED], ModelState.FAILED),
        (0, [State.READY], ModelState.READY),
    ],
)
def test_a_models_state_follows_from_its_replicas(wanted: int, states: list[State], expected: ModelState) -> None:
    """From their states only."""
    assert model_state(wanted, states) is expected
