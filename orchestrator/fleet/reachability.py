"""Tracks which replicas the gateways cannot connect to, from their reports."""

from __future__ import annotations

from collections.abc import Iterable

from orchestrator.fleet.gateway_places import GATEWAY_LOST_S


class Reachability:
    """The unreachable replicas, by the last report of each gateway."""

    def __init__(self) -> None:
        self._reports: dict[str, tuple[float, frozenset[str]]] = {}  # by gateway

    def receive(self, gateway: str, unreachable: Iterable[str], now: float) -> None:
        """Receive a gateway's report: the ids of the ready replicas to which it has no connection."""
        self._reports[gateway] = now, frozenset(unreachable)

    def unreachable(self, now: float) -> frozenset[str]:
        """Returns the replicas to which at least one live gateway cannot connect."""
        self._reports = {
            name: report for name, report in self._reports.items() if report[1] and now - report[0] <= GATEWAY_LOST_S
        }
        return frozenset().union(*(ids for _, ids in self._reports.values()))
