"""Explains why a model is unloaded, if no failure is the cause. Pure."""

from __future__ import annotations

from orchestrator.state.fleet_state import FleetState
from placements.spec.schema import ModelSpec


def why_unloaded(state: FleetState, model: ModelSpec) -> list[str]:
    """Returns the reasons for an operator: the manual action with the command that reverts it, or the autoscaler's.

    Empty: the model is at zero for lack of requests.
    """
    scale = state.records.state.scales.get(model.name)
    if scale is not None and scale.sleep:
        return [f"unloaded by hand: corewright load {model.name}"]
    if scale is not None and scale.count == 0:
        return [f"scaled to 0 by hand: corewright scale {model.name} auto"]
    return [state.counts.held_back[model.name]] if model.name in state.counts.held_back else []


def reason_for_clients(state: FleetState, model: ModelSpec, reason: str | None) -> str | None:
    """Returns ``reason`` for clients, without commands and without the figures of an autoscaler decision."""
    scale = state.records.state.scales.get(model.name)
    if scale is not None and (scale.sleep or scale.count == 0):
        return "by hand" if scale.sleep else "scaled to 0 by hand"
    held = state.counts.held_back.get(model.name)
    return reason if held is None or reason != held else held.partition(";")[0]
