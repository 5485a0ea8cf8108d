"""The controller's interface to a gateway."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, Protocol

from orchestrator.fleet.route_table import RouteTable
from orchestrator.scaling.demand_report import DemandReport
from workers.messages.metric_family import MetricFamily


class ControllerAway(Exception):
    """The controller does not reply, since it restarts, or its reply is an error."""


class ControllerClient(Protocol):
    """Each method raises ControllerAway."""

    async def routes(self, seen: int, timeout_s: float) -> tuple[int, RouteTable]: ...
    def wake(self, model: str) -> Coroutine[Any, Any, None]: ...
    async def demand(self, report: DemandReport) -> None: ...
    async def metrics(self) -> list[MetricFamily]: ...
