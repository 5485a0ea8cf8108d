"""What may fail while faults happen on network hosts: only what had to do with a machine at the time of its fault."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import httpx

from tests.network_fleet import NetworkFleet
from tests.network_invariants import CoreWatch
from tests.orchestrator.clients import BROKEN, Failure
from tests.repeated import Repeated

MARGIN_S = 5.0  # until gateways have noticed the begin or the end of a fault, on a busy machine
UNAVAILABLE = {"model_loading", "model_unavailable", "server_unavailable"}


class Faults(Repeated):
    """The faults so far, each of a machine, a replica or a gateway; and the replicas that were ready meanwhile, as the
    controller had them."""

    def __init__(self, fleet: NetworkFleet, watch: CoreWatch) -> None:
        self._fleet = fleet
        self._watch = watch
        self._faults: list[tuple[str, float, float]] = []  # a machine's name, a replica's id or a gateway's URL
        self._ready: list[tuple[float, list[str]]] = []  # the replicas' ids at that time

    def look(self) -> None:
        at = time.monotonic()
        with suppress(httpx.HTTPError, ValueError, KeyError):  # the controller is away, or says so
            replicas = [replica for model in self._fleet.status()["models"] for replica in model["replicas"]]
            self._ready.append((at, [replica["id"] for replica in replicas if replica["state"] == "ready"]))

    def add(self, name: str, lasts_s: float = 0.0) -> None:
        """Add a fault that begins now."""
        now = time.monotonic()
        self._faults.append((name, now, now + lasts_s))

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        """The fault lasts as long as the block, and is known from its begin on."""
        self.begin(name)
        yield
        self.end(name)

    def begin(self, name: str) -> None:
        self.add(name, float("inf"))

    def end(self, name: str) -> None:
        now = time.monotonic()
        self._faults = [(other, at, min(until, now) if other == name else until) for other, at, until in self._faults]

    def has(self, name: str, began: float, ended: float) -> bool:
        """Returns whether a fault of that name lasted at some time between both."""
        return any(
            other == name and at - MARGIN_S <= ended and began <= until + MARGIN_S for other, at, until in self._faults
        )

    def permits(self, failure: Failure) -> bool:
        """Returns whether a fault explains that answer:

        1. its gateway, or the machine of its gateway, had a fault,
        2. the replica whose answer had begun is lost, and it or its machine had a fault,
        3. it has Retry-After, and at some time no ready replica of the model was without a fault.
        """
        began, ended = failure.began, failure.ended
        if self.has(failure.gateway, began, ended):
            return True
        if self.has(self._fleet.gateway_machine(failure.gateway).name, began, ended):
            return True
        if failure.kind == BROKEN or failure.problem is not None:
            return False
        if failure.kind == "replica_lost":
            return failure.replica is not None and self._touched(failure.replica, began, ended)
        return failure.kind in UNAVAILABLE and not self._serves(failure.model, began, ended)

    def _touched(self, id: str, began: float, ended: float) -> bool:
        machines = self._watch.machines_of(id, began, ended)
        return self.has(id, began, ended) or any(self.has(machine, began, ended) for machine in machines)

    def _serves(self, model: str, began: float, ended: float) -> bool:
        """Returns whether the model had a ready replica without a fault all the time. A process that was not seen had
        ended before."""
        looks = [ready for at, ready in self._ready if began - self.pause_s <= at <= ended + self.pause_s]
        before = [ready for at, ready in self._ready if at < began][-1:]
        return all(
            any(
                id.startswith(f"{model}/")
                and self._watch.machines_of(id, began, ended)
                and not self._touched(id, began, ended)
                for id in ready
            )
            for ready in before + looks
        )
