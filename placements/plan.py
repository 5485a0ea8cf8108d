"""plan: which replica of which model lies on which cores of which host. Values in, values out."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter, itemgetter
from typing import Any

from placements.checkpoints import Checkpoint
from placements.cores import CoreRange
from placements.demand import demands, kinds_of
from placements.engines import needs_neuron, takes_cores
from placements.environ import environment
from placements.grid import grid_of, windows
from placements.packer import NEVER, Demand, Grade, Packer, Space, Tenant
from placements.packing import Free, bits, runs
from placements.pins import assign
from placements.problems import Problem
from placements.spec import ModelSpec, Pin, Spec
from placements.threads import cpu_mask, threads
from placements.topology import Host, alignment


@dataclass(frozen=True)
class Placement:
    """One replica, where it lies and what it gets."""

    model: str
    replica: int  # index within the model, from 0
    host: str
    cores: CoreRange | None  # None: it takes none (cpu engine on a real host)
    threads: int
    machine: Host | None = field(default=None, compare=False, repr=False)  # the host itself, where it is known

    @property
    def cpus(self) -> tuple[int, ...]:
        """CPU ids that it is bound to; () means not bound."""
        return () if self.machine is None else cpu_mask(self.machine, self.cores, self.threads)

    @property
    def env(self) -> dict[str, str]:
        """The variables of its process."""
        return environment(self.model, self.replica, self.cores, self.threads, self.cpus)

    @property
    def running(self) -> Running:
        """The same replica as it is seen once it runs."""
        return Running(self.model, self.replica, self.host, self.cores)

    def as_dict(self) -> dict[str, Any]:
        """As `plan -o json` prints it; ``cores`` equals NEURON_RT_VISIBLE_CORES."""
        cores = None if self.cores is None else str(self.cores)
        return {
            "model": self.model,
            "replica": self.replica,
            "host": self.host,
            "cores": cores,
            "threads": self.threads,
            "env": self.env,
        }


@dataclass(frozen=True)
class Unplaced:
    """One replica that fits nowhere, and why."""

    model: str
    replica: int
    problems: tuple[Problem, ...]

    @property
    def required(self) -> bool:
        """Whether the model falls below its ``min`` without it."""
        return any(problem.severity == "error" for problem in self.problems)

    def as_dict(self) -> dict[str, Any]:
        """As `plan -o json` prints it."""
        problems = [problem.as_dict() for problem in self.problems]
        return {"model": self.model, "replica": self.replica, "problems": problems}


@dataclass(frozen=True)
class Running:
    """A replica that holds cores now."""

    model: str
    replica: int
    host: str
    cores: CoreRange | None


@dataclass(frozen=True)
class Move:
    """A running replica that gets other cores, to make room."""

    before: Running
    after: Placement

    def as_dict(self) -> dict[str, Any]:
        """As `plan -o json` prints it."""
        return {
            "model": self.after.model,
            "replica": self.after.replica,
            "from": {"host": self.before.host, "cores": None if self.before.cores is None else str(self.before.cores)},
            "to": {"host": self.after.host, "cores": None if self.after.cores is None else str(self.after.cores)},
        }


@dataclass(frozen=True)
class Plan:
    """All placements, in the order of the spec; what did not fit, and why; what moves; and findings about the spec."""

    placements: tuple[Placement, ...] = ()
    unplaced: tuple[Unplaced, ...] = ()
    problems: tuple[Problem, ...] = ()
    moves: tuple[Move, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether every model has its ``min`` and no problem is an error: exit code 0 or 2 of `plan`, not 1."""
        errors = any(problem.severity == "error" for problem in self.problems)
        return not errors and not any(unplaced.required for unplaced in self.unplaced)

    @classmethod
    def refused(cls, problems: Iterable[Problem]) -> Plan:
        """The plan of a spec with errors: nothing but them."""
        return cls(problems=tuple(problems))

    def with_problems(self, problems: Iterable[Problem]) -> Plan:
        """The same with the findings about the spec, such as the warnings of `check`."""
        return replace(self, problems=(*self.problems, *problems))

    def as_dict(self) -> dict[str, Any]:
        """The stable JSON of `plan -o json`."""
        return {
            "placements": [placement.as_dict() for placement in self.placements],
            "unplaced": [unplaced.as_dict() for unplaced in self.unplaced],
            "moves": [move.as_dict() for move in self.moves],
            "problems": [problem.as_dict() for problem in self.problems],
        }


@dataclass(frozen=True)
class Changes:
    """What separates a plan from what runs. False when there is nothing to do."""

    start: tuple[Placement, ...]
    stop: tuple[Running, ...]

    def __bool__(self) -> bool:
        return bool(self.start or self.stop)


def diff(plan: Plan, running: Iterable[Running]) -> Changes:
    """What to start and what to stop, so that the plan is what runs."""
    observed = list(dict.fromkeys(running))
    wished = {placement.running for placement in plan.placements}
    return Changes(
        start=tuple(placement for placement in plan.placements if placement.running not in observed),
        stop=tuple(replica for replica in observed if replica not in wished),
    )


def plan(
    spec: Spec,
    hosts: Sequence[Host],
    checkpoints: Mapping[str, Checkpoint] | None = None,
    running: Iterable[Running] = (),
    wanted: Mapping[str, int] | None = None,
    blocked: Mapping[str, frozenset[int]] | None = None,
    numbered: Mapping[str, frozenset[int]] | None = None,
    *,
    moves: int | None = 0,
    costs: Mapping[str, float] | None = None,
) -> Plan:
    """Place every model's replicas: its ``min``, or what ``wanted`` names for it, at most its ``max``.

    ``running`` holds what runs now, ``blocked`` cores by host that may not be used (cordons, quarantine), ``numbered``
    replica indices by model that are in use elsewhere (older versions that still serve). ``checkpoints`` say which
    hosts have the memory for a model; one without is taken to fit. ``moves`` is how many running replicas may be given
    other cores to make room (None: any number), ``costs`` what that costs for a replica of a model, 1 where it names
    none. The spec is taken as free of errors.

    1. Running replicas that fit the spec stay, those on a pin first, then those with the lowest index. Others end:
       their cores count as free.
    2. A model's pins go to its replicas in order; pins that find their cores taken are not placed elsewhere.
    3. A replica that takes no cores goes to the host where such replicas have the fewest threads.
    4. Who gets cores is decided by grade: priority, then what ``min`` asks for before what exceeds it, then what runs
       before what is new. What runs gives way to a higher grade, and is placed anew. Within a grade most cores served
       win, largest degree first.
    5. Each takes its place as `packer` says.
    6. What found none is tried once more wherever a legal range is left.

    The result is deterministic, and planning with ``running`` equal to its placements changes nothing.
    """
    draft = _Draft(spec, hosts, checkpoints or {}, blocked or {}, numbered or {}, moves, costs or {})
    draft.keep(running, wanted or {})
    draft.place_pinned()
    draft.place_coreless()
    draft.place_floating()
    return draft.result()


@dataclass(frozen=True)
class Window:
    """A range that can be had, and what has to move for it."""

    host: str
    cores: CoreRange
    moves: tuple[Move, ...]


def defragment(
    spec: Spec,
    hosts: Sequence[Host],
    checkpoints: Mapping[str, Checkpoint] | None = None,
    running: Iterable[Running] = (),
    blocked: Mapping[str, frozenset[int]] | None = None,
    *,
    cores: int,
    moves: int | None = None,
    costs: Mapping[str, float] | None = None,
) -> Window | None:
    """The fewest and cheapest moves of running replicas after which ``cores`` cores in a row are free.

    The arguments are those of `plan`. None: at most ``moves`` of them open no such range.
    """
    observed = tuple(running)
    counts = Counter(replica.model for replica in observed)
    for allowed in (0, 1, 2, 3, 4, 6, 8, 12, 16, None):
        last = allowed is None or (moves is not None and allowed >= moves)
        most = moves if last else allowed
        draft = _Draft(spec, hosts, checkpoints or {}, blocked or {}, {}, most, costs or {})
        draft.keep(observed, counts)
        found = draft.open(cores)
        if found is not None or last:
            return found
    return None


@dataclass(eq=False, slots=True)
class _Item:
    """A replica to be placed."""

    tenant: Tenant
    required: bool  # counts towards ``min``
    pin: Pin | None = None
    number: int = 0  # of the pin, in the model's list


_LEAST = (1 << 30, True, True)
"""The grade of what may cost nobody anything."""


class _Draft:
    """The plan in the making: what is free, what is placed, what is not. The numbers are those of `plan`."""

    def __init__(
        self,
        spec: Spec,
        hosts: Sequence[Host],
        checkpoints: Mapping[str, Checkpoint],
        blocked: Mapping[str, frozenset[int]],
        numbered: Mapping[str, frozenset[int]],
        moves: int | None,
        costs: Mapping[str, float],
    ) -> None:
        self._spec = spec
        self._names = [model.name for model in spec.models]
        self._hosts = tuple(hosts)
        self._numbers = {host.name: i for i, host in enumerate(hosts)}
        self._blocked = blocked
        self._numbered = numbered
        self._moves = moves
        self._costs = costs
        self._kinds = kinds_of(hosts)
        self._demands = demands(spec, self._kinds.hosts, checkpoints)
        self._allowed = [self._usable(host) for host in self._hosts]
        self._cores = [host.cores for host in self._hosts]
        self._reserved = [sum(1 << core for core in host.reserved_cores) for host in self._hosts]
        self._taken = [0] * len(self._hosts)
        self._tenants: list[Tenant] = []  # that lie somewhere, before the packer takes over: running and pinned ones
        self._items: list[_Item] = []
        self._coreless_items: list[_Item] = []
        self._coreless: dict[tuple[int, int], tuple[int, int]] = {}  # (model, replica) -> (host, threads)
        self._busy: Counter[int] = Counter()  # threads of replicas that take no cores, by host
        self._unplaced: dict[tuple[int, int], Unplaced] = {}
        self._blocked_pins: list[_Item] = []
        self._idle_pins: list[Pin] = []
        self._reasons: dict[tuple[int, ...], tuple[str, str, str]] = {}  # why there is no room, by model
        self._thread_counts: list[dict[int, int]] = [{} for _ in spec.models]  # by kind of host
        self._coreless_hosts = [self._hosts_without_cores(model) for model in spec.models]

    def _usable(self, host: Host) -> int:
        mask = (1 << host.cores) - 1
        for core in (*host.reserved_cores, *self._blocked.get(host.name, ())):
            if 0 <= core < host.cores:
                mask &= ~(1 << core)
        return mask

    def _hosts_without_cores(self, model: ModelSpec) -> list[int]:
        """Hosts where the model runs without taking cores. Where there is one, the model takes cores nowhere."""
        kinds = [
            kind
            for kind, host in enumerate(self._kinds.hosts)
            if not takes_cores(model.engine, host) and (host.topology or not needs_neuron(model.engine))
        ]
        return [i for i, kind in enumerate(self._kinds.of) if kind in kinds] if kinds else []

    # 1.
    def keep(self, running: Iterable[Running], wanted: Mapping[str, int]) -> None:
        """Keep what runs and fits the spec, and name the replicas that are missing."""
        by_model: dict[str, list[Running]] = {}
        for replica in running:
            by_model.setdefault(replica.model, []).append(replica)
        for order, model in enumerate(self._spec.models):
            count = max(0, min(wanted.get(model.name, model.replicas.min), model.replicas.max))
            own = sorted(by_model.get(model.name, ()), key=lambda replica: replica.replica)
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
        numbers, occupied, tenants = self._numbers, self._taken, self._tenants
        for pin, replica in candidates:
            index, cores = replica.replica, replica.cores
            if index in used:
                continue
            if cores is None:
                self._keep_coreless(order, replica)
            else:
                host, first = numbers[replica.host], cores.first
                mask = ((1 << tp) - 1) << first
                if occupied[host] & mask:
                    continue  # another replica that is kept holds some of its cores
                occupied[host] |= mask
                grade = grades[len(used) < low]
                fixed = pin is not None
                tenants.append(
                    Tenant(order, index, tp, grade, demand, cost, host, first, fixed, host, first, True, replica)
                )
            used[index] = pin
        taken = {pin for pin in used.values() if pin is not None}
        to_pin = [i for i in range(len(pins)) if i not in taken]
        missing = to_pin[: pinned - len(taken)]
        if len(missing) < len(to_pin):
            self._idle_pins.extend(pins[i] for i in to_pin[len(missing) :])
        if len(used) < count:
            self._name_missing(model, order, count, used, missing)

    def _on_pins(self, pins: Sequence[Pin], running: Sequence[Running]) -> tuple[dict[int, Running], Sequence[Running]]:
        """Which replica lies on which pin, one that names its host before one that does not; and the others."""
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
                found = open_pins.get((replica.host, cores.first, cores.last))
                found = found or open_pins.get((None, cores.first, cores.last))
                if found:
                    on_pin[found.pop()] = replica
                    continue
            loose.append(replica)
        return on_pin, loose

    def _name_missing(
        self, model: ModelSpec, order: int, count: int, used: Mapping[int, int | None], pins: Sequence[int]
    ) -> None:
        elsewhere = self._numbered.get(model.name, frozenset())
        unused = (i for i in itertools.count() if i not in used and i not in elsewhere)
        indices = list(itertools.islice(unused, count - len(used)))
        left = dict.fromkeys(indices)
        chosen: dict[int, int] = {}
        for pin in pins:  # pin i for replica i where that is possible
            index = pin if pin in left else next(iter(left))
            del left[index]
            chosen[index] = pin
        required = max(0, model.replicas.min - len(used))
        items = self._coreless_items if self._coreless_hosts[order] else self._items
        tp, demand, cost = model.tp_degree, self._demands[order], self._costs.get(model.name, 1.0)
        grades = self._grades(model, runs=False)
        for place, index in enumerate([*sorted(chosen), *left]):
            needed = place < required
            tenant = Tenant(order, index, tp, grades[needed], demand, cost)
            number = chosen.get(index, -1)
            items.append(_Item(tenant, needed, model.cores[number] if number >= 0 else None, number))

    def _fitting(self, model: ModelSpec, order: int, running: Sequence[Running]) -> list[Running]:
        """Those that run as the spec has it, and lie where they may."""
        numbers, cores_of, reserved = self._numbers, self._cores, self._reserved
        if self._coreless_hosts[order]:
            hosts = set(self._coreless_hosts[order])
            return [one for one in running if one.cores is None and numbers.get(one.host) in hosts and one.replica >= 0]
        found = []
        tp = model.tp_degree
        for one in running:
            host, cores = numbers.get(one.host, -1), one.cores
            if host < 0 or cores is None or one.replica < 0:
                continue
            first, last = cores.first, cores.last
            if last - first + 1 == tp and last < cores_of[host] and not reserved[host] >> first & ((1 << tp) - 1):
                found.append(one)
        return found

    def _keep_coreless(self, order: int, replica: Running) -> None:
        host = self._numbers[replica.host]
        count = self._threads(order, host)
        self._coreless[order, replica.replica] = (host, count)
        self._busy[host] += count

    def _grades(self, model: ModelSpec, *, runs: bool) -> tuple[Grade, Grade]:
        """Of what exceeds ``min``, and of what it asks for."""
        return (-model.priority, True, not runs), (-model.priority, False, not runs)

    # 2.
    def place_pinned(self) -> None:
        items = sorted((item for item in self._items if item.pin is not None), key=_rank)
        free = {
            host.name: Free(host.topology.family if host.topology else "", host.cores, allowed & ~taken)
            for host, allowed, taken in zip(self._hosts, self._allowed, self._taken, strict=True)
        }
        pins = [_pin(item) for item in items]
        found = assign(pins, free) if items else ()
        left: list[_Item] = []
        for item, pin, name in zip(items, pins, found, strict=True):
            if name is None or not self._put_on_pin(item, pin, name):
                left.append(item)
        for item in left:  # the search for hosts is bounded
            names = [host.name for host in self._hosts] if item.pin.host is None else [item.pin.host]  # type: ignore[union-attr]
            if not any(name in self._numbers and self._put_on_pin(item, _pin(item), name) for name in names):
                self._blocked_pins.append(item)
                self._idle_pins.append(_pin(item))  # it may come free: others had better go elsewhere

    def _put_on_pin(self, item: _Item, pin: Pin, name: str) -> bool:
        host, mask = self._numbers[name], bits(pin.cores)
        if pin.cores.last >= self._hosts[host].cores or mask & (self._taken[host] | ~self._allowed[host]):
            return False
        item.tenant.host, item.tenant.first, item.tenant.fixed = host, pin.cores.first, True
        self._taken[host] |= mask
        self._tenants.append(item.tenant)
        return True

    # 3.
    def place_coreless(self) -> None:
        for item in sorted(self._coreless_items, key=_rank):
            order = item.tenant.model
            host = min(self._coreless_hosts[order], key=lambda host: self._busy[host])
            count = self._threads(order, host)
            self._coreless[order, item.tenant.replica] = (host, count)
            self._busy[host] += count

    # 4., 5.
    def place_floating(self) -> None:
        packer = self._packer()
        self._fill_pins(packer)
        missing: list[Tenant] = []
        waiting = sorted((item.tenant for item in self._items if item.pin is None), key=_tenant_rank)
        while waiting or packer.displaced:
            waiting = sorted([*waiting, *packer.displaced], key=_tenant_rank)
            packer.displaced.clear()
            grade = waiting[0].grade
            rivals = [tenant for tenant in waiting if tenant.grade == grade]
            waiting = waiting[len(rivals) :]
            missing = packer.improve(missing + packer.place_all(rivals))
        packer.bring_home()
        missing = [tenant for tenant in missing if not packer.squeeze_in(tenant)]  # 6.
        self._refuse_all(missing)

    def _fill_pins(self, packer: Packer) -> None:
        """Pins whose cores are held: their holders give way where they may."""
        for item in self._blocked_pins:
            pin, tenant = _pin(item), item.tenant
            hosts = [self._numbers[pin.host]] if pin.host in self._numbers else []
            if pin.host is None:
                hosts = list(range(len(self._hosts)))
            hosts = [host for host in hosts if pin.cores.last < self._hosts[host].cores]
            if packer.place_at(tenant, hosts, pin.cores.first):
                tenant.fixed = True
                self._tenants.append(tenant)

    def open(self, cores: int) -> Window | None:
        """Room for a range of ``cores``, which belongs to nobody."""
        kinds = frozenset(kind for kind, host in enumerate(self._kinds.hosts) if host.cores >= cores)
        if not kinds:
            return None
        packer = self._packer()
        tenant = Tenant(len(self._spec.models), 0, cores, _LEAST, Demand(len(self._spec.models), cores, kinds))
        if not packer.place(tenant):
            return None
        host = self._hosts[tenant.host].name
        return Window(host, CoreRange.of_length(tenant.first, cores), self.result().moves)

    def _packer(self) -> Packer:
        """Takes over with the pins and what runs in place."""
        fixed = [0] * len(self._hosts)
        for tenant in self._tenants:
            if tenant.fixed:
                fixed[tenant.host] |= tenant.mask
        idle = [self._idle_mask(host.name) for host in self._hosts] if self._idle_pins else [0] * len(self._hosts)
        spaces = []
        for i, host in enumerate(self._hosts):
            family = host.topology.family if host.topology else ""
            allowed = self._allowed[i]
            grid = grid_of(family, host.cores, allowed & ~fixed[i])
            memory = NEVER if host.memory_gib is None else host.memory_gib
            cpus = NEVER if host.emulated else len(host.usable_cpus)
            spaces.append(Space(self._kinds.of[i], grid, allowed, allowed, idle[i], memory, cpus))
        packer = Packer(spaces, self._moves)
        for tenant in self._tenants:
            packer.settle(tenant)
        return packer

    def _idle_mask(self, host: str) -> int:
        mask = 0
        for pin in self._idle_pins:
            if pin.host is None or pin.host == host:
                mask |= bits(pin.cores)
        return mask

    # The result

    def result(self) -> Plan:
        by_model: list[list[Placement]] = [[] for _ in self._spec.models]
        moves: list[tuple[int, int, Move]] = []
        names, hosts, kinds = self._names, self._hosts, self._kinds.of
        for tenant in self._all_tenants():
            host = tenant.host
            if host < 0:
                continue
            order, ran = tenant.model, tenant.ran
            at_home = ran is not None and tenant.at_home
            cores = ran.cores if ran is not None and at_home else CoreRange.of_length(tenant.first, tenant.size)
            count = self._thread_counts[order].get(kinds[host]) or self._threads(order, host)
            machine = hosts[host]
            placement = Placement(names[order], tenant.replica, machine.name, cores, count, machine)
            by_model[order].append(placement)
            if ran is not None and not at_home and ran != placement.running:
                moves.append((order, tenant.replica, Move(ran, placement)))
        for (order, replica), (host, count) in self._coreless.items():
            by_model[order].append(Placement(names[order], replica, hosts[host].name, None, count, hosts[host]))
        for own in by_model:
            own.sort(key=attrgetter("replica"))
        unplaced = tuple(self._unplaced[key] for key in sorted(self._unplaced))
        made = tuple(move for *_, move in sorted(moves, key=itemgetter(0, 1)))
        return Plan(tuple(itertools.chain.from_iterable(by_model)), unplaced, moves=made)

    def _threads(self, order: int, host: int) -> int:
        counts, kind = self._thread_counts[order], self._kinds.of[host]
        if kind not in counts:
            model = self._spec.models[order]
            counts[kind] = threads(model.threads, model.tp_degree, self._hosts[host])
        return counts[kind]

    # Refusals

    def _refuse_all(self, missing: Sequence[Tenant]) -> None:
        for item in self._blocked_pins:
            if item.tenant.host < 0:
                self._refuse_pin(item, _pin(item))
        for tenant in missing:
            self._refuse_room(_Item(tenant, not tenant.grade[1]))

    def _refuse_pin(self, item: _Item, pin: Pin) -> None:
        names = [pin.host] if pin.host is not None else list(self._numbers)
        reasons = [self._why_taken(self._numbers[name], pin.cores) for name in names if name in self._numbers]
        on = f" of {pin.host}" if pin.host else ""
        why = "; ".join(reasons[:3]) or "no host of that name is there"
        hint = "end what holds them, or change the pin"
        self._refuse(item, "pin-taken", f"is pinned to cores {pin.cores}{on}, but {why}", hint)

    def _why_taken(self, number: int, cores: CoreRange) -> str:
        host = self._hosts[number]
        if cores.last >= host.cores:
            return f"{host.name} has {_count(host.cores, 'core')}"
        holders = []
        for tenant in sorted(self._all_tenants(), key=_tenant_rank):
            if tenant.host == number and tenant.mask & bits(cores):
                held = CoreRange.of_length(tenant.first, tenant.size).overlap(cores)
                holders.append(f"{self._name(tenant)} holds {held}")
        for label, found in (("quarantined", self._blocked.get(host.name, ())), ("reserved", host.reserved_cores)):
            both = sorted(core for core in cores if core in found)
            holders.extend([f"{', '.join(map(str, both))} {'is' if len(both) == 1 else 'are'} {label}"] if both else [])
        return f"on {host.name} {' and '.join(holders)}"

    def _refuse_room(self, item: _Item) -> None:
        tenant = item.tenant
        key = (tenant.model,)
        found = self._reasons.get(key)
        if found is None:
            found = self._reasons[key] = self._why_no_room(tenant)
        self._refuse(item, *found)

    def _why_no_room(self, tenant: Tenant) -> tuple[str, str, str]:
        """(id, what, hint) of the first constraint that leaves no host."""
        tp = tenant.size
        needs = f"needs {tp} contiguous cores" if tp > 1 else "needs 1 core"
        hint = "fewer replicas, a smaller tp_degree, or another host would make it fit"
        hosts = [i for i, host in enumerate(self._hosts) if host.cores]
        if not hosts:
            return "no-room", f"needs {_count(tp, 'core')}, and no host has NeuronCores", hint
        hosts = [i for i in hosts if self._kinds.of[i] in tenant.demand.kinds]
        if not hosts:
            names = sorted({host.topology.instance for host in self._kinds.hosts if host.topology})
            what = f"finds no suitable host: tp_degree {tp}, its engine or its memory rules out {', '.join(names)}"
            return "no-suitable-host", what, "`corewright explain` says which; take another tp_degree or host type"
        free = self._free_masks()
        legal = {i: grid_of(*self._grid_key(i)).legal(tp) & windows(free[i], tp) for i in hosts}
        open_hosts = [i for i in hosts if legal[i]]
        if open_hosts:
            return self._why_closed(tenant, open_hosts)
        run_of = {i: _longest(free[i], self._hosts[i].cores) for i in hosts}
        best = max(hosts, key=lambda i: run_of[i][1])
        name, (first, length) = self._hosts[best].name, run_of[best]
        others = f" and none of {_count(len(hosts), 'host')} has a longer one" if len(hosts) > 1 else ""
        if length == 0:
            where = name if len(hosts) == 1 else f"any of {_count(len(hosts), 'host')}"
            return "no-room", f"{needs}, none is free on {where}", hint
        run = f"{length} ({CoreRange.of_length(first, length)}){others}"
        step = alignment(self._family(best), tp).legal
        aligned = f" from a multiple of {step} on" if length >= tp else ""
        return "no-room", f"{needs}{aligned}, the longest free run on {name} is {run}", hint

    def _why_closed(self, tenant: Tenant, hosts: Sequence[int]) -> tuple[str, str, str]:
        """Cores are free on these, and something else is missing."""
        model = self._spec.models[tenant.model]
        demand = tenant.demand
        on = Counter(one.host for one in self._all_tenants() if one.model == tenant.model)
        apart = [i for i in hosts if not demand.most or on[i] < demand.most]
        if not apart:
            where = f"the {_count(len(hosts), 'host')} with {_count(tenant.size, 'free core')}"
            what = (
                f"has spread: at most {demand.most} on a host, and {where} {'has' if len(hosts) == 1 else 'have'} that"
            )
            return "spread-blocks", what, "another host, or a larger spread"
        for id, wanted, left, unit, hint in (
            (
                "host-memory-short",
                demand.memory,
                self._memory_left(),
                "GiB of host memory",
                "host_memory_gib, if you measured that it needs less; or another host",
            ),
            (
                "vcpus-short",
                demand.cpus if demand.insists else (),
                self._cpus_left(),
                "CPUs for its threads",
                "fewer threads, or another host",
            ),
        ):
            if wanted and all(left[i] < wanted[self._kinds.of[i]] for i in apart):
                best = max(apart, key=lambda i: left[i])
                need = wanted[self._kinds.of[best]]
                what = f"needs {need:.4g} {unit}, {max(0.0, left[best]):.4g} are left on {self._hosts[best].name}"
                others = (
                    f", where most are of the {_count(len(apart), 'host')} with free cores" if len(apart) > 1 else ""
                )
                return id, f"{what}{others}", hint
        return "no-room", f"{model.name} finds no host with cores, memory and CPUs for it together", "another host"

    def _all_tenants(self) -> list[Tenant]:
        return [*self._tenants, *(item.tenant for item in self._items if item.pin is None)]

    def _free_masks(self) -> list[int]:
        free = list(self._allowed)
        for tenant in self._all_tenants():
            if tenant.host >= 0:
                free[tenant.host] &= ~tenant.mask
        return free

    def _memory_left(self) -> list[float]:
        left = [NEVER if host.memory_gib is None else host.memory_gib for host in self._hosts]
        for tenant in self._all_tenants():
            if tenant.demand.memory and tenant.host >= 0:
                left[tenant.host] -= tenant.demand.memory[self._kinds.of[tenant.host]]
        return left

    def _cpus_left(self) -> list[float]:
        left = [NEVER if host.emulated else len(host.usable_cpus) for host in self._hosts]
        for tenant in self._all_tenants():
            if tenant.host >= 0:
                left[tenant.host] -= self._threads(tenant.model, tenant.host)
        return left

    def _family(self, host: int) -> str:
        topology = self._hosts[host].topology
        return topology.family if topology else ""

    def _grid_key(self, host: int) -> tuple[str, int, int]:
        return self._family(host), self._hosts[host].cores, self._allowed[host]

    def _name(self, tenant: Tenant) -> str:
        return f"{self._spec.models[tenant.model].name}/{tenant.replica}"

    def _refuse(self, item: _Item, id: str, what: str, hint: str) -> None:
        model = self._spec.models[item.tenant.model].name
        path: tuple[str | int, ...] = ("models", model)
        where = self._spec.where(*path) if item.pin is None else self._spec.where(*path, "cores", item.number)
        fact = f"{self._name(item.tenant)} {what}"
        problem = Problem(id, "error" if item.required else "warning", where, fact, hint)
        key = (item.tenant.model, item.tenant.replica)
        self._unplaced[key] = Unplaced(model, item.tenant.replica, (problem,))


def _rank(item: _Item) -> tuple[object, ...]:
    return _tenant_rank(item.tenant)


def _tenant_rank(tenant: Tenant) -> tuple[object, ...]:
    """By grade; then largest first, and each model's first before any second."""
    return (tenant.grade, -tenant.size, tenant.replica, tenant.model)


def _pin(item: _Item) -> Pin:
    if item.pin is None:
        raise LookupError("it has no pin")
    return item.pin


def _longest(free: int, cores: int) -> tuple[int, int]:
    """(first, length) of the longest run, the first of several."""
    best = (0, 0)
    for run in runs(Free("", cores, free)):
        if len(run) > best[1]:
            best = (run.first, len(run))
    return best


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
