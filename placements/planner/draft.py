"""A plan under construction. The numbered steps are those of `plan.plan`."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter, itemgetter

from placements.facts.checkpoints import Checkpoint
from placements.facts.core_range import CoreRange
from placements.planner.board import Demand, Grade, Tenant
from placements.planner.host_pool import HostPool
from placements.planner.packer import Packer
from placements.planner.pins import FreeCores, assign, bits
from placements.planner.placement import Move, Placement, Running, Unplaced
from placements.planner.refine import move_fewer, prefer_holders, serve_more
from placements.planner.refusals import PlacementRefusal, Refusals
from placements.planner.replica_demand import coreless_kinds, demands
from placements.resources.environ import threads
from placements.spec.notation import CorePin
from placements.spec.problems import Problem
from placements.spec.schema import ModelSpec, Spec


@dataclass(eq=False, slots=True)
class PinnedItem:
    """A replica to be placed on a pin."""

    tenant: Tenant
    pin: CorePin
    number: int  # of the pin, in the model's list


_LEAST = (1 << 30, True, True)
"""The lowest grade: it displaces nothing."""


class PlanDraft:
    """A plan under construction: free cores, placed replicas, unplaced replicas. The numbers are those of `plan`."""

    def __init__(
        self,
        spec: Spec,
        ground: HostPool,
        checkpoints: Mapping[str, Checkpoint],
        numbered: Mapping[str, frozenset[int]],
        moves: int | None,
        costs: Mapping[str, float],
        held: Mapping[str, frozenset[str]],
    ) -> None:
        self._spec = spec
        self._ground = ground
        self._names = [model.name for model in spec.models]
        self._numbered = numbered
        self._moves = moves
        self._costs = costs
        self._held = {
            order: frozenset(number for host, number in ground.numbers.items() if name in held.get(host, ()))
            for order, name in enumerate(self._names if held else ())
        }
        self._demands = demands(spec, ground.kinds.hosts, checkpoints)
        self._taken = [0] * len(ground.hosts)
        self._tenants: list[Tenant] = []  # placed before the packer starts: running and pinned replicas
        self._pinned: list[PinnedItem] = []  # to be placed, as the next two
        self._floating: list[Tenant] = []
        self._waiting_coreless: list[Tenant] = []
        self._coreless: dict[tuple[int, int], tuple[int, int]] = {}  # (model, replica) -> (host, threads)
        self._busy: Counter[int] = Counter()  # threads of replicas that take no cores, by host
        self._unplaced: list[tuple[int, Unplaced]] = []  # with the order of the model
        self._blocked_pins: list[PinnedItem] = []
        self._idle_pins: list[CorePin] = []
        self._thread_counts: list[dict[int, int]] = [{} for _ in spec.models]  # by kind of host
        self._coreless_hosts = [self._hosts_without_cores(model) for model in spec.models]

    def _hosts_without_cores(self, model: ModelSpec) -> list[int]:
        kinds = coreless_kinds(model, self._ground.kinds.hosts)
        return [i for i, kind in enumerate(self._ground.kinds.of) if kind in kinds] if kinds else []

    # 1.
    def keep(self, running: Iterable[Running], wanted: Mapping[str, int]) -> None:
        """Keeps running replicas that fit the spec, and lists the missing ones."""
        by_model: dict[str, list[Running]] = {}
        for replica in running:
            by_model.setdefault(replica.model, []).append(replica)
        for order, model in enumerate(self._spec.models):
            count = max(0, min(wanted.get(model.name, model.replicas.min), model.replicas.max))
            own = sorted(by_model.get(model.name, ()), key=attrgetter("replica"))
            self._keep(model, order, count, own)

    def _keep(self, model: ModelSpec, order: int, count: int, running: Sequence[Running]) -> None:
        pins = () if self._coreless_hosts[order] else model.cores
        on_pin, loose = self._on_pins(pins, self._fitting(model, order, running))
        pinned = min(len(pins), count)
        candidates: list[tuple[int | None, Running]] = [*list(on_pin.items())[:pinned]]
        candidates.extend((None, replica) for replica in loose[: count - pinned])
        used: dict[int, int | None] = {}  # replica index -> pin
        low, tp, demand = model.replicas.min, model.tp_degree, self._demands[order]
        cost = self._costs.get(model.name, 1.0)
        grades = self._grades(model, runs=True)
        numbers, occupied, tenants = self._ground.numbers, self._taken, self._tenants
        for pin, replica in candidates:
            index, cores = replica.replica, replica.cores
            if index in used:
                continue
            if cores is None:
                self._put_coreless(order, index, numbers[replica.host])
            else:
                host, first = numbers[replica.host], cores.first
                mask = ((1 << tp) - 1) << first
                if occupied[host] & mask:
                    continue  # another kept replica holds some of its cores
                occupied[host] |= mask
                grade = grades[len(used) < low]
                fixed = pin is not None
                tenants.append(
                    Tenant(order, index, tp, grade, demand, cost, host, first, fixed, host, first, True, replica)
                )
            used[index] = pin
        used_pins = set(used.values()) - {None}
        to_pin = [i for i in range(len(pins)) if i not in used_pins]
        if len(to_pin) > pinned - len(used_pins):  # an older revision may still serve on the first pins
            to_pin.sort(key=lambda i: not self._ground.is_open(pins[i]))
        missing = to_pin[: pinned - len(used_pins)]
        if len(missing) < len(to_pin):
            self._idle_pins.extend(pins[i] for i in to_pin[len(missing) :])
        if len(used) < count:
            self._add_missing(model, order, count, used, missing)

    def _on_pins(
        self, pins: Sequence[CorePin], running: Sequence[Running]
    ) -> tuple[dict[int, Running], Sequence[Running]]:
        """Returns the replicas on pins, by pin, and the others. Pins with a host come before pins without one."""
        if not pins:
            return {}, running
        open_pins: dict[tuple[str | None, int, int], list[int]] = {}
        for i in reversed(range(len(pins))):
            open_pins.setdefault((pins[i].host, pins[i].cores.first, pins[i].cores.last), []).append(i)
        on_pin: dict[int, Running] = {}
        loose: list[Running] = []
        for replica in running:
            cores = replica.cores
            if cores is not None:
                open_indices = open_pins.get((replica.host, cores.first, cores.last))
                open_indices = open_indices or open_pins.get((None, cores.first, cores.last))
                if open_indices:
                    on_pin[open_indices.pop()] = replica
                    continue
            loose.append(replica)
        return on_pin, loose

    def _add_missing(
        self, model: ModelSpec, order: int, count: int, used: Mapping[int, int | None], pins: Sequence[int]
    ) -> None:
        elsewhere = self._numbered.get(model.name, frozenset())
        unused = (i for i in itertools.count() if i not in used and i not in elsewhere)
        indices = list(itertools.islice(unused, count - len(used)))
        unassigned = dict.fromkeys(indices)
        chosen: dict[int, int] = {}
        for pin in pins:  # pin i for replica i if possible
            index = pin if pin in unassigned else next(iter(unassigned))
            del unassigned[index]
            chosen[index] = pin
        required = max(0, model.replicas.min - len(used))
        floating = self._waiting_coreless if self._coreless_hosts[order] else self._floating
        tp, demand, cost = model.tp_degree, self._demands[order], self._costs.get(model.name, 1.0)
        grades = self._grades(model, runs=False)
        for place, index in enumerate([*sorted(chosen), *unassigned]):
            tenant = Tenant(order, index, tp, grades[place < required], demand, cost)
            if index in chosen:
                self._pinned.append(PinnedItem(tenant, model.cores[chosen[index]], chosen[index]))
            else:
                floating.append(tenant)

    def _fitting(self, model: ModelSpec, order: int, running: Sequence[Running]) -> list[Running]:
        """Returns the running replicas whose size and place the spec allows."""
        numbers, cores_of, reserved = self._ground.numbers, self._ground.cores, self._ground.reserved
        if self._coreless_hosts[order]:
            hosts = set(self._coreless_hosts[order])
            return [
                replica
                for replica in running
                if replica.cores is None and numbers.get(replica.host) in hosts and replica.replica >= 0
            ]
        fitting = []
        tp = model.tp_degree
        for replica in running:
            host, cores = numbers.get(replica.host, -1), replica.cores
            if host < 0 or cores is None or replica.replica < 0:
                continue
            first, last = cores.first, cores.last
            if last - first + 1 == tp and last < cores_of[host] and not reserved[host] >> first & ((1 << tp) - 1):
                fitting.append(replica)
        return fitting

    def _put_coreless(self, order: int, replica: int, host: int) -> None:
        count = self._threads(order, host)
        self._coreless[order, replica] = (host, count)
        self._busy[host] += count

    def _grades(self, model: ModelSpec, *, runs: bool) -> tuple[Grade, Grade]:
        """Returns the grades of replicas beyond ``min``, and of those within ``min``."""
        return (-model.priority, True, not runs), (-model.priority, False, not runs)

    # 2.
    def place_pinned(self) -> None:
        items = sorted(self._pinned, key=lambda item: _rank(item.tenant))
        if not items:
            return
        ground = self._ground
        masks = zip(ground.hosts, ground.allowed, self._taken, strict=True)
        free = {host.name: FreeCores(host.cores, allowed & ~taken) for host, allowed, taken in masks}
        able = [frozenset(ground.hosts[host].name for host in self._pin_hosts(item)) for item in items]
        unassigned = [
            item
            for item, name in zip(items, assign([item.pin for item in items], free, able), strict=True)
            if name is None or not self._admits_pin(item, name) or not self._put_on_pin(item, name)
        ]
        for item in unassigned:  # the search for hosts is bounded, and considers cores only
            names = sorted(ground.hosts[host].name for host in self._pin_hosts(item))
            names.sort(key=lambda name: not self._admits_pin(item, name))
            if not any(self._put_on_pin(item, name) for name in names):
                self._blocked_pins.append(item)
                self._idle_pins.append(item.pin)  # its cores may come free, so other replicas avoid them

    def _pin_hosts(self, item: PinnedItem) -> list[int]:
        return self._ground.pin_hosts(item.pin, item.tenant.demand.kinds)

    def _admits_pin(self, item: PinnedItem, name: str) -> bool:
        """Returns whether the host has the memory for the replica, and spread allows it there."""
        host, demand = self._ground.numbers[name], item.tenant.demand
        if demand.plain:
            return True
        tenants = [tenant for tenant in self._tenants if tenant.host == host]
        if demand.most and sum(tenant.model == demand.model for tenant in tenants) >= demand.most:
            return False
        kind, memory = self._ground.kinds.of[host], self._ground.hosts[host].memory_gib
        if not demand.memory or memory is None:
            return True
        used = sum(tenant.demand.memory[kind] for tenant in tenants if tenant.demand.memory)
        return used + demand.memory[kind] <= memory

    def _put_on_pin(self, item: PinnedItem, name: str) -> bool:
        host, cores = self._ground.numbers[name], item.pin.cores
        mask = bits(cores)
        if cores.last >= self._ground.cores[host] or mask & (self._taken[host] | ~self._ground.allowed[host]):
            return False
        item.tenant.host, item.tenant.first, item.tenant.fixed = host, cores.first, True
        self._taken[host] |= mask
        self._tenants.append(item.tenant)
        return True

    # 3.
    def place_coreless(self) -> None:
        for tenant in sorted(self._waiting_coreless, key=_rank):
            order = tenant.model
            near = self._held.get(order, frozenset())
            host = min(self._coreless_hosts[order], key=lambda host: (self._busy[host], host not in near))
            self._put_coreless(order, tenant.replica, host)

    # 4. to 7.
    def place_floating(self) -> None:
        packer = self._packer()
        self._fill_pins(packer.place_at)
        missing: list[Tenant] = []
        waiting = self._floating
        while waiting or packer.displaced:
            waiting = sorted([*waiting, *packer.displaced], key=_rank)
            packer.displaced.clear()
            grade = waiting[0].grade
            rivals = [tenant for tenant in waiting if tenant.grade == grade]
            waiting = waiting[len(rivals) :]
            missing = serve_more(packer, [*missing, *packer.place_all(rivals)])
        move_fewer(packer)
        self._fill_pins(packer.take)  # cores that have become free since
        missing = [tenant for tenant in missing if not packer.squeeze_in(tenant)]
        if self._held:
            prefer_holders(packer, sorted(self._floating, key=_rank), self._held)
        if missing:
            self._renumber({tenant.model for tenant in missing})
        if missing or self._blocked_pins:
            self._refuse(missing)

    def _fill_pins(self, place: Callable[[Tenant, Sequence[int], int], bool]) -> None:
        """Places replicas whose pins are blocked, with a method of the packer."""
        for item in self._blocked_pins:
            if item.tenant.host < 0 and place(item.tenant, self._pin_hosts(item), item.pin.cores.first):
                item.tenant.fixed = True
                self._tenants.append(item.tenant)

    def _renumber(self, models: set[int]) -> None:
        """Gives the places of each model to its new replicas with the lowest numbers."""
        by_model: dict[int, list[Tenant]] = {}
        for tenant in self._floating:
            if tenant.model in models:
                by_model.setdefault(tenant.model, []).append(tenant)
        for own in by_model.values():
            numbers = sorted(tenant.replica for tenant in own)
            own.sort(key=lambda tenant: (tenant.host < 0, tenant.replica))
            for tenant, number in zip(own, numbers, strict=True):
                tenant.replica = number

    def _refuse(self, missing: Sequence[Tenant]) -> None:
        """Reports missing replicas: an error within ``min``, a warning beyond it."""
        refusals = Refusals(self._spec, self._ground, self._all_tenants())
        placed = Counter(tenant.model for tenant in self._all_tenants() if tenant.host >= 0)
        placed.update(order for order, _ in self._coreless)
        blocked = {id(item.tenant): item for item in self._blocked_pins if item.tenant.host < 0}
        tenants = sorted(
            [*(item.tenant for item in blocked.values()), *missing], key=lambda tenant: (tenant.model, tenant.replica)
        )
        for tenant in tenants:
            required = placed[tenant.model] < self._spec.models[tenant.model].replicas.min
            placed[tenant.model] += 1
            item = blocked.get(id(tenant))
            if item is None:
                self._report(tenant, required, refusals.no_room(tenant))
            else:
                self._report(tenant, required, refusals.pin_taken(item.pin), item.number)

    def _report(self, tenant: Tenant, required: bool, refusal: PlacementRefusal, pin: int | None = None) -> None:
        name = self._names[tenant.model]
        where = self._spec.where("models", name) if pin is None else self._spec.where("models", name, "cores", pin)
        fact = f"{name}/{tenant.replica} {refusal.what}"
        problem = Problem(refusal.id, "error" if required else "warning", where, fact, refusal.hint)
        self._unplaced.append((tenant.model, Unplaced(name, tenant.replica, (problem,))))

    def clear_range(self, cores: int) -> tuple[str, CoreRange] | None:
        """Frees a range of ``cores`` cores and returns (host, range); None if that is not possible."""
        kinds = frozenset(kind for kind, host in enumerate(self._ground.kinds.hosts) if host.cores >= cores)
        if not kinds:
            return None
        packer = self._packer()
        order = len(self._spec.models)  # of no model
        tenant = Tenant(order, 0, cores, _LEAST, Demand(order, cores, kinds))
        if not packer.clear(tenant):
            return None
        return self._ground.hosts[tenant.host].name, CoreRange.of_length(tenant.first, cores)

    def _packer(self) -> Packer:
        """Returns a packer that holds the pinned and the running replicas."""
        ground = self._ground
        fixed = [0] * len(ground.hosts)
        for tenant in self._tenants:
            if tenant.fixed:
                fixed[tenant.host] |= tenant.mask
        spaces = [ground.space(i, fixed[i], ground.pin_mask(i, self._idle_pins)) for i in range(len(ground.hosts))]
        packer = Packer(spaces, self._moves)
        for tenant in self._tenants:
            packer.settle(tenant)
        return packer

    # The result

    def placements(self) -> tuple[Placement, ...]:
        """Returns the placements in the order of the spec, then by replica number."""
        by_model: list[list[Placement]] = [[] for _ in self._spec.models]
        models, hosts, kinds = self._spec.models, self._ground.hosts, self._ground.kinds.of
        for tenant in self._all_tenants():
            host = tenant.host
            if host < 0:
                continue
            order, ran = tenant.model, tenant.ran
            at_home = ran is not None and tenant.at_home
            cores = ran.cores if ran is not None and at_home else CoreRange.of_length(tenant.first, tenant.size)
            count = self._thread_counts[order].get(kinds[host]) or self._threads(order, host)
            machine = hosts[host]
            model = models[order]
            by_model[order].append(Placement(model.name, tenant.replica, machine.name, cores, count, machine, model))
        for (order, replica), (host, count) in self._coreless.items():
            machine, model = hosts[host], models[order]
            by_model[order].append(Placement(model.name, replica, machine.name, None, count, machine, model))
        for own in by_model:
            own.sort(key=attrgetter("replica"))
        return tuple(itertools.chain.from_iterable(by_model))

    def unplaced(self) -> tuple[Unplaced, ...]:
        """Returns the unplaced replicas in the same order."""
        return tuple(replica for _, replica in sorted(self._unplaced, key=lambda entry: (entry[0], entry[1].replica)))

    def moves(self) -> tuple[Move, ...]:
        """Returns the running replicas that get another place, in the same order."""
        hosts = self._ground.hosts
        entries = []
        for tenant in self._tenants:
            ran = tenant.ran
            if ran is not None and ran.cores is not None and tenant.host >= 0 and not tenant.at_home:
                machine = hosts[tenant.host]
                cores = CoreRange.of_length(tenant.first, tenant.size)
                if (ran.host, ran.cores) != (machine.name, cores):
                    count = self._threads(tenant.model, tenant.host)
                    model = self._spec.models[tenant.model]
                    placement = Placement(ran.model, ran.replica, machine.name, cores, count, machine, model)
                    entries.append((tenant.model, tenant.replica, Move(ran, placement)))
        return tuple(move for *_, move in sorted(entries, key=itemgetter(0, 1)))

    def _all_tenants(self) -> list[Tenant]:
        return [*self._tenants, *self._floating]

    def _threads(self, order: int, host: int) -> int:
        counts, kind = self._thread_counts[order], self._ground.kinds.of[host]
        if kind not in counts:
            model = self._spec.models[order]
            counts[kind] = threads(model.threads, model.tp_degree, self._ground.hosts[host])
        return counts[kind]


def _rank(tenant: Tenant) -> tuple[object, ...]:
    """By grade, then size (largest first), then replica number."""
    return (tenant.grade, -tenant.size, tenant.replica, tenant.model)
