"""One queue for each model, with late binding: a request leaves it only for a free slot."""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType

import msgspec.structs

from orchestrator.demand import Demand, RoutingDecision
from orchestrator.gateway import errors
from orchestrator.gateway.dial import open_link
from orchestrator.gateway.errors import ApiError
from orchestrator.gateway.generation import Limits
from orchestrator.gateway.link import ReplicaLink
from orchestrator.gateway.tally import Tally
from orchestrator.gateway.terms import Terms
from orchestrator.gateway.ticket import Sink, Ticket
from orchestrator.gateway.tracing import TraceHandle
from orchestrator.headroom import Headroom
from orchestrator.lifecycle import ModelState
from orchestrator.prefixes import Sessions, chain
from orchestrator.routes import ModelRoutes, Route
from orchestrator.routing import choose
from orchestrator.waiting import Line, LineFull
from orchestrator.waits import predicted_wait_s, retry_after_s
from workers.credentials import Credentials
from workers.requests import GenerateRequest

log = logging.getLogger(__name__)

CONNECT_DEADLINE_S = 5.0
RECONNECT_S = 0.1
NEW_TOKENIZER = "its tokenizer is another one now"
MEAN_SHARE = 0.1  # of the newest request in the exponential averages
LEAST_PREFIX = 0.25  # of a prompt, for which its replica is preferred
EXPECTED_TOKENS = 256.0  # of an answer, before any has ended

_PLAIN = Terms()


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
        self._line: Line[Ticket] = _line(routes)
        self._canary_line: Line[Ticket] | None = None  # of the version that is being tried, where there is one
        self._weights: dict[str, float] = {}  # of the tenants that have asked
        self._headroom = Headroom()
        self._sessions: Sessions[str] = Sessions()
        self._tally = Tally()
        self._links: dict[Route, ReplicaLink] = {}
        self._keeping: dict[Route, asyncio.Task[None]] = {}
        self._random = random.Random()
        self._limits: Limits | None = None  # until something changes
        self._prefix_block: int | None = None  # likewise
        self._mean_service_s = 1.0  # of one request in a slot; an exponential average
        self.mean_answer = EXPECTED_TOKENS  # tokens, likewise

    @property
    def names(self) -> tuple[str, ...]:
        """That requests may call the model by, its own first."""
        return (self.name, *self.routes.aliases)

    @property
    def waiting(self) -> int:
        return sum(map(len, self._lines))

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
        self,
        request: GenerateRequest,
        sink: Sink,
        tokenizer: str | None = None,
        trace: TraceHandle | None = None,
        terms: Terms = _PLAIN,
    ) -> Ticket:
        """Send a request to a free slot, or queue it. Its prompt was read with the routes' ``tokenizer`` of that time
        (None: today's). ``trace`` is told what becomes of it.

        Raises ApiError: 429 when the queue is full or its deadline cannot be kept, 503 when no replica can serve and
        none comes, or when the tokenizer is another one by now.

        1. a replica is ready, or is being swapped         -> queue, up to max_queue
        2. the model loads on request, and has not failed  -> wake it, and queue, up to max_queue
        3. else                                            -> 503
        """
        routes, state = self.routes, self.routes.state
        tally = self._tally
        tally.arrived += 1
        comes = routes.loads_on_request and state in (ModelState.UNLOADED, ModelState.LOADING)
        usable = len(routes.replicas) > len(self._refused)
        if not usable:
            tally.cold += 1
        if self._closed or not (usable or comes or routes.holds):  # 3
            raise errors.model_unavailable(self.name, state.value, routes.reason)
        ticket = Ticket(request, sink, self, terms)
        if tokenizer not in (None, routes.tokenizer):
            raise errors.model_unavailable(self.name, "updated", NEW_TOKENIZER)
        ticket.tokenizer = routes.tokenizer
        ticket.cold = not usable
        ticket.held_since = ticket.arrived_at if ticket.cold else None
        if trace is not None:
            ticket.trace = trace
            trace.queued()
        line = self._line_for(ticket)
        if self._weights.get(ticket.tenant) != terms.weight:
            self._weights[ticket.tenant] = terms.weight
            for each in self._lines:
                each.set_weight(ticket.tenant, terms.weight)
        ticket.over = not self._headroom.came(ticket.priority, ticket.arrived_at)
        if routes.max_wait_s is not None:
            latest = ticket.arrived_at + routes.max_wait_s
            ticket.deadline = latest if ticket.deadline is None else min(ticket.deadline, latest)
        first = line.peek()
        is_next = first is None or ticket.priority < first.priority
        if not (is_next and self._send_now(ticket)):
            try:
                self._enqueue(ticket, line)
            except ApiError:
                tally.refused += 1
                self._over(ticket, ticket.arrived_at)
                raise
        if comes and state is ModelState.UNLOADED:
            self._wake(self.name)
        return ticket

    def update(self, routes: ModelRoutes) -> None:
        """Take over what the controller says: open links to new replicas, retire those that left."""
        if routes.tokenizer != self.routes.tokenizer:  # what waits was read with the old tokenizer
            self._fail_waiting(errors.model_unavailable(self.name, "updated", NEW_TOKENIZER))
        before, self.routes = self.routes, routes
        self._limits = self._prefix_block = None
        self._refused &= set(routes.replicas)
        self._reline(before)
        for route, link in list(self._links.items()):
            link.resume() if route in routes.replicas else link.retire()
        for route in routes.replicas:
            self._keep_link(route)
        self._pump()
        if not routes.replicas:
            self._hold_waiting()
        unloaded = routes.state is ModelState.UNLOADED
        if routes.loads_on_request and unloaded and self.waiting:
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

    def report(self) -> tuple[Demand, RoutingDecision | None]:
        """What was counted since the last call, and how one of the requests came to its replica."""
        now = time.monotonic()
        oldest = min((ticket.arrived_at for line in self._lines for ticket in line), default=now)
        decision = self._tally.decision
        return self._tally.take(
            self.name, waiting=self.waiting, live=self.live, longest_wait_s=round(now - oldest, 3)
        ), decision

    # Owner of its tickets

    def left(self, ticket: Ticket) -> None:
        """Its client went away."""
        if ticket.link is not None:
            ticket.link.cancel(ticket)
            return
        self._line_of(ticket).remove(ticket)
        self._over(ticket, time.monotonic())

    def began(self, ticket: Ticket, now: float) -> None:
        """Its first token has been taken."""
        tally, objective = self._tally, self.routes.ttft_s
        tally.first_tokens += 1
        tally.prefill_s += now - ticket.sent_at
        if objective is not None and now - ticket.arrived_at > objective:
            tally.late += 1

    # The line

    @property
    def _lines(self) -> Sequence[Line[Ticket]]:
        return (self._line,) if self._canary_line is None else (self._line, self._canary_line)

    def _line_for(self, ticket: Ticket) -> Line[Ticket]:
        """Of the version that is drawn for it."""
        canary = self.routes.canary
        ticket.canary = canary is not None and self._random.random() < canary
        return self._line_of(ticket)

    def _line_of(self, ticket: Ticket) -> Line[Ticket]:
        return self._canary_line if ticket.canary and self._canary_line is not None else self._line

    def _reline(self, before: ModelRoutes) -> None:
        """Make the lines as the routes have them now; what waits keeps its place."""
        routes = self.routes
        for line in self._lines:
            line.max_count, line.max_bytes = routes.max_queue, routes.max_queue_bytes
        if (before.queue_order, before.canary is None) == (routes.queue_order, routes.canary is None):
            return
        waiting = [ticket for line in self._lines for ticket in line.clear()]
        self._line = _line(routes, self._weights)
        self._canary_line = None if routes.canary is None else _line(routes, self._weights)
        for ticket in sorted(waiting, key=lambda ticket: ticket.arrived_at, reverse=True):
            self._line_for(ticket).put_back(ticket)

    def _enqueue(self, ticket: Ticket, line: Line[Ticket]) -> None:
        """Raises ApiError 429."""
        now = ticket.arrived_at
        own_wait_s = line.own_wait_s(ticket, now) if self.slots else 0.0
        if ticket.deadline is not None and self.slots:
            kept = self._headroom.kept(ticket.priority, self.slots, now)
            wait_s = max(self._predicted_wait_s(line.ahead_of(ticket) + kept), own_wait_s)
            allowed_s = ticket.deadline - now
            if wait_s > allowed_s:
                raise errors.deadline_unreachable(self.name, wait_s, allowed_s, retry_after_s(wait_s, allowed_s))
        full = line.full(ticket)
        for victim in line.make_room(ticket) if full is not None else ():
            self._tally.refused += 1
            self._over(victim, now)
            victim.fail(self._full(str(full)))
        try:
            line.push(ticket)
        except LineFull as error:
            raise self._full(str(error)) from None
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
        self._tally.refused += 1
        self._line_of(ticket).remove(ticket)
        self._over(ticket, now)
        waited_s = now - ticket.arrived_at
        if late:
            ticket.fail(errors.deadline_exceeded(self.name, waited_s))
        else:
            ticket.fail(errors.model_unavailable(self.name, "loading", f"it is not ready after {waited_s:.0f} s"))

    def _hold_waiting(self) -> None:
        """There is no replica any more: what waits is held from now on as if it had come now."""
        now = time.monotonic()
        for line in self._lines:
            for ticket in line:
                if ticket.held_since is None:
                    ticket.held_since = now
                    self._start_timer(ticket, now)

    def _predicted_wait_s(self, ahead: int) -> float:
        """Until a request with so many before it has a slot."""
        held = [
            (ticket.request.max_tokens - ticket.produced) * link.pace if link.pace else math.inf
            for link in self._links.values()
            for ticket in link.tickets
        ]
        return predicted_wait_s(ahead, self.slots, self._mean_service_s, held)

    def _full(self, why: str) -> ApiError:
        """It may come again when the next place is free."""
        last = len(self._line)
        wait_s = self._predicted_wait_s(last) - self._predicted_wait_s(last - 1) if last and self.slots else math.inf
        return errors.queue_full(self.name, why, retry_after_s(wait_s))

    def _over(self, ticket: Ticket, now: float) -> None:
        """It is in no line and no slot any more; told once or more."""
        if ticket.timer is not None:
            ticket.timer.cancel()
            ticket.timer = None
        if not ticket.over:
            ticket.over = True
            self._headroom.went(ticket.priority, now)

    # Links

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
                on_ended=self._ended,
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
            if route not in self.routes.replicas:  # it left while the link was being opened
                link.close()
                return
            if not link.closed.is_set():
                self._links[route] = link
                self._changed()  # its Welcome may be here already
            await link.closed.wait()
            if link.refused:
                self._refused.add(route)
                if not self.slots:
                    self._fail_waiting(errors.model_unavailable(self.name, "unusable", "see the gateway's log"))
                return
            if link.welcome is None:
                await asyncio.sleep(RECONNECT_S)  # it hung up at once; do not spin

    def _changed(self) -> None:
        """A link has opened, or its replica has a free slot again."""
        self._limits = self._prefix_block = None
        self._pump()

    def _ended(self, ticket: Ticket, held_s: float) -> None:
        """A request has ended after so long in its slot."""
        if ticket.produced and not ticket.left:  # what was refused or cut off says nothing of the others
            self._mean_service_s += MEAN_SHARE * (held_s - self._mean_service_s)
            self.mean_answer += MEAN_SHARE * (ticket.produced - self.mean_answer)
        tally = self._tally
        tally.ended += 1
        tally.slot_s += held_s
        tally.prompt_tokens += ticket.tokens
        tally.output_tokens += ticket.produced
        self._charge(ticket)
        self._over(ticket, ticket.sent_at + held_s)
        self._pump()

    def _lost(self, link: ReplicaLink, tickets: list[Ticket]) -> None:
        if link.closed.is_set():
            self._links.pop(link.route, None)
            self._limits = None
        now = time.monotonic()
        for ticket in reversed(tickets):
            if ticket.can_retry and not self._closed and ticket.tokenizer == self.routes.tokenizer:
                if ticket.charged > 0:  # what is thrown away was not served
                    tokens, priority = -ticket.charged, ticket.priority
                    self._line_of(ticket).served(ticket.tenant, output_tokens=tokens, priority=priority)
                ticket.restart()
                self._retried(self.name, "lost" if link.closed.is_set() else "draining")
                self._line_of(ticket).put_back(ticket)
            else:
                self._over(ticket, now)
                ticket.fail(errors.replica_lost(self.name))
        self._pump()
        for ticket in tickets:
            self._wait_on(ticket, now)

    def _back(self, ticket: Ticket) -> None:
        """Another gateway was faster: it waits on, before all others, and nothing is lost."""
        if self._closed or ticket.left or ticket.tokenizer != self.routes.tokenizer:
            self._over(ticket, time.monotonic())
            ticket.fail(errors.replica_lost(self.name))
        else:
            if ticket.charged >= 0:
                self._line_of(ticket).served(ticket.tenant, prompt_tokens=-ticket.tokens, priority=ticket.priority)
                ticket.charged = -1
            ticket.back()
            self._line_of(ticket).put_back(ticket)
            self._pump()
            self._wait_on(ticket, time.monotonic())

    # To a slot

    def _pump(self) -> None:
        for line in self._lines:
            self._pump_line(line)

    def _pump_line(self, line: Line[Ticket]) -> None:
        if not len(line):
            return
        self._settle(line)
        while (ticket := line.peek()) is not None:
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
        if self._shared:
            self._line_of(ticket).pass_by(ticket)
        self._send(ticket, link)
        return True

    def _link_for(self, ticket: Ticket) -> ReplicaLink | None:
        """Where it goes, or None while it must wait."""
        links: Iterable[ReplicaLink] = self._links.values()
        if self.routes.canary is not None:
            links = self._of_version(ticket.canary) or self._of_version(not ticket.canary)
        affinity = self._affinity(ticket)
        link = choose(links, affinity, _stepped_at)
        if link is None:
            return None
        if self._headroom.mixed:
            free = sum(one.free_slots for one in links)
            slots = free + sum(one.live for one in links)
            if free <= self._headroom.kept(ticket.priority, slots, time.monotonic()):
                return None  # half of the slots are taken: when one is free again, it is looked at anew
        if affinity is not None and affinity(link):
            ticket.affinity = "prefix" if ticket.chain else "session"
        return link

    def _of_version(self, canary: bool) -> list[ReplicaLink]:
        return [link for link in self._links.values() if (link.route.id in self.routes.canaries) is canary]

    def _affinity(self, ticket: Ticket) -> Callable[[ReplicaLink], float] | None:
        """What speaks for a replica: that it has read the beginning of the prompt, or has served the session last."""
        session = ticket.terms.session
        home = self._sessions.get(session, ticket.arrived_at) if session else None
        if self._prefix_block is None:
            blocks = [link.welcome.prefix_block for link in self._links.values() if link.welcome is not None]
            self._prefix_block = max(blocks, default=0)
        block = self._prefix_block
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
        if self._shared and ticket.charged < 0:
            ticket.charged = 0
            self._line_of(ticket).served(ticket.tenant, prompt_tokens=ticket.tokens, priority=ticket.priority)
        if ticket.terms.session:
            self._sessions.put(ticket.terms.session, link.route.id, ticket.arrived_at)
        if ticket.terms.explains or self._tally.decision is None:
            self._explain(ticket, link)
        if link.prefixes is not None and ticket.chain:
            link.prefixes.keep(ticket.chain)
        link.send(ticket)

    def _explain(self, ticket: Ticket, link: ReplicaLink) -> None:
        """Record how it came to that replica."""
        ticket.decision = RoutingDecision(
            request=ticket.id,
            model=self.name,
            queue_ms=round((time.monotonic() - ticket.arrived_at) * 1000, 3),
            candidates=sum(one.free_slots > 0 for one in self._links.values()),
            replica=link.route.id,
            slot=link.live + 1,
            slots=0 if link.welcome is None else link.welcome.slots,
            cold=ticket.cold,
            retries=ticket.retries,
            affinity=ticket.affinity,
        )
        if self._tally.decision is None:
            self._tally.decision = ticket.decision

    # Whom tokens are counted to

    @property
    def _shared(self) -> bool:
        """Whether more than one tenant has asked: only then are tokens counted."""
        return len(self._weights) > 1

    def _settle(self, line: Line[Ticket]) -> None:
        """Charge what the live requests have produced, where that decides who is next."""
        if line.tenants > 1:
            for link in self._links.values():
                for ticket in link.tickets:
                    self._charge(ticket)

    def _charge(self, ticket: Ticket) -> None:
        new = ticket.produced - ticket.charged
        if new > 0 and ticket.charged >= 0:
            ticket.charged = ticket.produced
            self._line_of(ticket).served(ticket.tenant, output_tokens=new, priority=ticket.priority)

    def _fail_waiting(self, error: ApiError) -> None:
        now = time.monotonic()
        for line in self._lines:
            for ticket in line.clear():
                self._over(ticket, now)
                ticket.fail(error)


def _stepped_at(link: ReplicaLink) -> float:
    return link.stepped_at


def _line(routes: ModelRoutes, weights: Mapping[str, float] = MappingProxyType({})) -> Line[Ticket]:
    line: Line[Ticket] = Line(routes.max_queue, routes.max_queue_bytes, order=routes.queue_order)
    for tenant, weight in weights.items():
        line.set_weight(tenant, weight)
    return line
