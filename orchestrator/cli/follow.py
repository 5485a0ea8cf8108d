"""Follows the events of the fleet, and rollouts until they end."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator

from msgspec.structs import replace

from orchestrator.cli.app import FAILED, INTERRUPTED
from orchestrator.cli.bars import Bars, bars_on
from orchestrator.cli.client import AdminClient
from orchestrator.cli.listing import EVENTS
from orchestrator.cli.output import say, state_paint, stderr
from orchestrator.messages.controller_settings import LONGEST_WAIT_S
from orchestrator.messages.fleet_status import (
    EventPage,
    EventRow,
    FleetStatus,
    RevisionRow,
    RolloutReport,
    RolloutStatus,
)
from orchestrator.process.failure import Failed
from orchestrator.process.text_table import Paint, aligned, cells

PAGE = 1000
STEP_S = 5.0  # longest wait for an event before the rollout is read again
EVENT_WIDTHS = (6, 19, 7, 18, 16, 0)
BARS_S = 1.0  # the same while bars are drawn
SUCCEEDED = ("complete", "canary")  # a serving canary waits for `promote` or `undo`
ENDED = (*SUCCEEDED, "failed", "rolled_back")


def events_after(client: AdminClient, after: int, model: str | None) -> Iterator[EventRow]:
    """Yields the present events after that number, oldest first."""
    while True:
        page = client.read(EventPage, "events", {"after": after, "limit": PAGE, "model": model})
        yield from page.events
        if len(page.events) < PAGE:
            return
        after = page.next


def latest(client: AdminClient, most: int, model: str | None = None) -> list[EventRow]:
    """Returns the last ``most`` events, oldest first."""
    return list(deque(events_after(client, 0, model), maxlen=most))


def coming(client: AdminClient, after: int, model: str | None) -> Iterator[EventRow]:
    """Yields events after that number as they come, without end."""
    while True:
        query = {"after": after, "limit": PAGE, "model": model, "wait_s": LONGEST_WAIT_S}
        page = client.read(EventPage, "events", query, retry=True)
        yield from page.events
        after = page.next


def follow_to_end(
    client: AdminClient, revision: int, after: int, timeout_s: float | None
) -> tuple[RolloutReport | None, int]:
    """As ``follow_rollout``, with the exit code. After Ctrl-C the state is None."""
    try:
        with bars_on(stderr()) as bars:
            final = follow_rollout(client, revision, after, timeout_s, bars)
    except KeyboardInterrupt:
        say("stopped waiting; the rollout continues: see `corewright rollout status`")
        return None, INTERRUPTED
    return final, 0 if final.state in SUCCEEDED else FAILED


def follow_rollout(
    client: AdminClient, revision: int, after: int, timeout_s: float | None, bars: Bars | None = None
) -> RolloutReport:
    """Prints events on stderr, and draws bars, until the rollout of ``revision`` ends. Returns its final state.

    Raises Failed `rollout-late` at the timeout, `rollout-replaced` if another revision replaced it.
    """
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    report, step_s = (say, STEP_S) if bars is None else (bars.say, BARS_S)
    while True:
        if bars is not None:
            bars.show_status(client.read(FleetStatus, "status", retry=True))
        rollout = client.read(RolloutReport, "rollout", retry=True)
        ours, ended = rollout.revision == revision, rollout.state in ENDED
        remaining_s = step_s if deadline is None else min(step_s, deadline - time.monotonic())
        wait_s = 0.0 if ended or not ours else max(0.0, remaining_s)
        page = client.read(EventPage, "events", {"after": after, "limit": PAGE, "wait_s": wait_s}, retry=True)
        after = page.next
        for event in page.events:
            report(event_line(event, state_paint(stderr())))
        if ours and ended:
            return rollout
        if not ours:
            cause = f"replaced by revision {rollout.revision}"
            record = client.read(RevisionRow, f"revisions/{revision}", retry=True)
            if record.state in ENDED:  # rolled back by the controller; ``rollout`` has the models of the other one
                reason = "; ".join(part for part in (record.reason, cause) if part)
                return replace(rollout, revision=revision, state=record.state, reason=reason, models=[])
            raise Failed("rollout-replaced", f"revision {revision}: {cause}", "see `corewright rollout history`")
        if remaining_s <= 0:
            message = f"after {timeout_s:g} s {rollout_line(rollout)}"
            hint = "the rollout continues: `corewright rollout status --wait`"
            raise Failed("rollout-late", message, hint)


def event_line(event: EventRow | None, paint: Paint | None = None) -> str:
    """Returns one line of followed events; for None the header."""
    header = EVENTS.header()
    return aligned(header, cells(header if event is None else EVENTS.row(event)), EVENT_WIDTHS, paint)


def rollout_line(rollout: RolloutStatus) -> str:
    """Returns the state of a rollout and its reason in one line."""
    reason = f": {rollout.reason}" if rollout.reason else ""
    return f"revision {rollout.revision}: {rollout.state.replace('_', ' ')}{reason}"
