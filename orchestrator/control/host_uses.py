"""The hosts that come and go: which of them the fleet uses, by the journal, and why machines are not started."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from orchestrator.control.decisions.host_demand import START_S
from orchestrator.control.journal.journal_records import HostUse
from orchestrator.control.record_writer import RecordWriter
from placements.planner.placement import Placement
from placements.planner.spec_hosts import HostGroup, kept_hosts

LATE = 3.0  # a machine is late after this many start times
LEAST_LATE_S = 900.0
AVOID_S = 600.0  # a type that did not start is avoided for so long after its last failure


@dataclass(frozen=True)
class LaunchFailure:
    """The last failure to start a machine of one instance type. Times are by the wall clock."""

    reason: str
    at: float


class HostUses:
    """Which hosts of the groups with ``max`` one fleet uses. Their records are written by its controller."""

    def __init__(self, records: RecordWriter) -> None:
        self._records = records
        self.failures: dict[str, LaunchFailure] = {}  # by instance type
        self.expected: tuple[Placement, ...] = ()  # of the replicas once all requested hosts are there, if some wait

    def kept(self, groups: Sequence[HostGroup]) -> frozenset[str]:
        """Returns the hosts that the fleet uses, with or without a machine."""
        return frozenset(host.name for host in kept_hosts(groups, self._records.state.uses))

    def waiting(self) -> dict[str, HostUse]:
        """Returns the hosts that wait for their first machine, or for another one after a loss."""
        return {name: use for name, use in self._records.state.uses.items() if use.state == "requested"}

    def start_s(self, instance: str) -> float:
        """Returns how long a machine takes from its request until it joins."""
        return self._records.state.host_starts.get(instance, START_S)

    def report(self, reasons: Mapping[str, str]) -> Iterator[str]:
        """Take the reasons why machines are not started. Yields the instance types for which the reason is new."""
        now = self._records.wall()
        for instance, reason in reasons.items():
            last = self.failures.get(instance)
            self.failures[instance] = LaunchFailure(reason, now)
            if last is None or last.reason != reason:
                yield instance

    def report_late(self) -> Iterator[str]:
        """Count machines that are late as failures to start. Yields the instance types for which that is new."""
        late = {}
        for host, use in self.waiting().items():
            instance = host.rpartition("/")[0]
            limit_s = max(LEAST_LATE_S, LATE * self.start_s(instance))
            if self._records.wall() - use.at > limit_s and not self.why_waiting(host):
                late[instance] = f"no machine has joined within {limit_s:.0f} s"
        return self.report(late)

    def avoided(self) -> frozenset[str]:
        """Returns the instance types of which a machine failed to start lately, or is late."""
        now = self._records.wall()
        return frozenset(instance for instance, failure in self.failures.items() if now - failure.at < AVOID_S)

    def awaited(self) -> str | None:
        """Returns the hosts that wait for a machine, with the reasons; None if there is none."""
        hosts = [f"{host} ({why})" if (why := self.why_waiting(host)) else host for host in self.waiting()]
        return f"it waits for the requested machine of {', '.join(hosts)}" if hosts else None

    def why_waiting(self, host: str) -> str:
        """Returns why the machine of a host is not there yet; empty if there is no other reason than its start."""
        failure = self.failures.get(host.rpartition("/")[0])
        recent = failure is not None and self._records.wall() - failure.at < AVOID_S
        return failure.reason if failure is not None and recent else ""
