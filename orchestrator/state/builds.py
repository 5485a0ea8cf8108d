"""The versions of corewright in a fleet whose upgrade has not ended."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orchestrator.state.fleet_state import FleetState


def other_versions(state: FleetState) -> dict[str, str]:
    """Returns the version of each replica that does not run the controller's build, by id."""
    others = {}
    for view in state.views.values():
        build = state.revision_of_version(view.model, view.version).revision.build
        if build not in (None, state.settings.build) and not view.gone:
            others[view.id] = build.version
    return others


def versions(
    state: FleetState, host_actors: Mapping[str, str], gateways: Mapping[str, str], problem: str | None
) -> dict[str, Any] | None:
    """Returns the versions for `status`; None if there is one only. ``host_actors`` and ``gateways`` are those of other
    versions, by machine, and ``problem`` is why the upgrade does not go on."""
    own = state.settings.build
    others = {"host_actors": dict(host_actors), "gateways": dict(gateways), "replicas": other_versions(state)}
    if own is None or not any(others.values()):
        return None
    return {"controller": own.version, **others, "problem": problem}
