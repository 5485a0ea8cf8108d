"""The simulated queues of one model, one per gateway, and the replicas that they send to."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from random import Random

from orchestrator.dispatch.fair_queue import FairQueue
from orchestrator.dispatch.replica_choice import choose
from orchestrator.dispatch.wait_prediction import WaitPrediction
from orchestrator.scaling.demand_report import Counts
from orchestrator.simulate.simulated_link import SimLink
from orchestrator.simulate.simulated_model import SimModel
from orchestrator.simulate.simulated_replica import SimReplica
from orchestrator.simulate.simulated_request import Arrival, SimRequest
from orchestrator.simulate.virtual_clock import Clock

Choice = Callable[[Sequence[SimReplica], SimRequest], "SimReplica | None"]
"""An alternative router: returns the replica for a request; None: it waits in the queue until a request has ended."""


class Measured:
    """The measurements of a model's requests. Times are in seconds, in the order in which the requests ended."""

    __slots__ = ("arrived", "attained", "busy_s", "latencies", "lost", "output_tokens", "queued", "refused", "ttfts")

    def __init__(self) -> None:
        self.arrived = self.refused = self.lost = self.attained = self.output_tokens = 0
        self.busy_s = 0.0  # slot-seconds
        self.ttfts = array("d")
        self.latencies = array("d")
        self.queued = array("d")  # until it was sent to a replica

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


class SimulatedQueue:
    """One model: its requests arrive here, wait in the queue of their gateway, and are sent to a replica."""

    def __init__(
        self, model: SimModel, clock: Clock, *, gateways: int = 1, seed: int = 0, choice: Choice | None = None
    ) -> None:
        """Raises ValueError for an alternative router (``choice``) with several gateways."""
        if choice is not None and gateways > 1:
            raise ValueError("an alternative router supports one gateway only")
        self.model = model
        self.clock = clock
        self.replicas: list[SimReplica] = []  # replicas in routing
        self.counts = Counts()
        self.measured = Measured()
        self.since = 0.0  # earlier requests are not measured
        self.live = 0
        self.lines: list[FairQueue[SimRequest]] = [
            FairQueue(model.max_queue, model.max_queue_bytes, order=model.queue_order) for _ in range(gateways)
        ]
        self.on_cold: Callable[[], None] | None = None  # a request has arrived without a ready replica
        self.on_empty: Callable[[SimReplica], None] | None = None  # a retired replica has ended its last request
        self._links: list[list[SimLink]] = [[] for _ in range(gateways)]
        self._choice = choice
        self._gateway_of = Random(f"gateways {seed} {model.name}").randrange
        self._count = 0
        self._retired: set[SimReplica] = set()
        self._keys = False  # whether requests with API keys have arrived: without them there is one tenant
        self._ttft_s = model.ttft_s
        if (model.ttft_s, model.tpot_s, model.queue_s) == (None, None, None):
            self._ttft_s = model.judged_ttft_s
        self._waits = WaitPrediction()

    @property
    def waiting(self) -> int:
        return sum(map(len, self.lines))

    @property
    def longest_wait_s(self) -> float:
        """The longest wait of the queued requests."""
        if self._keys or self.model.queue_order != "fair":
            earliest = min((request.arrived_at for line in self.lines for request in line), default=math.inf)
        else:  # the first request has waited the longest
            firsts = [first for line in self.lines if (first := line.peek()) is not None]
            earliest = min((first.arrived_at for first in firsts), default=math.inf)
        return max(0.0, self.clock.now - earliest)

    def set_weight(self, tenant: str, weight: float) -> None:
        """Sets the weight of an API key in all queues."""
        for line in self.lines:
            line.set_weight(tenant, weight)

    def add(self, replica: SimReplica) -> None:
        """Adds a ready replica."""
        self.replicas.append(replica)
        if len(self.lines) > 1:
            for links in self._links:
                links.append(SimLink(replica))
        for gateway in range(len(self.lines)):
            self._pump(gateway)

    def retire(self, replica: SimReplica) -> None:
        """Removes a replica from routing; calls ``on_empty`` after its last request, which may be immediately."""
        self.replicas.remove(replica)
        for links in self._links:
            links[:] = [link for link in links if link.replica is not replica]
        if replica.live:
            self._retired.add(replica)
        elif self.on_empty is not None:
            self.on_empty(replica)

    def lose(self, requests: Sequence[SimRequest]) -> None:
        """Counts requests that a stopped replica has not answered."""
        self.live -= len(requests)
        self.measured.lost += sum(1 for request in requests if request.arrived_at >= self.since)

    def refuse_older(self, than: float) -> None:
        """Refuses queued requests that arrived before ``than``."""
        for line in self.lines:
            for request in [request for request in line if request.arrived_at < than]:
                line.remove(request)
                self._refuse(request)

    def arrive(self, arrival: Arrival) -> None:
        """Handles one arrival.

        1. the queue is empty, and a replica has a free slot   -> sent immediately
        2. the queue is full, or the wait would be too long    -> refused
        3. else                                                -> queued
        """
        now = self.clock.now
        self._count += 1
        request = SimRequest(arrival, self._count, now)
        self.counts.arrived += 1
        if now >= self.since:
            self.measured.arrived += 1
        if arrival.key:
            self._keys = True
        lines, gateway = self.lines, 0
        if len(lines) > 1:
            request.gateway = gateway = self._gateway_of(len(lines))
        line = lines[gateway]
        if not line and self._send_immediately(request, line):
            return
        late = self._would_be_late(request, line)
        if not late and line.refusal(request) is not None:
            for other in line.make_room(request):
                self._refuse(other)
        if late or line.refusal(request) is not None:
            self._refuse(request)
        else:
            line.push(request)
            if request.deadline is not None:
                self.clock.at(request.deadline, self._expire, request)
        if not self.replicas and self.on_cold is not None and self.waiting == 1:
            self.on_cold()

    # Inside

    def _send_immediately(self, request: SimRequest, line: FairQueue[SimRequest]) -> bool:
        """Step 1: the queue is empty."""
        if len(self.lines) > 1:
            sent = self._send_over_link(request, line)
        else:
            replicas, choice = self.replicas, self._choice
            replica = choose(replicas, None, self._stepped_at) if choice is None else choice(replicas, request)
            sent = replica is not None
            if replica is not None:
                self._send(request, replica, line)
        if sent and self._keys:
            line.pass_by(request)
        return sent

    def _stepped_at(self, replica: SimReplica) -> float:
        return replica.stepped_at(self.clock.now)

    def _link_stepped_at(self, link: SimLink) -> float:
        return link.replica.stepped_at(self.clock.now) if link.live else -math.inf

    def _would_be_late(self, request: SimRequest, line: FairQueue[SimRequest]) -> bool:
        limit = self.model.max_wait_s
        if limit is None:
            return False
        request.deadline = request.arrived_at + limit
        slots = self.model.slots * len(self.replicas)
        if not slots:
            return False
        own_wait_s = line.own_wait_s(request, self.clock.now)
        running = [math.inf] * min(slots, self.live)
        return self._waits.until_s(line.ahead_of(request), slots, running, own_wait_s) > limit

    def _expire(self, request: SimRequest) -> None:
        line = self.lines[request.gateway]
        if not request.sent_at and line.remove(request):
            self._refuse(request)

    def _refuse(self, request: SimRequest) -> None:
        if request.arrived_at >= self.since:
            self.measured.refused += 1

    def _pump(self, gateway: int) -> None:
        line = self.lines[gateway]
        if len(self.lines) > 1:
            while line and self._send_over_link(None, line, gateway):
                pass
            return
        replicas, choice = self.replicas, self._choice
        while line:
            if choice is None:
                replica = choose(replicas, None, self._stepped_at)
            else:
                first = line.peek()
                assert first is not None
                replica = choice(replicas, first)
            if replica is None:
                return
            self._send(line.pop(), replica, line)

    def _send_over_link(
        self, request: SimRequest | None, line: FairQueue[SimRequest], gateway: int | None = None
    ) -> bool:
        """Sends ``request``, or the next of the line, as the data plane does: a replica without free slots replies
        BUSY and notifies the gateway later. Messages take no time here."""
        if gateway is None:
            assert request is not None
            gateway = request.gateway
        while (link := choose(self._links[gateway], None, self._link_stepped_at)) is not None:
            replica = link.replica
            if replica.live < replica.slots:
                link.live += 1
                link.prefilling += 1
                self._send(line.pop() if request is None else request, replica, line)
                return True
            link.full = True
            replica.busy_gateways.append(gateway)
        return False

    def _send(self, request: SimRequest, replica: SimReplica, line: FairQueue[SimRequest]) -> None:
        due = replica.due
        self.live += 1
        replica.send(request, self.clock.now)
        if self._keys:
            line.charge(request.tenant, request.tokens)
        if replica.due != due:
            self.clock.at(replica.due, self._advance, replica)

    def _advance(self, replica: SimReplica) -> None:
        now = self.clock.now
        if replica.due != now:  # this call is obsolete: ``due`` has changed
            return
        replica.advance(now)
        due = replica.due
        if replica.began:
            self._handle_begun(replica.began, replica, now)
        if replica.ended:
            self._handle_ended(replica, now)
        if replica.due == due:  # else a request was sent to it, which scheduled its own call
            self.clock.at(due, self._advance, replica)

    def _handle_begun(self, began: list[SimRequest], replica: SimReplica, now: float) -> None:
        if len(self.lines) > 1:
            for request in began:
                self._link(replica, request).prefilling -= 1

    def _handle_ended(self, replica: SimReplica, now: float) -> None:
        counts, measured, ended = self.counts, self.measured, replica.ended
        counts.ended += len(ended)
        self.live -= len(ended)
        for request in ended:
            held = now - request.sent_at
            counts.slot_s += held
            self._waits.ended(held)
            if self._keys:
                self.lines[request.gateway].charge(request.tenant, 0, request.output_tokens)
            if request.arrived_at >= self.since:
                self._measure(request, now, measured)
        if replica in self._retired:
            if not replica.live:
                self._retired.discard(replica)
                if self.on_empty is not None:
                    self.on_empty(replica)
        elif len(self.lines) > 1:
            self._offer_slots(replica)
        elif self.lines[0]:
            self._pump(0)

    def _measure(self, request: SimRequest, now: float, measured: Measured) -> None:
        model, arrived_at, tokens = self.model, request.arrived_at, request.output_tokens
        ttft = request.first_at - arrived_at
        queued = request.sent_at - arrived_at
        measured.ttfts.append(ttft)
        measured.latencies.append(now - arrived_at)
        measured.queued.append(queued)
        measured.output_tokens += tokens
        measured.busy_s += now - request.sent_at
        if (
            (self._ttft_s is None or ttft <= self._ttft_s)
            and (model.queue_s is None or queued <= model.queue_s)
            and (model.tpot_s is None or tokens < 2 or now - request.first_at <= model.tpot_s * (tokens - 1))
        ):
            measured.attained += 1

    def _offer_slots(self, replica: SimReplica) -> None:
        """Free slots go first to gateways that received BUSY, in their order; then to those whose requests ended."""
        for request in replica.ended:
            link = self._link(replica, request)
            link.live -= 1
            link.full = False
        while replica.busy_gateways and replica.live < replica.slots:
            gateway = replica.busy_gateways.popleft()
            link = next(link for link in self._links[gateway] if link.replica is replica)
            link.full = False
            self._pump(gateway)
        for gateway in sorted({request.gateway for request in replica.ended}):
            self._pump(gateway)

    def _link(self, replica: SimReplica, request: SimRequest) -> SimLink:
        """Returns the link of the request's gateway; a new one for a retired replica."""
        return next((link for link in self._links[request.gateway] if link.replica is replica), SimLink(replica))
