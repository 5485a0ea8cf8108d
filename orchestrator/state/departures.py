"""Hosts that will end: by notices of Ray and of the cloud, or by an operator. One record in the journal for each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from orchestrator.fleet.effects import HostReport
from orchestrator.fleet.leaving_host import LeavingHost
from orchestrator.records.journal_records import Departure
from workers.messages.status import Notice

SAME_S = 2.0  # deadlines of one notice may differ by so much between two reports


def noticed_departures(recorded: Mapping[str, Departure], reports: Mapping[str, HostReport]) -> Iterator[Departure]:
    """Yields the records that notices lead to.

    1. A notice, and none is recorded, or one that it replaces -> the host departs
    2. No notice any more, and one is recorded                 -> the host stays
    An operator's departure stays, except that an earlier end by a notice replaces it. Hosts without a report keep what
    is recorded: a lost host has none, and one that comes back has a new machine.
    """
    for host, report in sorted(reports.items()):
        departure, notice = recorded.get(host), report.notice
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
