"""The queries of a running fleet: status, events, logs, recorded requests and settings."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

from orchestrator.api.fleet_operation import FleetOperation, missing_object
from orchestrator.api.refused import OperationRefused
from orchestrator.console.playground import Entrance
from orchestrator.fleet.fleet_status import FleetStatus
from orchestrator.fleet.replica_states import LEAVING
from orchestrator.fleet.snapshot import ReplicaView
from orchestrator.process.home import Home
from orchestrator.records.request_traces import read_page

LOG_POLL_S = 0.25

FIRST_LINES = 100

MOST_NAMED = 5  # requests in a refusal

EVENT_FIELDS = ("seq", "at", "level", "reason", "message", "model", "replica", "host")


class FleetQueries(FleetOperation):
    """Reads the state of a fleet."""

    _dashboard_url = ""

    def status(self) -> FleetStatus:
        return self._controller.status()

    async def events(self, after: int, limit: int, wait_s: float, model: str | None) -> dict[str, Any]:
        """Returns {events: [{seq, at, level, reason, message, model, replica, host}], next}, oldest first."""
        if model is not None:
            self._model(model)
        journal = self._state.records.journal
        deadline = time.monotonic() + wait_s
        version = 0
        while not (events := journal.events(after, limit, model)) and (remaining_s := deadline - time.monotonic()) > 0:
            version = await self._controller.change(version, min(remaining_s, LOG_POLL_S))
        rows = [{name: getattr(event, name) for name in EVENT_FIELDS} for event in events]
        listed = [{**row, "at": round(row["at"], 3)} for row in rows]
        return {"events": listed, "next": events[-1].seq if events else after}

    async def logs(self, model: str, replica: int | None, offset: int | None, wait_s: float) -> dict[str, Any]:
        """Returns {replica, file, offset, text}: the last lines, or what follows the byte ``offset``."""
        self._model(model)
        views = self._state.replicas_of(model)
        number = replica if replica is not None else _first_running(views)
        view = next((view for view in views if view.replica == number), None)
        if replica is not None and view is None and not Home(Path(self.settings.home)).log(model, number).exists():
            raise missing_object("replica-unknown", f"{model}/{number}", [view.id for view in views])
        path = Home(Path(self.settings.home)).log(model, number)
        host = None if view is None else view.host
        deadline = time.monotonic() + wait_s
        while True:
            part = await self._cluster.read_log(str(path), FIRST_LINES, host, offset)
            if part.text or time.monotonic() >= deadline:
                return {"replica": f"{model}/{number}", "file": str(path), "offset": part.offset, "text": part.text}
            offset = part.offset
            await asyncio.sleep(LOG_POLL_S)

    async def trace(self, after: str, limit: int) -> dict[str, Any]:
        """Returns the requests that gateways recorded, from ``after``: the ``next`` of an earlier page, or "" for all.

        {requests: [{time, model, prompt_tokens, output_tokens, key, first_ms, decode_ms}], next, more, speeds}."""
        folder = Home(Path(self.settings.home)).traces
        try:
            page = await self._state.in_thread(read_page, folder, after, limit)
        except ValueError as error:
            hint = "use the `next` of an earlier response, or omit it"
            raise OperationRefused("trace-cursor-wrong", str(error), hint, status=400) from None
        loads, current = self._controller.scaler.load_times(), self._state.current
        speeds = {
            model.name: {
                "load_s": loads.get(model.name),
                "since": current.revision.at,
                "shape": self._controller.speeds.shape(model, current),
            }
            for model in current.spec.models
        }
        return {"requests": page.requests, "next": page.next, "more": page.more, "speeds": speeds}

    def speeds(self) -> dict[str, Any]:
        """Returns {speeds: [{speeds, requests, shape}]}, the measured ones by shape."""
        return {"speeds": [own.as_dict() for own in self._controller.speeds.measured()]}

    def load_history(self) -> dict[str, Any]:
        """Returns {at, models: {name: {figure: [...]}}}: a sample every 10 s of the last hour."""
        return self._controller.load.as_columns()

    def requests(self) -> dict[str, Any]:
        """Returns {requests: [...]}: those at the gateways, and those that have ended while they were queried.
        Gateways report them for some seconds after each query."""
        return {"requests": self._controller.live_requests.query()}

    async def cancel_request(self, request: str, by: str) -> dict[str, Any]:
        """Has its gateway end a request, within a second or so."""
        if not self._controller.live_requests.cancel(request):
            open_requests = [each["request"] for each in self._controller.live_requests.query() if not each["ended"]]
            raise missing_object("request-unknown", request, open_requests[:MOST_NAMED])
        self._state.records.event("info", "RequestCancelled", f"{request} by {by}")
        return {"request": request}

    def entrance(self) -> Entrance | None:
        """Returns a gateway for the console's playground; on a joined cluster the first by the label of its machine."""
        reports = self._controller.gateways.serving()
        first = min(reports, key=lambda report: (report.place, report.gateway), default=None)
        return None if first is None else Entrance(first.address, nearby=not first.place)

    def live(self, *, with_requests: bool) -> dict[str, Any]:
        """Returns what the console shows beside the status: {load, links}, and the requests if a page shows them."""
        changes = self._controller.scaler.changes()
        load = {
            name: {**figures, "cold": changes.get((name, "Woken"), 0)}
            for name, figures in self._controller.load.now().items()
        }
        links = {"dashboard": self._dashboard(), "replicas": self._in_ray()}
        return {"load": load, "links": links, **(self.requests() if with_requests else {})}

    def _dashboard(self) -> str | None:
        """Returns the address of Ray's dashboard, which does not change while a fleet runs."""
        if not self._dashboard_url:
            record = Home(Path(self.settings.home)).read_record()
            self._dashboard_url = "" if record is None else record.dashboard_url or ""
        return self._dashboard_url or None

    def _in_ray(self) -> dict[str, dict[str, str]]:
        """Returns the ids of the replicas' actors and nodes, and the names of their logs there."""
        ids = self._cluster.actor_ids()
        return {
            view.id: {
                "actor": ids[view.actor][0],
                "node": ids[view.actor][1],
                "log": f"replica-{view.model}-{view.replica}.log",
            }
            for view in self._state.views.values()
            if view.actor in ids and not view.gone
        }

    def config(self) -> dict[str, Any]:
        """Returns {values: [{name, value, origin}]}; the origin is flag, environment, file or default."""
        return {"values": list(self.settings.config)}


def _first_running(views: list[ReplicaView]) -> int:
    """Returns the number of the first replica that is not stopping, else of the first one."""
    running = [view for view in views if not view.gone and view.state not in LEAVING]
    return next((view.replica for view in (*running, *views)), 0)
