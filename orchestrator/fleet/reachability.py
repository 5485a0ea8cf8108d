"""Which replicas the gateways cannot connect to, from their reports."""

from __future__ import annotations

from collections.abc import Iterable

FORGET_S = 10.0  # a gateway with something to report does so each second: one that is silent for longer has ended


class Reach:
    """The last report of each gateway."""

    def __init__(self) -> None:
        self._reports: dict[str, tuple[float, frozenset[str]]] = {}  # by gateway

    def hear(self, gateway: str, unreachable: Iterable[str], now: float) -> None:
        """Take a gateway's report: the ids of the ready replicas that it has no connection to."""
        self._reports[gateway] = now, frozenset(unreachable)

    def unreachable(self, now: float) -> frozenset[str]:
        """The replicas that at least one living gateway cannot connect to."""
        self._reports = {name: one for name, one in self._reports.items() if one[1] and now - one[0] <= FORGET_S}
        return frozenset().union(*(ids for _, ids in self._reports.values()))
