"""The queries of a running fleet: status, events, logs, recorded requests and settings."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

from orchestrator.api.fleet_operation import FleetOperation, missing_object
from orchestrator.api.refused import Refused
from orchestrator.fleet.replica_states import LEAVING
from orchestrator.fleet.snapshot import ReplicaView
from orchestrator.process.home import Home
from orchestrator.records.request_traces import read_page

LOG_BYTES = 64 * 2**10  # per response

LOG_POLL_S = 0.25

FIRST_LINES = 100

EVENT_FIELDS = ("seq", "at", "level", "reason", "message", "model", "replica", "host")


class FleetQueries(FleetOperation):
    """Reads the state of a fleet."""

    def status(self) -> dict[str, Any]:
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
            text, end = await self._cluster.log_part(str(path), offset, LOG_BYTES, FIRST_LINES, host)
            if text or time.monotonic() >= deadline:
                return {"replica": f"{model}/{number}", "file": str(path), "offset": end, "text": text}
            offset = end
            await asyncio.sleep(LOG_POLL_S)

    async def trace(self, after: str, limit: int) -> dict[str, Any]:
        """Returns the requests that gateways recorded, from ``after``: the ``next`` of an earlier page, or "" for all.

        {requests: [{time, model, prompt_tokens, output_tokens, key, first_ms, decode_ms}], next, more, speeds}."""
        folder = Home(Path(self.settings.home)).traces
        try:
            page = await self._state.in_thread(read_page, folder, after, limit)
        except ValueError as error:
            hint = "use the `next` of an earlier response, or omit it"
            raise Refused("trace-cursor-wrong", str(error), hint, status=400) from None
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

    def config(self) -> dict[str, Any]:
        """Returns {values: [{name, value, origin}]}; the origin is flag, environment, file or default."""
        return {"values": list(self.settings.config)}


def _first_running(views: list[ReplicaView]) -> int:
    """Returns the number of the first replica that is not stopping, else of the first one."""
    running = [view for view in views if not view.gone and view.state not in LEAVING]
    return next((view.replica for view in (*running, *views)), 0)
