"""The HTTP server of the admin API and the console: listens on loopback, authenticates the fleet's token or a key of
scope admin."""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import time
from collections import Counter
from collections.abc import Awaitable, Mapping, Sequence
from functools import partial
from pathlib import Path
from urllib.parse import parse_qsl

import msgspec

from orchestrator.access.audit_log import Audit
from orchestrator.access.keys import ApiKey, KeyFile
from orchestrator.api import queries
from orchestrator.api.operation import OperatedFleet
from orchestrator.api.routes import ROUTES, AdminRoute, console_calls
from orchestrator.api.schemas import Applied, EventsQuery, Fields, OperationRefused, Reason, Refusal, Undone
from orchestrator.console.fleet_feed import ConsoleSource, FleetFeed
from orchestrator.console.page import CONSOLE_PATH, PLAYGROUND_PATH, ConsolePage, Playground
from orchestrator.gateway.http.connection import HttpConnection
from orchestrator.gateway.http.exchange import Exchange, Request, checked
from orchestrator.gateway.http.http_server import HttpServer
from orchestrator.gateway.openai.errors import ApiError
from orchestrator.gateway.settings import GatewaySettings
from orchestrator.messages.controller_settings import ADMIN_PATH, BY_HEADER
from orchestrator.messages.fleet_status import EventPage
from orchestrator.process.failure import Failed
from orchestrator.process.home import Home
from placements.spec.problems import Problem

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 8 << 20
MAX_CONNECTIONS = 256
READ_S = 10.0  # limit for receiving a request, and until the first request of a connection
SWEEP_S = 0.25
MAX_BY_CHARACTERS = 200


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
        self.refusal = Refusal(error=Reason(code=code, message=message, hint=hint), problems=list(problems))


def _refusal(error: ApiError, exchange: Exchange) -> Refusal:
    """Returns the body of an error response, also of errors of the HTTP server, such as malformed HTTP."""
    if isinstance(error, _Error):
        return error.refusal
    return Refusal(error=Reason(code=error.code or str(error.status), message=error.message))


class AdminApi:
    """Handles the exchanges of the admin API, with the keys and the audit log of the fleet's home."""

    def __init__(
        self, fleet: OperatedFleet, routes: Sequence[AdminRoute] = ROUTES, console: ConsoleSource | None = None
    ) -> None:
        """``console`` is what the console reads of the fleet; None: what the queries return."""
        home, source = Home(Path(fleet.settings.home)), console or source_of(fleet)
        self._fleet = fleet
        self._patterns = [(re.compile(re.sub(r"{(\w+)}", r"(?P<\1>[^/]+)", route.path)), route) for route in routes]
        self._audit = Audit(home.audit)
        self._keys = KeyFile(home.keys)
        self._page = ConsolePage(fleet.settings.console_url, console_calls(routes))
        self._feed = FleetFeed(source)
        self._playground = Playground(source.entrance)
        self._changing: set[asyncio.Task[None]] = set()

    def handle(self, exchange: Exchange) -> Awaitable[None] | None:
        """Handles one exchange; a change continues if its client disconnects.

        Raises ApiError for an unauthorized client and for an unknown route.
        """
        request = exchange.request
        self._page.refuse_others(request.headers)
        if self._page.has(request.path):
            self._page.answer(exchange)
            return None
        key = self._caller(request.headers, request.path)
        exchange.connection.client = True
        if (request.method, request.path) == ("GET", f"{CONSOLE_PATH}/stream"):
            return self._feed.stream(exchange, lambda: self.early(request.headers) is None)
        if (request.method, request.path) == ("POST", PLAYGROUND_PATH):
            return self._playground.chat(exchange)
        route, values = self._route(request)
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
        if not key.has_scope("admin"):
            log.warning("refused %s to the key %s %s: it does not have the scope admin", path, key.id, key.name)
            fact = f"the key {key.name} does not have the scope admin"
            hint = "create one that has: corewright keys create NAME --scope admin"
            raise _error_of(OperationRefused("key-without-admin", fact, hint), 403)
        return key

    def _route(self, request: Request) -> tuple[AdminRoute, dict[str, str]]:
        """Returns the route and the fields in its path. Raises ApiError."""
        below, path = ADMIN_PATH, request.path.removeprefix(ADMIN_PATH)
        known = self._patterns if request.path.startswith(below) else []
        matches = [(route, match.groupdict()) for pattern, route in known if (match := pattern.fullmatch(path))]
        method = "GET" if request.method == "HEAD" else request.method
        for route, values in matches:
            if route.method == method:
                return route, values
        if matches:
            message = f"{request.path} does not support {request.method}."
            allow = ", ".join(route.method for route, _ in matches)
            raise _Error(405, code="method_not_allowed", message=message, allow=allow)
        message = f"The route {request.path} does not exist; see {ADMIN_PATH}/openapi.json."
        raise _Error(404, code="route_not_found", message=message)

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
        audit, by = self._audit, _by(request, key)
        fleet = self._fleet if key is None else self._fleet.for_keys
        try:
            fields = _body(route, request) if route.method == "POST" else _query(route, request, values)
            if not route.changes:
                return _json(await route.call(fleet, fields, by))
            caller = "fleet token" if key is None else f"key {key.id} {key.name}"
            action = f"{route.method} {route.path}"
            line = await asyncio.to_thread(audit.begin, caller, action, msgspec.to_builtins(fields), by=by)
        except Exception as error:  # noqa: BLE001  # the fleet is unchanged
            return _response_to(route, error)
        revision, status = None, route.status
        outcome: bytes | ApiError
        try:
            answer = await route.call(fleet, fields, by)
            revision = answer.revision if isinstance(answer, Applied | Undone) else None
            outcome = _json(answer)
        except Exception as error:  # noqa: BLE001  # every error becomes a response
            outcome = failed = _response_to(route, error)
            status = failed.status
        except BaseException:  # the server is stopping
            await asyncio.shield(asyncio.to_thread(audit.finish, line, "cut off"))
            raise
        await asyncio.shield(asyncio.to_thread(audit.finish, line, str(status), revision))
        return outcome


def source_of(fleet: OperatedFleet) -> ConsoleSource:
    """Returns what the console reads of a fleet."""

    def events(after: int, limit: int, wait_s: float) -> Awaitable[EventPage]:
        return queries.events(fleet, EventsQuery(after=after, limit=limit, wait_s=wait_s))

    return ConsoleSource(
        partial(queries.status, fleet), partial(queries.live, fleet), events, partial(queries.entrance, fleet)
    )


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


def _body(route: AdminRoute, request: Request) -> Fields:
    """Decodes the body; no body is an empty object, and the content type is ignored. Raises ApiError."""
    try:
        return msgspec.json.decode(checked(request.body) or b"{}", type=route.request)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _Error(400, code="invalid_request", message=f"The body: {error}") from None


def _query(route: AdminRoute, request: Request, values: Mapping[str, str]) -> Fields:
    """Decodes the path and the query. Raises ApiError."""
    pairs = [*values.items(), *parse_qsl(request.query, keep_blank_values=True)]
    repeated = [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]
    if repeated:
        raise _Error(
            400, code="invalid_request", message=f"The query: {', '.join(sorted(repeated))} is given more than once"
        )
    try:
        return msgspec.convert(dict(pairs), type=route.request, strict=False)
    except msgspec.MsgspecError as error:
        raise _Error(400, code="invalid_request", message=f"The query: {error}") from None


def _by(request: Request, key: ApiKey | None) -> str:
    """Returns the caller for the journal: the name in its header, and its key."""
    header = request.headers.get(BY_HEADER.lower().encode(), b"").decode("latin-1")
    name = "".join(letter for letter in header if letter.isprintable()).strip()[:MAX_BY_CHARACTERS]
    if key is None:
        return name or "admin"
    return f"{name} (key {key.name})" if name else f"key {key.name}"


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
