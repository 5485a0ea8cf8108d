"""A gateway's client of the controller actor."""

from __future__ import annotations

import asyncio
from typing import Any

import ray
from ray.exceptions import RayTaskError

from orchestrator.fleet.cluster_names import ray_name
from orchestrator.fleet.hosting import Hosting
from orchestrator.fleet.route_table import RouteTable
from orchestrator.gateway.controller_client import ControllerAway, ControllerFailed
from orchestrator.on_ray.ray_nodes import CONTROLLER
from orchestrator.scaling.demand_report import DemandReply, DemandReport
from workers.messages.metric_family import MetricFamily

SPEC_S = 60.0  # to read a model's folder and to plan
REPLY_S = 10.0  # for a reply of the controller, or for the lookup of its actor


class RemoteController:
    """Calls of the controller actor, which is looked up by name since it may be restarted.

    Every call has a deadline: without the machine of the controller, a call waits for ever, and a lookup for as long as
    Ray's head is away."""

    def __init__(self, fleet: str, place: str = "") -> None:
        """``fleet`` is the fleet's name, ``place`` the label of the gateway's machine on a joined cluster."""
        self._namespace = ray_name(fleet)
        self._place = place
        self._actor: Any = None
        self._lookup: asyncio.Future[Any] | None = None

    async def routes(self, seen: int, timeout_s: float) -> tuple[int, RouteTable]:
        answer: tuple[int, RouteTable] = await self._call("routes", seen, timeout_s, wait_s=timeout_s)
        return answer

    async def keys(self, seen: str, timeout_s: float) -> tuple[str, bytes]:
        answer: tuple[str, bytes] = await self._call("keys", seen, timeout_s, wait_s=timeout_s)
        return answer

    async def wake(self, model: str) -> None:
        await self._call("wake", model)

    async def demand(self, report: DemandReport) -> DemandReply:
        """Send the demand since the gateway's last report. A duplicate is counted once, except the usage of keys."""
        reply: DemandReply = await self._call("demand", report)
        return reply

    async def metrics(self) -> list[MetricFamily]:
        families: list[MetricFamily] = await self._call("metrics", *([self._place] if self._place else []))
        return families

    async def hosted(self) -> list[tuple[str, str]]:
        models: list[tuple[str, str]] = await self._call("hosted")
        return models

    async def host_model(self, name: str, folder: str, *, again: bool, wait_s: float) -> Hosting:
        hosting: Hosting = await self._call("host_model", name, folder, again, wait_s, wait_s=wait_s + SPEC_S)
        return hosting

    async def unhost_model(self, name: str) -> Hosting:
        hosting: Hosting = await self._call("unhost_model", name, wait_s=SPEC_S)
        return hosting

    async def _call(self, method: str, *arguments: Any, wait_s: float = 0.0) -> Any:
        try:
            if self._actor is None:
                self._actor = await self._found()
            return await asyncio.wait_for(getattr(self._actor, method).remote(*arguments), wait_s + REPLY_S)
        except RayTaskError as error:  # it is of the cause's type, too
            raise ControllerFailed(str(error)) from error
        except asyncio.TimeoutError:
            self._actor = None
            raise ControllerAway(f"it has not replied for {wait_s + REPLY_S:.0f} s") from None
        except Exception as error:  # Ray raises many types while the controller starts again
            self._actor = None
            raise ControllerAway(str(error)) from error

    async def _found(self) -> Any:
        """Returns the controller. Calls share one lookup, which cannot be stopped and keeps its thread."""
        lookup = self._lookup
        if lookup is None or lookup.done():
            work = asyncio.to_thread(ray.get_actor, CONTROLLER, self._namespace)
            self._lookup = lookup = asyncio.ensure_future(work)
            lookup.add_done_callback(lambda done: done.cancelled() or done.exception())  # its callers may have left
        return await asyncio.wait_for(asyncio.shield(lookup), REPLY_S)
