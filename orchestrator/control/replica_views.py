"""The controller's views of all replicas by id, with an index by model and by host, and which gateways reach them."""

from __future__ import annotations

from collections.abc import Iterable

from orchestrator.control.decisions.replica_view import ReplicaView
from orchestrator.messages.gateway_places import GATEWAY_LOST_S


class ReplicaViews(dict[str, ReplicaView]):
    """The replicas by id. With thousands of them on a hundred hosts, each model and host must not read them all.

    Entries are changed by assignment, `refresh` and `del` only. ``changes`` counts the assigned and deleted entries:
    what was computed from the places and states of replicas is valid until it grows. ``refreshes`` counts the others.
    """

    def __init__(self) -> None:
        super().__init__()
        self.changes = 0
        self.refreshes = 0
        self._of_models: dict[str, dict[int, ReplicaView]] = {}
        self._of_hosts: dict[str, dict[str, ReplicaView]] = {}

    def __setitem__(self, id: str, view: ReplicaView) -> None:
        self.changes += 1
        self._set(id, view)

    def refresh(self, view: ReplicaView) -> None:
        """Set a view that differs in the work that the replica reports only (`ReplicaView.after`)."""
        self.refreshes += 1
        self._set(view.id, view)

    def _set(self, id: str, view: ReplicaView) -> None:
        before = self.get(id)
        if before is not None and before.host != view.host:
            del self._of_hosts[before.host][id]
        super().__setitem__(id, view)
        self._of_models.setdefault(view.model, {})[view.replica] = view
        self._of_hosts.setdefault(view.host, {})[id] = view

    def __delitem__(self, id: str) -> None:
        self.changes += 1
        view = self[id]
        super().__delitem__(id)
        del self._of_models[view.model][view.replica]
        del self._of_hosts[view.host][id]

    def of_model(self, name: str) -> list[ReplicaView]:
        """Returns the replicas of a model in the order of their numbers."""
        return [view for _, view in sorted(self._of_models.get(name, {}).items())]

    def of_host(self, name: str) -> list[ReplicaView]:
        """Returns the replicas on a host."""
        return list(self._of_hosts.get(name, {}).values())


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
