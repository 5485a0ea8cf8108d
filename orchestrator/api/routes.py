"""The routes of the admin API, which the server, its OpenAPI document and the tests of the docs read."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec.structs

from orchestrator.api.openapi import openapi
from orchestrator.api.operator import Operator
from orchestrator.api.schemas import (
    ActionToPreview,
    EmptyBody,
    EventsQuery,
    HostCores,
    HostOrReplica,
    LogQuery,
    ModelName,
    ReplicaCount,
    RequestId,
    RevisionNumber,
    SpecToApply,
    SpecToExplain,
    SpecToPlan,
    TraceQuery,
    UndoTarget,
)

Operation = Callable[..., Any]
Schema = type[msgspec.Struct]


@dataclass(frozen=True)
class AdminRequest:
    """One decoded request."""

    fleet: Operator
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
    operation: Operation  # a method of Operator with the names of the schema, or a function of the request
    schema: Schema = EmptyBody
    refusals: tuple[int, ...] = ()  # statuses besides those of every route
    status: int = 200
    fixed: Mapping[str, Any] = field(default_factory=dict)  # further arguments of the operation

    async def call(self, request: AdminRequest) -> Any:
        """Returns the JSON. Raises Refused."""
        if self.operation in OWN:
            result = self.operation(request)
        else:
            by = {"by": request.by} if self.changes else {}
            arguments = {**msgspec.structs.asdict(request.fields), **by, **self.fixed}
            result = getattr(request.fleet, self.operation.__name__)(**arguments)
        return await result if inspect.isawaitable(result) else result

    @property
    def changes(self) -> bool:
        """Returns whether it changes the fleet and is written to the audit log."""
        return self.method == "POST" and self.path not in ("/plan", "/explain", "/preview")


def _openapi(_: AdminRequest) -> dict[str, Any]:
    return openapi(ROUTES)


async def _down(request: AdminRequest) -> dict[str, Any]:
    await request.request_shutdown()
    return {"stopping": True}


OWN = (_openapi, _down)  # operations without the fleet


def _get(
    path: str, summary: str, response: str, operation: Operation, schema: Schema = EmptyBody, *refusals: int
) -> AdminRoute:
    return AdminRoute("GET", path, summary, response, operation, schema, refusals)


def _change(
    path: str,
    summary: str,
    response: str,
    operation: Operation,
    schema: Schema = EmptyBody,
    *refusals: int,
    **fixed: Any,
) -> AdminRoute:
    """Returns a route that the fleet's state may forbid (409), or a full disk (507: journal, audit log)."""
    return AdminRoute("POST", path, summary, response, operation, schema, (*refusals, 409, 507), fixed=fixed)


ROUTES: tuple[AdminRoute, ...] = (
    _get("/status", "Models, replicas and hosts.", "the JSON of `corewright status`", Operator.status),
    _get("/spec", "The running spec.", "`file`, `base_dir`, `text`, `revision`", Operator.spec),
    _get(
        "/rollout", "The progress of the newest revision.", "the JSON of `corewright rollout status`", Operator.rollout
    ),
    _get(
        "/revisions",
        "All revisions in the journal, newest first.",
        "the JSON of `corewright rollout history`",
        Operator.revisions,
    ),
    _get(
        "/revisions/{number}",
        "One revision.",
        "its row of /revisions, and `text`, `file`, `base_dir`, `plan`",
        Operator.revision,
        RevisionNumber,
        404,
    ),
    _get(
        "/events",
        "Events, oldest first; with `wait_s` the request waits for a new one.",
        "`events`, and `next`, the `after` of the next request",
        Operator.events,
        EventsQuery,
        404,
    ),
    _get(
        "/logs",
        "The last lines of a replica's log, or what follows `offset`.",
        "`replica`, `file`, `offset`, `text`",
        Operator.logs,
        LogQuery,
        404,
    ),
    _get(
        "/trace",
        "The recorded requests: time, lengths, key and durations, without texts.",
        "`requests`, `next` (the `after` of the next request), `more`, `speeds`",
        Operator.trace,
        TraceQuery,
    ),
    _get(
        "/speeds",
        "The speeds that the fleet has measured, by the shape of the replicas.",
        "`speeds`, each with `speeds`, `requests` and `shape`",
        Operator.speeds,
    ),
    _get(
        "/load",
        "Queue, running requests, tokens per second and latencies of each model: a sample every 10 s of the last hour.",
        "`at`, and `models`: by name, a list for each figure",
        Operator.load_history,
    ),
    _get(
        "/requests",
        "The requests in queues and slots, and those that have ended while they were queried.",
        "`requests`, each with its queue time, replica and routing decision",
        Operator.requests,
    ),
    _get("/config", "The settings of this fleet.", "`values`, each with `name`, `value` and `origin`", Operator.config),
    _get("/openapi.json", "This API as an OpenAPI 3.1 document.", "the document", _openapi),
    AdminRoute(
        "POST",
        "/plan",
        "Preview an apply; with `defrag`, the moves that free that many contiguous cores.",
        "the JSON of `corewright plan`",
        Operator.propose,
        SpecToPlan,
        (409, 422),
    ),
    AdminRoute(
        "POST",
        "/explain",
        "Explain the placement of a model: why it is there or unplaced, and the remedies.",
        "the JSON of `corewright explain`",
        Operator.explain,
        SpecToExplain,
        (404, 409, 422),
    ),
    AdminRoute(
        "POST",
        "/preview",
        "Preview scale, load, unload, rollout/restart or drain.",
        "`index`, `revision`, `changes`, `placements`, `unplaced` as in `plan`, `strategies`, and `refusal`",
        Operator.preview,
        ActionToPreview,
        (404, 409),
    ),
    _change(
        "/requests/cancel",
        "Cancel a request that is in a queue or a slot.",
        "the request; its gateway ends it, and others of the same id, within a second or so",
        Operator.cancel_request,
        RequestId,
        404,
    ),
    _change(
        "/apply",
        "Make a spec the fleet's new revision.",
        "the JSON of `corewright apply`",
        Operator.apply,
        SpecToApply,
        422,
    ),
    _change("/rollout/undo", "Apply an earlier revision again.", "as `apply`", Operator.undo, UndoTarget, 404, 422),
    _change("/rollout/pause", "Pause the rollout: start no further replica.", "the rollout", Operator.pause),
    _change("/rollout/resume", "Resume a paused or failed rollout.", "the rollout", Operator.resume),
    _change("/rollout/promote", "End the canary and update every replica.", "the rollout", Operator.promote),
    _change(
        "/rollout/restart",
        "Restart every replica of a model in a new process.",
        "the rollout",
        Operator.restart,
        ModelName,
        404,
    ),
    _change("/scale", "Set the number of a model's replicas.", "the change", Operator.scale, ReplicaCount, 404),
    _change("/load", "Load a model: start a replica if it has none.", "the change", Operator.load, ModelName, 404),
    _change(
        "/unload",
        "Unload a model: stop its replicas until it is loaded again.",
        "the change",
        Operator.unload,
        ModelName,
        404,
    ),
    _change(
        "/cordon",
        "Exclude a host, or some of its cores, from new placements.",
        "the change",
        Operator.cordon,
        HostCores,
        404,
        422,
        on=True,
    ),
    _change("/uncordon", "Remove a cordon.", "the change", Operator.cordon, HostCores, 404, 422, on=False),
    _change(
        "/drain", "Drain and cordon a host, or replace a replica.", "the change", Operator.drain, HostOrReplica, 404
    ),
    AdminRoute("POST", "/down", "Drain and stop the fleet.", "202, immediately", _down, refusals=(507,), status=202),
)
