"""The gateway: OpenAI's routes, the probes, and the model queues behind them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import math
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast
from urllib.parse import unquote

import msgspec
import msgspec.structs

from orchestrator.access.keys import ApiKey, KeyFile
from orchestrator.fleet.route_table import RouteTable
from orchestrator.gateway.admission.authenticator import PREFLIGHT, Authenticator, allow_model, allow_scope
from orchestrator.gateway.admission.key_limits import KeyLimits
from orchestrator.gateway.http.exchange import JSON, Exchange
from orchestrator.gateway.http.http_server import Handler, HttpServer
from orchestrator.gateway.openai import body_reader, errors, protocol
from orchestrator.gateway.openai.answers import Answer, Choice
from orchestrator.gateway.openai.errors import ApiError
from orchestrator.gateway.openai.openapi import openapi
from orchestrator.gateway.openai.reply import Note, Reply
from orchestrator.gateway.openai.request_builder import Prompts, prompts_of, requests_for
from orchestrator.gateway.openai.tokenize import detokenized, tokenized
from orchestrator.gateway.serving.model_queue import ModelQueue
from orchestrator.gateway.serving.scheduling_parameters import read_scheduling_parameters
from orchestrator.gateway.serving.tokenizer_threads import TokenizerThreads
from orchestrator.gateway.serving.tokenizers import Tokenizers
from orchestrator.gateway.settings import GatewaySettings
from orchestrator.gateway.telemetry.exposition import wants_openmetrics
from orchestrator.gateway.telemetry.gateway_metrics import GatewayMetrics, ModelSnapshot, ReplicaSnapshot, Vitals
from orchestrator.gateway.telemetry.peers import Peers
from orchestrator.gateway.telemetry.recorder import RequestRecorder
from orchestrator.gateway.telemetry.request_spans import RequestTracing, TraceHandle
from orchestrator.gateway.telemetry.scrapes import Page, Scrapes
from orchestrator.process.awake_clock import AwakeClock
from orchestrator.process.home import Home
from orchestrator.process.logs import Access, access_log
from orchestrator.process.version import corewright_version
from orchestrator.scaling.demand_report import DemandReport
from workers.messages.metric_family import MetricFamily
from workers.messages.requests import GenerateRequest
from workers.text.tokenizer import ByteTokenizer, PromptTokenizer
from workers.text.tokenizer_process import TokenizerFault

log = logging.getLogger(__name__)

CONTROLLER_SILENT_S = 10.0  # without an answer to a long poll: the controller is down
CONTROLLER_METRICS_S = 1.0
REPORT_S = 1.0  # between two reports of demand
QUIET_REPORTS = 5  # without demand, every fifth report is sent
KEY_IN_USE_S = 300.0
SETTLE_S = 1.0
INLINE_BYTES = 2048  # the byte tokenizer runs inline up to this body size: a thread would cost more
BYTES_OF_TOKEN = 4  # estimate by which a key is charged before tokenizing
UNAUTHENTICATED_LOG_S = 10.0  # between two log lines about requests without a valid key
OPEN = frozenset({"/livez", "/readyz", "/health", "/ping"})  # routes that need no key
TEXT = b"text/plain; charset=utf-8"
MODELS = "/v1/models/"
CHAT = "/v1/chat/completions"
CLIENT_GONE = 499  # nginx's status for a client that disconnected before the answer

GenerationBody = protocol.ChatRequest | protocol.CompletionRequest
T = TypeVar("T")


class ControllerAway(Exception):
    """The controller does not reply, since it restarts, or its reply is an error."""


class ControllerClient(Protocol):
    """The controller's interface to the gateway. Each method raises ControllerAway."""

    async def routes(self, seen: int, timeout_s: float) -> tuple[int, RouteTable]: ...
    def wake(self, model: str) -> Coroutine[Any, Any, None]: ...
    async def demand(self, report: DemandReport) -> None: ...
    async def metrics(self) -> list[MetricFamily]: ...


class Gateway:
    """One gateway: a queue per model, kept in line with the controller's route table. One event loop."""

    def __init__(self, controller: ControllerClient, settings: GatewaySettings) -> None:
        self._controller = controller
        self._settings = settings
        self._id = uuid.uuid4().hex[:8]
        self._created = int(time.time())
        self._request_ids = map(f"{self._id}-%d".__mod__, itertools.count())
        self._answer_ids = map(f"-{self._id}%x".__mod__, itertools.count())
        self.queues: dict[str, ModelQueue] = {}
        self._names: dict[str, ModelQueue] = {}  # by name and alias
        self._tokenizers = Tokenizers()
        self._tokenizing = TokenizerThreads()
        self._scrapes = Scrapes(self._metrics_page)
        self._table: RouteTable | None = None
        self._routes_at = 0.0  # the last answer of the controller (monotonic)
        self._routes_known = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._unauthenticated: Counter[int] = Counter()  # by status, requests without a valid key, not logged yet
        self._unauthenticated_at = -math.inf  # their last log line (monotonic)
        home = Home(Path(settings.home))
        self.gate = Authenticator(settings, KeyFile(home.keys))
        self.metrics = GatewayMetrics()
        self._tracing = RequestTracing.from_environment(self._id)
        self._limits = KeyLimits(home.sockets / "limits", settings.gateways)
        self._recorder = RequestRecorder(home.traces, self._id)
        self._epoch = time.time() - time.monotonic()  # add to a monotonic time to get seconds since the epoch
        self.server = HttpServer(settings, self.handle, self.ended, self.gate.early)
        self.certificate_expires: float | None = None  # seconds since the epoch
        folder = home.sockets / "gateways"
        self.clock = AwakeClock()
        self._peers = Peers(folder, self._families, settings.gateways, home.seats, self.clock)
        self._controller_families: list[MetricFamily] = []  # from its last answer
        self._controller_families_at: float | None = None  # monotonic
        self._routes: Mapping[str, tuple[str, Handler]] = {
            CHAT: ("POST", self.chat),
            "/v1/completions": ("POST", self.complete),
            "/v1/models": ("GET", self.models),
            "/metrics": ("GET", self.metrics_page),
            "/tokenize": ("POST", self.tokenize),
            "/detokenize": ("POST", self.detokenize),
            "/openapi.json": ("GET", self.openapi),
            "/version": ("GET", self.version),
            "/livez": ("GET", self.livez),
            "/readyz": ("GET", self.readyz),
            "/health": ("GET", self.readyz),
            "/ping": ("GET", self.readyz),
        }

    # Keeping up with the controller

    async def follow(self) -> None:
        """Applies each new route table, until cancelled. While the controller is down the last table stays in use."""
        known_version = 0
        while True:
            try:
                version, table = await self._controller.routes(known_version, CONTROLLER_SILENT_S / 3)
            except ControllerAway as error:
                log.warning("cannot get routes from the controller: %s", error)
                await asyncio.sleep(0.2)
                known_version = 0
                continue
            self._routes_at = time.monotonic()
            self._routes_known.set()
            if version != known_version:
                known_version = version
                self._update(table)

    async def report(self) -> None:
        """Reports the demand to the controller once a second, until cancelled. Reports are lost while it is down; each
        report states how long it covers."""
        reported_at, quiet = time.monotonic(), 0
        for number in itertools.count(1):
            await asyncio.sleep(REPORT_S)
            demands = [queue.report() for queue in self.queues.values()]
            now = time.monotonic()
            unreachable = [route.id for queue in self.queues.values() for route in queue.links.unreachable(now)]
            busy = bool(unreachable)
            busy |= any(demand.arrived or demand.ended or demand.waiting or demand.live for demand, _ in demands)
            quiet = 0 if busy else quiet + 1
            if quiet > 1 and quiet % QUIET_REPORTS:  # the first quiet one resets the last busy one
                continue
            report = DemandReport(
                gateway=self._id,
                number=number,
                seconds=round(now - reported_at, 3),
                models=[demand for demand, _ in demands],
                decisions=[decision for _, decision in demands if decision is not None],
                unreachable=unreachable,
            )
            reported_at = now
            try:
                await asyncio.wait_for(self._controller.demand(report), CONTROLLER_SILENT_S)
            except (ControllerAway, asyncio.TimeoutError) as error:
                log.warning("cannot report the demand to the controller: %s", error)
            self._recorder.write_soon()
            self._log_unauthenticated(now)
            self._epoch = time.time() - time.monotonic()  # the machine's clock may have been set

    async def wait_for_routes(self, within_s: float) -> None:
        """Returns when the first routes have arrived, or after ``within_s``."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._routes_known.wait(), within_s)

    def _update(self, table: RouteTable) -> None:
        if self._table is not None and self._table.ready and not table.ready:
            table = msgspec.structs.replace(table, ready=True)  # a restarted controller has forgotten it
        self._table = table
        for routes in table.models:
            queue = self.queues.get(routes.name)
            if queue is None:
                queue = ModelQueue(
                    routes,
                    gateway=self._id,
                    token=table.token,
                    credentials=table.credentials,
                    wake=self._wake,
                    retried=self.metrics.retried,
                    read_again=self._read_again,
                )
                self.queues[routes.name] = queue
            if queue.routes is routes or queue.routes.tokenizer != routes.tokenizer:
                self._tokenizers.fetch(routes.engine, routes.source, routes.tokenizer)
            queue.update(routes)
            if table.stopping:
                queue.close()
        for name in self.queues.keys() - {routes.name for routes in table.models}:
            self.queues.pop(name).close()
        self._names = {name: queue for queue in self.queues.values() for name in queue.names}
        self._tokenizers.retain({(routes.engine == "echo", routes.source, routes.tokenizer) for routes in table.models})

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

    async def keep(self) -> None:
        """Writes the heartbeat and checks the other gateways. To be called several times a second."""
        try:
            await self._peers.keep()
        except OSError as error:  # a full disk, or too many open files: it can serve without
            log.debug("cannot write the heartbeat: %s", error)

    async def stop(self) -> None:
        """Stops the gateway; to be called when every exchange is over."""
        await self._peers.leave()
        await asyncio.to_thread(self._recorder.close)
        self._tokenizing.close()
        self._limits.close()
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close)
        await asyncio.gather(*[queue.stop() for queue in self.queues.values()])

    def _read_again(self, queue: ModelQueue) -> None:
        task = asyncio.get_running_loop().create_task(self._renew_all(queue))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _renew_all(self, queue: ModelQueue) -> None:
        """Renders and tokenizes again the waiting requests that were read for earlier routes."""
        while replies := dict.fromkeys(cast(Reply, ticket.sink) for ticket in queue.outdated()):
            for reply in replies:
                try:
                    await self._renew(queue, reply)
                except ApiError as error:
                    reply.fail(error)
                except Exception:
                    log.exception("cannot tokenize again for %s, request %s", queue.name, reply.exchange.id)
                    reply.fail(errors.internal_error())
        queue.pump()

    async def _renew(self, queue: ModelQueue, reply: Reply) -> None:
        """Renews the requests of one reply. Raises ApiError."""
        request = reply.exchange.request
        read = body_reader.read_chat if request.path == CHAT else body_reader.read_completion
        body: GenerationBody = await asyncio.to_thread(read, request.body)
        prompts = await self._prompts(reply.exchange, queue, body)
        if not reply.exchange.ended:
            ids = (ticket.id for ticket in reply.tickets)
            reply.renew(prompts, self._requests(queue, body, prompts[0], ids))

    def _wake(self, model: str) -> None:
        task = asyncio.get_running_loop().create_task(self._controller.wake(model))
        self._tasks.add(task)
        task.add_done_callback(self._woken)

    def _woken(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:  # the next routes retry it
            log.warning("cannot request a first replica from the controller: %s", error)

    # Every request

    def handle(self, exchange: Exchange) -> Awaitable[None] | None:
        """Answers a request, at once or by the awaitable that it returns. Raises ApiError."""
        request = exchange.request
        if b"origin" in request.headers:
            self.gate.admit_origin(exchange)
        path = request.path
        if path in OPEN:
            pass
        elif request.method == "OPTIONS" and b"access-control-request-method" in request.headers:
            exchange.respond(204, b"", headers=PREFLIGHT)  # browsers send it without the key
            return None
        else:
            self.gate.admit(exchange)
        method, handler = self._route(path)
        if request.method == method or (request.method == "HEAD" and method == "GET"):
            return handler(exchange)
        raise errors.method_not_allowed(request.method, path, method)

    def _route(self, path: str) -> tuple[str, Handler]:
        route = self._routes.get(path)
        if route is not None:
            return route
        if path.startswith(MODELS):
            return "GET", self.model
        raise errors.route_not_found(path)

    def ended(self, exchange: Exchange) -> None:
        """Counts and logs an exchange that is over."""
        note: Note | None = exchange.note
        self._log(exchange, note)
        if exchange.grant is not None:
            used = 0 if note is None else note.completion_tokens + (note.prompt_tokens if note.replica else 0)
            exchange.grant.settle(used, time.monotonic())
        if note is not None and note.replica is not None:
            self._record(exchange, note)
        if exchange.trace is not None and note is not None:
            usage = note.prompt_tokens, note.completion_tokens
            exchange.trace.end(exchange.code or note.reason or "cancelled", usage, exchange.status or CLIENT_GONE)
        if exchange.code is not None:
            self.metrics.refused(None if note is None else note.model, exchange.status, exchange.code)
        if note is not None and note.overhead_s is not None:
            self.metrics.overhead(note.overhead_s)

    def _log_unauthenticated(self, now: float) -> None:
        """Logs one line about requests without a valid key, at most every ``UNAUTHENTICATED_LOG_S``."""
        if not self._unauthenticated or now - self._unauthenticated_at < UNAUTHENTICATED_LOG_S:
            return
        counts = ", ".join(f"{count} with status {status}" for status, count in sorted(self._unauthenticated.items()))
        log.warning("requests without a valid key since the last such line, or the start: %s", counts)
        self._unauthenticated.clear()
        self._unauthenticated_at = now

    def _record(self, exchange: Exchange, note: Note) -> None:
        """Records a request for `trace export`: lengths only."""
        key = "" if exchange.key is None else exchange.key.id
        arrived_at = exchange.request.received_at + self._epoch
        self._recorder.note(
            arrived_at, note.model, note.prompt_tokens, note.completion_tokens, key, note.prefill_s, note.decode_s
        )

    def _log(self, exchange: Exchange, note: Note | None) -> None:
        request, key = exchange.request, exchange.key
        if request.path in OPEN and exchange.status == 200:
            return  # a probe, every second or so
        if key is None and self.gate.demands_keys:
            self._unauthenticated[exchange.status or CLIENT_GONE] += 1  # a line for each could fill the disk
            return
        prompts = self._settings.log_prompts and note is not None
        access_log(
            Access(
                method=request.method,
                path=request.path,
                status=exchange.status or CLIENT_GONE,
                request_id=exchange.id,
                ms=(time.monotonic() - request.received_at) * 1000,
                model=None if note is None else note.model,
                replica=None if note is None else note.replica,
                key=None if key is None else key.id,
                prompt_tokens=None if note is None else note.prompt_tokens,
                completion_tokens=None if note is None else note.completion_tokens,
                reason=exchange.code or (None if note is None else note.reason),
                prompt=request.body.decode(errors="replace") if prompts else None,
                answer=note.answer if prompts and note is not None else None,
            )
        )

    # Routes

    def openapi(self, exchange: Exchange) -> None:
        exchange.respond(200, _document(self.gate.demands_keys))

    def tokenize(self, exchange: Exchange) -> Awaitable[None]:
        body = body_reader.read_tokenize(_json_of(exchange))
        if isinstance(body, protocol.TokenizeChatRequest):
            self._check_messages(body)
        queue = self._queue(exchange, body.model)

        def work(tokenizer: PromptTokenizer) -> tuple[bytes, int]:
            answer = tokenized(body, tokenizer, queue.routes.max_len)
            return _encode(answer), answer.count

        return self._by_tokenizer(exchange, queue, work)

    def detokenize(self, exchange: Exchange) -> Awaitable[None]:
        body = body_reader.read_detokenize(_json_of(exchange))
        queue = self._queue(exchange, body.model)

        def work(tokenizer: PromptTokenizer) -> tuple[bytes, int]:
            return _encode(detokenized(body, tokenizer, queue.routes.max_len)), len(body.tokens)

        return self._by_tokenizer(exchange, queue, work)

    async def _by_tokenizer(
        self, exchange: Exchange, queue: ModelQueue, work: Callable[[PromptTokenizer], tuple[bytes, int]]
    ) -> None:
        """Answers with the JSON that ``work`` returns, and charges its tokens to the key."""
        routes = queue.routes
        tokenizer = await self._tokenizers.get(routes.engine, routes.source, routes.tokenizer)
        body, tokens = await self._on_thread(exchange, queue, lambda: work(tokenizer))
        if exchange.grant is not None:
            exchange.grant.least = tokens
            exchange.add_headers(self._limits.headers(exchange.key, time.monotonic()))
        exchange.respond(200, body)

    async def _on_thread(self, exchange: Exchange, queue: ModelQueue, work: Callable[[], T]) -> T:
        """Returns what ``work`` does, which tokenizes the exchange's body. A key with limits is charged beforehand by
        the length of the body, and the charge stays if ``work`` rejects the body. Raises ApiError."""
        key, size = exchange.key, len(exchange.request.body)
        charges = key is not None and key.limited and exchange.grant is None
        try:
            if charges:
                exchange.grant = self._limits.take(key, size // BYTES_OF_TOKEN, time.monotonic(), least=0)
                exchange.grant.least = exchange.grant.reserved
            return await self._tokenizing.run("" if key is None else key.id, size, work, queue.name)
        except TokenizerFault as fault:
            log.warning("the tokenizer of %s failed, request %s: %s", queue.name, exchange.id, fault)
            raise errors.tokenizer_failed(queue.name, fault) from None
        except ApiError:
            if charges:
                exchange.add_headers(self._limits.headers(key, time.monotonic()))
            raise

    def livez(self, exchange: Exchange) -> None:
        exchange.respond(200, b"ok\n", content_type=TEXT)

    def readyz(self, exchange: Exchange) -> None:
        cause = self._not_ready()
        exchange.respond(503 if cause else 200, f"{cause or 'ok'}\n".encode(), content_type=TEXT)

    def _not_ready(self) -> str | None:
        if self._table is None or time.monotonic() - self._routes_at > CONTROLLER_SILENT_S:
            return "the controller does not answer"
        if self._table.stopping:
            return "the fleet is stopping"
        if not self._table.ready:
            late = [f"{model.name}: {model.state.value}" for model in self._table.models if not model.replicas]
            return "\n".join(["not ready", *late])
        now = time.monotonic()
        cut_off = [f"{name}: unreachable" for name, queue in self.queues.items() if queue.links.cut_off(now)]
        return "\n".join(["not ready", *cut_off]) if cut_off else None

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
        snapshot = [
            ModelSnapshot(
                queue.name,
                queue.waiting,
                [
                    ReplicaSnapshot(link.replica, link.live, slots, link.kv_tokens, slots * queue.routes.max_len)
                    for link in queue.links
                    if link.welcome is not None and (slots := link.welcome.slots)
                ],
            )
            for queue in self.queues.values()
        ]
        families_at = self._controller_families_at
        vitals = Vitals(
            connections=len(self.server.connections),
            keys=sum(not key.expired(time.time()) for key in self.gate.keys.keys),
            keys_in_use=self.gate.in_use(KEY_IN_USE_S),
            certificate_expires=self.certificate_expires,
            controller_age_s=None if families_at is None else time.monotonic() - families_at,
        )
        return self.metrics.families(snapshot, vitals)

    def version(self, exchange: Exchange) -> None:
        exchange.respond(200, _encode({"version": corewright_version()}))

    def models(self, exchange: Exchange) -> None:
        allow_scope(exchange.key, "inference")
        shown = [self._card(name, self._names[name]) for name in self._names_for(exchange.key)]
        exchange.respond(200, _encode({"object": "list", "data": shown}))

    def _names_for(self, key: ApiKey | None) -> list[str]:
        """Returns the names and aliases of the models that the key allows."""
        if key is None or not key.models:
            return list(self._names)
        return [name for name, queue in self._names.items() if set(key.models) & set(queue.names)]

    def model(self, exchange: Exchange) -> None:
        name = unquote(exchange.request.path[len(MODELS) :])
        exchange.respond(200, _encode(self._card(name, self._queue(exchange, name))))

    def _card(self, name: str, queue: ModelQueue) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "corewright",
            "root": queue.name,
            "parent": None if name == queue.name else queue.name,
            "max_model_len": queue.routes.max_len,
        }

    def chat(self, exchange: Exchange) -> Awaitable[None] | None:
        body = body_reader.read_chat(_json_of(exchange))
        self._check_messages(body)
        return self._with_tokenizer(exchange, body, self._queue(exchange, body.model), 1)

    def _check_messages(self, body: protocol.Chat) -> None:
        if len(body.messages) > self._settings.max_messages:
            raise errors.too_many_messages(len(body.messages), self._settings.max_messages)

    def complete(self, exchange: Exchange) -> Awaitable[None] | None:
        body = body_reader.read_completion(_json_of(exchange))
        several = isinstance(body.prompt, list) and not isinstance(body.prompt[0], int)
        count = len(body.prompt) if several else 1
        return self._with_tokenizer(exchange, body, self._queue(exchange, body.model), count)

    def _queue(self, exchange: Exchange, model: str) -> ModelQueue:
        """Returns the queue of the model with that name or alias, if the key allows it. Raises ApiError."""
        allow_scope(exchange.key, "inference")
        if self._table is None:
            raise errors.model_unavailable(model, "loading", "the gateway has just started")
        queue = self._names.get(model)
        if exchange.key is not None and exchange.key.models:
            allow_model(exchange.key, (model,) if queue is None else queue.names, model)
        if queue is None:
            raise errors.model_not_found(model, self._names_for(exchange.key))
        if self._table.stopping:
            raise errors.model_unavailable(model, "stopping", None)
        return queue

    def _with_tokenizer(
        self, exchange: Exchange, body: GenerationBody, queue: ModelQueue, prompts: int
    ) -> Awaitable[None] | None:
        routes = queue.routes
        count = prompts * (body.n or 1)
        if count > 1 and count > (room := routes.max_queue + queue.slots):  # before that many requests are made
            raise errors.too_many_choices(count, room)
        tokenizer = self._tokenizers.loaded(routes.engine, routes.source, routes.tokenizer)
        if not isinstance(tokenizer, ByteTokenizer) or len(exchange.request.body) > INLINE_BYTES:
            return self._start_later(exchange, body, queue)
        self._start(exchange, body, queue, prompts_of(body, tokenizer, routes.tool_parser))
        return None

    async def _start_later(self, exchange: Exchange, body: GenerationBody, queue: ModelQueue) -> None:
        self._start(exchange, body, queue, await self._prompts(exchange, queue, body))

    async def _prompts(self, exchange: Exchange, queue: ModelQueue, body: GenerationBody) -> Prompts:
        """Tokenizes on a thread, once the tokenizer is loaded. While an update holds requests, a failed load is retried
        at each change of the routes: a rollback changes the tokenizer. Raises ApiError."""
        until = time.monotonic() + queue.routes.hold_s
        while True:
            routes = queue.routes
            try:
                tokenizer = await self._tokenizers.get(routes.engine, routes.source, routes.tokenizer)
            except ApiError:
                if not await queue.other_routes(routes, until - time.monotonic()):
                    raise
                continue
            limits = queue.limits.within(self._settings.max_prompt_tokens)
            work = functools.partial(prompts_of, body, tokenizer, routes.tool_parser, limits)
            prompts = await self._on_thread(exchange, queue, work)
            if queue.routes.tokenizer == routes.tokenizer:
                return prompts

    def _requests(
        self, queue: ModelQueue, body: GenerationBody, prompts: list[list[int]], ids: Iterator[str]
    ) -> list[GenerateRequest]:
        """Returns the requests for the replicas. Raises ApiError 400."""
        default = None if isinstance(body, protocol.ChatRequest) else protocol.DEFAULT_COMPLETION_TOKENS
        limits = queue.limits.within(self._settings.max_prompt_tokens)
        return requests_for(body, prompts, limits, default, ids)

    def _start(self, exchange: Exchange, body: GenerationBody, queue: ModelQueue, tokenized_prompts: Prompts) -> None:
        """Puts the request's choices into the queue; its Reply does the rest. Raises ApiError."""
        if exchange.ended:
            return  # the client disconnected
        prompts, echoes, parser = tokenized_prompts
        chat = isinstance(body, protocol.ChatRequest)
        copies = body.n or 1
        requests = self._requests(queue, body, prompts, self._request_ids)
        terms = read_scheduling_parameters(exchange.request.headers, exchange.key, body.priority, time.monotonic())
        self._charge(exchange, body, requests, queue)
        choices = [Choice(i, prompts[i // copies], echoes[i // copies]) for i in range(len(requests))]
        id = ("chatcmpl" if chat else "cmpl") + next(self._answer_ids)
        answer = Answer(id, body.model, int(time.time()), chat, choices, bool(body.return_token_ids))
        usage = body.stream_options is not None and body.stream_options.include_usage
        note = Note(queue.name, bool(body.stream), prompt_tokens=answer.prompt_tokens)
        settings = self._settings
        reply = Reply(exchange, answer, note, self.metrics, usage, settings.keep_alive_s, settings.log_prompts)
        trace = None if self._tracing is None else self._trace(self._tracing, exchange, queue.name, chat)
        try:
            for request, choice in zip(requests, choices, strict=True):
                if parser is not None:
                    choice.parser = parser()
                reply.add(queue.submit(request, reply, trace, terms, exchange.id), choice)
                trace = None  # only the first of several choices is traced
        except BaseException:
            reply.leave()
            raise

    def _charge(
        self, exchange: Exchange, body: GenerationBody, requests: Sequence[GenerateRequest], queue: ModelQueue
    ) -> None:
        """Reserves what the request may use from the limits of its key. Raises ApiError 429."""
        key = exchange.key
        if key is None or not key.limited:
            return
        expected = queue.mean_answer if body.max_tokens is None else math.inf
        tokens = sum(len(request.prompt_ids) + int(min(request.max_tokens, expected)) for request in requests)
        least = sum(len(request.prompt_ids) for request in requests) if body.max_tokens is None else None
        now = time.monotonic()
        if exchange.grant is not None:  # the reservation for tokenizing
            exchange.grant.least = 0
            exchange.grant.settle(0, now)
        try:
            exchange.grant = self._limits.take(key, tokens, now, least=least)
        finally:
            exchange.add_headers(self._limits.headers(key, now))

    def _trace(self, tracing: RequestTracing, exchange: Exchange, model: str, chat: bool) -> TraceHandle | None:
        operation = "chat" if chat else "text_completion"
        exchange.trace = tracing.start(exchange.request.headers, model, operation, exchange.id)
        return exchange.trace


_encode = msgspec.json.encode


@functools.cache
def _document(needs_key: bool) -> bytes:
    return _encode(openapi(needs_key=needs_key))


def _json_of(exchange: Exchange) -> bytes:
    """Returns the body. Raises ApiError 415 for another content type, such as that of `curl -d` without a header."""
    kind = exchange.request.headers.get(b"content-type")
    if kind and kind != JSON and kind.partition(b";")[0].strip().lower() != b"application/json":
        raise errors.wrong_content_type(kind.decode("latin-1"))
    return exchange.request.body
