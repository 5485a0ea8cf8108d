"""How many replicas each model should have: one decision over all models that share cores. Pure: the time is given.

`autoscale` is the whole of it. What was asked for is a `History` (`forecast`), what there is a `FleetNow`, what is
decided are `Targets`. docs/scaling.md tells its users each rule with its number and why.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from orchestrator.fleet.core_allocation import CoreAllocation, Owner, Place
from orchestrator.scaling.forecast import Forecast, History, Load
from orchestrator.scaling.service_capacity import RULES, Rules, ServiceCapacity

__all__ = ["RULES", "FleetNow", "History", "Load", "ModelNow", "Objectives", "Rules", "Targets", "autoscale"]


@dataclass(frozen=True)
class Objectives:
    """What requests of a model should meet, in seconds; None: nobody says."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    queue_s: float | None = None


@dataclass(frozen=True)
class ModelNow:
    """A model as it stands. Times are seconds of the clock that ``now`` is of."""

    name: str
    cores: int  # of one replica; 0 where it takes none
    slots: int  # of one replica
    min: int  # as it holds now, with the schedules
    max: int  # as it holds now, with the schedules
    priority: int = 0  # a greater one goes first
    load_s: float = 60.0  # from the start of a replica to its first request
    objectives: Objectives = Objectives()
    idle_s: float = 600.0  # without a request, until it goes to zero
    override: int | None = None  # what somebody has scaled it to by hand
    target: int = 0  # what was decided last
    ready: int = 0
    starting: int = 0
    since: float | None = None  # when its newest replica became ready, or began to start if that is not ready yet
    given_up: int = 0  # that have failed and are not started again for now
    reachable: int | None = None  # how many the planner could place last
    worth_per_1000: float | None = None  # of requests that are answered in time, in the currency of the prices
    first_ready_at: float | None = None  # when a replica was ready first since it had none: the idle clock starts there
    places: tuple[Place, ...] = ()  # host and first core of its replicas, lowest index first; as far as it is known
    prefill_s: float = 0.5  # of one prompt: what of ttft_s is not for waiting


@dataclass(frozen=True)
class FleetNow:
    """The models, and the cores that they share."""

    models: tuple[ModelNow, ...]
    hosts: tuple[tuple[int, float], ...]  # usable cores, and the price of one for an hour
    blocked: tuple[frozenset[int], ...] = ()  # numbers of the cores of each host that nobody may use


@dataclass(frozen=True)
class Targets:
    """What was decided: replicas by model, and one sentence for each model that changes, or is held back."""

    counts: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    reasons: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))


def autoscale(history: History, fleet: FleetNow, now: float, rules: Rules = RULES) -> Targets:
    """How many replicas each model should have now.

    1. A model keeps what it has, within its min and max; one that somebody has scaled by hand gets that number.
    2. A model of min 0 that nobody has asked anything for idle_s goes to zero.
    3. What costs money and is not worth it goes.
    4. Replicas that have cores keep them; those of min (or by hand) that have none get some: free ones, those of a
       lower priority, those of an equal one beyond its min. What is then without a place is cut.
    5. From the highest priority to the lowest, and in each by what a core serves more: each model may grow by what
       step_cores hold, onto free cores, onto those of lower priority, or onto those of equal priority that serve
       less there: gain x (H - load) / H > 2.5 x loss. At most two replicas end for that.

    The cores of all targets together are never more than those of the hosts.
    """
    table = _Table(history, fleet, now, rules)
    table.drop_idle()
    table.drop_costly()
    table.settle()
    table.grow()
    return table.targets()


class _Seat:
    """One model while it is decided upon."""

    def __init__(self, model: ModelNow, history: History, now: float, rules: Rules) -> None:
        by_hand = model.override
        self.model = model
        self.rules = rules
        self.low = max(0, min(model.min, model.max) if by_hand is None else min(by_hand, model.max))
        self.high = max(self.low, model.max if by_hand is None else self.low)
        self.count = min(max(model.target, self.low), self.high)
        self.places: list[Place | None] = []  # of those that have their cores
        self.reason: str | None = None
        self.last = history.last(model.name)
        self.asked_at = history.asked_at(model.name)
        self.unserved_s = history.unserved_s(model.name, now)
        self.forecast: Forecast = history.forecast(model.name)
        self.worth = ServiceCapacity(
            self.forecast, model.slots, self._slack_s(), model.objectives.tpot_s is not None, rules
        )
        self.horizon_s = max(rules.horizon_s, rules.horizon_loads * model.load_s)
        self.resident = self._resident(now, rules)

    def _slack_s(self) -> float | None:
        """What a request may wait, by the objectives."""
        wished = self.model.objectives
        slack = [] if wished.queue_s is None else [wished.queue_s]
        if wished.ttft_s is not None:
            slack.append(max(0.0, wished.ttft_s - self.model.prefill_s))
        return min(slack, default=None)

    def _resident(self, now: float, rules: Rules) -> bool:
        """Whether its newest replica has had its time: what was measured before that one served tells nothing."""
        model = self.model
        wanted = model.target if model.reachable is None else min(model.target, model.reachable)
        if model.ready + model.starting + model.given_up < wanted:
            return False  # its newest has not even begun: it waits for cores that become free
        if model.since is None:
            return model.starting == 0
        return model.starting == 0 and now - model.since >= max(rules.residency * model.load_s, rules.warm_up_s)

    @property
    def changed(self) -> int:
        return self.count - self.model.target

    def gain(self) -> float:
        """Requests a second that one replica more serves in time."""
        return self.worth.more(self.count, self.high)

    @property
    def step(self) -> int:
        """Replicas that it may grow by in one decision."""
        cores = self.model.cores
        return max(1, self.rules.step_cores // cores) if cores else 1

    def loss(self, fewer: int = 1) -> float:
        """Requests a second, over the horizon, that so many fewer serve no longer in time.

        Of a model that is idle only those are lost that come until a replica is loaded again, with some delay.
        """
        lost = self.worth.of(self.count) - self.worth.of(self.count - fewer)
        if self.last.live or self.last.waiting or self.last.arrived:
            return lost
        return lost * min(1.0, self.rules.reload * self.model.load_s / self.horizon_s)

    def spare(self) -> bool:
        """Whether the load fits on one fewer."""
        return self.count > 0 and self.worth.fits(self.count - 1)


@dataclass(frozen=True)
class _Offer:
    """Cores in a row that would be free if some replicas ended."""

    rank: tuple[bool, float, int, Place]  # nobody falls below min while another is above its own; least loss first
    place: Place
    ends: Mapping[str, int]  # how many of each model
    loss: float  # requests a second that those of no lower priority would serve no longer
    equal: int  # how many those are
    keeps_one: bool  # whether each of these models keeps a replica


class _Table:
    """All models while they are decided upon."""

    def __init__(self, history: History, fleet: FleetNow, now: float, rules: Rules) -> None:
        self.now = now
        self.rules = rules
        self.seats = {model.name: _Seat(model, history, now, rules) for model in fleet.models}
        self.classes = sorted({model.priority for model in fleet.models}, reverse=True)
        self.floor = CoreAllocation(fleet.hosts, fleet.blocked)
        self.total = sum(cores for cores, _ in fleet.hosts)
        self.costs = any(price > 0.0 for _, price in fleet.hosts)
        self._known_offers: dict[tuple[int, int, bool], list[_Offer]] = {}  # until somebody comes or goes
        self.promised = 0  # cores for min, of which the planner is to say where
        self.ended = 0  # replicas that end for others that serve more there

    # 2.
    def drop_idle(self) -> None:
        for seat in self.seats.values():
            model = seat.model
            if seat.low or not seat.count or model.override is not None or model.first_ready_at is None:
                continue
            idle = self.now - max(model.first_ready_at, seat.asked_at or model.first_ready_at)
            if idle >= model.idle_s and not seat.last.waiting and not seat.last.live:
                seat.count = 0
                seat.reason = f"no request for {idle:.0f} s, and its idle_s is {model.idle_s:.0f}"

    # 3.
    def drop_costly(self) -> None:
        """The last replica of a model, where it lies on cores that cost more than what it serves is worth."""
        if not self.costs:
            return
        for seat in self.seats.values():
            model, lies = seat.model, seat.model.places
            if seat.count <= seat.low or not seat.resident or len(lies) != seat.count:
                continue
            cost = self.floor.price(lies[-1]) * model.cores
            if cost <= 0.0:
                continue
            if model.worth_per_1000 is None:
                if seat.spare():
                    seat.count -= 1
                    seat.reason = f"its cores cost {cost:.2f} an hour, and {seat.count} replicas suffice"
                continue
            worth = self._worth(seat, seat.loss())
            if worth * self.rules.keep_paid < cost:
                seat.count -= 1
                seat.reason = f"its cores cost {cost:.2f} an hour, and the last replica is worth {worth:.2f}"

    def _worth(self, seat: _Seat, requests_s: float) -> float:
        """Money an hour; where nobody says what requests are worth, any, as long as the load does not fit without."""
        worth = seat.model.worth_per_1000
        if worth is None:
            return 0.0 if seat.worth.fits(seat.count) else math.inf
        return worth * requests_s * 3.6

    # 4.
    def settle(self) -> None:
        """Each replica gets its cores; what is without is cut."""
        ranked = sorted(self.seats.values(), key=lambda seat: (-seat.model.priority, seat.model.name))
        for seat in ranked:
            for nth, place in enumerate(seat.model.places[: seat.count]):
                if len(seat.places) == nth and self.floor.take((seat.model.name, nth), seat.model.cores, place):
                    seat.places.append(place)
        self._settle_rest([seat for seat in ranked if len(seat.places) < seat.low], least=True)
        self._settle_rest([seat for seat in ranked if len(seat.places) < seat.count], least=False)
        self._cut(ranked)

    def _settle_rest(self, seats: list[_Seat], *, least: bool) -> None:
        """Cores for replicas that have none, the largest first within a priority."""
        for seat in sorted(seats, key=lambda seat: (-seat.model.priority, -seat.model.cores, seat.model.name)):
            while len(seat.places) < (seat.low if least else seat.count):
                place = self._free_place(seat, least=least)
                if place is None and least:
                    offer = self._vacate(seat, least=True)
                    place = None if offer is None else offer.place
                if place is None and seat.model.cores:
                    break
                self._put(seat, place)

    def _cut(self, ranked: list[_Seat]) -> None:
        """What is beyond min and has no cores goes; and what min asks for, where there are not even the cores."""
        left = self.total - sum(seat.model.cores * len(seat.places) for seat in self.seats.values())
        for seat in ranked:
            missing = seat.count - len(seat.places)
            if missing <= 0:
                continue
            cores = max(1, seat.model.cores)
            # what min asks for may find room that only the planner knows of
            kept = min(max(0, seat.low - len(seat.places)), left // cores)
            left -= kept * cores
            self.promised += kept * seat.model.cores
            if kept < missing:
                seat.count = len(seat.places) + kept
                seat.reason = f"no {cores} free cores in a row for {_replicas(missing - kept)}"

    # 5.
    def grow(self) -> None:
        for priority in self.classes:
            bids = [(self._bid(seat), seat) for seat in self.seats.values() if seat.model.priority == priority]
            bids = [bid for bid in bids if bid[0] > 0.0]
            bids.sort(key=lambda bid: (-bid[0], bid[1].model.cores, bid[1].model.name))
            for _, seat in bids:
                grown = True
                while grown and self._bid(seat) > 0.0:
                    before = seat.count
                    self._grow(seat)
                    grown = seat.count > before

    def _bid(self, seat: _Seat) -> float:
        """What a core would serve more for the rest of the horizon; 0.0 where the model is not to grow."""
        model, rules = seat.model, self.rules
        if seat.count >= seat.high or seat.count < model.target or len(seat.places) < seat.count:
            return 0.0
        if seat.changed >= seat.step:
            return 0.0
        if model.reachable is not None and model.reachable < model.target:
            return 0.0  # the planner is still looking for room for the last one
        if model.ready == 0 and seat.count >= max(rules.first_steps, seat.step):
            return 0.0
        if seat.count == 0 and self._idle(seat) and not self._must_wake(seat):
            return 0.0  # what is left of the forecast of a model that went to zero starts nothing
        left = seat.horizon_s - model.load_s
        if seat.worth.most_more(seat.count) * left < rules.least_served and not self._must_wake(seat):
            return 0.0
        served = self._served(seat)
        return served / max(1, model.cores) if served >= rules.least_served or self._must_wake(seat) else 0.0

    def _idle(self, seat: _Seat) -> bool:
        """Whether nobody has asked for it for so long that it goes to zero."""
        return seat.asked_at is None or self.now - seat.asked_at >= seat.model.idle_s

    def _served(self, seat: _Seat) -> float:
        """Requests that one replica more serves in time within the horizon; for the first also those that wait."""
        served = seat.gain() * (seat.horizon_s - seat.model.load_s)
        if seat.count == 0:
            served += self.rules.waiting_weight * seat.last.waiting
        return served

    def _must_wake(self, seat: _Seat) -> bool:
        return seat.count == 0 and seat.last.waiting > 0

    def _grow(self, seat: _Seat) -> None:
        model, before = seat.model, seat.count
        gain = seat.gain()
        place = self._free_place(seat, least=False)
        where = f"on {model.cores} free cores"
        if place is None and model.cores:
            offer = self._vacate(seat, least=False)
            if offer is None:
                if seat.reason is None:
                    seat.reason = f"held back: no cores that serve less elsewhere; {self._demand(seat)}"
                return
            place, where = offer.place, f"on the cores of {_replicas(sum(offer.ends.values()))} that served less"
        self._put(seat, place)
        seat.count = len(seat.places)
        what = f"one more serves {gain:.2f} requests a second more"
        if before == 0:
            what = "the first requests wake it" if seat.last.waiting else what
        seat.reason = f"{self._demand(seat)}; {what}, {where}"

    def _demand(self, seat: _Seat) -> str:
        guess = seat.forecast
        return (
            f"{guess.rates[0]:.2f} requests a second of {guess.service_s:.1f} s for "
            f"{seat.model.slots * seat.model.target} slots, {guess.waiting} waiting"
        )

    # Room

    def _put(self, seat: _Seat, place: Place | None) -> None:
        if place is not None:
            self.floor.take((seat.model.name, len(seat.places)), seat.model.cores, place)
        seat.places.append(place)
        self._known_offers.clear()

    def _free_place(self, seat: _Seat, *, least: bool) -> Place | None:
        """Cores of nobody; those that cost something only for min, or where it pays."""
        model = seat.model
        if not model.cores or self.floor.free - model.cores < self.promised:
            return None
        most = math.inf if least else self._worth(seat, seat.gain()) / model.cores
        return self.floor.room(model.cores, most=most)

    def _vacate(self, seat: _Seat, *, least: bool) -> _Offer | None:
        """Have others end where they serve the least, and return whose cores; None where nobody may be asked to."""
        model = seat.model
        if not model.cores:
            return None
        worth = self._served(seat) / seat.horizon_s
        most = math.inf if least else self._worth(seat, seat.gain()) / model.cores
        starved = self._starved(seat)
        for offer in self._offers(model.cores, model.priority, least=least):
            if model.name in offer.ends or self.floor.price(offer.place) > most:
                continue
            freed = sum(self.seats[name].model.cores * count for name, count in offer.ends.items())
            if self.floor.free + freed - model.cores < self.promised:
                continue
            if offer.rank[0] and not least and seat.count and seat.worth.fits(seat.count):
                continue  # its load fits without: nobody's min goes for that
            if not least and offer.equal:
                if seat.count and self._abandons(offer):
                    continue
                if self.ended + offer.equal > self.rules.ends_a_tick:
                    continue
                if worth <= self.rules.reluctance * offer.loss and not (starved and offer.keeps_one):
                    if starved or len(self.classes) > 1:
                        continue
                    return None  # the others cost more
            self.ended += offer.equal
            for name, count in offer.ends.items():
                self._end(self.seats[name], count, f"its cores serve more for {model.name}")
            return offer
        return None

    def _offers(self, cores: int, priority: int, *, least: bool) -> list[_Offer]:
        """Where others could end for a replica of that size and priority, those that cost least first."""
        known = self._known_offers.get((cores, priority, least))
        if known is None:
            allowed = {name: self._may_end(priority, other, least=least) for name, other in self.seats.items()}
            found = (self._offer(place, owners, allowed, priority) for place, owners in self.floor.windows(cores))
            known = sorted((offer for offer in found if offer is not None), key=lambda offer: offer.rank)
            self._known_offers[cores, priority, least] = known
        return known

    def _offer(
        self, place: Place, owners: tuple[Owner, ...], allowed: Mapping[str, int], priority: int
    ) -> _Offer | None:
        ends: dict[str, int] = {}
        for name, nth in owners:
            count = len(self.seats[name].places) - nth
            if count > allowed[name]:
                return None
            ends[name] = max(ends.get(name, 0), count)
        if sum(ends.values()) != len(owners):
            return None  # the planner keeps those of the lowest index
        loss = lower = 0.0
        equal, keeps_one, short = 0, True, False
        for name, count in ends.items():
            seat = self.seats[name]
            if seat.model.priority < priority:
                lower += seat.loss(count)
                short = short or len(seat.places) - count < seat.low
                continue
            loss += seat.loss(count)
            equal += count
            keeps_one = keeps_one and seat.count > count
        return _Offer((short, loss + 1e-3 * lower, len(owners), place), place, ends, loss, equal, keeps_one)

    def _abandons(self, offer: _Offer) -> bool:
        """Whether requests wait for a model that would lose its last replica: not for a second one of another."""
        ended = [self.seats[name] for name, count in offer.ends.items() if self.seats[name].count <= count]
        return any(seat.last.waiting for seat in ended)

    def _starved(self, seat: _Seat) -> bool:
        waited = seat.last.longest_wait_s >= self.rules.starved_s or seat.unserved_s >= self.rules.unserved_s
        return seat.count == 0 and waited

    def _may_end(self, priority: int, other: _Seat, *, least: bool) -> int:
        """How many of a model's replicas may end for one of that priority."""
        beyond = max(0, len(other.places) - other.low)
        if other.model.override is not None and other.model.priority >= priority:
            return 0
        if other.model.priority < priority:
            return len(other.places)
        if other.model.priority > priority:
            return min(beyond, 1) if other.resident and other.changed == 0 and other.spare() else 0
        if least:
            return beyond
        if other.changed > 0 or not other.resident:
            return 0
        return beyond

    def _end(self, seat: _Seat, count: int, why: str) -> None:
        for _ in range(count):
            place = seat.places.pop()
            if place is not None:
                self.floor.leave((seat.model.name, len(seat.places)), seat.model.cores, place)
        self._known_offers.clear()
        seat.count = len(seat.places)
        seat.reason = f"{why}; {self._demand(seat)}"

    def targets(self) -> Targets:
        counts, reasons = {}, {}
        for name, seat in self.seats.items():
            counts[name] = seat.count
            target = seat.model.target
            if seat.count != target:
                why = seat.reason or ("scaled by hand" if seat.model.override is not None else "its min and max")
                reasons[name] = f"{target} to {seat.count}: {why}"
            elif seat.reason is not None:
                reasons[name] = seat.reason
        return Targets(MappingProxyType(counts), MappingProxyType(reasons))


def _replicas(count: int) -> str:
    return f"{count} replica" if count == 1 else f"{count} replicas"
