"""The simulated queues of one model, one per gateway, and their links to its replicas."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

from orchestrator.dispatch.dispatcher import Dispatcher, Refusal
from orchestrator.scaling.forecast import Counts
from orchestrator.simulate.scenario import Arrival, SimModel
from orchestrator.simulate.simulated_replica import SimLink, SimReplica, SimRequest
from orchestrator.simulate.virtual_clock import Clock


@dataclass(slots=True)
class Measured:
    """The measurements of a model's requests. Times are in seconds, in the order in which the requests ended."""

    arrived: int = 0
    refused: int = 0
    lost: int = 0
    attained: int = 0
    output_tokens: int = 0
    ttfts: array[float] = field(default_factory=lambda: array("d"))
    latencies: array[float] = field(default_factory=lambda: array("d"))
    queued: array[float] = field(default_factory=lambda: array("d"))  # until it was sent to a replica

    @property
    def answered(self) -> int:
        return len(self.latencies)

    @property
    def open(self) -> int:
        """Requests that were neither answered nor refused nor lost when the run ended."""
        return self.arrived - self.answered - self.refused - self.lost

    @property
    def attainment(self) -> float:
        """The fraction of the requests that were answered within the objectives; 1.0 without requests."""
        return self.attained / self.arrived if self.arrived else 1.0


class SimLinks(list[SimLink]):
    """The links of one gateway."""

    slots = 0  # of all replicas
    prefix_block = 0

    @property
    def reachable(self) -> bool:
        return bool(self)


class SimulatedQueue:
    """One model: its requests arrive here, wait in the queue of their gateway, and are sent to a replica."""

    binds_late = True  # a request is sent only to a free slot; an alternative router may send it before

    def __init__(self, model: SimModel, clock: Clock, *, gateways: int = 1, seed: int = 0, since: float = 0.0) -> None:
        """Requests before ``since`` are not measured."""
        self.model = model
        self.clock = clock
        self.replicas: list[SimReplica] = []  # replicas in routing
        self.counts = Counts()
        self.measured = Measured()
        self.since = since
        self.live = 0
        self.on_cold: Callable[[], None] | None = None  # a request has arrived without a ready replica
        self.on_empty: Callable[[SimReplica], None] | None = None  # a retired replica has ended its last request
        self._links = [SimLinks() for _ in range(gateways)]
        self._dispatchers = [self.new_dispatcher(links) for links in self._links]
        self._gateway_of = Random(f"gateways {seed} {model.name}").randrange
        self._count = 0
        self._retired: set[SimReplica] = set()
        judged = model.judged
        self._ttft_s, self._tpot_s, self._queue_s = (
            math.inf if limit is None else limit / 1000 for limit in (judged.ttft_ms, judged.tpot_ms, judged.queue_ms)
        )

    def new_dispatcher(self, links: SimLinks) -> Dispatcher[SimRequest, SimLink]:
        return Dispatcher(self.model.queue, links, self)

    @property
    def waiting(self) -> int:
        return sum(dispatcher.waiting for dispatcher in self._dispatchers)

    @property
    def longest_wait_s(self) -> float:
        """The longest wait of the queued requests."""
        return max(dispatcher.longest_wait_s(self.clock.now) for dispatcher in self._dispatchers)

    def add(self, replica: SimReplica) -> None:
        """Adds a ready replica."""
        self.replicas.append(replica)
        for gateway, links in enumerate(self._links):
            links.append(SimLink(replica, gateway, self.clock))
            links.slots += replica.slots
        for dispatcher in self._dispatchers:
            dispatcher.pump(self.clock.now)

    def retire(self, replica: SimReplica) -> None:
        """Removes a replica from routing; calls ``on_empty`` after its last request, which may be immediately."""
        self.replicas.remove(replica)
        for links, dispatcher in zip(self._links, self._dispatchers, strict=True):
            links[:] = [link for link in links if link.replica is not replica]
            links.slots -= replica.slots
            if not links:
                dispatcher.hold(self.clock.now)
        if replica.live:
            self._retired.add(replica)
        elif self.on_empty is not None:
            self.on_empty(replica)

    def lose(self, requests: Sequence[SimRequest]) -> None:
        """Counts requests that a stopped replica has not answered."""
        self.live -= len(requests)
        for request in requests:
            self._dispatchers[request.gateway].over(request, self.clock.now)
            self.measured.lost += request.arrived_at >= self.since

    def arrive(self, arrival: Arrival) -> None:
        """Handles one arrival."""
        now = self.clock.now
        self._count += 1
        request = SimRequest.of(arrival, self._count, now)
        self.counts.arrived += 1
        if now >= self.since:
            self.measured.arrived += 1
        dispatchers = self._dispatchers
        if len(dispatchers) > 1:
            request.gateway = self._gateway_of(len(dispatchers))
        refusal = dispatchers[request.gateway].submit(request, 1.0, now)
        if refusal is not None:
            self.refuse(request, refusal)
        if not self.replicas and self.on_cold is not None and self.waiting == 1:
            self.on_cold()

    # Effects of a dispatcher

    def send(self, request: SimRequest, link: SimLink) -> bool:
        """Sends a request as the data plane does: a replica without free slots replies BUSY, and notifies the gateway
        later. Messages take no time here."""
        replica = link.replica
        if replica.live >= replica.slots and self.binds_late:
            link.free_slots = 0
            replica.busy.append(link)
            return False
        self._stop_timer(request)
        request.link = link
        link.live += 1
        link.prefilling += 1
        link.free_slots -= 1
        self.live += 1
        due = replica.due
        replica.send(request, self.clock.now)
        if replica.due != due:
            self.clock.at(replica.due, self._advance, replica)
        return True

    def wait(self, request: SimRequest, delay_s: float | None) -> None:
        self._stop_timer(request)
        if delay_s is not None:
            request.timer = self.clock.at(self.clock.now + delay_s, self._waited, request)

    def refuse(self, request: SimRequest, refusal: Refusal) -> None:
        self._stop_timer(request)
        if request.arrived_at >= self.since:
            self.measured.refused += 1

    # Inside

    def _stop_timer(self, request: SimRequest) -> None:
        if request.timer:
            self.clock.cancel(request.timer)
            request.timer = 0

    def _waited(self, request: SimRequest) -> None:
        request.timer = 0
        self._dispatchers[request.gateway].waited(request, self.clock.now)

    def _advance(self, replica: SimReplica) -> None:
        now = self.clock.now
        if replica.due != now:  # this call is obsolete: ``due`` has changed
            return
        replica.advance(now)
        due = replica.due
        for request in replica.began:
            assert request.link is not None
            request.link.prefilling -= 1
            request.link.idle = False
        if replica.ended:
            self._handle_ended(replica, now)
        if replica.due == due:  # else a request was sent to it, which scheduled its own call
            self.clock.at(due, self._advance, replica)

    def _handle_ended(self, replica: SimReplica, now: float) -> None:
        """Free slots go first to gateways that received BUSY, in their order; then to those whose requests ended."""
        counts, measured, ended = self.counts, self.measured, replica.ended
        counts.ended += len(ended)
        self.live -= len(ended)
        for request in ended:
            link, held_s, tokens = request.link, now - request.sent_at, request.output_tokens
            assert link is not None
            link.live -= 1
            link.idle = not link.live
            link.free_slots = replica.slots - link.live
            link.tracked.ended(now - request.first_at, tokens - 1)
            link.pace = link.tracked.value
            counts.slot_s += held_s
            if request.work_s:
                counts.encoded += 1
                counts.inputs += len(self.model.inputs(request.tokens))
                counts.work_s += request.work_s
            self._dispatchers[request.gateway].ended(request, held_s, tokens, now)
            if request.arrived_at >= self.since:
                self._measure(request, now, measured)
        if replica in self._retired:
            if not replica.live:
                self._retired.discard(replica)
                if self.on_empty is not None:
                    self.on_empty(replica)
            return
        while replica.busy and replica.live < replica.slots:
            link = replica.busy.popleft()
            link.free_slots = replica.slots - link.live
            self._dispatchers[link.gateway].pump(now)
        for gateway in sorted({request.gateway for request in ended}) if len(self._dispatchers) > 1 else (0,):
            self._dispatchers[gateway].pump(now)

    def _measure(self, request: SimRequest, now: float, measured: Measured) -> None:
        arrived_at, tokens = request.arrived_at, request.output_tokens
        ttft, queued = request.first_at - arrived_at, request.sent_at - arrived_at
        measured.ttfts.append(ttft)
        measured.latencies.append(now - arrived_at)
        measured.queued.append(queued)
        if self.model.encoder is None:
            measured.output_tokens += tokens
        in_pace = tokens < 2 or now - request.first_at <= self._tpot_s * (tokens - 1)
        measured.attained += in_pace and ttft <= self._ttft_s and queued <= self._queue_s
