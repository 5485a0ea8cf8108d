"""The queue of one model in a gateway, with late binding: a request leaves it only for a free slot."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import msgspec
import msgspec.structs

from orchestrator.dispatch.dispatcher import Dispatcher, Expired, Full, QueueSettings, Refusal, Unreachable
from orchestrator.dispatch.wait_prediction import MEAN_SHARE, retry_after_s
from orchestrator.gateway.openai import errors
from orchestrator.gateway.openai.errors import ApiError
from orchestrator.gateway.serving.replica_link import Arrived, ReplicaLink
from orchestrator.gateway.serving.replica_link_pool import LinkSettings, ReplicaLinks
from orchestrator.gateway.serving.ticket import PLAIN, SchedulingParameters, Sink, Ticket, ticket_for
from orchestrator.gateway.telemetry.request_spans import TraceHandle
from orchestrator.messages.replica_states import ModelState
from orchestrator.messages.route_table import ModelRoutes
from orchestrator.scaling.demand_report import DemandWindow, RoutingDecision, undecided
from orchestrator.scaling.forecast import Counts
from workers.messages.requests import FinishReason, GenerateRequest

log = logging.getLogger(__name__)

MAX_BARE_S = 60.0  # without a replica of a model that should always have one, before `/readyz` reports it
EXPECTED_TOKENS = 256.0  # assumed length of an answer until one has ended


@dataclass(frozen=True)
class ModelNames:
    """The names by which clients use a model."""

    model: str
    aliases: Sequence[str]
    adapters: Sequence[str]

    def __iter__(self) -> Iterator[str]:
        """Yields the model's name and its aliases, then those of the model with each adapter."""
        models = (self.model, *self.aliases)
        yield from models
        yield from (f"{name}:{adapter}" for name in models for adapter in self.adapters)

    def adapter(self, name: str) -> str:
        """Returns the adapter of a name of the model; empty for the model itself."""
        return "" if ":" not in name or name == self.model or name in self.aliases else name.rpartition(":")[2]

    def label(self, name: str) -> str:
        """Returns the first of the `synonyms`, by which metrics count."""
        adapter = self.adapter(name)
        return f"{self.model}:{adapter}" if adapter else self.model

    def synonyms(self, name: str) -> tuple[str, ...]:
        """Returns all names of what clients use by this one."""
        models, adapter = (self.model, *self.aliases), self.adapter(name)
        return tuple(f"{other}:{adapter}" for other in models) if adapter else models


class QueueRecord:
    """What a queue has counted since its last report, and the first routing decision since then."""

    def __init__(self, model: str) -> None:
        self.counts = Counts()
        self.sample: RoutingDecision | None = None
        self.watched = False  # an operator looks at the requests: each routing decision is recorded
        self._model = model

    def began(self, ticket: Ticket, now: float) -> None:
        """Counts a request whose first token was taken."""
        counts, stream = self.counts, ticket.stream
        counts.first_tokens += 1
        counts.prefill_s += stream.batches_s or now - stream.sent_at
        if stream.work_s:
            counts.encoded += 1
            counts.inputs += len(ticket.request.inputs)
            counts.work_s += stream.work_s

    def ended(self, ticket: Ticket, now: float, *, timed: bool) -> None:
        """Counts a request that has left its slot; if ``timed``, also the times of its tokens, unless it has ended in
        the same step as it began."""
        counts, stream = self.counts, ticket.stream
        counts.ended += 1
        counts.slot_s += now - stream.sent_at
        if timed and stream.link is not None and 0.0 < stream.first_at < now:
            prompt, first_s = len(ticket.request.prompt_ids), stream.first_at - stream.sent_at
            counts.time(stream.link.route.version, prompt, first_s, stream.produced, now - stream.first_at)

    def decide(self, ticket: Ticket, link: ReplicaLink, candidates: int) -> None:
        """Records the routing decision: the link is one of so many ``candidates`` with a free slot."""
        ticket.decision = RoutingDecision(
            request=ticket.x_request_id,
            model=self._model,
            queue_ms=round((time.monotonic() - ticket.arrived_at) * 1000, 3),
            candidates=candidates,
            replica=link.id,
            slot=link.live + 1,
            slots=0 if link.welcome is None else link.welcome.slots,
            cold=ticket.cold,
            retries=ticket.retries,
            affinity=ticket.affinity,
            expected_ms=None if ticket.expected_s is None else round(ticket.expected_s * 1000),
        )
        if self.sample is None:
            self.sample = ticket.decision


class ModelQueue:
    """The requests of one model and the links to its replicas: the only one that sends, returns and ends tickets. Owned
    by the gateway's event loop. What gets which slot is decided by its ``dispatcher``."""

    def __init__(
        self,
        routes: ModelRoutes,
        settings: LinkSettings,
        *,
        wake: Callable[[str], None],
        retried: Callable[[str, str], None] = lambda model, kind: None,
        read_again: Callable[[ModelQueue], None] = lambda queue: None,
    ) -> None:
        """``wake`` requests a first replica of the model from the controller. ``retried`` is called with the model and
        the cause when a request moves to another replica. ``read_again`` is called when ``outdated`` has tickets, and
        must end with a call of ``pump``."""
        self.name = routes.name
        self.routes = routes
        self.names = _names(routes)
        self.record = QueueRecord(routes.name)
        self.mean_answer = EXPECTED_TOKENS  # tokens; an exponential average
        self._wake = wake
        self._retried = retried
        self._read_again = read_again
        self._news = asyncio.Event()  # set when the routes are replaced
        self._closed = False
        self._bare_since: float | None = None  # since then it has had no replica, although it should always have one
        self.links = ReplicaLinks(routes, settings, self)
        self.dispatcher: Dispatcher[Ticket, ReplicaLink] = Dispatcher(_settings(routes), self.links, self)

    @property
    def waiting(self) -> int:
        return self.dispatcher.waiting

    # For clients and the controller

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
        self.record.counts.arrived += 1
        loads = routes.loads_on_request and state in (ModelState.UNLOADED, ModelState.LOADING)
        usable = self.links.usable
        if self._closed or not (usable or loads or routes.holds):  # 3
            ready_in_s = None if self._closed else _ready_in_s(routes)
            error = errors.model_unavailable(self.name, state.value, routes.reason, ready_in_s)
            raise _explained(error, routes, terms, cold=True)
        ticket = ticket_for(request, sink, terms)
        ticket.reading = routes.reading
        ticket.x_request_id = x_request_id or request.id
        if not usable:
            ticket.cold, ticket.expected_s = True, _ready_in_s(routes)
            ticket.held_since = ticket.arrived_at
        if trace is not None:
            ticket.trace = trace
            trace.queued()
        refusal = self.dispatcher.submit(ticket, terms.weight, ticket.arrived_at)  # 1, 2
        if refusal is not None:
            raise _explained(self._error_of(refusal), routes, terms, cold=ticket.cold)
        if loads and state is ModelState.UNLOADED:  # 2
            self._wake(self.name)
        return ticket

    def leave(self, ticket: Ticket) -> None:
        """Ends a ticket whose client is gone, or has all it needs: removes it from its line or its slot."""
        if ticket.outcome is not None:
            return
        ticket.outcome = FinishReason.CANCELLED
        if (link := ticket.stream.link) is not None:
            link.cancel(ticket)
        else:
            ticket.stop_timer()
            self.dispatcher.withdraw(ticket, time.monotonic())

    def update(self, routes: ModelRoutes) -> None:
        """Applies the controller's routes: opens links to new replicas, and retires those of removed ones."""
        self.routes, self.names = routes, _names(routes)
        if routes.replicas or not routes.required:
            self._bare_since = None
        elif self._bare_since is None:
            self._bare_since = time.monotonic()
        self._news.set()
        self._news = asyncio.Event()
        self.dispatcher.update(_settings(routes))
        self.links.update(routes)
        self._hold_outdated()
        now = time.monotonic()
        self.dispatcher.pump(now)
        if not routes.replicas:
            self.dispatcher.hold(now)
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
        record, longest_wait_s = self.record, self.dispatcher.longest_wait_s(time.monotonic())
        demand = DemandWindow(
            model=self.name,
            waiting=self.waiting,
            live=self.links.live,
            longest_wait_s=round(longest_wait_s, 3),
            **msgspec.structs.asdict(record.counts),
        )
        decision, record.sample, record.counts = record.sample, None, Counts()
        return demand, decision

    # Tickets that were read for earlier routes

    def outdated(self) -> list[Ticket]:
        """Returns the waiting tickets that must be tokenized again, earliest first. They stay in their lines, and get
        no slot before ``renew``."""
        outdated = (ticket for ticket in self.dispatcher.entries if ticket.is_outdated(self.routes))
        return sorted(outdated, key=lambda ticket: ticket.arrived_at)

    def renew(self, ticket: Ticket, request: GenerateRequest) -> None:
        """Replaces the request of a waiting ticket, which was tokenized again. Raises ApiError for a request that no
        frame can hold."""
        self.dispatcher.resized(ticket, ticket.renew(request, self.routes.reading))

    def pump(self) -> None:
        """Sends requests to free slots, after the outdated ones were tokenized again."""
        self.dispatcher.blocked = None
        self._hold_outdated()
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

    def _hold_outdated(self, returning: Sequence[Ticket] = ()) -> None:
        """Has waiting or ``returning`` tickets tokenized again, if they are outdated."""
        blocked = self.dispatcher.blocked
        tickets = returning or self.dispatcher.entries
        if blocked is None and any(ticket.is_outdated(self.routes) for ticket in tickets):
            self.dispatcher.blocked = lambda ticket: ticket.is_outdated(self.routes)
            self._read_again(self)

    # Effects of the dispatcher

    def send(self, ticket: Ticket, link: ReplicaLink) -> bool:
        if ticket.timer is not None:
            ticket.stop_timer()
        record = self.record
        if ticket.terms.explains or record.watched or record.sample is None:
            record.decide(ticket, link, sum(candidate.free_slots > 0 for candidate in self.links))
        link.send(ticket)
        return True

    def wait(self, ticket: Ticket, delay_s: float | None) -> None:
        ticket.stop_timer()
        if delay_s is not None:
            ticket.timer = asyncio.get_running_loop().call_later(delay_s, self._waited, ticket)
        ticket.sink.on_wait()

    def refuse(self, ticket: Ticket, refusal: Refusal) -> None:
        self._fail(ticket, self._error_of(refusal))

    def _waited(self, ticket: Ticket) -> None:
        ticket.timer = None
        self.dispatcher.waited(ticket, time.monotonic())

    # What links report

    def arrived(self, link: ReplicaLink, arrived: Arrived) -> None:
        """Handles what a link has read: slots first, so that waiting requests get them at once, then the sinks."""
        now = arrived.at
        if arrived.closed:
            self.links.lost(link)
        if arrived.lost or arrived.closed:  # without the link, others may serve what waits: a canary's other version
            self._return(link, arrived.lost, now, lost=True)
        if arrived.busy:  # before the slots of those that have ended are given away
            self._return(link, arrived.busy, now, lost=False)
        if arrived.ended:
            self._end(arrived.ended, now)
        if arrived.freed:
            self.links.recount()
            self.dispatcher.pump(now)
        for ticket in arrived.touched:
            stream = ticket.stream
            stream.touched = False
            if ticket.outcome is not None or not stream.events:
                continue
            ticket.outcome = stream.events[-1].finish
            try:
                ticket.sink.on_events(ticket, now)
            except Exception:  # one answer must not end the shared connection
                log.exception("cannot write the answer to request %s", ticket.x_request_id)
                self.leave(ticket)
                ticket.sink.on_failure(ticket, errors.internal_error())

    def unreachable(self) -> None:
        self.dispatcher.hold(time.monotonic())

    def unusable(self) -> None:
        self._fail_waiting(errors.model_unavailable(self.name, "unusable", "see the gateway's log"))

    def _end(self, tickets: Sequence[Ticket], now: float) -> None:
        """Handles the requests that have left their slots."""
        for ticket in tickets:
            produced = ticket.stream.produced
            answered = (produced > 0 or ticket.encoded) and ticket.outcome is None
            if answered and produced:
                self.mean_answer += MEAN_SHARE * (produced - self.mean_answer)
            self.record.ended(ticket, now, timed=answered and produced > 0)
            self.dispatcher.ended(ticket, now - ticket.stream.sent_at, produced, now, answered)
        self.dispatcher.pump(now)

    def _return(self, link: ReplicaLink, tickets: Sequence[Ticket], now: float, *, lost: bool) -> None:
        """Returns tickets to the heads of their lines, the first one foremost: their replica was lost, or else another
        gateway has taken the slot."""
        # The request that broke the link would break the next one too. Which one it was is unknown, but it is none of
        # those that the replica has refused, which return before the end of the connection.
        broken = link.broken and link.closed.is_set()
        for ticket in tickets:
            can_return = not self._closed and (not lost or (ticket.can_retry and not broken))
            if not can_return:
                ticket.fail(errors.replica_lost(self.name))  # its reply may leave other tickets
        returning: list[Ticket] = []
        for ticket in tickets:
            if ticket.outcome is not None:
                self.dispatcher.over(ticket, now)
                continue
            ticket.restart(lost=lost)
            returning.append(ticket)
            if lost:
                self._retried(self.name, "lost" if link.closed.is_set() else "draining" if link.drains else "unserved")
        self._hold_outdated(returning)
        self.dispatcher.put_back(returning, now, lost=lost)

    # Failures

    def _fail_waiting(self, error: ApiError) -> None:
        for ticket in self.dispatcher.clear(time.monotonic()):
            self._fail(ticket, error)

    def _fail(self, ticket: Ticket, error: ApiError) -> None:
        """Fails a ticket that got no slot."""
        ticket.stop_timer()
        waited_s = time.monotonic() - ticket.arrived_at
        ticket.fail(_explained(error, self.routes, ticket.terms, cold=ticket.cold, waited_s=waited_s))

    def _error_of(self, refusal: Refusal) -> ApiError:
        if isinstance(refusal, Full):
            next_place_s = self.dispatcher.next_place_s(refusal.waiting)
            if not self.links.slots and (ready_in_s := _ready_in_s(self.routes)) is not None:
                next_place_s = ready_in_s
            return errors.queue_full(self.name, str(refusal.cause), retry_after_s(next_place_s))
        if isinstance(refusal, Unreachable):
            return errors.deadline_unreachable(self.name, *refusal, retry_after_s(*refusal))
        if isinstance(refusal, Expired):
            return errors.deadline_exceeded(self.name, refusal.waited_s)
        return _not_started(self.routes, refusal.waited_s)


def _settings(routes: ModelRoutes) -> QueueSettings:
    return msgspec.convert(routes, QueueSettings, from_attributes=True)


def _names(routes: ModelRoutes) -> ModelNames:
    return ModelNames(routes.name, routes.aliases, routes.adapters)


def _ready_in_s(routes: ModelRoutes) -> float | None:
    """Returns the expected seconds until the model has a replica; None: unknown, or it has one."""
    return routes.ready_in_s(time.time())


def _explained(
    error: ApiError, routes: ModelRoutes, terms: SchedulingParameters, *, cold: bool, waited_s: float = 0.0
) -> ApiError:
    """Returns the error, with the expected wait for a client that requests explanations."""
    return error.explained(undecided(waited_s, cold, _ready_in_s(routes))) if terms.explains else error


def _not_started(routes: ModelRoutes, waited_s: float) -> ApiError:
    """Returns the error of a request that was held for ``hold_s``."""
    if routes.replicas:  # the controller has not noticed yet, or is away
        cause = f"none of its replicas can be reached after {waited_s:.0f} s"
        return errors.model_unavailable(routes.name, "unreachable", cause)
    if routes.state is not ModelState.UNLOADED:
        failed = routes.state is ModelState.FAILED and routes.reason
        cause = f"it is not ready after {waited_s:.0f} s" + (f", {routes.reason}" if failed else "")
        return errors.model_unavailable(routes.name, "failed" if failed else "loading", cause, _ready_in_s(routes))
    cause = f"no replica was started in {waited_s:.0f} s" + (f", {routes.reason}" if routes.reason else "")
    return errors.model_unavailable(routes.name, routes.state.value, cause, _ready_in_s(routes))
