"""Follows the events of the fleet, and rollouts until they end."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from typing import Any

from orchestrator.cli.app import FAILED, INTERRUPTED
from orchestrator.cli.client import AdminClient
from orchestrator.cli.output import say
from orchestrator.cli.tables import event_line, rollout_line
from orchestrator.fleet.controller_settings import LONGEST_WAIT_S
from orchestrator.process.failure import Failed

PAGE = 1000
STEP_S = 5.0  # longest wait for an event before the rollout is read again
SUCCEEDED = ("complete", "canary")  # a serving canary waits for `promote` or `undo`
ENDED = (*SUCCEEDED, "failed", "rolled_back")


def events_after(client: AdminClient, after: int, model: str | None) -> Iterator[dict[str, Any]]:
    """Yields the present events after that number, oldest first."""
    while True:
        page = client.get("events", {"after": after, "limit": PAGE, "model": model})
        yield from page["events"]
        if len(page["events"]) < PAGE:
            return
        after = page["next"]


def latest(client: AdminClient, most: int, model: str | None = None) -> list[dict[str, Any]]:
    """Returns the last ``most`` events, oldest first."""
    return list(deque(events_after(client, 0, model), maxlen=most))


def coming(client: AdminClient, after: int, model: str | None) -> Iterator[dict[str, Any]]:
    """Yields events after that number as they come, without end."""
    while True:
        page = client.get_with_retries(
            "events", {"after": after, "limit": PAGE, "model": model, "wait_s": LONGEST_WAIT_S}
        )
        yield from page["events"]
        after = page["next"]


def follow_to_end(
    client: AdminClient, revision: int, after: int, timeout_s: float | None
) -> tuple[dict[str, Any] | None, int]:
    """As ``follow_rollout``, with the exit code. After Ctrl-C the state is None."""
    try:
        final = follow_rollout(client, revision, after, timeout_s)
    except KeyboardInterrupt:
        say("stopped waiting; the rollout continues: see `corewright rollout status`")
        return None, INTERRUPTED
    return final, 0 if final["state"] in SUCCEEDED else FAILED


def follow_rollout(client: AdminClient, revision: int, after: int, timeout_s: float | None) -> dict[str, Any]:
    """Print events on stderr until the rollout of ``revision`` ends. Returns its final state.

    Raises Failed `rollout-late` at the timeout, `rollout-replaced` if another revision replaced it.
    """
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while True:
        rollout: dict[str, Any] = client.get_with_retries("rollout")
        ours, ended = rollout["revision"] == revision, rollout["state"] in ENDED
        remaining_s = STEP_S if deadline is None else min(STEP_S, deadline - time.monotonic())
        wait_s = 0.0 if ended or not ours else max(0.0, remaining_s)
        page = client.get_with_retries("events", {"after": after, "limit": PAGE, "wait_s": wait_s})
        after = page["next"]
        for event in page["events"]:
            say(event_line(event))
        if ours and ended:
            return rollout
        if not ours:
            cause = f"replaced by revision {rollout['revision']}"
            record = client.get_with_retries(f"revisions/{revision}")
            if record["state"] in ENDED:  # rolled back by the controller; ``rollout`` has the models of the other one
                reason = "; ".join(part for part in (record.get("reason"), cause) if part)
                return {**rollout, "revision": revision, "state": record["state"], "reason": reason, "models": []}
            raise Failed("rollout-replaced", f"revision {revision}: {cause}", "see `corewright rollout history`")
        if remaining_s <= 0:
            message = f"after {timeout_s:g} s {rollout_line(rollout)}"
            hint = "the rollout continues: `corewright rollout status --wait`"
            raise Failed("rollout-late", message, hint)
