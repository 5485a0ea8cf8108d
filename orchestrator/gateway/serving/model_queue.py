"""The queue of one model in a gateway, with late binding: a request leaves it only for a free slot."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Iterable

import msgspec.structs

from orchestrator.dispatch.fair_queue import FairQueue, QueueFull
from orchestrator.dispatch.headroom import Headroom
from orchestrator.dispatch.prefix_index import Sessions, chain
from orchestrator.dispatch.replica_choice import choose
from orchestrator.dispatch.wait_prediction import MEAN_SHARE, WaitPrediction, retry_after_s
from orchestrator.fleet.replica_states import ModelState
from orchestrator.fleet.route_table import ModelRoutes, Route
from orchestrator.gateway.openai import errors
from orchestrator.gateway.openai.errors import ApiError
from orchestrator.gateway.openai.request_builder import RequestLimits
from orchestrator.gateway.serving.model_line import ModelLine
from orchestrator.gateway.serving.replica_link import ReplicaLink
from orchestrator.gateway.serving.replica_link_pool import ReplicaLinks
from orchestrator.gateway.serving.scheduling_parameters import SchedulingParameters
from orchestrator.gateway.serving.ticket import Sink, Ticket, ticket_for
from orchestrator.gateway.telemetry.request_spans import TraceHandle
from orchestrator.scaling.demand_report import Counts, DemandWindow, RoutingDecision
from workers.messages.credentials import Credentials
from workers.messages.requests import GenerateRequest

LEAST_PREFIX = 0.25  # share of a prompt that must be cached for its replica to be preferred
EXPECTED_TOKENS = 256.0  # assumed length of an answer until one has ended

_PLAIN = SchedulingParameters()


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
        read_again: Callable[[ModelQueue], None] = lambda queue: None,
    ) -> None:
        """``credentials`` are for replicas on other hosts. ``wake`` requests a first replica of the model from the
        controller. ``retried`` is called with the model and the cause when a request moves to another replica.
        ``read_again`` is called when ``outdated`` has tickets, and must end with a call of ``pump``."""
        self.name = routes.name
        self.routes = routes
        self._gateway = gateway
        self._token = token
        self._wake = wake
        self._retried = retried
        self._read_again = read_again
        self._reading = False  # outdated tickets are being tokenized again
        self._news = asyncio.Event()  # set when the routes are replaced
        self._closed = False
        self._lines = ModelLine(routes)
        self._waits = WaitPrediction()
        self._headroom = Headroom()
        self._sessions: Sessions[str] = Sessions()
        self._counts = Counts()
        self._sample: RoutingDecision | None = None  # the first since the last report
        self._links = ReplicaLinks(
            routes, self._link, credentials=credentials, on_open=self._changed, on_unusable=self._unusable
        )
        self.mean_answer = EXPECTED_TOKENS  # tokens; an exponential average

    @property
    def names(self) -> tuple[str, ...]:
        """The model's name, then its aliases."""
        return (self.name, *self.routes.aliases)

    @property
    def waiting(self) -> int:
        return self._lines.waiting

    @property
    def live(self) -> int:
        return self._links.live

    @property
    def links(self) -> ReplicaLinks:
        """The open links."""
        return self._links

    @property
    def slots(self) -> int:
        """The slots of all connected replicas."""
        return self._links.slots

    @property
    def limits(self) -> RequestLimits:
        """The limits of a request of this model, as far as replicas have reported them."""
        return self._links.limits

    def submit(
        self,
        request: GenerateRequest,
        sink: Sink,
        trace: TraceHandle | None = None,
        terms: SchedulingParameters = _PLAIN,
        x_request_id: str = "",
    ) -> Ticket:
        """Sends a request to a free slot, or queues it. Its prompt was read with the current routes' tokenizer.
        ``trace`` follows the request. ``x_request_id`` is that of its answer.

        Raises ApiError: 429 when the queue is full or its deadline cannot be met, 503 when no replica can serve it and
        none is expected.

        1. a replica is ready, or is being swapped         -> queue, up to max_queue
        2. the model loads on request, and has not failed  -> wake it, and queue, up to max_queue
        3. else                                            -> 503
        """
        routes, state = self.routes, self.routes.state
        self._counts.arrived += 1
        loads = routes.loads_on_request and state in (ModelState.UNLOADED, ModelState.LOADING)
        usable = self._links.usable
        if self._closed or not (usable or loads or routes.holds):  # 3
            raise errors.model_unavailable(self.name, state.value, routes.reason)
        ticket = ticket_for(request, sink, self, terms)
        ticket.tokenizer = routes.tokenizer
        ticket.x_request_id = x_request_id or request.id
        ticket.cold = not usable
        ticket.held_since = ticket.arrived_at if ticket.cold else None
        if trace is not None:
            ticket.trace = trace
            trace.queued()
        line = self._lines.enter(ticket)
        ticket.over = not self._headroom.add(ticket.priority, ticket.arrived_at)
        if routes.max_wait_s is not None:
            latest = ticket.arrived_at + routes.max_wait_s
            ticket.deadline = latest if ticket.deadline is None else min(ticket.deadline, latest)
        first = line.peek()  # 1, 2
        is_next = first is None or ticket.priority < first.priority
        if not (is_next and self._send_now(ticket)):
            try:
                self._enqueue(ticket, line)
            except ApiError:
                self._over(ticket, ticket.arrived_at)
                raise
        if loads and state is ModelState.UNLOADED:  # 2
            self._wake(self.name)
        return ticket

    def update(self, routes: ModelRoutes) -> None:
        """Applies the controller's routes: opens links to new replicas, and retires those of removed ones."""
        self.routes = routes
        self._news.set()
        self._news = asyncio.Event()
        self._lines.update(routes, self._links.tickets)
        self._links.update(routes)
        self._look_for_outdated(self._lines.tickets)
        self._pump()
        if not routes.replicas:
            self._hold_waiting()
        unloaded = routes.state is ModelState.UNLOADED
        if routes.loads_on_request and unloaded and self.waiting:
            self._wake(self.name)  # the controller may have been restarted since the last call
        ends = routes.state is ModelState.FAILED or (unloaded and not routes.loads_on_request)
        if ends and not routes.holds:  # nothing will start it
            self._fail_waiting(errors.model_unavailable(self.name, routes.state.value, routes.reason))

    def close(self) -> None:
        """Stops accepting and sending requests: the model left the routes, or the fleet stops."""
        self._closed = True
        self.routes = msgspec.structs.replace(self.routes, replicas=[])
        self._fail_waiting(errors.model_unavailable(self.name, "stopping", None))
        self._links.update(self.routes)

    async def stop(self) -> None:
        """Closes the links; to be called when the gateway stops."""
        await self._links.stop()

    def report(self) -> tuple[DemandWindow, RoutingDecision | None]:
        """Returns the demand since the last call, and the routing decision of one request."""
        now = time.monotonic()
        oldest = min((ticket.arrived_at for ticket in self._lines.tickets), default=now)
        demand = self._counts.demand(
            self.name, waiting=self.waiting, live=self.live, longest_wait_s=round(now - oldest, 3)
        )
        decision, self._sample = self._sample, None
        self._counts = Counts()
        return demand, decision

    # Tickets that were read for earlier routes

    def outdated(self) -> list[Ticket]:
        """Returns the waiting tickets that must be tokenized again, earliest first: the routes have changed tokenizer
        or template, or have shorter slots. They stay in their lines, and get no slot before `Ticket.renew`."""
        return sorted(filter(self._is_outdated, self._lines.tickets), key=lambda ticket: ticket.arrived_at)

    def pump(self) -> None:
        """Sends requests to free slots, after the outdated ones were tokenized again."""
        self._reading = False
        self._look_for_outdated(self._lines.tickets)
        self._pump()

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
        return ticket.tokenizer != routes.tokenizer or ticket.tokens + ticket.request.max_tokens > routes.max_len

    def _look_for_outdated(self, tickets: Iterable[Ticket]) -> None:
        if not self._reading and any(map(self._is_outdated, tickets)):
            self._reading = True
            self._read_again(self)

    # TicketOwner

    def on_left(self, ticket: Ticket) -> None:
        if ticket.link is not None:
            ticket.link.cancel(ticket)
            return
        self._lines.of(ticket).remove(ticket)
        self._over(ticket, time.monotonic())

    def on_renewed(self, ticket: Ticket, growth: int) -> None:
        ticket.tokenizer = self.routes.tokenizer
        self._lines.of(ticket).bytes += growth

    def on_began(self, ticket: Ticket, now: float) -> None:
        self._counts.first_tokens += 1
        self._counts.prefill_s += now - ticket.sent_at

    # Waiting

    def _enqueue(self, ticket: Ticket, line: FairQueue[Ticket]) -> None:
        """Adds the ticket to the line. Raises ApiError 429."""
        now = ticket.arrived_at
        own_wait_s = line.own_wait_s(ticket, now) if self.slots else 0.0
        if ticket.deadline is not None and self.slots:
            reserved = self._headroom.reserved(ticket.priority, self.slots, now)
            wait_s = self._predicted_wait_s(line.ahead_of(ticket) + reserved, own_wait_s)
            allowed_s = ticket.deadline - now
            if wait_s > allowed_s:
                raise errors.deadline_unreachable(self.name, wait_s, allowed_s, retry_after_s(wait_s, allowed_s))
        full = line.refusal(ticket)
        for victim in line.make_room(ticket) if full is not None else ():
            self._over(victim, now)
            victim.fail(self._full(line, str(full)))
        try:
            line.push(ticket)
        except QueueFull as error:
            raise self._full(line, str(error)) from None
        self._pump()
        self._wait_on(ticket, now)

    def _wait_on(self, ticket: Ticket, now: float) -> None:
        """Starts the wait of a ticket that did not get a slot at once."""
        if ticket.link is None and not ticket.left:
            if not self.routes.replicas and ticket.held_since is None:
                ticket.held_since = now
            self._start_timer(ticket, now)
            ticket.sink.on_wait()

    def _start_timer(self, ticket: Ticket, now: float) -> None:
        """Starts the timer for the end of a wait: the deadline, and for a model without replicas ``hold_s``."""
        if ticket.link is not None or ticket.left:
            return
        if ticket.timer is not None:
            ticket.timer.cancel()
            ticket.timer = None
        until = [] if ticket.deadline is None else [ticket.deadline]
        if ticket.held_since is not None:
            until.append(ticket.held_since + self.routes.hold_s)
        if until:
            delay = max(0.0, min(until) - now)
            ticket.timer = asyncio.get_running_loop().call_later(delay, self._waited_enough, ticket)

    def _waited_enough(self, ticket: Ticket) -> None:
        now = time.monotonic()
        ticket.timer = None
        if ticket.link is not None or ticket.left:
            return
        late = ticket.deadline is not None and now >= ticket.deadline - 0.001
        if not late and self.routes.replicas:  # no longer held: it waits for a slot as the others do
            ticket.held_since = None
            self._start_timer(ticket, now)
            return
        self._lines.of(ticket).remove(ticket)
        self._over(ticket, now)
        waited_s = now - ticket.arrived_at
        if late:
            ticket.fail(errors.deadline_exceeded(self.name, waited_s))
        else:
            ticket.fail(self._not_started(waited_s))

    def _not_started(self, waited_s: float) -> ApiError:
        """Returns the error of a request that was held for ``hold_s``."""
        routes = self.routes
        if routes.state is not ModelState.UNLOADED:
            failed = routes.state is ModelState.FAILED and routes.reason
            cause = f"it is not ready after {waited_s:.0f} s" + (f", {routes.reason}" if failed else "")
            return errors.model_unavailable(self.name, "failed" if failed else "loading", cause)
        cause = f"no replica was started in {waited_s:.0f} s" + (f", {routes.reason}" if routes.reason else "")
        return errors.model_unavailable(self.name, routes.state.value, cause)

    def _hold_waiting(self) -> None:
        """Holds the waiting requests from now on, as if they had just arrived: the last replica is gone."""
        now = time.monotonic()
        for ticket in self._lines.tickets:
            if ticket.held_since is None:
                ticket.held_since = now
                self._start_timer(ticket, now)

    def _predicted_wait_s(self, ahead: int, own_wait_s: float = 0.0) -> float:
        """Returns the predicted wait of a request with ``ahead`` others before it."""
        held = [
            (ticket.request.max_tokens - ticket.produced) * link.pace if link.pace else math.inf
            for link in self._links
            for ticket in link.tickets
        ]
        return self._waits.until_s(ahead, self.slots, held, own_wait_s)

    def _full(self, line: FairQueue[Ticket], cause: str) -> ApiError:
        """Returns the error for a full line, to be retried when the next place is free."""
        last = len(line)
        wait_s = self._predicted_wait_s(last) - self._predicted_wait_s(last - 1) if last and self.slots else math.inf
        return errors.queue_full(self.name, cause, retry_after_s(wait_s))

    def _over(self, ticket: Ticket, now: float) -> None:
        """Cleans up after a ticket that has left the lines and slots; may be called more than once."""
        if ticket.timer is not None:
            ticket.timer.cancel()
            ticket.timer = None
        if not ticket.over:
            ticket.over = True
            self._headroom.remove(ticket.priority, now)

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

    def _unusable(self) -> None:
        self._fail_waiting(errors.model_unavailable(self.name, "unusable", "see the gateway's log"))

    def _changed(self) -> None:
        """Handles a link that has opened, or whose replica has a free slot again."""
        self._links.forget()
        self._pump()

    def _ended(self, ticket: Ticket, held_s: float) -> None:
        """Handles a request that ended after ``held_s`` in its slot."""
        if ticket.produced and not ticket.left:  # refused and cancelled requests would bias the means
            self._waits.ended(held_s)
            self.mean_answer += MEAN_SHARE * (ticket.produced - self.mean_answer)
        self._counts.ended += 1
        self._counts.slot_s += held_s
        if ticket.charged >= 0:
            self._lines.charge(ticket)
        self._over(ticket, ticket.sent_at + held_s)
        self._pump()

    def _lost(self, link: ReplicaLink, tickets: list[Ticket]) -> None:
        if link.closed.is_set():
            self._links.lost(link)
        now = time.monotonic()
        for ticket in reversed(tickets):
            # The request that broke the link would break the next one too, and which one it was is unknown.
            if ticket.can_retry and not link.broken and not self._closed:
                self._lines.refund_answer(ticket)
                ticket.restart()
                self._retried(self.name, "lost" if link.closed.is_set() else "draining")
                self._lines.of(ticket).put_back(ticket)
            else:
                self._over(ticket, now)
                ticket.fail(errors.replica_lost(self.name))
        self._look_for_outdated(tickets)
        self._pump()
        for ticket in tickets:
            self._wait_on(ticket, now)

    def _requeue(self, ticket: Ticket) -> None:
        """Returns a ticket to the head of its line: another gateway has taken the slot."""
        if self._closed or ticket.left:
            self._over(ticket, time.monotonic())
            ticket.fail(errors.replica_lost(self.name))
        else:
            self._lines.refund_prompt(ticket)
            ticket.requeue()
            self._lines.of(ticket).put_back(ticket)
            self._look_for_outdated((ticket,))
            self._pump()
            self._wait_on(ticket, time.monotonic())

    # To a slot

    def _pump(self) -> None:
        for line in self._lines.filled:
            self._pump_line(line)

    def _pump_line(self, line: FairQueue[Ticket]) -> None:
        if line.tenants > 1:  # the tokens of live requests decide which tenant is next
            for live in self._links.tickets:
                self._lines.charge(live)
        while (ticket := line.peek()) is not None:
            if self._reading and self._is_outdated(ticket):
                return
            link = self._link_for(ticket)
            if link is None:
                return  # the rest of the line is not more urgent
            line.pop()
            self._send(ticket, link)

    def _send_now(self, ticket: Ticket) -> bool:
        """Sends a ticket that is next in line; returns False when it must wait."""
        link = self._link_for(ticket)
        if link is None:
            return False
        if self._lines.shared:
            self._lines.of(ticket).pass_by(ticket)
        self._send(ticket, link)
        return True

    def _link_for(self, ticket: Ticket) -> ReplicaLink | None:
        """Returns the link for a ticket; None while it must wait."""
        links: Iterable[ReplicaLink] = self._links
        if self.routes.canary is not None:
            links = self._links.of_version(ticket.canary) or self._links.of_version(not ticket.canary)
        affinity = self._affinity(ticket) if ticket.terms.session or self._links.prefix_block else None
        link = choose(links, affinity, _stepped_at)
        if link is None:
            return None
        if self._headroom.mixed:
            free = sum(link.free_slots for link in links)
            slots = free + sum(link.live for link in links)
            if free <= self._headroom.reserved(ticket.priority, slots, time.monotonic()):
                return None  # half of the slots are taken: retried when one is free again
        if affinity is not None and affinity(link):
            ticket.affinity = "prefix" if ticket.chain else "session"
        return link

    def _affinity(self, ticket: Ticket) -> Callable[[ReplicaLink], float] | None:
        """Returns the affinity of the ticket to a replica, by cached prefix and last session; None without either."""
        session = ticket.terms.session
        home = self._sessions.get(session, ticket.arrived_at) if session else None
        block = self._links.prefix_block
        if block and ticket.chain is None:
            ticket.chain = chain(ticket.request.prompt_ids, block)
        if home is None and not ticket.chain:
            return None

        def affinity(link: ReplicaLink) -> float:
            share = link.prefixes.share(ticket.chain) if link.prefixes is not None and ticket.chain else 0.0
            return max(share if share >= LEAST_PREFIX else 0.0, LEAST_PREFIX if link.route.id == home else 0.0)

        return affinity

    def _send(self, ticket: Ticket, link: ReplicaLink) -> None:
        if ticket.timer is not None:
            ticket.timer.cancel()
            ticket.timer = None
        if self._lines.shared:
            self._lines.charge_prompt(ticket)
        if ticket.terms.session:
            self._sessions.put(ticket.terms.session, link.route.id, ticket.arrived_at)
        if ticket.terms.explains or self._sample is None:
            self._explain(ticket, link)
        if link.prefixes is not None and ticket.chain:
            link.prefixes.add(ticket.chain)
        link.send(ticket)

    def _explain(self, ticket: Ticket, link: ReplicaLink) -> None:
        """Records the routing decision."""
        ticket.decision = RoutingDecision(
            request=ticket.x_request_id,
            model=self.name,
            queue_ms=round((time.monotonic() - ticket.arrived_at) * 1000, 3),
            candidates=sum(candidate.free_slots > 0 for candidate in self._links),
            replica=link.route.id,
            slot=link.live + 1,
            slots=0 if link.welcome is None else link.welcome.slots,
            cold=ticket.cold,
            retries=ticket.retries,
            affinity=ticket.affinity,
        )
        if self._sample is None:
            self._sample = ticket.decision

    def _fail_waiting(self, error: ApiError) -> None:
        now = time.monotonic()
        for line in self._lines:
            for ticket in line.clear():
                self._over(ticket, now)
                ticket.fail(error)


def _stepped_at(link: ReplicaLink) -> float:
    return link.stepped_at
