"""The names of the running fleet's models, replicas and hosts, for completion in shells."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

import typer

DEADLINE_S = 2.0  # a shell waits for its completions
LISTED = ("models", "replicas", "hosts")


def names_of(*kinds: str) -> Callable[[], list[str]]:
    """Returns the function that lists the fleet's models, replicas or hosts, for `autocompletion`."""

    def names() -> list[str]:
        return _names(kinds)

    return names


def names_to_get(context: typer.Context) -> list[str]:
    """Returns the names that `get KIND` takes."""
    kind = context.params.get("kind")
    return _names(("models" if kind == "events" else str(kind.value if isinstance(kind, Enum) else kind),))


def _names(kinds: tuple[str, ...]) -> list[str]:
    """Returns the names of these kinds; none without a fleet that answers in time."""
    from orchestrator.cli.client import find_fleet
    from orchestrator.cli.get import items_by_name
    from orchestrator.process.failure import Failed

    client = find_fleet()
    if client is None:
        return []
    try:
        status = client.status(DEADLINE_S)
    except Failed:
        return []
    return [name for kind in kinds if kind in LISTED for name in items_by_name(status, kind)]
