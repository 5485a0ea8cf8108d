"""The names under which a fleet is kept on a Ray cluster, which it may share with other fleets and other users."""

from __future__ import annotations

HOST_ACTOR = "host/"  # begins the name of each host actor
SHARED = "corewright"  # the namespace in Ray's KV of what the fleets of a cluster must agree on


def host_actor_name(label: str, version: str) -> str:
    """Returns the name of a host actor, by the label of its Ray node and the version of corewright that it runs: in an
    upgrade, those of two versions are on a node for a moment."""
    return f"{HOST_ACTOR}{label}@{version}"


def host_actor_of(name: str) -> tuple[str, str] | None:
    """Returns the label and the version in the name of a host actor; None for another actor."""
    label, _, version = name.removeprefix(HOST_ACTOR).rpartition("@")
    return (label, version) if name.startswith(HOST_ACTOR) else None


def ray_name(fleet: str) -> str:
    """Returns the name of the fleet's Ray namespace, of its namespace in Ray's KV and of its Serve application."""
    return f"corewright-{fleet}"
