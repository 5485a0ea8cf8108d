"""plan: which replica of which model lies on which cores of which host. Values in, values out."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from placements.checkpoints import Checkpoint
from placements.cores import CoreRange
from placements.engines import needs_neuron, takes_cores
from placements.environ import environment
from placements.packing import Free, admit, bits, fits, runs, windows
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
    cpus: tuple[int, ...] = ()  # CPU ids it is bound to; () means not bound

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
class Plan:
    """All placements, in the order of the spec; what did not fit, and why; and findings about the spec."""

    placements: tuple[Placement, ...] = ()
    unplaced: tuple[Unplaced, ...] = ()
    problems: tuple[Problem, ...] = ()

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


@dataclass(frozen=True)
class _Item:
    """A replica to be placed."""

    model: ModelSpec
    order: int  # of the model in the spec
    replica: int
    required: bool  # counts towards ``min``
    pin: int | None = None  # index into model.cores

    @property
    def rank(self) -> tuple[int, bool, int, int, int]:
        """Strict priority; then what min asks for; then largest first, and each model's first before any second."""
        return (-self.model.priority, not self.required, -self.model.tp_degree, self.replica, self.order)

    @property
    def grade(self) -> tuple[int, bool]:
        """Items of one grade compete for cores; a lower grade never costs a higher one any."""
        return self.rank[:2]


def plan(
    spec: Spec,
    hosts: Sequence[Host],
    checkpoints: Mapping[str, Checkpoint] | None = None,
    running: Iterable[Running] = (),
    wanted: Mapping[str, int] | None = None,
    blocked: Mapping[str, frozenset[int]] | None = None,
    numbered: Mapping[str, frozenset[int]] | None = None,
) -> Plan:
    """Place every model's replicas: its ``min``, or what ``wanted`` names for it, at most its ``max``.

    ``running`` holds what runs now, ``blocked`` cores by host that may not be used (quarantine), ``numbered`` replica
    indices by model that are in use elsewhere (older versions that still serve). ``checkpoints`` decide nothing yet;
    rules that need them are those of `check`. The spec is taken as free of errors.

    1. Running replicas that fit the spec stay, those on a pin first, then those with the lowest index. Others end:
       their cores count as free.
    2. A model's pins go to its replicas in order; pins that find their cores taken are not placed elsewhere.
    3. A replica that takes no cores goes to the host where such replicas have the fewest threads.
    4. Who gets cores is decided by grade: priority, then what ``min`` asks for before what exceeds it; within a grade
       most cores served win, largest degree first.
    5. Then each takes its place, largest first: away from pins that are not in use, in a preferred block before any
       other legal window, in the shortest free run, as long as all the others admitted still fit.
    6. What was not admitted is tried once more wherever a legal window is left.

    The result is deterministic, and planning with ``running`` equal to its placements changes nothing.
    """
    draft = _Draft(spec, hosts, blocked or {}, numbered or {})
    observed = tuple(dict.fromkeys(running))
    items: list[_Item] = []
    for order, model in enumerate(spec.models):
        count = max(0, min((wanted or {}).get(model.name, model.replicas.min), model.replicas.max))
        items.extend(draft.keep(model, order, count, [replica for replica in observed if replica.model == model.name]))
    items.sort(key=lambda item: item.rank)
    draft.place_pinned([item for item in items if item.pin is not None])
    floating = [item for item in items if item.pin is None]
    draft.place_coreless([item for item in floating if draft.coreless_hosts(item.model)])
    draft.place_floating([item for item in floating if not draft.coreless_hosts(item.model)])
    return draft.result()


class _Draft:
    """The plan in the making: what is free, what is placed, what is not. The numbers are those of `plan`."""

    def __init__(
        self,
        spec: Spec,
        hosts: Sequence[Host],
        blocked: Mapping[str, frozenset[int]],
        numbered: Mapping[str, frozenset[int]],
    ) -> None:
        self._spec = spec
        self._numbered = numbered
        self._hosts = {host.name: host for host in hosts}
        self._blocked = blocked
        self._free = {host.name: Free.of(host, blocked.get(host.name, ())) for host in hosts}
        self._busy_threads: Counter[str] = Counter()  # of replicas that take no cores, by host
        self._placed: dict[tuple[int, int], Placement] = {}  # (order of the model, replica)
        self._unplaced: dict[tuple[int, int], Unplaced] = {}
        self._idle_pins: list[Pin] = []

    def result(self) -> Plan:
        placed = tuple(self._placed[key] for key in sorted(self._placed))
        return Plan(placed, tuple(self._unplaced[key] for key in sorted(self._unplaced)))

    def coreless_hosts(self, model: ModelSpec) -> list[Host]:
        """Hosts where the model runs without taking cores. Where there is one, the model takes cores nowhere."""
        return [
            host
            for host in self._hosts.values()
            if not takes_cores(model.engine, host) and (host.topology or not needs_neuron(model.engine))
        ]

    # 1.
    def keep(self, model: ModelSpec, order: int, count: int, running: Sequence[Running]) -> list[_Item]:
        """Keep what runs and fits the spec, and name the replicas that are missing up to ``count``."""
        pins = () if self.coreless_hosts(model) else model.cores
        on_pin: dict[int, Running] = {}
        loose: list[Running] = []
        for replica in sorted(running, key=lambda replica: replica.replica):
            if self._still_fits(model, replica):
                open_pins = [i for i, pin in enumerate(pins) if i not in on_pin and _meets(pin, replica)]
                if open_pins:
                    on_pin[max(open_pins, key=lambda i: pins[i].host is not None)] = replica
                else:
                    loose.append(replica)
        pinned = min(len(pins), count)
        used: dict[int, int | None] = {}  # replica index -> pin
        candidates: list[tuple[int | None, Running]] = [*list(on_pin.items())[:pinned]]
        candidates.extend((None, replica) for replica in loose[: count - pinned])
        for pin, replica in candidates:
            if replica.replica not in used and self._keep_cores(model, order, replica):
                used[replica.replica] = pin
        taken_pins = set(used.values())
        to_pin = [i for i in range(len(pins)) if i not in taken_pins]
        missing_pins = to_pin[: pinned - len(taken_pins - {None})]
        self._idle_pins.extend(pins[i] for i in to_pin if i not in missing_pins)
        return self._missing(model, order, count, set(used), missing_pins)

    def _missing(self, model: ModelSpec, order: int, count: int, used: set[int], pins: Sequence[int]) -> list[_Item]:
        number = count - len(used)
        elsewhere = self._numbered.get(model.name, frozenset())
        unused = (i for i in itertools.count() if i not in used and i not in elsewhere)
        indices = [next(unused) for _ in range(number)]
        chosen: dict[int, int] = {}
        for pin in pins:  # pin i for replica i where that is possible
            free = [i for i in indices if i not in chosen]
            chosen[pin if pin in free else free[0]] = pin
        required = max(0, model.replicas.min - len(used))
        ordered = sorted(indices, key=lambda i: (i not in chosen, i))
        return [_Item(model, order, index, place < required, chosen.get(index)) for place, index in enumerate(ordered)]

    def _still_fits(self, model: ModelSpec, replica: Running) -> bool:
        host = self._hosts.get(replica.host)
        if host is None or replica.replica < 0:
            return False
        if self.coreless_hosts(model):
            return replica.cores is None and host in self.coreless_hosts(model)
        if replica.cores is None or replica.cores.last >= host.cores or len(replica.cores) != model.tp_degree:
            return False
        return not any(core in host.reserved_cores for core in replica.cores)

    def _keep_cores(self, model: ModelSpec, order: int, replica: Running) -> bool:
        """False when another replica that is kept holds some of its cores."""
        others = (p for p in self._placed.values() if p.host == replica.host and p.cores is not None)
        if replica.cores is not None and any(p.cores and replica.cores.overlap(p.cores) for p in others):
            return False
        self._put(_Item(model, order, replica.replica, True), replica.host, replica.cores)
        return True

    # 2.
    def place_pinned(self, items: Sequence[_Item]) -> None:
        pins = [_pin(item) for item in items]
        for item, pin, host in zip(items, pins, assign(pins, self._free), strict=True):
            if host is not None:
                self._put(item, host, pin.cores)
        for item, pin in zip(items, pins, strict=True):
            if (item.order, item.replica) in self._placed:
                continue
            host = next(
                (name for name, free in self._free.items() if _allows(pin, name) and free.holds(pin.cores)), None
            )
            if host is not None:  # the search for hosts is bounded
                self._put(item, host, pin.cores)
            else:
                self._refuse_pin(item, pin)
                self._idle_pins.append(pin)  # it may come free: others had better go elsewhere

    def _refuse_pin(self, item: _Item, pin: Pin) -> None:
        names = [pin.host] if pin.host is not None else list(self._hosts)
        reasons = [self._why_taken(self._hosts[name], pin.cores) for name in names if name in self._hosts]
        on = f" of {pin.host}" if pin.host else ""
        why = "; ".join(reasons[:3]) or "no host of that name is there"
        hint = "end what holds them, or change the pin"
        self._refuse(item, "pin-taken", f"is pinned to cores {pin.cores}{on}, but {why}", hint)

    def _why_taken(self, host: Host, cores: CoreRange) -> str:
        if cores.last >= host.cores:
            return f"{host.name} has {_count(host.cores, 'core')}"
        holders = [
            f"{p.model}/{p.replica} holds {p.cores.overlap(cores)}"
            for _, p in sorted(self._placed.items())
            if p.host == host.name and p.cores is not None and p.cores.overlap(cores)
        ]
        for label, held in (("quarantined", self._blocked.get(host.name, ())), ("reserved", host.reserved_cores)):
            both = sorted(core for core in cores if core in held)
            holders.extend([f"{', '.join(map(str, both))} {'is' if len(both) == 1 else 'are'} {label}"] if both else [])
        return f"on {host.name} {' and '.join(holders)}"

    # 3.
    def place_coreless(self, items: Sequence[_Item]) -> None:
        for item in items:
            host = min(self.coreless_hosts(item.model), key=lambda host: self._busy_threads[host.name])
            self._put(item, host.name, None)

    # 4.
    def place_floating(self, items: Sequence[_Item]) -> None:
        kinds = Counter(free for free in self._free.values() if free.cores)
        before: Counter[int] = Counter()
        admitted: list[_Item] = []
        for _, grade in itertools.groupby(items, key=lambda item: item.grade):
            rivals = list(grade)
            chosen = admit(kinds, before, Counter(item.model.tp_degree for item in rivals))
            before += chosen
            for item in rivals:
                if chosen[item.model.tp_degree] > 0:
                    chosen[item.model.tp_degree] -= 1
                    admitted.append(item)
        self._place_admitted(admitted)
        # 6. The searches above are bounded: whatever still finds a window takes it.
        for item in items:
            if (item.order, item.replica) not in self._placed and not self._place(item, Counter()):
                self._refuse_room(item)

    # 5.
    def _place_admitted(self, items: Sequence[_Item]) -> None:
        rest = Counter(item.model.tp_degree for item in items)
        for item in items:
            rest[item.model.tp_degree] -= 1
            self._place(item, rest)

    def _place(self, item: _Item, rest: Mapping[int, int]) -> bool:
        """Put the item into the best window that leaves room for ``rest``."""
        tp = item.model.tp_degree
        tried: set[tuple[Free, CoreRange]] = set()
        kinds = Counter(free for free in self._free.values() if free.cores)
        for _, host, window in sorted(self._choices(tp)):
            kind = self._free[host]
            if (kind, window) in tried:
                continue
            tried.add((kind, window))
            after = kinds.copy()
            after[kind] -= 1
            after[kind.without(window)] += 1
            if fits(after, rest):
                self._put(item, host, window)
                return True
        return False

    def _choices(self, tp: int) -> Iterator[tuple[tuple[bool, bool, int, int], str, CoreRange]]:
        """Legal windows, each with its rank: idle pins, preferred alignment, length of the free run, host."""
        seen: set[tuple[Free, int]] = set()
        for order, (name, free) in enumerate(self._free.items()):
            idle = self._idle_mask(name)
            if (free, idle) in seen:  # an equal host comes before
                continue
            seen.add((free, idle))
            preferred = alignment(free.family, tp).preferred if free.family else 1
            for window in windows(free, tp):
                run = next(run for run in runs(free) if run.overlap(window))
                rank = (bool(bits(window) & idle), not window.aligned(preferred), len(run), order)
                yield rank, name, window

    def _idle_mask(self, host: str) -> int:
        mask = 0
        for pin in self._idle_pins:
            if _allows(pin, host):
                mask |= bits(pin.cores)
        return mask

    def _refuse_room(self, item: _Item) -> None:
        tp = item.model.tp_degree
        hosts = [host for host in self._hosts.values() if host.cores]
        hint = "fewer replicas, a smaller tp_degree, or another host would make it fit"
        if not hosts:
            self._refuse(item, "no-room", f"needs {_count(tp, 'core')}, and no host has NeuronCores", hint)
            return
        longest = {host.name: max(runs(self._free[host.name]), key=len, default=None) for host in hosts}
        name, run = max(longest.items(), key=lambda entry: len(entry[1] or ()))
        others = f" and none of {_count(len(hosts), 'host')} has a longer one" if len(hosts) > 1 else ""
        needs = f"needs {tp} contiguous cores" if tp > 1 else "needs 1 core"
        if run is None:
            where = name if len(hosts) == 1 else f"any of {_count(len(hosts), 'host')}"
            self._refuse(item, "no-room", f"{needs}, none is free on {where}", hint)
        elif len(run) < tp:
            what = f"{needs}, the longest free run on {name} is {len(run)} ({run}){others}"
            self._refuse(item, "no-room", what, hint)
        else:
            step = alignment(self._free[name].family, tp).legal
            what = f"{needs} from a multiple of {step} on, the longest free run on {name} is {len(run)} ({run}){others}"
            self._refuse(item, "no-room", what, hint)

    def _put(self, item: _Item, name: str, cores: CoreRange | None) -> None:
        host = self._hosts[name]
        count = threads(item.model.threads, item.model.tp_degree, host)
        if cores is None:
            self._busy_threads[name] += count
        else:
            self._free[name] = self._free[name].without(cores)
        mask = cpu_mask(host, cores, count)
        self._placed[item.order, item.replica] = Placement(item.model.name, item.replica, name, cores, count, mask)

    def _refuse(self, item: _Item, id: str, what: str, hint: str) -> None:
        path: tuple[str | int, ...] = ("models", item.model.name)
        where = self._spec.where(*path) if item.pin is None else self._spec.where(*path, "cores", item.pin)
        fact = f"{item.model.name}/{item.replica} {what}"
        problem = Problem(id, "error" if item.required else "warning", where, fact, hint)
        self._unplaced[item.order, item.replica] = Unplaced(item.model.name, item.replica, (problem,))


def _pin(item: _Item) -> Pin:
    if item.pin is None:
        raise LookupError(f"{item.model.name}/{item.replica} has no pin")
    return item.model.cores[item.pin]


def _meets(pin: Pin, replica: Running) -> bool:
    return pin.cores == replica.cores and _allows(pin, replica.host)


def _allows(pin: Pin, host: str) -> bool:
    return pin.host in (None, host)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
