"""The admin API: HTTP of the controller, on loopback, for whoever holds the fleet's token or a key that may change it.

``ROUTES`` is all of it: the server, the OpenAPI document and the tests of the docs read the same table.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hmac
import inspect
import logging
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import parse_qsl

import msgspec

from orchestrator.access.audit_log import Audit, AuditLine
from orchestrator.access.keys import ApiKey, KeyFile
from orchestrator.access.source_policy import allowed_to_keys
from orchestrator.api.operations import Operations, Refused
from orchestrator.fleet.controller_settings import ADMIN_PATH, BY_HEADER, LONGEST_WAIT_S, ControllerSettings
from orchestrator.gateway.http.connection import HttpConnection, HttpServer
from orchestrator.gateway.http.exchange import Exchange, Request
from orchestrator.gateway.http.openapi_parts import components as schema_components
from orchestrator.gateway.http.openapi_parts import json_content, json_response, operation_id
from orchestrator.gateway.openai.errors import ApiError
from orchestrator.gateway.settings import GatewaySettings
from orchestrator.process.failure import Failed
from orchestrator.process.home import Home
from orchestrator.process.version import corewright_version
from placements.spec.parse import parse
from placements.spec.problems import Problem

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 8 << 20
MAX_CONNECTIONS = 256
READ_S = 10.0  # for a request to arrive, and until the first of a connection
SWEEP_S = 0.25
LONGEST_BY = 200


# What is asked. A field that is not here is refused.


class EmptyBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """No fields."""


class SpecText(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A spec as it was read from a file."""

    text: str
    file: Annotated[str, msgspec.Meta(min_length=1, description="Its name in problems.")]
    base_dir: Annotated[str, msgspec.Meta(pattern="^/", description="The folder that its relative paths begin at.")]


class SpecToPlan(SpecText, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A spec, and for how many cores there is to be room."""

    defrag: (
        Annotated[int, msgspec.Meta(ge=1, le=1000, description="What must move so that so many cores are free.")] | None
    ) = None


class SpecToExplain(SpecText, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A spec, and one of its models."""

    model: str


class SpecToApply(SpecText, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A spec, and on what condition it is to be applied."""

    check_index: Annotated[int, msgspec.Meta(ge=0, description="Refuse when the fleet's index is another.")] | None = (
        None
    )
    canary: (
        Annotated[float, msgspec.Meta(gt=0, lt=1, description="Share of the requests for the new version.")] | None
    ) = None


class ModelName(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    model: str


class ReplicaCount(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    model: str
    count: Annotated[int, msgspec.Meta(ge=0, description="null: as the spec says.")] | None


class RevisionToUndoTo(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    to: Annotated[int, msgspec.Meta(ge=1, description="null: the revision before the current one.")] | None = None


class HostCores(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    host: str
    cores: (
        Annotated[str, msgspec.Meta(pattern=r"^\d+(-\d+)?$", description='Such as "3" or "0-3"; null: the whole host.')]
        | None
    ) = None


class HostOrReplica(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    target: Annotated[str, msgspec.Meta(description="A host's name or a replica's id.")]


class RevisionNumber(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    number: Annotated[int, msgspec.Meta(ge=1)]


Wait = Annotated[float, msgspec.Meta(ge=0, le=LONGEST_WAIT_S, description="Seconds to wait for something new.")]


class EventsWanted(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    after: Annotated[int, msgspec.Meta(ge=0, description="Only events with a greater seq.")] = 0
    limit: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 100
    wait_s: Wait = 0.0
    model: str | None = None


class LogWanted(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    model: str
    replica: Annotated[int, msgspec.Meta(ge=0)] | None = None
    offset: Annotated[int, msgspec.Meta(ge=0, description="Only what came after so many bytes.")] | None = None
    wait_s: Wait = 0.0


class TraceWanted(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    after: Annotated[str, msgspec.Meta(description="The `next` of an earlier answer; empty: from the oldest.")] = ""
    limit: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 1000


# What is answered when it is refused


class Reason(msgspec.Struct, frozen=True, kw_only=True):
    code: Annotated[str, msgspec.Meta(description="Listed in docs/errors.md.")]
    message: str
    hint: str = ""


class SpecProblem(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    severity: str
    where: str
    what: str
    hint: str


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """Every answer with a status from 400 on."""

    error: Reason
    problems: list[SpecProblem] = []


# The routes


@dataclass(frozen=True)
class AdminRequest:
    """One request, read."""

    fleet: Operations
    ask_down: Callable[[], Awaitable[None]]
    what: Any  # of the route's ``asks``
    by: str


@dataclass(frozen=True)
class AdminRoute:
    """``path`` is below /admin/v1. ``asks`` are the fields of a POST's body, of a GET's path and query."""

    method: str
    path: str
    summary: str
    answer: str
    call: Callable[[AdminRequest], Any]  # the JSON, or an awaitable of it
    asks: type[msgspec.Struct] = EmptyBody
    refusals: tuple[int, ...] = ()  # statuses beside those that every route has
    status: int = 200

    @property
    def changes(self) -> bool:
        """Whether it changes the fleet: then it is written into the audit log."""
        return self.method == "POST" and self.path not in ("/plan", "/explain")


def _spec(asked: AdminRequest) -> dict[str, Any]:
    revision = asked.fleet.revision(asked.fleet.status()["revision"])
    return {key: revision[key] for key in ("file", "base_dir", "text", "revision")}


async def _apply(asked: AdminRequest) -> dict[str, Any]:
    what, fleet = asked.what, asked.fleet
    return await fleet.apply(
        what.text, what.file, what.base_dir, by=asked.by, check_index=what.check_index, canary=what.canary
    )


async def _events(asked: AdminRequest) -> dict[str, Any]:
    what = asked.what
    return await asked.fleet.events(what.after, what.limit, what.wait_s, what.model)


async def _logs(asked: AdminRequest) -> dict[str, Any]:
    what = asked.what
    return await asked.fleet.logs(what.model, what.replica, what.offset, what.wait_s)


async def _trace(asked: AdminRequest) -> dict[str, Any]:
    return await asked.fleet.trace(asked.what.after, asked.what.limit)


async def _down(asked: AdminRequest) -> dict[str, Any]:
    await asked.ask_down()
    return {"stopping": True}


CHANGING = (409, 507)  # the fleet's state forbids it; the journal or the audit log cannot be written

ROUTES = (
    AdminRoute(
        "GET", "/status", "Models, replicas and hosts.", "the JSON of `corewright status`", lambda a: a.fleet.status()
    ),
    AdminRoute("GET", "/spec", "The spec that runs.", "`file`, `base_dir`, `text`, `revision`", _spec),
    AdminRoute(
        "GET",
        "/rollout",
        "How far the newest revision is.",
        "the JSON of `corewright rollout status`",
        lambda a: a.fleet.rollout(),
    ),
    AdminRoute(
        "GET",
        "/revisions",
        "Every revision that is kept, newest first.",
        "the JSON of `corewright rollout history`",
        lambda a: {"revisions": a.fleet.revisions()},
    ),
    AdminRoute(
        "GET",
        "/revisions/{number}",
        "One revision.",
        "its row, and `text`, `file`, `base_dir`, `plan`",
        lambda a: a.fleet.revision(a.what.number),
        RevisionNumber,
        (404,),
    ),
    AdminRoute(
        "GET",
        "/events",
        "What happened, oldest first; with `wait_s` it waits for something to tell.",
        "`events`, and `next`, the `after` of the next question",
        _events,
        EventsWanted,
        (404,),
    ),
    AdminRoute(
        "GET",
        "/logs",
        "The last lines of a replica's log, or what came after `offset`.",
        "`replica`, `file`, `offset`, `text`",
        _logs,
        LogWanted,
        (404,),
    ),
    AdminRoute(
        "GET",
        "/trace",
        "What was asked of the models: when, how long, by which key. No text.",
        "`requests`, `next`, the `after` of the next question, `more`, `speeds`",
        _trace,
        TraceWanted,
    ),
    AdminRoute(
        "GET",
        "/config",
        "The settings of this `up`.",
        "`values`: `name`, `value`, `origin` of each",
        lambda a: a.fleet.config(),
    ),
    AdminRoute("GET", "/openapi.json", "This API as an OpenAPI 3.1 document.", "the document", lambda _: openapi()),
    AdminRoute(
        "POST",
        "/plan",
        "What applying a spec would do; with `defrag` what must move so that so many cores in a row are free.",
        "the JSON of `corewright plan`",
        lambda a: a.fleet.propose(a.what.text, a.what.file, a.what.base_dir, a.what.defrag),
        SpecToPlan,
        (409, 422),
    ),
    AdminRoute(
        "POST",
        "/explain",
        "Why a model of a spec is where it is, or has no place, and what would help.",
        "the JSON of `corewright explain`",
        lambda a: a.fleet.explain(a.what.text, a.what.file, a.what.base_dir, a.what.model),
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
        lambda a: a.fleet.undo(a.what.to, a.by),
        RevisionToUndoTo,
        (404, *CHANGING, 422),
    ),
    AdminRoute(
        "POST",
        "/rollout/pause",
        "Begin no further replica.",
        "the rollout",
        lambda a: a.fleet.pause(a.by),
        refusals=CHANGING,
    ),
    AdminRoute(
        "POST",
        "/rollout/resume",
        "Go on with a paused rollout.",
        "the rollout",
        lambda a: a.fleet.resume(a.by),
        refusals=CHANGING,
    ),
    AdminRoute(
        "POST",
        "/rollout/promote",
        "End the canary: every replica becomes new.",
        "the rollout",
        lambda a: a.fleet.promote(a.by),
        refusals=CHANGING,
    ),
    AdminRoute(
        "POST",
        "/rollout/restart",
        "Replace every replica of a model by a new process.",
        "the rollout",
        lambda a: a.fleet.restart(a.what.model, a.by),
        ModelName,
        (404, *CHANGING),
    ),
    AdminRoute(
        "POST",
        "/scale",
        "Set the number of a model's replicas.",
        "what changed",
        lambda a: a.fleet.scale(a.what.model, a.what.count, a.by),
        ReplicaCount,
        (404, *CHANGING),
    ),
    AdminRoute(
        "POST",
        "/load",
        "Start a model that has no replica.",
        "what changed",
        lambda a: a.fleet.load(a.what.model, a.by),
        ModelName,
        (404, *CHANGING),
    ),
    AdminRoute(
        "POST",
        "/unload",
        "End a model's replicas until it is loaded again.",
        "what changed",
        lambda a: a.fleet.unload(a.what.model, a.by),
        ModelName,
        (404, *CHANGING),
    ),
    AdminRoute(
        "POST",
        "/cordon",
        "Place nothing new on a host, or on some of its cores.",
        "what changed",
        lambda a: a.fleet.cordon(a.what.host, a.what.cores, True, a.by),
        HostCores,
        (404, *CHANGING, 422),
    ),
    AdminRoute(
        "POST",
        "/uncordon",
        "Take a cordon back.",
        "what changed",
        lambda a: a.fleet.cordon(a.what.host, a.what.cores, False, a.by),
        HostCores,
        (404, *CHANGING, 422),
    ),
    AdminRoute(
        "POST",
        "/drain",
        "Empty and cordon a host, or replace a replica.",
        "what changed",
        lambda a: a.fleet.drain(a.what.target, a.by),
        HostOrReplica,
        (404, *CHANGING),
    ),
    AdminRoute("POST", "/down", "Drain the fleet and end it.", "202, at once", _down, refusals=(507,), status=202),
)


class _Error(ApiError):
    """An answer with a status from 400 on, as a ``Refusal``."""

    def __init__(
        self,
        status: int,
        *,
        code: str,
        message: str,
        hint: str = "",
        problems: Sequence[Problem] = (),
        allow: str | None = None,
    ) -> None:
        super().__init__(status, message, code=code, allow=allow)
        reported = [SpecProblem(**item.as_dict()) for item in problems]
        self.refusal = Refusal(error=Reason(code=code, message=message, hint=hint), problems=reported)


def _refusal(error: ApiError) -> Refusal:
    """Also of what comes before the API: what is not HTTP, or over a limit."""
    if isinstance(error, _Error):
        return error.refusal
    return Refusal(error=Reason(code=error.code or str(error.status), message=error.message))


class AdminApi:
    """Answers the exchanges of the admin API. Keys and audit log are those of the fleet's home."""

    def __init__(self, fleet: Operations, ask_down: Callable[[], Awaitable[None]]) -> None:
        """``ask_down`` tells the daemon that the fleet is to end."""
        home = Home(Path(fleet.settings.home))
        self._fleet = fleet
        self._ask_down = ask_down
        self._audit = Audit(home.audit)
        self._keys = KeyFile(home.keys)
        self._changing: set[asyncio.Task[None]] = set()

    def handle(self, exchange: Exchange) -> Awaitable[None]:
        """Raises ApiError for an unauthorized client and for an unknown route. A change goes on without its client."""
        request = exchange.request
        key = self._caller(request.headers, request.path)
        exchange.connection.client = True
        route, values = _route(request)
        if not route.changes:
            return self._answer(route, values, exchange, key)
        task = asyncio.get_running_loop().create_task(self._answer(route, values, exchange, key))
        self._changing.add(task)
        task.add_done_callback(self._changing.discard)
        return asyncio.shield(task)

    def early(self, headers: Mapping[bytes, bytes]) -> ApiError | None:
        """Returns why a client with these headers is refused, before its long body is read."""
        try:
            self._caller(headers, "the admin API")
        except ApiError as error:
            return error
        return None

    async def close(self) -> None:
        """Cancel the changes that are still under way: the server ends."""
        for task in self._changing:
            task.cancel()
        await asyncio.gather(*self._changing, return_exceptions=True)

    def _caller(self, headers: Mapping[bytes, bytes], path: str) -> ApiKey | None:
        """The admin key of the request; None for the fleet's token. Raises ApiError for anything else."""
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        bearer = scheme.lower() == b"bearer"
        if bearer and hmac.compare_digest(given, self._fleet.settings.token.encode()):
            return None
        key = self._keys.current().authenticate(given.decode("latin-1"), time.time()) if bearer else None
        if key is None:
            message = "The admin API needs the token of fleet.json or a key: Authorization: Bearer TOKEN."
            raise _Error(401, code="invalid_token", message=message)
        if not key.may("admin"):
            log.warning("the key %s %s, which has no scope admin, asked for %s", key.id, key.name, path)
            hint = "corewright keys create NAME --scope admin"
            raise _of_failed(Refused("key-without-admin", f"the key {key.name} may not change the fleet", hint), 403)
        return key

    async def _answer(
        self, route: AdminRoute, values: Mapping[str, str], exchange: Exchange, key: ApiKey | None
    ) -> None:
        outcome = await self._outcome(route, values, exchange.request, key)
        if isinstance(outcome, ApiError):
            exchange.fail(outcome)
        else:
            exchange.respond(route.status, outcome)

    async def _outcome(
        self, route: AdminRoute, values: Mapping[str, str], request: Request, key: ApiKey | None
    ) -> bytes | ApiError:
        audit = self._audit
        try:
            what = _body(route, request) if route.method == "POST" else _query(route, request, values)
            asked = AdminRequest(self._fleet, self._ask_down, what, _by(request, key))
            if not route.changes:
                asked = await _checked(asked, key)
                return _json(await _called(route, asked))
            caller = "fleet token" if key is None else f"key {key.id} {key.name}"
            action = f"{route.method} {route.path}"
            written = await asyncio.to_thread(audit.begin, caller, action, msgspec.to_builtins(what), by=asked.by)
        except Exception as error:  # noqa: BLE001  # the fleet is unchanged
            return _of_error(route, error)
        revision, status = None, route.status
        outcome: bytes | ApiError
        try:
            asked = await _checked(asked, key)
            result = await _called(route, asked)
            if isinstance(result, dict) and isinstance(result.get("revision"), int):
                revision = result["revision"]
            outcome = _json(result)
        except Exception as error:  # noqa: BLE001  # each becomes an answer
            outcome = failed = _of_error(route, error)
            status = failed.status
        except BaseException:  # the server ends
            await _end(audit, written, "cut off", None)
            raise
        await _end(audit, written, str(status), revision)
        return outcome


async def _called(route: AdminRoute, asked: AdminRequest) -> Any:
    result = route.call(asked)
    return await result if inspect.isawaitable(result) else result


async def _end(audit: Audit, written: AuditLine, status: str, revision: int | None) -> None:
    try:
        await asyncio.shield(asyncio.to_thread(audit.finish, written, status, revision))
    except Failed as failed:  # it is done; the line of before says that it was asked
        log.error("%s", failed)


async def _checked(asked: AdminRequest, key: ApiKey | None) -> AdminRequest:
    """Who comes with a key need not have a shell here: what a spec may read is narrower. Raises Refused.

    What is undone without a number gets the one that was looked at: a moment later it could be another."""
    what = asked.what
    if key is None:
        return asked
    if isinstance(what, RevisionToUndoTo):
        revision = asked.fleet.revision(what.to)
        asked = dataclasses.replace(asked, what=RevisionToUndoTo(to=revision["revision"]))
        what = SpecText(text=revision["text"], file=revision["file"], base_dir=revision["base_dir"])
    if isinstance(what, SpecText):
        await asyncio.to_thread(_refuse_barred, what, asked.fleet.settings)
    return asked


def _refuse_barred(what: SpecText, settings: ControllerSettings) -> None:
    parsed = parse(what.text, what.file, what.base_dir)
    problems = () if parsed.spec is None else allowed_to_keys(settings).problems(parsed.spec)
    if problems:
        message = f"{what.file} names what a key may not have read"
        hint = "apply it on the fleet's own machine, with the token of fleet.json"
        raise Refused("spec-invalid", message, hint, status=422, problems=problems)


def _of_failed(failed: Failed, status: int) -> ApiError:
    problem = failed.problem
    problems = failed.problems if isinstance(failed, Refused) else ()
    return _Error(status, code=problem.id, message=problem.what, hint=problem.hint, problems=problems)


def _of_error(route: AdminRoute, error: Exception) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, Refused):
        return _of_failed(error, error.status)
    if isinstance(error, Failed):
        return _of_failed(error, 507 if error.problem.id == "audit-unwritable" else 500)
    log.error("%s %s failed", route.method, route.path, exc_info=error)  # a bug must not look like an API that is gone
    return _Error(500, code="internal_error", message="The controller failed; its log says more.")


def _body(route: AdminRoute, request: Request) -> Any:
    """No body at all is an empty object; the content type does not matter. Raises ApiError."""
    try:
        return msgspec.json.decode(request.body or b"{}", type=route.asks)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _Error(400, code="invalid_request", message=f"The body: {error}") from None


def _query(route: AdminRoute, request: Request, values: Mapping[str, str]) -> Any:
    """Raises ApiError."""
    pairs = [*values.items(), *parse_qsl(request.query, keep_blank_values=True)]
    twice = [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]
    if twice:
        raise _Error(
            400, code="invalid_request", message=f"The query: {', '.join(sorted(twice))} is given more than once"
        )
    try:
        return msgspec.convert(dict(pairs), type=route.asks, strict=False)
    except msgspec.MsgspecError as error:
        raise _Error(400, code="invalid_request", message=f"The query: {error}") from None


def _by(request: Request, key: ApiKey | None) -> str:
    """Who asks, as the journal will tell it: what it calls itself, and the key that it came with."""
    header = request.headers.get(BY_HEADER.lower().encode(), b"").decode("latin-1")
    given = "".join(letter for letter in header if letter.isprintable()).strip()[:LONGEST_BY]
    if key is None:
        return given or "admin"
    return f"{given} (key {key.name})" if given else f"key {key.name}"


_PATTERNS = [(re.compile(ADMIN_PATH + re.sub(r"{(\w+)}", r"(?P<\1>[^/]+)", route.path)), route) for route in ROUTES]


def _route(request: Request) -> tuple[AdminRoute, dict[str, str]]:
    """The route, and what the path has for its fields. Raises ApiError."""
    matches = [(route, match.groupdict()) for pattern, route in _PATTERNS if (match := pattern.fullmatch(request.path))]
    method = "GET" if request.method == "HEAD" else request.method
    for route, values in matches:
        if route.method == method:
            return route, values
    if matches:
        message = f"{request.path} does not take {request.method}."
        raise _Error(
            405, code="method_not_allowed", message=message, allow=", ".join(route.method for route, _ in matches)
        )
    message = f"There is no {request.path}; see {ADMIN_PATH}/openapi.json."
    raise _Error(404, code="route_not_found", message=message)


_json = msgspec.json.encode


# The document

_REFUSED = {
    400: "The request cannot be read.",
    401: "The token or key is missing or wrong.",
    403: "The key has no scope admin.",
    404: "What it is about does not exist.",
    409: "The fleet's state forbids it.",
    413: "The body is too large.",
    422: "The spec has errors; `problems` lists them.",
    500: "The controller failed.",
    507: "The journal or the audit log cannot be written; nothing was changed.",
}


def openapi() -> dict[str, Any]:
    """The OpenAPI 3.1 document of ``ROUTES``."""
    kinds = [*dict.fromkeys(route.asks for route in ROUTES), Refusal]
    references, components = schema_components(kinds)
    bodies = {route.asks.__name__ for route in ROUTES if route.method == "POST"}
    queries = {route.asks.__name__ for route in ROUTES} - bodies
    paths: dict[str, dict[str, Any]] = {}
    for route in ROUTES:
        operation: dict[str, Any] = {
            "operationId": operation_id(route.method, route.path),
            "summary": route.summary,
            "responses": {str(route.status): json_response(route.answer, {"type": "object"})},
        }
        if route.method == "POST":
            required = bool(components[route.asks.__name__].get("required"))
            operation["requestBody"] = {"required": required, "content": json_content(references[route.asks])}
        elif route.asks is not EmptyBody:
            operation["parameters"] = _parameters(route, components[route.asks.__name__])
        common = (400, 401, 403, 413, 500) if route.method == "POST" else (400, 401, 403, 500)
        for status in sorted({*common, *route.refusals}):
            operation["responses"][str(status)] = json_response(_REFUSED[status], references[Refusal])
        paths.setdefault(f"{ADMIN_PATH}{route.path}", {})[route.method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "corewright's admin API", "version": corewright_version()},
        "security": [{"token": []}],
        "paths": paths,
        "components": {
            "schemas": {name: schema for name, schema in components.items() if name not in queries},
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _parameters(route: AdminRoute, schema: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "in": "path" if f"{{{name}}}" in route.path else "query",
            "required": name in schema.get("required", ()),
            "schema": field,
        }
        for name, field in schema["properties"].items()
    ]


async def serve_admin(api: AdminApi, port: int) -> None:
    """Serve the API on loopback until the task is cancelled. Any local user can connect: before authentication, the
    number of connections, their time without a request and the bytes that they send are bounded."""
    limits = GatewaySettings(
        host="127.0.0.1",
        port=port,
        home="",
        max_body_bytes=MAX_BODY_BYTES,
        max_connections=MAX_CONNECTIONS,
        read_s=READ_S,
    )
    http = HttpServer(limits, api.handle, early=api.early, evicts=True, body_of=_refusal)
    server = await asyncio.get_running_loop().create_server(lambda: HttpConnection(http), limits.host, port)
    try:
        while True:
            await asyncio.sleep(SWEEP_S)
            http.sweep(time.monotonic())
    finally:
        server.close()
        await api.close()
        http.abort()
