"""The queries of a running fleet: status, events, logs, recorded and open requests, speeds, load and settings."""

from __future__ import annotations

import asyncio
import time
from functools import cache
from pathlib import Path

import msgspec

from orchestrator.api.operation import OperatedFleet, missing_object, model_of
from orchestrator.api.schemas import (
    CancelledRequest,
    EventsQuery,
    LoadSamples,
    LogPart,
    LogQuery,
    OperationRefused,
    RequestId,
    RequestList,
    SettingList,
    SpeedList,
    Stopping,
    TracePage,
    TraceQuery,
)
from orchestrator.console.fleet_feed import LiveView, RayLinks, ReplicaInRay
from orchestrator.console.page import Entrance
from orchestrator.control.decisions.replica_view import ReplicaView
from orchestrator.control.start_times import load_times
from orchestrator.messages.fleet_status import EventPage, EventRow, FleetStatus
from orchestrator.messages.replica_states import LEAVING
from orchestrator.messages.request_traces import read_page
from orchestrator.process.home import Home

LOG_POLL_S = 0.25

FIRST_LINES = 100

MOST_NAMED = 5  # requests in a refusal


def status(fleet: OperatedFleet) -> FleetStatus:
    """Returns the fleet as it is."""
    return fleet.controller.status()


async def events(fleet: OperatedFleet, request: EventsQuery) -> EventPage:
    """Returns events, oldest first; waits for one if there is none."""
    if request.model is not None:
        model_of(fleet, request.model)
    journal, version = fleet.state.records.journal, 0
    deadline = time.monotonic() + request.wait_s
    while not (page := journal.events(request.after, request.limit, request.model)):
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0:
            return EventPage(events=[], next=request.after)
        version = await fleet.controller.change(version, min(remaining_s, LOG_POLL_S))
    rows = [msgspec.convert(event, EventRow, from_attributes=True) for event in page]
    return EventPage(
        events=[msgspec.structs.replace(row, at=round(row.at, 3)) for row in rows],
        next=rows[-1].seq,
    )


async def logs(fleet: OperatedFleet, request: LogQuery) -> LogPart:
    """Returns the last lines of a replica's log, or what follows the byte ``offset``."""
    model, offset = request.model, request.offset
    model_of(fleet, model)
    views = fleet.state.views.of_model(model)
    number = request.replica if request.replica is not None else _first_running(views)
    view = next((view for view in views if view.replica == number), None)
    path = Home(Path(fleet.settings.home)).log(model, number)
    if request.replica is not None and view is None and not path.exists():
        raise missing_object("replica-unknown", f"{model}/{number}", [view.id for view in views])
    host = None if view is None else view.host
    deadline = time.monotonic() + request.wait_s
    while True:
        part = await fleet.cluster.read_log(str(path), FIRST_LINES, host, offset)
        if part.text or time.monotonic() >= deadline:
            return LogPart(replica=f"{model}/{number}", file=str(path), offset=part.offset, text=part.text)
        offset = part.offset
        await asyncio.sleep(LOG_POLL_S)


def _first_running(views: list[ReplicaView]) -> int:
    """Returns the number of the first replica that is not stopping, else of the first one."""
    running = [view for view in views if not view.gone and view.state not in LEAVING]
    return next((view.replica for view in (*running, *views)), 0)


async def trace(fleet: OperatedFleet, request: TraceQuery) -> TracePage:
    """Returns the requests that gateways recorded, from ``after``: the ``next`` of an earlier page, or "" for all."""
    folder = Home(Path(fleet.settings.home)).traces
    try:
        page = await fleet.state.in_thread(read_page, folder, request.after, request.limit)
    except ValueError as error:
        hint = "use the `next` of an earlier response, or omit it"
        raise OperationRefused("trace-cursor-wrong", str(error), hint, status=400) from None
    loads, current = load_times(fleet.state), fleet.state.current
    speeds = {
        model.name: {
            "load_s": loads.get(model.name),
            "since": current.revision.at,
            "shape": fleet.controller.speeds.shape(model, current),
        }
        for model in current.spec.models
    }
    parts = {"requests": page.requests, "next": page.next, "more": page.more, "speeds": speeds}
    return msgspec.convert(parts, TracePage)


def speeds(fleet: OperatedFleet) -> SpeedList:
    """Returns the speeds that the fleet has measured, by the shape of the replicas."""
    return msgspec.convert({"speeds": list(fleet.controller.speeds.measured())}, SpeedList, from_attributes=True)


def load_history(fleet: OperatedFleet) -> LoadSamples:
    """Returns the load of each model: a sample every 10 s of the last hour."""
    return msgspec.convert(fleet.controller.load.as_columns(), LoadSamples)


def requests(fleet: OperatedFleet) -> RequestList:
    """Returns the requests at the gateways, and those that have ended while they were queried. Gateways report them for
    some seconds after each query."""
    return msgspec.convert({"requests": fleet.controller.live_requests.query()}, RequestList)


async def cancel_request(fleet: OperatedFleet, request: RequestId, by: str) -> CancelledRequest:
    """Has its gateway end a request, within a second or so."""
    live = fleet.controller.live_requests
    if not live.cancel(request.request):
        open_requests = [each.request for each in requests(fleet).requests if not each.ended]
        raise missing_object("request-unknown", request.request, open_requests[:MOST_NAMED])
    fleet.state.records.event("info", "RequestCancelled", f"{request.request} by {by}")
    return CancelledRequest(request=request.request)


def config(fleet: OperatedFleet) -> SettingList:
    """Returns the settings of this fleet."""
    return msgspec.convert({"values": fleet.settings.config}, SettingList)


async def down(fleet: OperatedFleet, by: str) -> Stopping:
    """Has the daemon drain and stop the fleet."""
    await fleet.request_shutdown()
    return Stopping()


# For the console


def entrance(fleet: OperatedFleet) -> Entrance | None:
    """Returns a gateway for the console's playground; on a joined cluster the first by the label of its machine."""
    reports = fleet.controller.gateways.serving()
    first = min(reports, key=lambda report: (report.place, report.gateway), default=None)
    return None if first is None else Entrance(first.address, nearby=not first.place)


def live(fleet: OperatedFleet, with_requests: bool) -> LiveView:
    """Returns what the console shows beside the status."""
    changes = fleet.controller.scaler.changes()
    load = {
        name: {**figures, "cold": changes.get((name, "Woken"), 0)}
        for name, figures in fleet.controller.load.now().items()
    }
    try:
        dashboard = _dashboard_url(fleet.settings.home)
    except LookupError:
        dashboard = None
    shown = requests(fleet).requests if with_requests else None
    return LiveView(load, RayLinks(dashboard, _in_ray(fleet)), shown)


@cache
def _dashboard_url(home: str) -> str:
    """Returns the address of Ray's dashboard, which does not change while a fleet runs. Raises LookupError if it is not
    known yet."""
    record = Home(Path(home)).read_record()
    if record is None or not record.dashboard_url:
        raise LookupError(home)
    return record.dashboard_url


def _in_ray(fleet: OperatedFleet) -> dict[str, ReplicaInRay]:
    ids = fleet.cluster.actor_ids()
    return {
        view.id: ReplicaInRay(*ids[view.actor], f"replica-{view.model}-{view.replica}.log")
        for view in fleet.state.views.values()
        if view.actor in ids and not view.gone
    }
