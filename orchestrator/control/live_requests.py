"""The requests at the gateways, while an operator looks at them, and the cancelling of one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec.structs

from orchestrator.messages.gateway_calls import GATEWAY_LOST_S
from orchestrator.scaling.demand_report import DemandReport, LiveRequest

WATCHED_S = 10.0  # after the last query, gateways stop reporting their requests
ENDED = 200  # requests that have ended, kept while they are watched


class LiveRequests:
    """The last report of each gateway about its requests, on the controller's event loop."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._watched_until = float("-inf")
        self._open: dict[str, tuple[float, list[LiveRequest]]] = {}  # by gateway
        self._ended: deque[LiveRequest] = deque(maxlen=ENDED)
        self._cancelled: dict[str, set[str]] = {}  # by gateway; sent with the reply to its next report

    @property
    def watched(self) -> bool:
        return self._clock() < self._watched_until

    def receive(self, report: DemandReport) -> dict[str, Any]:
        """Receives a gateway's report. Returns the fields of the reply to it."""
        if not self.watched:
            self._open.clear()
            self._ended.clear()
        else:
            self._open[report.gateway] = self._clock(), [each for each in report.requests if not each.ended]
            self._ended.extend(each for each in report.requests if each.ended)
        return {"watched": self.watched, "cancelled": sorted(self._cancelled.pop(report.gateway, ()))}

    def query(self) -> list[dict[str, Any]]:
        """Returns the open requests, the oldest first, then those that have ended, the last first. Gateways report them
        from now on."""
        now = self._clock()
        self._watched_until = now + WATCHED_S
        heard = [each for at, requests in self._open.values() if now - at < GATEWAY_LOST_S for each in requests]
        shown = [*sorted(heard, key=lambda each: -each.age_s), *reversed(self._ended)]
        return [_as_dict(each) for each in shown]

    def cancel(self, request: str) -> bool:
        """Has a request cancelled by its gateway with its next report; returns False if no gateway has it."""
        gateways = [
            name for name, (_, requests) in self._open.items() if any(each.request == request for each in requests)
        ]
        for name in gateways:
            self._cancelled.setdefault(name, set()).add(request)
        return bool(gateways)


def _as_dict(request: LiveRequest) -> dict[str, Any]:
    decision = request.decision
    fields = msgspec.structs.asdict(request)
    return {**fields, "decision": None if decision is None else msgspec.structs.asdict(decision)}
