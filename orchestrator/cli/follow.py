"""Following what the fleet does: its events, and a rollout to its end."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from typing import Any

from orchestrator.cli.client import AdminClient
from orchestrator.cli.output import say
from orchestrator.cli.tables import event_line, rollout_line
from orchestrator.fleet.controller_settings import LONGEST_WAIT_S
from orchestrator.process.failure import Failed

PAGE = 1000
STEP_S = 5.0  # a rollout that tells no event is looked at so often
SUCCEEDED = ("complete", "canary")  # a canary that serves waits for a person
ENDED = (*SUCCEEDED, "failed", "rolled_back")


def events_after(client: AdminClient, after: int, model: str | None) -> Iterator[dict[str, Any]]:
    """Those that there are now, oldest first."""
    while True:
        page = client.get("events", {"after": after, "limit": PAGE, "model": model})
        yield from page["events"]
        if len(page["events"]) < PAGE:
            return
        after = page["next"]


def latest(client: AdminClient, most: int, model: str | None = None) -> list[dict[str, Any]]:
    """The last ``most`` of them, oldest first."""
    return list(deque(events_after(client, 0, model), maxlen=most))


def coming(client: AdminClient, after: int, model: str | None) -> Iterator[dict[str, Any]]:
    """Events from then on, for ever."""
    while True:
        page = client.patiently("events", {"after": after, "limit": PAGE, "model": model, "wait_s": LONGEST_WAIT_S})
        yield from page["events"]
        after = page["next"]


def follow_rollout(client: AdminClient, revision: int, after: int, timeout_s: float | None) -> dict[str, Any]:
    """Tell events on stderr until the rollout of ``revision`` has ended; gives it as it is then.

    Raises Failed `rollout-late` at the time limit, `rollout-replaced` when another revision took its place.
    """
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while True:
        rollout: dict[str, Any] = client.patiently("rollout")
        ours, ended = rollout["revision"] == revision, rollout["state"] in ENDED
        left = STEP_S if deadline is None else min(STEP_S, deadline - time.monotonic())
        wait_s = 0.0 if ended or not ours else max(0.0, left)
        page = client.patiently("events", {"after": after, "limit": PAGE, "wait_s": wait_s})
        after = page["next"]
        for event in page["events"]:
            say(event_line(event))
        if ours and ended:
            return rollout
        if not ours:
            what = f"revision {rollout['revision']} took its place"
            was = client.patiently(f"revisions/{revision}")
            if was["state"] in ENDED:  # the controller has gone back by itself; the models are those of the other one
                reason = "; ".join(part for part in (was.get("reason"), what) if part)
                return {**rollout, "revision": revision, "state": was["state"], "reason": reason, "models": []}
            raise Failed("rollout-replaced", f"revision {revision}: {what}", "corewright rollout history")
        if left <= 0:
            what = f"after {timeout_s:g} s {rollout_line(rollout)}"
            raise Failed("rollout-late", what, "it goes on: corewright rollout status --wait")
