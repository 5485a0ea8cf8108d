"""The controller's interface to a gateway."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, Protocol

from orchestrator.messages.controller_replies import Hosting
from orchestrator.messages.route_table import RouteTable
from orchestrator.scaling.demand_report import DemandReply, DemandReport
from workers.messages.metric_family import MetricFamily


class ControllerAway(Exception):
    """The controller does not reply, since it restarts, or its reply is an error."""


class ControllerFailed(ControllerAway):
    """The controller replies with an exception: a defect, so that the same request fails again."""


class ControllerClient(Protocol):
    """Each method raises ControllerAway."""

    async def routes(self, seen: int, timeout_s: float) -> tuple[int, RouteTable]: ...
    async def keys(self, seen: str, timeout_s: float) -> tuple[str, bytes]:
        """Returns the version and the content of the key file, see `KeyFeed.next`."""
        ...

    def wake(self, model: str) -> Coroutine[Any, Any, None]: ...
    async def demand(self, report: DemandReport) -> DemandReply: ...
    async def metrics(self) -> list[MetricFamily]: ...
    async def hosted(self) -> list[tuple[str, str]]:
        """Returns the name and the folder of each model that SageMaker has loaded."""
        ...

    async def host_model(self, name: str, folder: str, *, again: bool, wait_s: float) -> Hosting:
        """See `HostedModels.host_model`."""
        ...

    async def unhost_model(self, name: str) -> Hosting: ...
