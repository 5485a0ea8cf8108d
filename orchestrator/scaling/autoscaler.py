"""The autoscaler: decides the number of replicas of all models that share cores, in one pure function.

`autoscale` takes the demand so far (`History`) and the state of the fleet (`FleetNow`) and returns `Targets`.
docs/scaling.md documents each rule with its number and its reason.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from orchestrator.scaling.forecast import History, Load
from orchestrator.scaling.service_capacity import RULES, EncoderCapacity, ServiceCapacity
from placements.facts.plural import counted
from placements.planner.board import Tenant
from placements.planner.capacity import Capacity, Need, Place, Vacancy
from placements.planner.host_pool import HostPool
from placements.spec.sections import Objectives

__all__ = ["FleetNow", "History", "Load", "ModelNow", "Targets", "autoscale"]


@dataclass(frozen=True)
class ModelNow:
    """The state of a model. Times are in seconds, of the same clock as ``now``."""

    name: str
    need: Need | None  # of each replica; None if it uses no cores
    slots: int  # per replica
    min: int  # at this time, with the schedules
    max: int  # at this time, with the schedules
    priority: int = 0  # higher first
    load_s: float = 60.0  # from the start of a replica to its first request
    objectives: Objectives = field(default_factory=Objectives)
    idle_s: float = 600.0  # time without a request until it scales to zero
    override: int | None = None  # the number of replicas that an operator has set
    target: int = 0  # the last decision
    ready: int = 0
    starting: int = 0
    since: float | None = None  # when its newest replica became ready, or started if it is not ready yet
    given_up: int = 0  # failed replicas that are not restarted for now
    reachable: int | None = None  # replicas that the planner could place last
    worth_per_1000: float | None = None  # of requests that are answered in time, in the currency of the prices
    first_ready_at: float | None = None  # when it first had a ready replica again: the idle clock starts then
    places: tuple[Place, ...] = ()  # of its replicas, lowest index first, as far as known
    prefill_s: float = 0.5  # of one prompt: the part of ttft_s that is not queueing
    encodes: bool = False  # it is an encoder, whose engine works for all requests in its slots at once

    @property
    def cores(self) -> int:
        """The cores of each replica."""
        return 0 if self.need is None else self.need.demand.size


@dataclass(frozen=True)
class FleetNow:
    """The models, and the hosts whose cores they share."""

    models: tuple[ModelNow, ...]
    pool: HostPool  # with the price of one core per hour


@dataclass(frozen=True)
class Targets:
    """The decision: replicas by model, and the reason for each model that changes or is held back."""

    counts: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    reasons: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))


def autoscale(history: History, fleet: FleetNow, now: float) -> Targets:
    """Returns the number of replicas that each model should have now.

    1. A model keeps its replicas, within its min and max; a model that an operator has scaled gets that number.
    2. A model of min 0 without requests for idle_s scales to zero. Otherwise the objective items_per_second of an
       encoder raises its min.
    3. Replicas that cost more than they are worth are removed.
    4. Replicas that have cores keep them. Those of min (or of an operator) without cores get free ones, those of a
       lower priority, or those of an equal priority beyond its min. Replicas that then have no cores are dropped.
    5. From the highest priority to the lowest, and in each by the gain per core: each model may grow by step_cores,
       onto free cores, onto those of lower priority, or onto those of equal priority that serve less there:
       gain x (H - load) / H > 3 x loss. At most four replicas are removed for that.

    Cores are counted by the planner's board (`Capacity`): a replica counts as possible only where `plan` places it.
    """
    table = _Table(history, fleet, now)
    table.drop_idle()
    table.follow_items_per_second()
    table.drop_costly()
    table.settle()
    table.grow()
    return table.targets()


class _Seat:
    """One model during a decision."""

    def __init__(self, model: ModelNow, history: History, now: float) -> None:
        override = model.override
        self.model = model
        self.low = max(0, min(model.min, model.max) if override is None else min(override, model.max))
        self.high = max(self.low, model.max if override is None else self.low)
        self.count = min(max(model.target, self.low), self.high)
        self.placed: list[Tenant | None] = []  # the replicas that have cores; None for one that uses none
        self.reason: str | None = None
        course = history.course(model.name)
        self.last = course.last
        self.asked_at = course.asked_at
        self.unserved_s = course.unserved_s(now)
        self.forecast = history.forecast(model.name)
        slack_s, tpot = self._slack_s(), model.objectives.tpot_ms is not None
        self.worth = (
            EncoderCapacity(self.forecast, slack_s)
            if model.encodes
            else ServiceCapacity(self.forecast, model.slots, slack_s, tpot)
        )
        self.horizon_s = max(RULES.horizon_s, RULES.horizon_loads * model.load_s)
        self.resident = self._resident(now)

    def _slack_s(self) -> float | None:
        """Returns how long a request may wait by the objectives."""
        objectives = self.model.objectives
        slack = [] if objectives.queue_ms is None else [objectives.queue_ms / 1000]
        if objectives.ttft_ms is not None:
            slack.append(max(0.0, objectives.ttft_ms / 1000 - self.model.prefill_s))
        return min(slack, default=None)

    def _resident(self, now: float) -> bool:
        """Returns whether its newest replica has served long enough: earlier measurements do not include it."""
        model = self.model
        target = model.target if model.reachable is None else min(model.target, model.reachable)
        if model.ready + model.starting + model.given_up < target:
            return False  # its newest replica has not started: it waits for cores
        if model.since is None:
            return model.starting == 0
        return model.starting == 0 and now - model.since >= max(RULES.residency * model.load_s, RULES.warm_up_s)

    @property
    def changed(self) -> int:
        return self.count - self.model.target

    def gain(self) -> float:
        """Returns the requests per second that one more replica serves in time."""
        return self.worth.gain(self.count, self.high)

    @property
    def step(self) -> int:
        """The largest number of replicas to add in one decision."""
        cores = self.model.cores
        return max(1, RULES.step_cores // cores) if cores else 1

    def loss(self, fewer: int = 1) -> float:
        """Returns the requests per second, over the horizon, that are no longer served in time with ``fewer`` replicas
        less.

        An idle model loses only the requests that arrive until a replica is loaded again.
        """
        lost = self.worth.of(self.count) - self.worth.of(self.count - fewer)
        if self.last.live or self.last.waiting or self.last.arrived:
            return lost
        return lost * min(1.0, RULES.reload * self.model.load_s / self.horizon_s)

    def spare(self) -> bool:
        """Returns whether the load fits on one replica less."""
        return self.count > 0 and self.worth.fits(self.count - 1)

    def idle(self, now: float) -> bool:
        """Returns whether it has been without requests for idle_s."""
        return self.asked_at is None or now - self.asked_at >= self.model.idle_s

    def served(self) -> float:
        """Returns the requests that one more replica serves in time within the horizon; the first one also serves some
        of the waiting ones."""
        served = self.gain() * (self.horizon_s - self.model.load_s)
        if self.count == 0:
            served += RULES.waiting_weight * self.last.waiting
        return served

    def must_wake(self) -> bool:
        return self.count == 0 and self.last.waiting > 0

    def demand(self) -> str:
        forecast = self.forecast
        if self.model.encodes:
            return (
                f"{forecast.rates[0]:.2f} requests per second, of which a replica serves {1 / forecast.work_s:.2f}, "
                f"for {counted(self.model.target, 'replica')}, {forecast.waiting} waiting"
            )
        return (
            f"{forecast.rates[0]:.2f} requests per second of {forecast.service_s:.1f} s for "
            f"{self.model.slots * self.model.target} slots, {forecast.waiting} waiting"
        )


@dataclass(frozen=True)
class _Offer:
    """Contiguous cores that become free if some replicas are removed."""

    rank: tuple[bool, float, int, bool, Place]  # last if a model would fall below its min; then least loss first
    vacancy: Vacancy
    removals: Mapping[str, int]  # replicas to remove, by model
    loss: float  # requests per second that models of the same or a higher priority lose
    equal: int  # removals of these models
    keeps_one: bool  # whether each of these models keeps a replica


class _Table:
    """All models and the allocation of their cores during a decision."""

    def __init__(self, history: History, fleet: FleetNow, now: float) -> None:
        self.now = now
        self.seats = {model.name: _Seat(model, history, now) for model in fleet.models}
        self.classes = sorted({model.priority for model in fleet.models}, reverse=True)
        self.names = [model.name for model in fleet.models]
        pins = [pin for model in fleet.models if model.need is not None for pin in model.need.pins]
        self.capacity = Capacity(fleet.pool, pins)
        self.costs = any(price > 0.0 for price in fleet.pool.prices)
        self._offers_cache: dict[tuple[object, ...], list[_Offer]] = {}  # until a replica is added or removed
        self.promised: list[tuple[frozenset[int], int]] = []  # kinds of host and cores for min that moves would free
        self.removed = 0  # replicas that are removed for others that serve more on their cores

    # 2.
    def drop_idle(self) -> None:
        for seat in self.seats.values():
            model = seat.model
            if seat.low or not seat.count or model.override is not None or model.first_ready_at is None:
                continue
            idle = self.now - max(model.first_ready_at, seat.asked_at or model.first_ready_at)
            if idle >= model.idle_s and not seat.last.waiting and not seat.last.live:
                seat.count = 0
                seat.reason = f"no request for {idle:.0f} s (idle_s {model.idle_s:.0f})"

    def follow_items_per_second(self) -> None:
        """Raises the min of models to the replicas that encode as many inputs per second as wanted, once measured."""
        for seat in self.seats.values():
            wanted, input_s = seat.model.objectives.items_per_second, seat.forecast.input_s
            if wanted is None or input_s is None or not seat.count or seat.model.override is not None:
                continue
            needed = math.ceil(wanted * input_s)
            seat.low = max(seat.low, min(needed, seat.high))
            if seat.count < seat.low:
                seat.count = seat.low
                seat.reason = (
                    f"items_per_second {wanted:g} needs {needed}; a replica encodes {1 / input_s:.1f} per second"
                )

    # 3.
    def drop_costly(self) -> None:
        """Removes the last replica of a model if its cores cost more than its requests are worth."""
        if not self.costs:
            return
        for seat in self.seats.values():
            model, places = seat.model, seat.model.places
            if seat.count <= seat.low or not seat.resident or len(places) != seat.count or not places:
                continue
            cost = self.capacity.pool.prices[places[-1][0]] * model.cores
            if cost <= 0.0:
                continue
            if model.worth_per_1000 is None:
                if seat.spare():
                    seat.count -= 1
                    seat.reason = (
                        f"its cores cost {cost:.2f} per hour, and {counted(seat.count, 'replica')} can serve the load"
                    )
                continue
            worth = self._worth(seat, seat.loss())
            if worth * RULES.keep_paid < cost:
                seat.count -= 1
                seat.reason = f"its cores cost {cost:.2f} per hour, and the last replica is worth {worth:.2f}"

    def _worth(self, seat: _Seat, requests_s: float) -> float:
        """Returns the worth of requests per hour; if none is configured, infinite until the replicas serve the load."""
        worth = seat.model.worth_per_1000
        if worth is None:
            return 0.0 if seat.worth.fits(seat.count) else math.inf
        return worth * requests_s * 3.6

    # 4.
    def settle(self) -> None:
        """Assigns cores to each replica and drops those without."""
        ranked = sorted(self.seats.values(), key=lambda seat: (-seat.model.priority, seat.model.name))
        for seat in ranked:
            for place in seat.model.places[: seat.count]:
                tenant = self._tenant(seat)
                if tenant is None or not self.capacity.hold(tenant, place):
                    break
                seat.placed.append(tenant)
        self._settle_rest([seat for seat in ranked if len(seat.placed) < seat.low], least=True)
        self._settle_rest([seat for seat in ranked if len(seat.placed) < seat.count], least=False)
        for seat in ranked:
            self._drop_unplaced(seat)

    def _settle_rest(self, seats: list[_Seat], *, least: bool) -> None:
        """Assigns cores to replicas that have none, the largest first within a priority."""
        for seat in sorted(seats, key=lambda seat: (-seat.model.priority, -seat.model.cores, seat.model.name)):
            while len(seat.placed) < (seat.low if least else seat.count):
                if not (self._add(seat, least=least) or (least and self._vacate(seat, least=True) is not None)):
                    break

    def _drop_unplaced(self, seat: _Seat) -> None:
        """Drops replicas without cores: those beyond min, and those of min if the hosts do not have enough cores."""
        missing = seat.count - len(seat.placed)
        if missing <= 0:
            return
        need, cores = seat.model.need, max(1, seat.model.cores)
        kinds = frozenset[int]() if need is None or need.pins else need.demand.kinds
        free = self.capacity.free(kinds) - sum(other for of, other in self.promised if of & kinds)
        # the planner may find room for the replicas of min by moving others
        retained = min(max(0, seat.low - len(seat.placed)), max(0, free) // cores)
        if retained:
            self.promised.append((kinds, retained * cores))
        if retained < missing:
            seat.count = len(seat.placed) + retained
            seat.reason = f"no {cores} contiguous free cores for {counted(missing - retained, 'replica')}"

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
        """Returns what one more core would serve for the rest of the horizon; 0.0 if the model must not grow."""
        model = seat.model
        if seat.count >= seat.high or seat.count < model.target or len(seat.placed) < seat.count:
            return 0.0
        if seat.changed >= seat.step:
            return 0.0
        if model.reachable is not None and model.reachable < model.target:
            return 0.0  # the planner has not found room for the last replica yet
        if model.ready == 0 and seat.count >= max(RULES.first_steps, seat.step):
            return 0.0
        if seat.count == 0 and seat.idle(self.now) and not seat.must_wake():
            return 0.0  # the decaying forecast of a model that scaled to zero must not start it
        if model.encodes and seat.count and seat.worth.fits(seat.count):
            return 0.0  # at its many requests per second, the smallest share of them would be worth a replica
        remaining_s = seat.horizon_s - model.load_s
        if seat.worth.unserved(seat.count) * remaining_s < RULES.least_served and not seat.must_wake():
            return 0.0
        served = seat.served()
        return served / max(1, model.cores) if served >= RULES.least_served or seat.must_wake() else 0.0

    def _grow(self, seat: _Seat) -> None:
        model, before = seat.model, seat.count
        gain = seat.gain()
        where = f"on {model.cores} free cores"
        if not self._add(seat, least=False):
            offer = self._vacate(seat, least=False)
            if offer is None:
                if seat.reason is None:
                    seat.reason = f"held back: no cores that serve less elsewhere; {seat.demand()}"
                return
            where = f"on the cores of {counted(sum(offer.removals.values()), 'replica')} that served less"
        seat.count = len(seat.placed)
        effect = f"one more replica serves {gain:.2f} more requests per second"
        if before == 0 and seat.last.waiting:
            effect = "started for waiting requests"
        seat.reason = f"{seat.demand()}; {effect}, {where}"

    # Room

    def _tenant(self, seat: _Seat) -> Tenant | None:
        """Returns the next replica of a model, without a place; None if it uses no cores."""
        model, nth = seat.model, len(seat.placed)
        if model.need is None:
            return None
        order, grade = self.names.index(model.name), (-model.priority, nth >= seat.low, nth >= len(model.places))
        return Tenant(order, nth, model.cores, grade, model.need.demand)

    def _add(self, seat: _Seat, *, least: bool) -> bool:
        """Adds a replica on free cores; on cores with a price only for min, or if the replica is worth it."""
        need, tenant = seat.model.need, self._tenant(seat)
        if need is not None and tenant is not None:
            own = [placed for placed in seat.placed if placed is not None]
            if not self.capacity.place(tenant, need, own, most=self._most(seat, least=least)):
                return False
            if not self._keeps_promises():
                self.capacity.remove(tenant)
                return False
        seat.placed.append(tenant)
        self._offers_cache.clear()
        return True

    def _most(self, seat: _Seat, *, least: bool) -> float:
        """Returns the highest price per core and hour that one more replica is worth."""
        return math.inf if least else self._worth(seat, seat.gain()) / max(1, seat.model.cores)

    def _keeps_promises(self) -> bool:
        return all(self.capacity.free(kinds) >= self._promised_on(kinds) for kinds, _ in self.promised)

    def _promised_on(self, kinds: frozenset[int]) -> int:
        return sum(cores for others, cores in self.promised if others <= kinds)

    def _vacate(self, seat: _Seat, *, least: bool) -> _Offer | None:
        """Adds a replica in place of others, where they serve the least; returns None if none can be removed."""
        model, tenant = seat.model, self._tenant(seat)
        if model.need is None or tenant is None:
            return None
        worth = seat.served() / seat.horizon_s
        most = self._most(seat, least=least)
        starved = self._starved(seat)
        for offer in self._offers(seat, least=least):
            if model.name in offer.removals or self.capacity.pool.prices[offer.vacancy.place[0]] > most:
                continue
            if offer.rank[0] and not least and seat.count and seat.worth.fits(seat.count):
                continue  # its load fits without it: no other model falls below its min for that
            if not least and offer.equal:
                if seat.count and self._abandons(offer):
                    continue
                if self.removed + offer.equal > RULES.removals_per_decision:
                    continue
                if worth <= RULES.reluctance * offer.loss and not (starved and offer.keeps_one):
                    if starved or len(self.classes) > 1:
                        continue
                    return None  # the remaining offers cost more
            if self._accept(offer, seat, tenant):
                return offer
        return None

    def _accept(self, offer: _Offer, seat: _Seat, tenant: Tenant) -> bool:
        """Removes the replicas of an offer and puts the tenant there, unless cores that are promised would be used."""
        freed = [placed for name, count in offer.removals.items() for placed in self.seats[name].placed[-count:]]
        mark = self.capacity.mark()
        for placed in freed:
            if placed is not None:
                self.capacity.remove(placed)
        if not self.capacity.put(tenant, offer.vacancy) or not self._keeps_promises():
            self.capacity.undo_to(mark)
            return False
        for name, count in offer.removals.items():
            other = self.seats[name]
            del other.placed[-count:]
            other.count = len(other.placed)
            other.reason = f"its cores serve more requests for {seat.model.name}; {other.demand()}"
        self.removed += offer.equal
        seat.placed.append(tenant)
        self._offers_cache.clear()
        return True

    def _offers(self, seat: _Seat, *, least: bool) -> list[_Offer]:
        """Returns the offers for one more replica of a model, the least costly first."""
        need, priority = seat.model.need, seat.model.priority
        assert need is not None
        plain = need.demand.plain and not need.pins
        key = (need.demand.size, need.demand.kinds, "" if plain else seat.model.name, priority, least)
        offers = self._offers_cache.get(key)
        if offers is None:
            allowed = {name: self._removable(priority, other, least=least) for name, other in self.seats.items()}
            own = [placed for placed in seat.placed if placed is not None]
            every = (self._offer(vacancy, allowed, priority) for vacancy in self.capacity.vacancies(need, own))
            offers = sorted((offer for offer in every if offer is not None), key=lambda offer: offer.rank)
            self._offers_cache[key] = offers
        return offers

    def _offer(self, vacancy: Vacancy, allowed: Mapping[str, int], priority: int) -> _Offer | None:
        removals: dict[str, int] = {}
        for tenant in vacancy.tenants:
            name = self.names[tenant.model]
            count = len(self.seats[name].placed) - tenant.replica
            if count > allowed[name]:
                return None
            removals[name] = max(removals.get(name, 0), count)
        if sum(removals.values()) != len(vacancy.tenants):
            return None  # the planner keeps the replicas with the lowest indexes
        loss = lower = 0.0
        equal, keeps_one, short = 0, True, False
        for name, count in removals.items():
            seat = self.seats[name]
            if seat.model.priority < priority:
                lower += seat.loss(count)
                short = short or len(seat.placed) - count < seat.low
                continue
            loss += seat.loss(count)
            equal += count
            keeps_one = keeps_one and seat.count > count
        rank = (short, loss + 1e-3 * lower, len(vacancy.tenants), vacancy.off_grid, vacancy.place)
        return _Offer(rank, vacancy, removals, loss, equal, keeps_one)

    def _abandons(self, offer: _Offer) -> bool:
        """Returns whether a model with waiting requests would lose its last replica to a second replica of another."""
        emptied = [self.seats[name] for name, count in offer.removals.items() if self.seats[name].count <= count]
        return any(seat.last.waiting for seat in emptied)

    def _starved(self, seat: _Seat) -> bool:
        waited = seat.last.longest_wait_s >= RULES.starved_s or seat.unserved_s >= RULES.unserved_s
        return seat.count == 0 and waited

    def _removable(self, priority: int, other: _Seat, *, least: bool) -> int:
        """Returns how many replicas of a model can be removed for one of that priority."""
        beyond = max(0, len(other.placed) - other.low)
        if other.model.override is not None and other.model.priority >= priority:
            return 0
        if other.model.priority < priority:
            return len(other.placed)
        if other.model.priority > priority:
            return min(beyond, 1) if other.resident and other.changed == 0 and other.spare() else 0
        if least:
            return beyond
        if other.changed > 0 or not other.resident:
            return 0
        return beyond

    def targets(self) -> Targets:
        counts, reasons = {}, {}
        for name, seat in self.seats.items():
            counts[name] = seat.count
            target = seat.model.target
            if seat.count != target:
                why = seat.reason or ("scaled by an operator" if seat.model.override is not None else "its min and max")
                reasons[name] = f"{target} to {seat.count}: {why}"
            elif seat.reason is not None:
                reasons[name] = seat.reason
        return Targets(MappingProxyType(counts), MappingProxyType(reasons))
