"""The HTTP server of the admin API and the console: listens on loopback, authenticates the fleet's token or a key of
scope admin."""

from __future__ import annotations

import asyncio
import dataclasses
import hmac
import logging
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import msgspec

from orchestrator.access.audit_log import Audit
from orchestrator.access.keys import ApiKey, KeyFile
from orchestrator.access.source_policy import allowed_to_keys
from orchestrator.api.operator import Operator
from orchestrator.api.refused import OperationRefused
from orchestrator.api.routes import ROUTES, AdminRequest, AdminRoute
from orchestrator.api.schemas import Reason, Refusal, SpecProblem, SpecText, UndoTarget
from orchestrator.console.fleet_feed import FleetFeed
from orchestrator.console.own_pages import OwnPages
from orchestrator.console.page import CONSOLE_PATH, answer_file, is_file
from orchestrator.console.playground import PLAYGROUND_PATH, Playground
from orchestrator.fleet.controller_settings import ADMIN_PATH, BY_HEADER, ControllerSettings
from orchestrator.gateway.http.connection import HttpConnection
from orchestrator.gateway.http.exchange import Exchange, Request, checked
from orchestrator.gateway.http.http_server import HttpServer
from orchestrator.gateway.openai.errors import ApiError
from orchestrator.gateway.settings import GatewaySettings
from orchestrator.process.failure import Failed
from orchestrator.process.home import Home
from placements.spec.parse import parse
from placements.spec.problems import Problem

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 8 << 20
MAX_CONNECTIONS = 256
READ_S = 10.0  # limit for receiving a request, and until the first request of a connection
SWEEP_S = 0.25
LONGEST_BY = 200  # characters


class _Error(ApiError):
    """An error response with a ``Refusal`` as its body."""

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


def _refusal(error: ApiError, exchange: Exchange) -> Refusal:
    """Returns the body of an error response, also of errors of the HTTP server, such as malformed HTTP."""
    if isinstance(error, _Error):
        return error.refusal
    return Refusal(error=Reason(code=error.code or str(error.status), message=error.message))


class AdminApi:
    """Handles the exchanges of the admin API, with the keys and the audit log of the fleet's home."""

    def __init__(self, fleet: Operator, request_shutdown: Callable[[], Awaitable[None]]) -> None:
        """``request_shutdown`` asks the daemon to stop the fleet."""
        home = Home(Path(fleet.settings.home))
        self._fleet = fleet
        self._request_shutdown = request_shutdown
        self._audit = Audit(home.audit)
        self._keys = KeyFile(home.keys)
        self._pages = OwnPages.at(fleet.settings.console_url)
        self._feed = FleetFeed(fleet)
        self._playground = Playground(fleet.entrance)
        self._changing: set[asyncio.Task[None]] = set()

    def handle(self, exchange: Exchange) -> Awaitable[None] | None:
        """Handles one exchange; a change continues if its client disconnects.

        Raises ApiError for an unauthorized client and for an unknown route.
        """
        request = exchange.request
        self._pages.refuse_others(request.headers)
        if is_file(request.path):
            answer_file(exchange)
            return None
        key = self._caller(request.headers, request.path)
        exchange.connection.client = True
        if (request.method, request.path) == ("GET", f"{CONSOLE_PATH}/stream"):
            return self._feed.stream(exchange, lambda: self.early(request.headers) is None)
        if (request.method, request.path) == ("POST", PLAYGROUND_PATH):
            return self._playground.chat(exchange)
        route, values = _route(request)
        if not route.changes:
            return self._answer(route, values, exchange, key)
        task = asyncio.get_running_loop().create_task(self._answer(route, values, exchange, key))
        self._changing.add(task)
        task.add_done_callback(self._changing.discard)
        return asyncio.shield(task)

    def early(self, headers: Mapping[bytes, bytes]) -> ApiError | None:
        """Returns the error for a client that is not authorized, before its body is read."""
        try:
            self._caller(headers, "the admin API")
        except ApiError as error:
            return error
        return None

    async def close(self) -> None:
        """Cancels the changes in progress."""
        self._feed.close()
        for task in self._changing:
            task.cancel()
        await asyncio.gather(*self._changing, return_exceptions=True)

    def _caller(self, headers: Mapping[bytes, bytes], path: str) -> ApiKey | None:
        """Returns the admin key of the request; None for the fleet's token. Raises ApiError for anything else."""
        scheme, _, credential = headers.get(b"authorization", b"").partition(b" ")
        bearer = scheme.lower() == b"bearer"
        if bearer and hmac.compare_digest(credential, self._fleet.settings.token.encode()):
            return None
        key = self._keys.current().authenticate(credential.decode("latin-1"), time.time()) if bearer else None
        if key is None:
            message = "The admin API needs the token of fleet.json or a key: Authorization: Bearer TOKEN."
            raise _Error(401, code="invalid_token", message=message)
        if not key.may("admin"):
            log.warning("refused %s to the key %s %s: it does not have the scope admin", path, key.id, key.name)
            what = f"the key {key.name} does not have the scope admin"
            hint = "create one that has: corewright keys create NAME --scope admin"
            raise _error_of(OperationRefused("key-without-admin", what, hint), 403)
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
            fields = _body(route, request) if route.method == "POST" else _query(route, request, values)
            call = AdminRequest(self._fleet, self._request_shutdown, fields, _by(request, key))
            if not route.changes:
                return _json(await route.call(await _check(call, key)))
            caller = "fleet token" if key is None else f"key {key.id} {key.name}"
            action = f"{route.method} {route.path}"
            line = await asyncio.to_thread(audit.begin, caller, action, msgspec.to_builtins(fields), by=call.by)
        except Exception as error:  # noqa: BLE001  # the fleet is unchanged
            return _response_to(route, error)
        revision, status = None, route.status
        outcome: bytes | ApiError
        try:
            result = await route.call(await _check(call, key))
            if isinstance(result, dict) and isinstance(result.get("revision"), int):
                revision = result["revision"]
            outcome = _json(result)
        except Exception as error:  # noqa: BLE001  # every error becomes a response
            outcome = failed = _response_to(route, error)
            status = failed.status
        except BaseException:  # the server is stopping
            await asyncio.shield(asyncio.to_thread(audit.finish, line, "cut off"))
            raise
        await asyncio.shield(asyncio.to_thread(audit.finish, line, str(status), revision))
        return outcome


async def _check(request: AdminRequest, key: ApiKey | None) -> AdminRequest:
    """Applies the narrower source policy of API keys to the spec of a request. Raises Refused.

    Pins an undo without a number to the revision that was checked: the default can change before the undo runs.
    """
    fields = request.fields
    if key is None:
        return request
    if isinstance(fields, UndoTarget):
        revision = request.fleet.revision(fields.to)
        request = dataclasses.replace(request, fields=msgspec.structs.replace(fields, to=revision["revision"]))
        fields = SpecText(text=revision["text"], file=revision["file"], base_dir=revision["base_dir"])
    if isinstance(fields, SpecText):
        await asyncio.to_thread(_check_sources, fields, request.fleet.settings)
    return request


def _check_sources(spec: SpecText, settings: ControllerSettings) -> None:
    parsed = parse(spec.text, spec.file, spec.base_dir)
    problems = () if parsed.spec is None else allowed_to_keys(settings).problems(parsed.spec)
    if problems:
        what = f"{spec.file} names sources or programs that an API key may not use"
        hint = "apply it on the fleet's host, with the token of fleet.json"
        raise OperationRefused("spec-invalid", what, hint, status=422, problems=problems)


def _error_of(failed: Failed, status: int) -> ApiError:
    problem = failed.problem
    problems = failed.problems if isinstance(failed, OperationRefused) else ()
    return _Error(status, code=problem.id, message=problem.what, hint=problem.hint, problems=problems)


def _response_to(route: AdminRoute, error: Exception) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, OperationRefused):
        return _error_of(error, error.status)
    if isinstance(error, Failed):
        return _error_of(error, 507 if error.problem.id == "audit-unwritable" else 500)
    log.error("%s %s failed", route.method, route.path, exc_info=error)  # a bug must still get a response
    return _Error(500, code="internal_error", message="Internal error of the controller; see its log.")


def _body(route: AdminRoute, request: Request) -> Any:
    """Decodes the body; no body is an empty object, and the content type is ignored. Raises ApiError."""
    try:
        return msgspec.json.decode(checked(request.body) or b"{}", type=route.schema)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _Error(400, code="invalid_request", message=f"The body: {error}") from None


def _query(route: AdminRoute, request: Request, values: Mapping[str, str]) -> Any:
    """Decodes the path and the query. Raises ApiError."""
    pairs = [*values.items(), *parse_qsl(request.query, keep_blank_values=True)]
    repeated = [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]
    if repeated:
        raise _Error(
            400, code="invalid_request", message=f"The query: {', '.join(sorted(repeated))} is given more than once"
        )
    try:
        return msgspec.convert(dict(pairs), type=route.schema, strict=False)
    except msgspec.MsgspecError as error:
        raise _Error(400, code="invalid_request", message=f"The query: {error}") from None


def _by(request: Request, key: ApiKey | None) -> str:
    """Returns the caller for the journal: the name in its header, and its key."""
    header = request.headers.get(BY_HEADER.lower().encode(), b"").decode("latin-1")
    name = "".join(letter for letter in header if letter.isprintable()).strip()[:LONGEST_BY]
    if key is None:
        return name or "admin"
    return f"{name} (key {key.name})" if name else f"key {key.name}"


_PATTERNS = [(re.compile(ADMIN_PATH + re.sub(r"{(\w+)}", r"(?P<\1>[^/]+)", route.path)), route) for route in ROUTES]


def _route(request: Request) -> tuple[AdminRoute, dict[str, str]]:
    """Returns the route and the fields in its path. Raises ApiError."""
    matches = [(route, match.groupdict()) for pattern, route in _PATTERNS if (match := pattern.fullmatch(request.path))]
    method = "GET" if request.method == "HEAD" else request.method
    for route, values in matches:
        if route.method == method:
            return route, values
    if matches:
        message = f"{request.path} does not support {request.method}."
        raise _Error(
            405, code="method_not_allowed", message=message, allow=", ".join(route.method for route, _ in matches)
        )
    message = f"The route {request.path} does not exist; see {ADMIN_PATH}/openapi.json."
    raise _Error(404, code="route_not_found", message=message)


_json = msgspec.json.encode


async def serve_admin(api: AdminApi, port: int) -> None:
    """Serves the API on loopback until the task is cancelled.

    Any local user can connect: before authentication, the number of connections, their time without a request and the
    bytes that they send are bounded.
    """
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
