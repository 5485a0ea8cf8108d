"""One queue for each model, with late binding: a request leaves it only for a free slot."""

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
from orchestrator.fleet.lifecycle import ModelState
from orchestrator.fleet.route_table import ModelRoutes, Route
from orchestrator.gateway.openai import errors
from orchestrator.gateway.openai.errors import ApiError
from orchestrator.gateway.openai.request_builder import RequestLimits
from orchestrator.gateway.serving.model_line import ModelLine
from orchestrator.gateway.serving.replica_link import ReplicaLink
from orchestrator.gateway.serving.replica_links import ReplicaLinks
from orchestrator.gateway.serving.scheduling_parameters import SchedulingParameters
from orchestrator.gateway.serving.ticket import Sink, Ticket, ticket_for
from orchestrator.gateway.telemetry.request_spans import TraceHandle
from orchestrator.scaling.demand_report import Counts, DemandWindow, RoutingDecision
from workers.messages.credentials import Credentials
from workers.messages.requests import GenerateRequest

LEAST_PREFIX = 0.25  # of a prompt, for which its replica is preferred
EXPECTED_TOKENS = 256.0  # of an answer, before any has ended

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
        """``credentials`` are for replicas on other hosts; ``wake`` asks the controller for a first replica of a model
        that has none; ``retried`` is told of the model and why, when a request goes to another replica;
        ``read_again`` is called when ``outdated`` has tickets, and ends with a call of ``pump``."""
        self.name = routes.name
        self.routes = routes
        self._gateway = gateway
        self._token = token
        self._wake = wake
        self._retried = retried
        self._read_again = read_again
        self._reading = False  # some of what waits is outdated
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
        """That requests may call the model by, its own first."""
        return (self.name, *self.routes.aliases)

    @property
    def waiting(self) -> int:
        return self._lines.waiting

    @property
    def live(self) -> int:
        return self._links.live

    @property
    def links(self) -> ReplicaLinks:
        """Those that are open."""
        return self._links

    @property
    def slots(self) -> int:
        """Of all connected replicas."""
        return self._links.slots

    @property
    def limits(self) -> RequestLimits:
        """Of a request of this model, as far as a replica has told them."""
        return self._links.limits

    def submit(
        self,
        request: GenerateRequest,
        sink: Sink,
        trace: TraceHandle | None = None,
        terms: SchedulingParameters = _PLAIN,
        known_as: str = "",
    ) -> Ticket:
        """Send a request to a free slot, or queue it. Its prompt was read with the tokenizer that the routes have now.
        ``trace`` is told what becomes of it. ``known_as`` is the x-request-id of its answer.

        Raises ApiError: 429 when the queue is full or its deadline cannot be kept, 503 when no replica can serve and
        none comes.

        1. a replica is ready, or is being swapped         -> queue, up to max_queue
        2. the model loads on request, and has not failed  -> wake it, and queue, up to max_queue
        3. else                                            -> 503
        """
        routes, state = self.routes, self.routes.state
        self._counts.arrived += 1
        comes = routes.loads_on_request and state in (ModelState.UNLOADED, ModelState.LOADING)
        usable = self._links.usable
        if self._closed or not (usable or comes or routes.holds):  # 3
            raise errors.model_unavailable(self.name, state.value, routes.reason)
        ticket = ticket_for(request, sink, self, terms)
        ticket.tokenizer = routes.tokenizer
        ticket.known_as = known_as or request.id
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
        if comes and state is ModelState.UNLOADED:  # 2
            self._wake(self.name)
        return ticket

    def update(self, routes: ModelRoutes) -> None:
        """Take over what the controller says: open links to new replicas, retire those that left."""
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
            self._wake(self.name)  # the controller may have been started again since we asked
        ends = routes.state is ModelState.FAILED or (unloaded and not routes.loads_on_request)
        if ends and not routes.holds:  # nothing will start it
            self._fail_waiting(errors.model_unavailable(self.name, routes.state.value, routes.reason))

    def close(self) -> None:
        """The model is gone from the routes, or the fleet ends: nothing more is accepted or begun."""
        self._closed = True
        self.routes = msgspec.structs.replace(self.routes, replicas=[])
        self._fail_waiting(errors.model_unavailable(self.name, "stopping", None))
        self._links.update(self.routes)

    async def stop(self) -> None:
        """Let go of the replicas: the gateway ends."""
        await self._links.stop()

    def report(self) -> tuple[DemandWindow, RoutingDecision | None]:
        """What was counted since the last call, and how one of the requests came to its replica."""
        now = time.monotonic()
        oldest = min((ticket.arrived_at for ticket in self._lines.tickets), default=now)
        told = self._counts.demand(
            self.name, waiting=self.waiting, live=self.live, longest_wait_s=round(now - oldest, 3)
        )
        decision, self._sample = self._sample, None
        self._counts = Counts()
        return told, decision

    # What was read for other routes

    def outdated(self) -> list[Ticket]:
        """Those that wait and must be read again, the earliest first: the routes have another tokenizer or template by
        now, or shorter slots. They stay in their lines, and get no slot before `Ticket.renew`."""
        return sorted(filter(self._is_outdated, self._lines.tickets), key=lambda ticket: ticket.arrived_at)

    def pump(self) -> None:
        """What was outdated has been read again: send what there are slots for."""
        self._reading = False
        self._look_for_outdated(self._lines.tickets)
        self._pump()

    async def other_routes(self, within_s: float) -> bool:
        """Wait for the next routes while an update holds requests; False where it does not, or after ``within_s``."""
        if self._closed or not self.routes.holds:
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

    # Owner of its tickets

    def left(self, ticket: Ticket) -> None:
        """Its client went away."""
        if ticket.link is not None:
            ticket.link.cancel(ticket)
            return
        self._lines.of(ticket).remove(ticket)
        self._over(ticket, time.monotonic())

    def renewed(self, ticket: Ticket, grown: int) -> None:
        """It waits, and was read again for the routes of now; ``grown``: by so many bytes."""
        ticket.tokenizer = self.routes.tokenizer
        self._lines.of(ticket).bytes += grown

    def began(self, ticket: Ticket, now: float) -> None:
        """Its first token has been taken."""
        self._counts.first_tokens += 1
        self._counts.prefill_s += now - ticket.sent_at

    # Waiting

    def _enqueue(self, ticket: Ticket, line: FairQueue[Ticket]) -> None:
        """Raises ApiError 429."""
        now = ticket.arrived_at
        own_wait_s = line.own_wait_s(ticket, now) if self.slots else 0.0
        if ticket.deadline is not None and self.slots:
            kept = self._headroom.reserved(ticket.priority, self.slots, now)
            wait_s = self._predicted_wait_s(line.ahead_of(ticket) + kept, own_wait_s)
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
        """It is in a line, if it has not got a slot just now."""
        if ticket.link is None and not ticket.left:
            if not self.routes.replicas and ticket.held_since is None:
                ticket.held_since = now
            self._start_timer(ticket, now)
            ticket.sink.waits()

    def _start_timer(self, ticket: Ticket, now: float) -> None:
        """Of how long one that is in a line may wait: until its deadline, and for a model that it has started as long
        as that may take."""
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
        if not late and self.routes.replicas:  # it need not be held any more: it waits as the others do
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
        """It has been held for as long as the spec says."""
        routes = self.routes
        if routes.state is not ModelState.UNLOADED:
            failed = routes.state is ModelState.FAILED and routes.reason
            why = f"it is not ready after {waited_s:.0f} s" + (f", {routes.reason}" if failed else "")
            return errors.model_unavailable(self.name, "failed" if failed else "loading", why)
        why = f"no replica was started in {waited_s:.0f} s" + (f", {routes.reason}" if routes.reason else "")
        return errors.model_unavailable(self.name, routes.state.value, why)

    def _hold_waiting(self) -> None:
        """There is no replica any more: what waits is held from now on as if it had come now."""
        now = time.monotonic()
        for ticket in self._lines.tickets:
            if ticket.held_since is None:
                ticket.held_since = now
                self._start_timer(ticket, now)

    def _predicted_wait_s(self, ahead: int, own_wait_s: float = 0.0) -> float:
        """Until a request with so many before it has a slot."""
        held = [
            (ticket.request.max_tokens - ticket.produced) * link.pace if link.pace else math.inf
            for link in self._links
            for ticket in link.tickets
        ]
        return self._waits.until_s(ahead, self.slots, held, own_wait_s)

    def _full(self, line: FairQueue[Ticket], why: str) -> ApiError:
        """It may come again when the next place in its line is free."""
        last = len(line)
        wait_s = self._predicted_wait_s(last) - self._predicted_wait_s(last - 1) if last and self.slots else math.inf
        return errors.queue_full(self.name, why, retry_after_s(wait_s))

    def _over(self, ticket: Ticket, now: float) -> None:
        """It is in no line and no slot any more; told once or more."""
        if ticket.timer is not None:
            ticket.timer.cancel()
            ticket.timer = None
        if not ticket.over:
            ticket.over = True
            self._headroom.remove(ticket.priority, now)

    # What links tell

    def _link(self, route: Route) -> ReplicaLink:
        """A new one, which is not connected yet."""
        return ReplicaLink(
            route,
            gateway=self._gateway,
            token=self._token,
            on_change=self._changed,
            on_ended=self._ended,
            on_lost=self._lost,
            on_busy=self._back,
            later=asyncio.get_running_loop().call_soon,
        )

    def _unusable(self) -> None:
        self._fail_waiting(errors.model_unavailable(self.name, "unusable", "see the gateway's log"))

    def _changed(self) -> None:
        """A link has opened, or its replica has a free slot again."""
        self._links.forget()
        self._pump()

    def _ended(self, ticket: Ticket, held_s: float) -> None:
        """A request has ended after so long in its slot."""
        if ticket.produced and not ticket.left:  # what was refused or cut off says nothing of the others
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
            # The answer that broke the link would break the next one too, and it is not known whose it was.
            if ticket.can_retry and not link.broken and not self._closed:
                self._lines.take_back_answer(ticket)
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

    def _back(self, ticket: Ticket) -> None:
        """Another gateway was faster: it waits on, before all others, and nothing is lost."""
        if self._closed or ticket.left:
            self._over(ticket, time.monotonic())
            ticket.fail(errors.replica_lost(self.name))
        else:
            self._lines.take_back_prompt(ticket)
            ticket.back()
            self._lines.of(ticket).put_back(ticket)
            self._look_for_outdated((ticket,))
            self._pump()
            self._wait_on(ticket, time.monotonic())

    # To a slot

    def _pump(self) -> None:
        for line in self._lines.filled:
            self._pump_line(line)

    def _pump_line(self, line: FairQueue[Ticket]) -> None:
        if line.tenants > 1:  # what live requests have produced decides who is next
            for live in self._links.tickets:
                self._lines.charge(live)
        while (ticket := line.peek()) is not None:
            if self._reading and self._is_outdated(ticket):
                return
            link = self._link_for(ticket)
            if link is None:
                return  # those behind it are no more urgent
            line.pop()
            self._send(ticket, link)

    def _send_now(self, ticket: Ticket) -> bool:
        """Send it where nobody waits before it and a slot is free."""
        link = self._link_for(ticket)
        if link is None:
            return False
        if self._lines.shared:
            self._lines.of(ticket).pass_by(ticket)
        self._send(ticket, link)
        return True

    def _link_for(self, ticket: Ticket) -> ReplicaLink | None:
        """Where it goes, or None while it must wait."""
        links: Iterable[ReplicaLink] = self._links
        if self.routes.canary is not None:
            links = self._links.of_version(ticket.canary) or self._links.of_version(not ticket.canary)
        affinity = self._affinity(ticket) if ticket.terms.session or self._links.prefix_block else None
        link = choose(links, affinity, _stepped_at)
        if link is None:
            return None
        if self._headroom.mixed:
            free = sum(one.free_slots for one in links)
            slots = free + sum(one.live for one in links)
            if free <= self._headroom.reserved(ticket.priority, slots, time.monotonic()):
                return None  # half of the slots are taken: when one is free again, it is looked at anew
        if affinity is not None and affinity(link):
            ticket.affinity = "prefix" if ticket.chain else "session"
        return link

    def _affinity(self, ticket: Ticket) -> Callable[[ReplicaLink], float] | None:
        """What speaks for a replica: that it has read the beginning of the prompt, or has served the session last."""
        session = ticket.terms.session
        home = self._sessions.get(session, ticket.arrived_at) if session else None
        block = self._links.prefix_block
        if block and ticket.chain is None:
            ticket.chain = chain(ticket.request.prompt_ids, block)
        if home is None and not ticket.chain:
            return None

        def speaks_for(link: ReplicaLink) -> float:
            share = link.prefixes.share(ticket.chain) if link.prefixes is not None and ticket.chain else 0.0
            return max(share if share >= LEAST_PREFIX else 0.0, LEAST_PREFIX if link.route.id == home else 0.0)

        return speaks_for

    def _send(self, ticket: Ticket, link: ReplicaLink) -> None:
        if ticket.timer is not None:
            ticket.timer.cancel()
            ticket.timer = None
        if self._lines.shared:
            self._lines.sent(ticket)
        if ticket.terms.session:
            self._sessions.put(ticket.terms.session, link.route.id, ticket.arrived_at)
        if ticket.terms.explains or self._sample is None:
            self._explain(ticket, link)
        if link.prefixes is not None and ticket.chain:
            link.prefixes.add(ticket.chain)
        link.send(ticket)

    def _explain(self, ticket: Ticket, link: ReplicaLink) -> None:
        """Record how it came to that replica."""
        ticket.decision = RoutingDecision(
            request=ticket.known_as,
            model=self.name,
            queue_ms=round((time.monotonic() - ticket.arrived_at) * 1000, 3),
            candidates=sum(one.free_slots > 0 for one in self._links),
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
