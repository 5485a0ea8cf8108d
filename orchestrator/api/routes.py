"""The routes of the admin API, which the server, its OpenAPI document and the tests of the docs read."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from orchestrator.api.openapi import openapi
from orchestrator.api.operator_protocol import Operations
from orchestrator.api.schemas import (
    EmptyBody,
    EventsQuery,
    HostCores,
    HostOrReplica,
    LogQuery,
    ModelName,
    ReplicaCount,
    RevisionNumber,
    SpecToApply,
    SpecToExplain,
    SpecToPlan,
    TraceQuery,
    UndoTarget,
)


@dataclass(frozen=True)
class AdminRequest:
    """One decoded request."""

    fleet: Operations
    request_shutdown: Callable[[], Awaitable[None]]
    fields: Any  # an instance of the route's ``schema``
    by: str  # the caller, for the journal


@dataclass(frozen=True)
class AdminRoute:
    """One route below /admin/v1. ``schema`` describes the body of a POST, and the path and query of a GET."""

    method: str
    path: str
    summary: str
    response: str  # what it contains, for the OpenAPI document
    call: Callable[[AdminRequest], Any]  # returns the JSON, or an awaitable of it
    schema: type[msgspec.Struct] = EmptyBody
    refusals: tuple[int, ...] = ()  # statuses besides those of every route
    status: int = 200

    @property
    def changes(self) -> bool:
        """Whether it changes the fleet and is written to the audit log."""
        return self.method == "POST" and self.path not in ("/plan", "/explain")


def _spec(request: AdminRequest) -> dict[str, Any]:
    revision = request.fleet.revision(request.fleet.status()["revision"])
    return {key: revision[key] for key in ("file", "base_dir", "text", "revision")}


async def _apply(request: AdminRequest) -> dict[str, Any]:
    fields, fleet = request.fields, request.fleet
    return await fleet.apply(
        fields.text, fields.file, fields.base_dir, by=request.by, check_index=fields.check_index, canary=fields.canary
    )


async def _events(request: AdminRequest) -> dict[str, Any]:
    fields = request.fields
    return await request.fleet.events(fields.after, fields.limit, fields.wait_s, fields.model)


async def _logs(request: AdminRequest) -> dict[str, Any]:
    fields = request.fields
    return await request.fleet.logs(fields.model, fields.replica, fields.offset, fields.wait_s)


async def _trace(request: AdminRequest) -> dict[str, Any]:
    return await request.fleet.trace(request.fields.after, request.fields.limit)


async def _down(request: AdminRequest) -> dict[str, Any]:
    await request.request_shutdown()
    return {"stopping": True}


CHANGING = (409, 507)  # the fleet's state forbids it; the journal or the audit log cannot be written

ROUTES: tuple[AdminRoute, ...] = (
    AdminRoute(
        "GET", "/status", "Models, replicas and hosts.", "the JSON of `corewright status`", lambda r: r.fleet.status()
    ),
    AdminRoute("GET", "/spec", "The running spec.", "`file`, `base_dir`, `text`, `revision`", _spec),
    AdminRoute(
        "GET",
        "/rollout",
        "The progress of the newest revision.",
        "the JSON of `corewright rollout status`",
        lambda r: r.fleet.rollout(),
    ),
    AdminRoute(
        "GET",
        "/revisions",
        "All revisions in the journal, newest first.",
        "the JSON of `corewright rollout history`",
        lambda r: {"revisions": r.fleet.revisions()},
    ),
    AdminRoute(
        "GET",
        "/revisions/{number}",
        "One revision.",
        "its row of /revisions, and `text`, `file`, `base_dir`, `plan`",
        lambda r: r.fleet.revision(r.fields.number),
        RevisionNumber,
        (404,),
    ),
    AdminRoute(
        "GET",
        "/events",
        "Events, oldest first; with `wait_s` the request waits for a new one.",
        "`events`, and `next`, the `after` of the next request",
        _events,
        EventsQuery,
        (404,),
    ),
    AdminRoute(
        "GET",
        "/logs",
        "The last lines of a replica's log, or what follows `offset`.",
        "`replica`, `file`, `offset`, `text`",
        _logs,
        LogQuery,
        (404,),
    ),
    AdminRoute(
        "GET",
        "/trace",
        "The recorded requests: time, lengths, key and durations, without texts.",
        "`requests`, `next` (the `after` of the next request), `more`, `speeds`",
        _trace,
        TraceQuery,
    ),
    AdminRoute(
        "GET",
        "/config",
        "The settings of this fleet.",
        "`values`, each with `name`, `value` and `origin`",
        lambda r: r.fleet.config(),
    ),
    AdminRoute(
        "GET", "/openapi.json", "This API as an OpenAPI 3.1 document.", "the document", lambda _: openapi(ROUTES)
    ),
    AdminRoute(
        "POST",
        "/plan",
        "Preview an apply; with `defrag`, the moves that free that many contiguous cores.",
        "the JSON of `corewright plan`",
        lambda r: r.fleet.propose(r.fields.text, r.fields.file, r.fields.base_dir, r.fields.defrag),
        SpecToPlan,
        (409, 422),
    ),
    AdminRoute(
        "POST",
        "/explain",
        "Explain the placement of a model: why it is there or unplaced, and the remedies.",
        "the JSON of `corewright explain`",
        lambda r: r.fleet.explain(r.fields.text, r.fields.file, r.fields.base_dir, r.fields.model),
        SpecToExplain,
        (404, 409, 422),
    ),
    AdminRoute(
        "POST",
        "/apply",
        "Make a spec the fleet's new revision.",
        "the JSON of `corewright apply`",
        _apply,
        SpecToApply,
        (*CHANGING, 422),
    ),
    AdminRoute(
        "POST",
        "/rollout/undo",
        "Apply an earlier revision again.",
        "as `apply`",
        lambda r: r.fleet.undo(r.fields.to, r.by),
        UndoTarget,
        (404, *CHANGING, 422),
    ),
    AdminRoute(
        "POST",
        "/rollout/pause",
        "Pause the rollout: start no further replica.",
        "the rollout",
        lambda r: r.fleet.pause(r.by),
        refusals=CHANGING,
    ),
    AdminRoute(
        "POST",
        "/rollout/resume",
        "Resume a paused or failed rollout.",
        "the rollout",
        lambda r: r.fleet.resume(r.by),
        refusals=CHANGING,
    ),
    AdminRoute(
        "POST",
        "/rollout/promote",
        "End the canary and update every replica.",
        "the rollout",
        lambda r: r.fleet.promote(r.by),
        refusals=CHANGING,
    ),
    AdminRoute(
        "POST",
        "/rollout/restart",
        "Restart every replica of a model in a new process.",
        "the rollout",
        lambda r: r.fleet.restart(r.fields.model, r.by),
        ModelName,
        (404, *CHANGING),
    ),
    AdminRoute(
        "POST",
        "/scale",
        "Set the number of a model's replicas.",
        "the change",
        lambda r: r.fleet.scale(r.fields.model, r.fields.count, r.by),
        ReplicaCount,
        (404, *CHANGING),
    ),
    AdminRoute(
        "POST",
        "/load",
        "Load a model: start a replica if it has none.",
        "the change",
        lambda r: r.fleet.load(r.fields.model, r.by),
        ModelName,
        (404, *CHANGING),
    ),
    AdminRoute(
        "POST",
        "/unload",
        "Unload a model: stop its replicas until it is loaded again.",
        "the change",
        lambda r: r.fleet.unload(r.fields.model, r.by),
        ModelName,
        (404, *CHANGING),
    ),
    AdminRoute(
        "POST",
        "/cordon",
        "Exclude a host, or some of its cores, from new placements.",
        "the change",
        lambda r: r.fleet.cordon(r.fields.host, r.fields.cores, True, r.by),
        HostCores,
        (404, *CHANGING, 422),
    ),
    AdminRoute(
        "POST",
        "/uncordon",
        "Remove a cordon.",
        "the change",
        lambda r: r.fleet.cordon(r.fields.host, r.fields.cores, False, r.by),
        HostCores,
        (404, *CHANGING, 422),
    ),
    AdminRoute(
        "POST",
        "/drain",
        "Drain and cordon a host, or replace a replica.",
        "the change",
        lambda r: r.fleet.drain(r.fields.target, r.by),
        HostOrReplica,
        (404, *CHANGING),
    ),
    AdminRoute("POST", "/down", "Drain and stop the fleet.", "202, immediately", _down, refusals=(507,), status=202),
)
