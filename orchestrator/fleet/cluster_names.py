"""The names under which a fleet is kept on a Ray cluster, which it may share with other fleets and other users."""

from __future__ import annotations

HOST_ACTOR = "host/"  # begins the name of each host actor; the label of its Ray node follows
SHARED = "corewright"  # the namespace in Ray's KV of what the fleets of a cluster must agree on


def ray_name(fleet: str) -> str:
    """Returns the name of the fleet's Ray namespace, of its namespace in Ray's KV and of its Serve application."""
    return f"corewright-{fleet}"
