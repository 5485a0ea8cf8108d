"""The gateway: the parts of one process, and how it answers each route."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
import uuid
from codecs import BOM_UTF8
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import msgspec.structs

from orchestrator.access.keys import KeyFile
from orchestrator.gateway.authenticator import PREFLIGHT, Authenticator
from orchestrator.gateway.controller_client import ControllerAway, ControllerClient
from orchestrator.gateway.encoding.encoding import Encoding
from orchestrator.gateway.generation import Generation, apply_to_prompt, with_defaults
from orchestrator.gateway.http.exchange import JSON, Exchange, header_list
from orchestrator.gateway.http.http_server import HttpServer
from orchestrator.gateway.http.route import ANY_SCOPE, HttpRoutes
from orchestrator.gateway.key_limits import KeyLimits
from orchestrator.gateway.lmi import INVOCATIONS
from orchestrator.gateway.model_cards import ModelCards, is_anthropics
from orchestrator.gateway.openai import body_reader, errors
from orchestrator.gateway.openai.answers import VersionAnswer
from orchestrator.gateway.openai.errors import ApiError
from orchestrator.gateway.openai.protocol import Chat, ChatRequest, TokenizeChatRequest
from orchestrator.gateway.openapi import ANTHROPIC, GatewayRoute, openapi
from orchestrator.gateway.received import ReceivedFiles, ReceivedKeys
from orchestrator.gateway.request_log import RequestLog, cancel
from orchestrator.gateway.sagemaker import SageMaker
from orchestrator.gateway.served_models import ServedModels
from orchestrator.gateway.serving.model_queue import ModelQueue
from orchestrator.gateway.serving.ticket import STRICT, read_flag
from orchestrator.gateway.serving.tokenizers import Tokenizers
from orchestrator.gateway.settings import GatewaySettings
from orchestrator.gateway.telemetry.exposition import Page, Scrapes, wants_openmetrics
from orchestrator.gateway.telemetry.gateway_metrics import GatewayMetrics, ModelSnapshot, ReplicaSnapshot, Vitals
from orchestrator.gateway.telemetry.peers import Peers
from orchestrator.gateway.telemetry.recorder import RequestRecorder
from orchestrator.process.awake_clock import AwakeClock
from orchestrator.process.home import Home
from orchestrator.process.version import corewright_version
from orchestrator.scaling.demand_report import DemandReply
from workers.messages.metric_family import MetricFamily

log = logging.getLogger(__name__)

CONTROLLER_METRICS_S = 1.0
REPORT_S = 1.0  # between two reports of demand
REPORT_DEADLINE_S = 10.0
ALONE_S = 10.0  # without the controller, until requests at other gateways no longer count
QUIET_REPORTS = 5  # without demand, every fifth report is sent
KEY_IN_USE_S = 300.0
SETTLE_S = 1.0
TEXT = b"text/plain; charset=utf-8"
IGNORED_TOOLS = b"x-corewright-ignored-tools"
_encode = msgspec.json.encode


class Gateway:
    """One gateway: its routes and its parts. One event loop."""

    def __init__(self, controller: ControllerClient, settings: GatewaySettings, routes: Sequence[GatewayRoute]) -> None:
        self.routes = HttpRoutes(routes)
        self._documents: dict[bool, bytes] = {}  # OpenAPI, by whether keys are needed
        methods = ", ".join([*self.routes.methods, "OPTIONS"]).encode()
        self._preflight = ((b"access-control-allow-methods", methods), *PREFLIGHT)
        self._controller = controller
        self._settings = settings
        id = uuid.uuid4().hex[:8]
        home = Home(Path(settings.home))
        files = ReceivedFiles(home.received, settings.fleet) if settings.place else None
        self.keys = ReceivedKeys(controller, files)
        self.gate = Authenticator(settings, KeyFile(home.keys) if files is None else KeyFile(files.keys, required=True))
        self.metrics = GatewayMetrics()
        self._limits = KeyLimits()
        self._tokenizers = Tokenizers()
        self._generation = Generation(settings, id, self._tokenizers, self._limits, self.metrics)
        self._encoding = Encoding(settings, id, self._tokenizers, self._generation, self.metrics)
        retried, read_again = self.metrics.retried, self._generation.read_again
        self.served = ServedModels(controller, id, settings.machine, self._tokenizers, retried, read_again, files)
        self.models = ModelCards(self.served)
        self._recorder = RequestRecorder(home.traces, id)
        self._log = RequestLog(self.gate, self.metrics, self._recorder, with_texts=settings.log_prompts)
        self.server = HttpServer(settings, self.handle, self._log.ended, self.gate.early, body_of=self._error_body)
        self.certificate_expires: float | None = None  # seconds since the epoch
        self.listens = False  # a spare gateway does not yet
        self.clock = AwakeClock()
        self._peers = Peers(home.sockets / "gateways", self._families, settings.gateways, home.seats, self.clock)
        self._scrapes = Scrapes(self._metrics_page)
        self._controller_families: list[MetricFamily] = []  # from its last answer
        self._controller_families_at: float | None = None  # monotonic
        self.sagemaker = SageMaker(controller, self.served, self._invoked, limited=settings.sagemaker)

    async def report(self) -> None:
        """Reports the demand to the controller once a second, until cancelled; without demand every fifth second, or
        when the gateway becomes ready or unready. Reports are lost while the controller is down. Each report
        states the time that it covers."""
        heard_at = reported_at = time.monotonic()
        quiet = 0
        before = ("", "")  # address and cause of unreadiness in the last report that was sent
        for number in itertools.count(1):
            await asyncio.sleep(REPORT_S)
            now = time.monotonic()
            report, busy = self.served.demand(number, now - reported_at, now)
            serves = (self._settings.url if self.listens else "", self._unready() or "")
            quiet = 0 if busy or serves != before else quiet + 1
            if quiet > 1 and quiet % QUIET_REPORTS:  # the first quiet one resets the last busy one
                continue
            reported_at = now
            usage = self._limits.report(now)
            age_s = self.served.routes_age_s
            report = msgspec.structs.replace(
                report,
                place=self._settings.place,
                version=corewright_version(),
                address=serves[0],
                unready=serves[1],
                routes_age_s=None if age_s is None else round(age_s, 3),
                loads=self.metrics.loads(),
                requests=self._log.live(self.served.queues.values()),
                usage=usage,
            )
            try:
                reply = await asyncio.wait_for(self._controller.demand(report), REPORT_DEADLINE_S)
            except (ControllerAway, asyncio.TimeoutError) as error:
                self._limits.restore(usage)
                if now - heard_at > ALONE_S:
                    self._limits.charge((), self.gate.keys, now)
                log.warning("cannot report the demand to the controller: %s", error)
            else:
                heard_at, before = now, serves
                self._follow(reply)
                self._limits.charge(reply.usage, self.gate.keys, time.monotonic())
            self._log.write(now)
            self._tokenizers.sweep(now)

    def _follow(self, reply: DemandReply) -> None:
        """Does what operators request of this gateway."""
        self._log.watched = reply.watched
        for queue in self.served.queues.values():
            queue.record.watched = reply.watched
        cancel(self.served.queues.values(), reply.cancelled)

    async def join(self) -> bool:
        """Joins the fleet's gateways; returns False when all their places are taken."""
        try:
            return await self._peers.join()
        except OSError as error:  # it can serve without
            log.error("the metrics of this gateway are not available to the other gateways: %s", error)
            return True

    @property
    def settled(self) -> bool:
        """True when the input from the last pause of this process has been read."""
        return self.clock() - self.clock.resumed_at() >= SETTLE_S

    async def beat(self) -> None:
        """Writes the heartbeat and checks the other gateways. To be called several times a second."""
        try:
            await self._peers.beat()
        except OSError as error:  # a full disk, or too many open files: it can serve without
            log.debug("cannot write the heartbeat: %s", error)

    async def leave(self) -> None:
        """Frees its place among the gateways."""
        await self._peers.leave()

    async def stop(self) -> None:
        """Stops the gateway; to be called when every exchange is over, after ``leave``."""
        await asyncio.to_thread(self._recorder.close)
        await self._generation.stop()
        await self.served.stop()

    # Every request

    def handle(self, exchange: Exchange) -> Awaitable[None] | None:
        """Answers a request, at once or by the awaitable that it returns. Raises ApiError."""
        request = exchange.request
        if self._drains():
            request.keep_alive = False  # its client connects again, to another machine
        if b"origin" in request.headers:
            self.gate.admit_origin(exchange)
        routes, exchange.parameters = self.routes.at(request.path)
        if not routes and (path := self.routes.meant(request.path)) is not None:
            request.path = path
            routes, exchange.parameters = self.routes.at(path)
        method = "GET" if request.method == "HEAD" and "HEAD" not in routes else request.method
        route = exchange.route = routes.get(method) or next(iter(routes.values()), None)
        if route is not None and route.errors is ANTHROPIC:
            exchange.add_headers(((b"request-id", exchange.id.encode()),))
        if route is None or route.scope is not None:
            if request.method == "OPTIONS" and b"access-control-request-method" in request.headers:
                exchange.respond(204, b"", headers=self._preflight)  # browsers send it without the key
                return None
            self.gate.admit(exchange)
        if route is None:
            raise errors.route_not_found(request.path)
        if method not in routes:
            raise errors.method_not_allowed(request.method, request.path, ", ".join(routes))
        scope, key = route.scope, exchange.key
        if key is not None and scope is not None and scope not in (ANY_SCOPE, *key.scopes):
            raise errors.key_not_for(scope)
        handler: Callable[[Gateway, Exchange], Awaitable[None] | None] = route.handler
        return handler(self, exchange)

    # Routes

    def openapi(self, exchange: Exchange) -> None:
        needs_key = self.gate.requires_keys
        if (document := self._documents.get(needs_key)) is None:
            document = self._documents[needs_key] = _encode(openapi(needs_key=needs_key, routes=self.routes.all))
        exchange.respond(200, document)

    def tokenize(self, exchange: Exchange) -> Awaitable[None] | None:
        """Answers a request that needs the tokenizer only."""
        route = exchange.route
        if route.forwards and self._forwarded(exchange):
            return None
        body = _read(exchange, self.metrics)
        queue = self._queue_of(exchange, body)
        if isinstance(body, TokenizeChatRequest):
            apply_to_prompt(body, queue.routes.defaults(body.model))
        return self._generation.tokenize(exchange, queue, lambda it: route.writes(body, it, queue.routes.max_len))

    def livez(self, exchange: Exchange) -> None:
        exchange.respond(200, b"ok\n", content_type=TEXT)

    def readyz(self, exchange: Exchange) -> None:
        cause, age_s = self._unready(), self.served.routes_age_s
        age = f"routes: {age_s:.0f} s old\n" if self._settings.place and age_s is not None else ""
        exchange.respond(503 if cause else 200, f"{cause or 'ok'}\n{age}".encode(), content_type=TEXT)

    def _unready(self) -> str | None:
        """Returns why clients should use another gateway; None if there is no reason."""
        return "this machine drains" if self._drains() else self.served.not_ready()

    def _drains(self) -> bool:
        return bool(self._settings.place) and self.served.drains(self._settings.place)

    async def metrics_page(self, exchange: Exchange) -> None:
        accept = exchange.request.headers.get(b"accept", b"").decode("latin-1")
        page, kind = await self._scrapes.page(wants_openmetrics(accept))
        exchange.respond(200, [page], content_type=kind.encode())  # as a part: a page of megabytes is not copied

    async def _metrics_page(self, openmetrics: bool) -> Page:
        """Returns the page with the metrics of this gateway, the other gateways and the controller."""
        try:
            self._controller_families = await asyncio.wait_for(self._controller.metrics(), CONTROLLER_METRICS_S)
            self._controller_families_at = time.monotonic()
        except (ControllerAway, asyncio.TimeoutError) as error:
            log.warning("cannot get metrics from the controller: %s", error)
        return await self._peers.page(self._controller_families, openmetrics)

    def _families(self) -> list[MetricFamily]:
        """Returns the families of this gateway alone."""
        families_at = self._controller_families_at
        vitals = Vitals(
            connections=len(self.server.connections),
            keys=sum(not key.expired(time.time()) for key in self.gate.keys.keys),
            keys_in_use=self.gate.in_use(KEY_IN_USE_S),
            certificate_expires=self.certificate_expires,
            controller_age_s=None if families_at is None else time.monotonic() - families_at,
        )
        return self.metrics.families([_snapshot(queue) for queue in self.served.queues.values()], vitals)

    def version(self, exchange: Exchange) -> None:
        exchange.respond(200, _encode(VersionAnswer(corewright_version())))

    def generate(self, exchange: Exchange) -> Awaitable[None] | None:
        """Answers a request of an API that generates text, with the reader and the writer of its route."""
        route = exchange.route
        if route.forwards and self._forwarded(exchange):
            return None
        body = _read(exchange, self.metrics)
        exchange.names = body.names
        if isinstance(body, ChatRequest) and body.ignored_tools:
            exchange.add_headers(((IGNORED_TOOLS, header_list(body.ignored_tools)),))
        queue = self._queue_of(exchange, body)
        if route.forwards and queue.routes.reads_parts and isinstance(body, ChatRequest) and body.has_other_parts:
            request = exchange.request
            request.body = with_defaults(request.body, queue.routes.defaults(body.model))
            self._generation.forward(exchange, body_reader.read_forwarded(request.body), queue)
            return None
        return self._generation.start(exchange, body, queue)

    def _queue_of(self, exchange: Exchange, body: Any) -> ModelQueue:
        """Returns the queue for a request's model, after the checks that need no tokenizer. Raises ApiError."""
        if isinstance(body, Chat) and len(body.messages) > self._settings.max_messages:
            raise errors.too_many_messages(len(body.messages), self._settings.max_messages)
        queue = self.served.queue(exchange.key, body.model)
        if queue.routes.forwards and not exchange.route.forwards:
            raise errors.not_forwarded(queue.name, exchange.request.path)
        return queue

    def encode(self, exchange: Exchange) -> Awaitable[None] | None:
        if self._forwarded(exchange):
            return None
        body = _read(exchange, self.metrics)
        return self._encoding.start(exchange, body, self.served.queue(exchange.key, body.model))

    def _forwarded(self, exchange: Exchange) -> bool:
        """Starts a request whose model gets the client's own body; returns False for one of another model."""
        if not self.served.forwards:
            return False
        body = body_reader.read_forwarded(_json_of(exchange))
        queue = self.served.queue(exchange.key, body.model)
        if queue.routes.forwards:
            self._generation.forward(exchange, body, queue)
        return queue.routes.forwards

    def _invoked(self, exchange: Exchange, path: str) -> Awaitable[None] | None:
        """Answers a request of SageMaker as the route of ``path`` does; `/invocations` itself has LMI's requests."""
        exchange.request.path = path
        route = exchange.route = self.routes.at(path)[0]["POST"]
        return self.generate(exchange) if path == INVOCATIONS else route.handler(self, exchange)

    def _error_body(self, error: ApiError, exchange: Exchange) -> Any:
        """Returns the JSON of an error in the shape of the route's API."""
        route = exchange.route or next(iter(self.routes.at(exchange.request.path)[0].values()), None)
        if route is None:
            return error.body()
        to_anthropic = route.to_anthropic is not None and is_anthropics(exchange.request)
        return (ANTHROPIC if to_anthropic else route.errors).body(error, exchange.id)


def _snapshot(queue: ModelQueue) -> ModelSnapshot:
    """Returns the gauges of a model."""
    generates = queue.routes.kind == "generate"
    slot_tokens = queue.routes.max_len if generates else 0  # of its KV cache
    replicas = [
        ReplicaSnapshot(link.replica, link.live, slots, link.kv_tokens, slots * slot_tokens)
        for link in queue.links
        if link.welcome is not None and (slots := link.welcome.slots)
    ]
    return ModelSnapshot(queue.name, queue.waiting, replicas, encodes=not generates)


def _json_of(exchange: Exchange) -> bytes:
    """Returns the body. Raises ApiError 415 for another content type, such as that of `curl -d` without a header."""
    kind = exchange.request.headers.get(b"content-type")
    if kind and kind != JSON and kind.partition(b";")[0].strip().lower() != b"application/json":
        raise errors.wrong_content_type(kind.decode("latin-1"))
    if exchange.request.body.startswith(BOM_UTF8):  # from PowerShell and .NET
        exchange.request.body = exchange.request.body[len(BOM_UTF8) :]
    return exchange.request.body


def _read(exchange: Exchange, metrics: GatewayMetrics) -> Any:
    """Returns the request of a body, and counts its unknown fields. Raises ApiError."""
    headers = exchange.request.headers
    strict = STRICT in headers and read_flag(headers, STRICT)
    body, unknown = body_reader.read(exchange.route.reads, _json_of(exchange), strict=strict)
    if unknown:
        metrics.unknown(unknown)
    return body
