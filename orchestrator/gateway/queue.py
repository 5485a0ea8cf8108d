"""One queue for each model, with late binding: a request leaves it only for a free slot."""

from __future__ import annotations

import asyncio
import functools
import logging
import random
from collections import deque
from collections.abc import Callable, Iterable

import msgspec.structs

from orchestrator.gateway import errors
from orchestrator.gateway.dial import open_link
from orchestrator.gateway.errors import ApiError
from orchestrator.gateway.generation import Limits
from orchestrator.gateway.link import ReplicaLink
from orchestrator.gateway.ticket import Sink, Ticket
from orchestrator.gateway.tracing import TraceHandle
from orchestrator.lifecycle import ModelState
from orchestrator.routes import ModelRoutes, Route
from orchestrator.routing import choose
from workers.credentials import Credentials
from workers.requests import GenerateRequest

log = logging.getLogger(__name__)

CONNECT_DEADLINE_S = 5.0
RECONNECT_S = 0.1
NEW_TOKENIZER = "its tokenizer is another one now"
RETRY_AFTER_S = (1, 60)  # the bounds of what a refused client is told


class ModelQueue:
    """The requests of one model and the links to its replicas. Owned by the gateway's event loop."""

    def __init__(
        self,
        routes: ModelRoutes,
        *,
        gateway: str,
        token: str,
        credentials: Credentials | None,
        wake: Callable[[str], None],
        retried: Callable[[str, str], None] = lambda model, kind: None,
    ) -> None:
        """``credentials`` are for replicas on other hosts; ``wake`` asks the controller for a first replica of a model
        that has none; ``retried`` is told of the model and why, when a request goes to another replica."""
        self.name = routes.name
        self.routes = routes
        self._gateway = gateway
        self._token = token
        self._credentials = credentials
        self._wake = wake
        self._retried = retried
        self._refused: set[Route] = set()  # replicas that would not serve us, or are of another version
        self._closed = False
        self._waiting: deque[Ticket] = deque()
        self._links: dict[Route, ReplicaLink] = {}
        self._keeping: dict[Route, asyncio.Task[None]] = {}
        self._random = random.Random()
        self._limits: Limits | None = None  # until something changes
        self._mean_service_s = 1.0  # of one request in a slot; an exponential average

    @property
    def names(self) -> tuple[str, ...]:
        """That requests may call the model by, its own first."""
        return (self.name, *self.routes.aliases)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def live(self) -> int:
        return sum(link.live for link in self._links.values())

    @property
    def links(self) -> Iterable[ReplicaLink]:
        """Those that are open."""
        return self._links.values()

    @property
    def slots(self) -> int:
        """Of all connected replicas."""
        return sum(link.welcome.slots for link in self._links.values() if link.welcome is not None)

    @property
    def longest_prompt(self) -> int | None:
        """Tokens of the largest prefill bucket, as a replica has said it; None before one has."""
        prompts = [link.welcome.max_prompt for link in self._links.values() if link.welcome is not None]
        return max(prompts, default=None)

    @property
    def vocab_size(self) -> int | None:
        """Token ids are below this; None before a replica has said it."""
        return next((link.welcome.vocab_size for link in self._links.values() if link.welcome is not None), None)

    @property
    def limits(self) -> Limits:
        """Of a request of this model, as far as a replica has told them."""
        if self._limits is None:
            longest = self.longest_prompt or self.routes.max_len
            self._limits = Limits(self.routes.max_len, longest, self.vocab_size)
        return self._limits

    def submit(
        self, request: GenerateRequest, sink: Sink, tokenizer: str | None = None, trace: TraceHandle | None = None
    ) -> Ticket:
        """Queue a request, whose prompt was read with the routes' ``tokenizer`` of that time (None: today's). ``trace``
        is told what becomes of it.

        Raises ApiError: 429 when the queue is full, 503 when no replica can serve and none comes, or when the tokenizer
        is another one by now.

        1. a replica is ready, or is being swapped         -> queue, up to max_queue
        2. the model loads on request, and has not failed  -> wake it, and queue, up to max_queue
        3. else                                            -> 503
        """
        routes, state = self.routes, self.routes.state
        comes = routes.loads_on_request and state in (ModelState.UNLOADED, ModelState.LOADING)
        usable = len(routes.replicas) > len(self._refused)
        if self._closed or not (usable or comes or routes.holds):  # 3
            raise errors.model_unavailable(self.name, state.value, routes.reason)
        ticket = Ticket(request, sink, self._left)
        if tokenizer not in (None, routes.tokenizer):
            raise errors.model_unavailable(self.name, "updated", NEW_TOKENIZER)
        ticket.tokenizer = routes.tokenizer
        if trace is not None:
            ticket.trace = trace
            trace.queued()
        ticket.canary = routes.canary is not None and self._random.random() < routes.canary
        self._waiting.append(ticket)
        self._pump()
        if ticket.link is None and len(self._waiting) > self.routes.max_queue:
            self._waiting.pop()
            raise errors.queue_full(self.name, len(self._waiting), self._retry_after_s())
        if comes and state is ModelState.UNLOADED:
            self._wake(self.name)
        return ticket

    def update(self, routes: ModelRoutes) -> None:
        """Take over what the controller says: open links to new replicas, retire those that left."""
        if routes.tokenizer != self.routes.tokenizer:  # what waits was read with the old tokenizer
            self._fail_waiting(errors.model_unavailable(self.name, "updated", NEW_TOKENIZER))
        self.routes = routes
        self._limits = None
        self._refused &= set(routes.replicas)
        for route, link in list(self._links.items()):
            link.resume() if route in routes.replicas else link.retire()
        for route in routes.replicas:
            self._keep_link(route)
        self._pump()
        unloaded = routes.state is ModelState.UNLOADED
        if routes.loads_on_request and unloaded and self._waiting:
            self._wake(self.name)  # the controller may have been started again since we asked
        if routes.state is ModelState.FAILED or (unloaded and not routes.loads_on_request):  # nothing will start it
            self._fail_waiting(errors.model_unavailable(self.name, routes.state.value, routes.reason))

    def close(self) -> None:
        """The model is gone from the routes, or the fleet ends: nothing more is accepted or begun."""
        self._closed = True
        self.routes = msgspec.structs.replace(self.routes, replicas=[])
        self._fail_waiting(errors.model_unavailable(self.name, "stopping", None))
        for link in self._links.values():
            link.retire()

    async def stop(self) -> None:
        """Let go of the replicas: the gateway ends."""
        pending = set(self._keeping.values())
        while pending:  # more than once: up to Python 3.11 wait_for may swallow a cancellation
            for task in pending:
                task.cancel()
            _, pending = await asyncio.wait(pending, timeout=0.1)
        for link in list(self._links.values()):
            link.close()

    # Inside

    def _keep_link(self, route: Route) -> None:
        if route not in self._keeping and route not in self._refused:
            task = asyncio.get_running_loop().create_task(self._keep(route))
            self._keeping[route] = task
            task.add_done_callback(lambda _: self._keeping.pop(route))

    async def _keep(self, route: Route) -> None:
        """Hold a link to the replica for as long as it is in the routes: a lost link is not a lost replica."""
        loop = asyncio.get_running_loop()
        while route in self.routes.replicas:
            make = functools.partial(
                ReplicaLink,
                route,
                gateway=self._gateway,
                token=self._token,
                on_change=self._changed,
                on_lost=self._lost,
                on_busy=self._back,
                later=loop.call_soon,
            )
            try:
                connecting = open_link(loop, make, route.socket, self._credentials)
                _, link = await asyncio.wait_for(connecting, CONNECT_DEADLINE_S)
            except (OSError, asyncio.TimeoutError) as error:
                log.warning("%s cannot be reached on %s: %s", route.id, route.socket, error)
                await asyncio.sleep(RECONNECT_S)
                continue
            if not link.closed.is_set():
                self._links[route] = link
                self._limits = None
                self._pump()  # its Welcome may be here already
            await link.closed.wait()
            if link.refused:
                self._refused.add(route)
                if not self.slots:
                    self._fail_waiting(errors.model_unavailable(self.name, "unusable", "see the gateway's log"))
                return
            if link.welcome is None:
                await asyncio.sleep(RECONNECT_S)  # it hung up at once; do not spin

    def _lost(self, link: ReplicaLink, tickets: list[Ticket]) -> None:
        if link.closed.is_set():
            self._links.pop(link.route, None)
            self._limits = None
        for ticket in reversed(tickets):
            if ticket.can_retry and not self._closed and ticket.tokenizer == self.routes.tokenizer:
                ticket.restart()
                self._retried(self.name, "lost" if link.closed.is_set() else "draining")
                self._waiting.appendleft(ticket)
            else:
                ticket.fail(errors.replica_lost(self.name))
        self._pump()

    def _back(self, ticket: Ticket) -> None:
        """Another gateway was faster: it waits on, before all others, and nothing is lost."""
        if self._closed or ticket.tokenizer != self.routes.tokenizer:
            ticket.fail(errors.replica_lost(self.name))
        elif not ticket.left:
            ticket.back()
            self._waiting.appendleft(ticket)
            self._pump()

    def _left(self, ticket: Ticket) -> None:
        if ticket.link is None:
            self._waiting.remove(ticket)
        else:
            ticket.link.cancel(ticket)

    def _pump(self) -> None:
        if self.routes.canary is not None:
            self._pump_by_version()
        while self._waiting and self.routes.canary is None and (link := choose(self._links.values())) is not None:
            link.send(self._waiting.popleft())

    def _pump_by_version(self) -> None:
        """A request waits for a slot of the version that was drawn for it, unless nothing of that version is there."""
        links: dict[bool, list[ReplicaLink]] = {True: [], False: []}
        for link in self._links.values():
            links[link.route.id in self.routes.canaries].append(link)
        for ticket in list(self._waiting):
            chosen = choose(links[ticket.canary] or links[not ticket.canary])
            if chosen is not None:
                self._waiting.remove(ticket)
                chosen.send(ticket)

    def _fail_waiting(self, error: ApiError) -> None:
        while self._waiting:
            self._waiting.popleft().fail(error)

    def _changed(self, ended_after_s: float | None) -> None:
        """A link has opened, or a request has ended after so long in its slot."""
        if ended_after_s is None:
            self._limits = None
        else:
            self._mean_service_s += 0.1 * (ended_after_s - self._mean_service_s)
        self._pump()

    def _retry_after_s(self) -> int:
        """When a place in the queue should be free: one request ends every mean service time / slots."""
        lowest, highest = RETRY_AFTER_S
        return max(lowest, min(highest, round(self._mean_service_s / max(1, self.slots))))
