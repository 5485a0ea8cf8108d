"""Hosts that will end, by notices of Ray and of the cloud or by an operator, and when their replicas leave. Pure.

There is one record in the journal for each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from orchestrator.control.decisions.replica_view import ReplicaView
from orchestrator.control.journal.journal_records import Departure
from orchestrator.messages.replica_states import LEAVING, State
from workers.messages.status import Notice

STOP_S = 5.0  # before the end no process is left
END_S = 10.0  # before the end no request runs


@dataclass(frozen=True)
class LeavingHost:
    """The times of a departure, on the snapshot's clock."""

    since: float  # when its notice came
    until: float  # when the host may be gone

    @property
    def stop_at(self) -> float:
        """When every replica is stopped, whatever it does."""
        return self.until - STOP_S

    def drain_at(self, view: ReplicaView) -> float:
        """Returns when a ready replica begins to drain although nothing replaces it.

        At most half of the notice is for requests in progress: until then it serves, and a replacement may get ready.
        """
        return self.until - END_S - min(view.deadlines.drain_s, max(0.0, self.until - self.since) / 2)


def replicas_to_end(
    views: Iterable[ReplicaView], leaving: Mapping[str, LeavingHost], now: float
) -> frozenset[tuple[str, int]]:
    """Returns the (id, epoch) of the replicas that have to end now, by the host that leaves:

    1. a starting one: it would serve only for a moment
    2. a ready one, once its drain has to begin
    """
    return frozenset(
        (view.id, view.epoch)
        for view in views
        if (host := leaving.get(view.host)) is not None
        and view.state not in LEAVING
        and (view.state is not State.READY or now >= host.drain_at(view))
    )


SAME_S = 2.0  # deadlines of one notice may differ by so much between two reports


def noticed_departures(recorded: Mapping[str, Departure], notices: Mapping[str, Notice | None]) -> Iterator[Departure]:
    """Yields the records that notices lead to.

    1. A notice, and none is recorded, or one that it replaces -> the host departs
    2. No notice any more, and one is recorded                 -> the host stays
    An operator's departure stays, except that an earlier end by a notice replaces it. ``notices`` has the hosts that
    report. Others keep what is recorded: a lost host does not report, and one that comes back has a new machine.
    """
    for host, notice in sorted(notices.items()):
        departure = recorded.get(host)
        if notice is None:
            if departure is not None and departure.noticed:
                yield Departure(host=host, on=False, noticed=True, cause=departure.cause)
        elif departure is None or _replaces(notice, departure):
            yield Departure(host=host, on=True, cause=notice.cause, until=notice.until, noticed=True)


def _replaces(notice: Notice, departure: Departure) -> bool:
    """Returns whether the notice has an earlier deadline, or another one than the notice that is recorded."""
    if notice.until is None:
        return False
    if departure.until is None or notice.until < departure.until - SAME_S:
        return True
    return departure.noticed and abs(notice.until - departure.until) > SAME_S


def leaving_hosts(departures: Mapping[str, Departure], clock_minus_wall: float) -> dict[str, LeavingHost]:
    """Returns the hosts with a deadline, on the clock of snapshots."""
    return {
        host: LeavingHost(departure.at + clock_minus_wall, departure.until + clock_minus_wall)
        for host, departure in departures.items()
        if departure.until is not None
    }
