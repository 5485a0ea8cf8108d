"""The queue of one model in a gateway, with late binding: a request leaves it only for a free slot."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable
from operator import attrgetter

import msgspec
import msgspec.structs

from orchestrator.dispatch.dispatcher import Dispatcher, Expired, Full, QueueSettings, Refusal, Unreachable
from orchestrator.dispatch.wait_prediction import MEAN_SHARE, retry_after_s
from orchestrator.gateway.openai import errors
from orchestrator.gateway.openai.errors import ApiError
from orchestrator.gateway.serving.replica_link import ReplicaLink
from orchestrator.gateway.serving.replica_link_pool import ReplicaLinks
from orchestrator.gateway.serving.ticket import PLAIN, SchedulingParameters, Sink, Ticket, ticket_for
from orchestrator.gateway.telemetry.request_spans import TraceHandle
from orchestrator.messages.replica_states import ModelState
from orchestrator.messages.route_table import ModelRoutes, Route
from orchestrator.scaling.demand_report import DemandWindow, RoutingDecision, undecided
from orchestrator.scaling.forecast import Counts
from workers.messages.credentials import Credentials
from workers.messages.requests import GenerateRequest

MAX_BARE_S = 60.0  # without a replica of a model that should always have one, before `/readyz` reports it
EXPECTED_TOKENS = 256.0  # assumed length of an answer until one has ended


class ModelQueue:
    """The requests of one model and the links to its replicas. Owned by the gateway's event loop. What gets which slot
    is decided by its ``dispatcher``."""

    def __init__(
        self,
        routes: ModelRoutes,
        *,
        gateway: str,
        token: str,
        machine: str = "",
        credentials: Credentials | None,
        wake: Callable[[str], None],
        retried: Callable[[str, str], None] = lambda model, kind: None,
        read_again: Callable[[ModelQueue], None] = lambda queue: None,
    ) -> None:
        """``machine`` and ``credentials`` are those of ReplicaLinks. ``wake`` requests a first replica of the model
        from the controller. ``retried`` is called with the model and the cause when a request moves to another replica.
        ``read_again`` is called when ``outdated`` has tickets, and must end with a call of ``pump``."""
        self.name = routes.name
        self.routes = routes
        self._gateway = gateway
        self._token = token
        self._wake = wake
        self._retried = retried
        self._read_again = read_again
        self._news = asyncio.Event()  # set when the routes are replaced
        self._closed = False
        self._bare_since: float | None = None  # since then it has had no replica, although it should always have one
        self.watched = False  # an operator looks at the requests: each routing decision is recorded
        self._counts = Counts()
        self._sample: RoutingDecision | None = None  # the first since the last report
        self.links = ReplicaLinks(
            routes,
            self._link,
            machine=machine,
            credentials=credentials,
            on_open=self._changed,
            on_unreachable=self._hold,
            on_unusable=self._unusable,
        )
        self.dispatcher: Dispatcher[Ticket, ReplicaLink] = Dispatcher(
            _settings(routes), self.links, self, stepped_at=attrgetter("stepped_at")
        )
        self.mean_answer = EXPECTED_TOKENS  # tokens; an exponential average

    @property
    def names(self) -> tuple[str, ...]:
        """The model's name, then its aliases."""
        return (self.name, *self.routes.aliases)

    @property
    def kv_tokens_of_slot(self) -> int:
        """The tokens that the KV cache of a slot holds; 0 for a model that does not generate."""
        return self.routes.max_len if self.routes.kind == "generate" else 0

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names by which clients use the model with an adapter."""
        return tuple(f"{name}:{adapter}" for name in self.names for adapter in self.routes.adapters)

    def adapter(self, name: str) -> str:
        """Returns the adapter of a name of the model; empty for the model itself."""
        return "" if ":" not in name or name in self.names else name.rpartition(":")[2]

    def synonyms(self, name: str) -> tuple[str, ...]:
        """Returns all names of what clients use by this one."""
        adapter = self.adapter(name)
        return tuple(f"{other}:{adapter}" for other in self.names) if adapter else self.names

    def label(self, name: str) -> str:
        """Returns the first of the `synonyms`, by which metrics count."""
        adapter = self.adapter(name)
        return f"{self.name}:{adapter}" if adapter else self.name

    @property
    def waiting(self) -> int:
        return self.dispatcher.waiting

    @property
    def live(self) -> int:
        return self.links.live

    def submit(
        self,
        request: GenerateRequest,
        sink: Sink,
        trace: TraceHandle | None = None,
        terms: SchedulingParameters = PLAIN,
        x_request_id: str = "",
    ) -> Ticket:
        """Sends a request to a free slot, or queues it. Its prompt was read with the current routes' tokenizer.
        ``trace`` follows the request. ``x_request_id`` is that of its answer.

        Raises ApiError: 429 when the queue is full or its deadline cannot be met, 503 when no replica can serve it and
        none is expected.

        1. a replica is ready, being swapped, or expected back  -> queue, up to max_queue
        2. the model loads on request, and has not failed       -> wake it, and queue, up to max_queue
        3. else                                                 -> 503
        """
        routes, state = self.routes, self.routes.state
        self._counts.arrived += 1
        loads = routes.loads_on_request and state in (ModelState.UNLOADED, ModelState.LOADING)
        usable = self.links.usable
        if self._closed or not (usable or loads or routes.holds):  # 3
            ready_in_s = None if self._closed else self._ready_in_s()
            error = errors.model_unavailable(self.name, state.value, routes.reason, ready_in_s)
            raise self._explained(error, terms, cold=True)
        ticket = ticket_for(request, sink, self, terms)
        ticket.reading = routes.reading
        ticket.x_request_id = x_request_id or request.id
        if not usable:
            ticket.cold, ticket.expected_s = True, self._ready_in_s()
            ticket.held_since = ticket.arrived_at
        if trace is not None:
            ticket.trace = trace
            trace.queued()
        refusal = self.dispatcher.submit(ticket, terms.weight, ticket.arrived_at)  # 1, 2
        if refusal is not None:
            raise self._explained(self._error(refusal), terms, cold=ticket.cold)
        if loads and state is ModelState.UNLOADED:  # 2
            self._wake(self.name)
        return ticket

    def update(self, routes: ModelRoutes) -> None:
        """Applies the controller's routes: opens links to new replicas, and retires those of removed ones."""
        self.routes = routes
        if routes.replicas or not routes.required:
            self._bare_since = None
        elif self._bare_since is None:
            self._bare_since = time.monotonic()
        self._news.set()
        self._news = asyncio.Event()
        self.dispatcher.update(_settings(routes))
        self.links.update(routes)
        self._look_for_outdated(self.dispatcher.entries)
        self.dispatcher.pump(time.monotonic())
        if not routes.replicas:
            self._hold()
        unloaded = routes.state is ModelState.UNLOADED
        if routes.loads_on_request and unloaded and self.waiting:
            self._wake(self.name)  # the controller may have been restarted since the last call
        ends = routes.state is ModelState.FAILED or (unloaded and not routes.loads_on_request)
        if ends and not routes.holds:  # nothing will start it
            self._fail_waiting(errors.model_unavailable(self.name, routes.state.value, routes.reason))

    def lacking_s(self, now: float) -> float:
        """Returns for how long the model has had no replica beyond `MAX_BARE_S`, or twice an expected start if that is
        longer; 0.0 while it has not."""
        bare_s = 0.0 if self._bare_since is None else now - self._bare_since
        return bare_s if bare_s > max(MAX_BARE_S, 2 * (self.routes.start_s or 0.0)) else 0.0

    def close(self) -> None:
        """Stops accepting and sending requests: the model left the routes, or the fleet stops."""
        self._closed = True
        self.routes = msgspec.structs.replace(self.routes, replicas=[])
        self._fail_waiting(errors.model_unavailable(self.name, "stopping", None))
        self.links.update(self.routes)

    def report(self) -> tuple[DemandWindow, RoutingDecision | None]:
        """Returns the demand since the last call, and the routing decision of one request."""
        now = time.monotonic()
        longest_wait_s = round(self.dispatcher.longest_wait_s(now), 3)
        demand = DemandWindow(
            model=self.name,
            waiting=self.waiting,
            live=self.live,
            longest_wait_s=longest_wait_s,
            **msgspec.structs.asdict(self._counts),
        )
        decision, self._sample = self._sample, None
        self._counts = Counts()
        return demand, decision

    # Tickets that were read for earlier routes

    def outdated(self) -> list[Ticket]:
        """Returns the waiting tickets that must be tokenized again, earliest first: the routes have changed tokenizer
        or template, or have shorter slots. They stay in their lines, and get no slot before `Ticket.renew`."""
        return sorted(filter(self._is_outdated, self.dispatcher.entries), key=lambda ticket: ticket.arrived_at)

    def pump(self) -> None:
        """Sends requests to free slots, after the outdated ones were tokenized again."""
        self.dispatcher.blocked = None
        self._look_for_outdated(self.dispatcher.entries)
        self.dispatcher.pump(time.monotonic())

    async def other_routes(self, than: ModelRoutes, within_s: float) -> bool:
        """Waits for other routes than those that the caller used, while an update holds requests. Returns False if none
        does, or after ``within_s``."""
        if self._closed:
            return False
        if self.routes is not than:
            return True
        if not self.routes.holds:
            return False
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._news.wait(), within_s)
            return True
        return False

    def _is_outdated(self, ticket: Ticket) -> bool:
        routes = self.routes
        if ticket.request.forwarded is not None:
            return not (routes.forwards or routes.reads_parts)
        return ticket.reading != routes.reading or ticket.slot_tokens > routes.max_len

    def _look_for_outdated(self, tickets: Iterable[Ticket]) -> None:
        if self.dispatcher.blocked is None and any(map(self._is_outdated, tickets)):
            self.dispatcher.blocked = self._is_outdated
            self._read_again(self)

    # TicketOwner

    def on_left(self, ticket: Ticket) -> None:
        if (link := ticket.stream.link) is not None:
            link.cancel(ticket)
        else:
            ticket.stop_timer()
            self.dispatcher.withdraw(ticket, time.monotonic())

    def on_renewed(self, ticket: Ticket, growth: int) -> None:
        ticket.reading = self.routes.reading
        self.dispatcher.resized(ticket, growth)

    def on_began(self, ticket: Ticket, now: float) -> None:
        counts, stream = self._counts, ticket.stream
        counts.first_tokens += 1
        counts.prefill_s += stream.batches_s or now - stream.sent_at
        if stream.work_s:
            counts.encoded += 1
            counts.inputs += len(ticket.request.inputs)
            counts.work_s += stream.work_s

    # Effects of the dispatcher

    def send(self, ticket: Ticket, link: ReplicaLink) -> bool:
        if ticket.timer is not None:
            ticket.stop_timer()
        if ticket.terms.explains or self.watched or self._sample is None:
            self._explain(ticket, link)
        link.send(ticket)
        return True

    def wait(self, ticket: Ticket, delay_s: float | None) -> None:
        ticket.stop_timer()
        if delay_s is not None:
            ticket.timer = asyncio.get_running_loop().call_later(delay_s, self._waited, ticket)
        ticket.sink.on_wait()

    def refuse(self, ticket: Ticket, refusal: Refusal) -> None:
        ticket.stop_timer()
        self._fail(ticket, self._error(refusal))

    def _waited(self, ticket: Ticket) -> None:
        ticket.timer = None
        self.dispatcher.waited(ticket, time.monotonic())

    def _error(self, refusal: Refusal) -> ApiError:
        if isinstance(refusal, Full):
            next_place_s = self.dispatcher.next_place_s(refusal.waiting)
            if not self.links.slots and (ready_in_s := self._ready_in_s()) is not None:
                next_place_s = ready_in_s
            return errors.queue_full(self.name, str(refusal.cause), retry_after_s(next_place_s))
        if isinstance(refusal, Unreachable):
            return errors.deadline_unreachable(self.name, *refusal, retry_after_s(*refusal))
        if isinstance(refusal, Expired):
            return errors.deadline_exceeded(self.name, refusal.waited_s)
        return self._not_started(refusal.waited_s)

    def _not_started(self, waited_s: float) -> ApiError:
        """Returns the error of a request that was held for ``hold_s``."""
        routes = self.routes
        if routes.replicas:  # the controller has not noticed yet, or is away
            cause = f"none of its replicas can be reached after {waited_s:.0f} s"
            return errors.model_unavailable(self.name, "unreachable", cause)
        if routes.state is not ModelState.UNLOADED:
            failed = routes.state is ModelState.FAILED and routes.reason
            cause = f"it is not ready after {waited_s:.0f} s" + (f", {routes.reason}" if failed else "")
            state = "failed" if failed else "loading"
            return errors.model_unavailable(self.name, state, cause, self._ready_in_s())
        cause = f"no replica was started in {waited_s:.0f} s" + (f", {routes.reason}" if routes.reason else "")
        return errors.model_unavailable(self.name, routes.state.value, cause, self._ready_in_s())

    def _ready_in_s(self) -> float | None:
        """Returns the expected seconds until the model has a replica; None: unknown, or it has one."""
        return self.routes.ready_in_s(time.time())

    def _explained(
        self, error: ApiError, terms: SchedulingParameters, *, cold: bool, waited_s: float = 0.0
    ) -> ApiError:
        """Returns the error, with the expected wait for a client that requests explanations."""
        return error.explained(undecided(waited_s, cold, self._ready_in_s())) if terms.explains else error

    def _fail(self, ticket: Ticket, error: ApiError) -> None:
        """Fails a ticket that got no slot."""
        waited_s = time.monotonic() - ticket.arrived_at
        ticket.fail(self._explained(error, ticket.terms, cold=ticket.cold, waited_s=waited_s))

    # Callbacks of links

    def _link(self, route: Route) -> ReplicaLink:
        """Returns a new link that is not connected yet."""
        return ReplicaLink(
            route,
            gateway=self._gateway,
            token=self._token,
            on_change=self._changed,
            on_ended=self._ended,
            on_lost=self._lost,
            on_busy=self._requeue,
            later=asyncio.get_running_loop().call_soon,
        )

    def _hold(self) -> None:
        self.dispatcher.hold(time.monotonic())

    def _unusable(self) -> None:
        self._fail_waiting(errors.model_unavailable(self.name, "unusable", "see the gateway's log"))

    def _changed(self) -> None:
        """Handles a link that has opened, or whose replica has a free slot again."""
        self.links.recount()
        self.dispatcher.pump(time.monotonic())

    def _time(self, ticket: Ticket, now: float) -> None:
        """Counts the times of a request that has ended in this step, unless that is also its first one."""
        stream = ticket.stream
        if stream.link is not None and 0.0 < stream.first_at < now:
            prompt, first_s = len(ticket.request.prompt_ids), stream.first_at - stream.sent_at
            version, decode_s = stream.link.route.version, now - stream.first_at
            self._counts.time(version, prompt, first_s, stream.produced, decode_s)

    def _ended(self, tickets: list[Ticket], now: float) -> None:
        """Handles the requests that ended in one step."""
        for ticket in tickets:
            held_s, produced = now - ticket.stream.sent_at, ticket.stream.produced
            answered = (produced > 0 or ticket.encoded) and not ticket.left
            if answered and produced:
                self.mean_answer += MEAN_SHARE * (produced - self.mean_answer)
                self._time(ticket, now)
            self._counts.ended += 1
            self._counts.slot_s += held_s
            self.dispatcher.ended(ticket, held_s, produced, now, answered)
        self.dispatcher.pump(now)

    def _lost(self, link: ReplicaLink, tickets: list[Ticket]) -> None:
        if link.closed.is_set():
            self.links.lost(link)
        now = time.monotonic()
        for ticket in reversed(tickets):
            # The request that broke the link would break the next one too, and which one it was is unknown.
            if ticket.can_retry and not link.broken and not self._closed:
                ticket.restart()
                cause = "lost" if link.closed.is_set() else "draining" if link.drains else "unserved"
                self._retried(self.name, cause)
                self.dispatcher.put_back(ticket, lost=True)
            else:
                self.dispatcher.over(ticket, now)
                ticket.fail(errors.replica_lost(self.name))
        self._look_for_outdated(tickets)
        self.dispatcher.resume(tickets, now)

    def _requeue(self, ticket: Ticket) -> None:
        """Returns a ticket to the head of its line: another gateway has taken the slot."""
        now = time.monotonic()
        if self._closed or ticket.left:
            self.dispatcher.over(ticket, now)
            ticket.fail(errors.replica_lost(self.name))
        else:
            ticket.requeue()
            self.dispatcher.put_back(ticket, lost=False)
            self._look_for_outdated((ticket,))
            self.dispatcher.resume((ticket,), now)

    def _explain(self, ticket: Ticket, link: ReplicaLink) -> None:
        """Records the routing decision."""
        ticket.decision = RoutingDecision(
            request=ticket.x_request_id,
            model=self.name,
            queue_ms=round((time.monotonic() - ticket.arrived_at) * 1000, 3),
            candidates=sum(candidate.free_slots > 0 for candidate in self.links),
            replica=link.route.id,
            slot=link.live + 1,
            slots=0 if link.welcome is None else link.welcome.slots,
            cold=ticket.cold,
            retries=ticket.retries,
            affinity=ticket.affinity,
            expected_ms=None if ticket.expected_s is None else round(ticket.expected_s * 1000),
        )
        if self._sample is None:
            self._sample = ticket.decision

    def _fail_waiting(self, error: ApiError) -> None:
        for ticket in self.dispatcher.clear(time.monotonic()):
            ticket.stop_timer()
            self._fail(ticket, error)


def _settings(routes: ModelRoutes) -> QueueSettings:
    return msgspec.convert(routes, QueueSettings, from_attributes=True)
