"""Checks pins with one function for each rule."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from placements.engines.registry import takes_cores
from placements.facts.core_range import CoreRange
from placements.facts.plural import counted, plural
from placements.facts.topology import Host, Topology, alignment
from placements.planner.pins import FreeCores, assign
from placements.rules.case import Case, Fleet, Rule, core_list, on_each
from placements.spec.notation import CorePin
from placements.spec.problems import Problem
from placements.spec.schema import Spec


def pins_within_max(case: Case) -> Iterator[Problem]:
    """There are at most two pins for each replica: one to run on, one for its next revision."""
    if _single_cores(case) or "cores" in case.model.broken:
        return  # reported by another rule
    pins, most = case.model.cores, 2 * case.model.replicas.max
    if len(pins) > most:
        replicas = counted(case.model.replicas.max, "replica")
        fact = f"{len(pins)} pins for at most {replicas}: {_quoted(pins[most])} and later pins are never used"
        raised = case.model.replicas.model_copy(update={"max": len(pins)})
        hint = "remove pins: an update uses at most one more for each replica"
        hint = f"raise replicas.max to {len(pins)}, or {hint}" if case.works(replicas=raised) else hint
        yield case.problem("too-many-pins", ("cores", most), fact, hint)


def pins_have_effect(case: Case) -> Iterator[Problem]:
    """Only a model that uses cores has pins."""
    if case.model.cores and case.all_hosts.hosts and not case.hosts:
        fact = (
            f"pin {_quoted(case.model.cores[0])} has no effect: the {case.engine} engine uses no cores of a real host"
        )
        yield case.problem("pin-without-effect", ("cores",), fact, "remove the pins", "warning")


def pins_on_known_hosts(case: Case) -> Iterator[Problem]:
    """A pin's host exists."""
    names = case.all_hosts.names
    for i, pin in enumerate(case.model.cores):
        if names and pin.host is not None and pin.host not in names:
            fact = f'pin {_quoted(pin)} names the unknown host "{pin.host}"; the hosts are {_some([*names])}'
            others = [CorePin(pin.cores, name) for name in names]
            if pin.host.isdecimal() and int(pin.host) < pin.cores.first:  # "0:7", a range in another notation
                others = [CorePin(CoreRange(int(pin.host), pin.cores.last))]
            meant = next((other for other in others if _works(case, i, other)), None)
            hint = "name one of the hosts" if meant is None else f"write {_quoted(meant)}"
            yield case.problem("pin-unknown-host", ("cores", i), fact, hint)


def pins_inside_host(case: Case) -> Iterator[Problem]:
    """A pin's cores exist."""
    for i, pin, hosts in _pinned(case):
        host = max(hosts, key=lambda host: host.cores)
        if pin.cores.last >= host.cores:
            fact = f"pin {_quoted(pin)} ends at core {pin.cores.last}; {host.name} has cores 0-{host.cores - 1}"
            yield case.problem("pin-outside-host", ("cores", i), fact, "pin to cores that exist")


def pins_off_reserved(case: Case) -> Iterator[Problem]:
    """A pin contains no reserved core."""
    for i, pin, hosts in _pinned(case):
        shared = [sorted(set(pin.cores) & host.reserved_cores) for host in hosts if pin.cores.last < host.cores]
        if shared and all(shared):
            fact = f"pin {_quoted(pin)} contains reserved {core_list(shared[0])}"
            hint = "move the pin, or remove the core from reserve.cores"
            yield case.problem("pin-reserved", ("cores", i), fact, hint)


def pins_as_long_as_tp(case: Case) -> Iterator[Problem]:
    """A pin has tp_degree cores."""
    tp = case.model.tp_degree
    if case.hosts and _single_cores(case):
        count = len(case.model.cores)
        fact = f"cores lists {count} single cores, but each item is the range of one replica, and tp_degree is {tp}"
        ranges = ", ".join(map(_quoted, _ranges(case)))
        hint = f"write cores: [{ranges}]" if ranges else f"write a range of {tp} cores for each replica"
        yield case.problem("pin-length", ("cores",), fact, hint)
        return
    for i, pin in enumerate(case.model.cores):
        if len(pin.cores) != tp and case.hosts and (pin.host is None or pin.host in case.all_hosts.names):
            fact = f"pin {_quoted(pin)} has {counted(len(pin.cores), 'core')}, but tp_degree is {tp}"
            fitting, length = CorePin(CoreRange.of_length(pin.cores.first, tp), pin.host), len(pin.cores)
            ways = [f"pin to {_quoted(fitting)}"] if _works(case, i, fitting) else []
            ways += [f"set tp_degree to {length}"] if case.works(tp_degree=length) else []
            yield case.problem("pin-length", ("cores", i), fact, ", or ".join(ways) or f"pin to {tp} free cores")


def pins_have_their_degree(case: Case) -> Iterator[Problem]:
    """A pin is on a host whose type suits the model, if some types do not."""
    able = [topology for topology in case.fleet.types if case.has_degree(topology)]
    fitting = [host for host, _ in case.fleet.kinds if case.suits(host)]
    for i, pin, hosts in _pinned(case):
        own = ", ".join(topology.instance for topology in Fleet(hosts).types)
        if not able or any(case.suits(host) for host in hosts):
            continue
        if not any(host.topology and case.has_degree(host.topology) for host in hosts):
            fact = f"pin {_quoted(pin)} is on {own}, which does not support tp_degree {case.model.tp_degree}"
            hint = f"pin to a host of type {_types(able)}"
            yield case.problem("illegal-degree", ("cores", i), fact, hint)
        elif fitting:
            fact = f"pin {_quoted(pin)} is on {own}, whose cores have too little HBM for {case.model.name}"
            hint = f"pin to a host of type {_types(Fleet(fitting).types)}"
            yield case.problem("hbm-exceeded", ("cores", i), fact, hint)


def pins_are_aligned(case: Case) -> Iterator[Problem]:
    """A pin begins at a core that the hardware of one of its hosts allows for its degree."""
    tp = case.model.tp_degree
    for i, pin, hosts in _pinned(case):
        inside = [host for host in hosts if pin.cores.last < host.cores] or hosts
        types = [topology for topology in Fleet(inside).types if tp <= topology.cores]
        types = [topology for topology in types if case.has_degree(topology)] or types
        if len(pin.cores) != tp or not types:
            continue  # reported by another rule
        steps = {topology: alignment(topology.family, tp).legal for topology in types}
        if any(pin.cores.aligned(step) for step in steps.values()):
            continue
        aligned = f"a multiple of {steps[types[0]]}"
        if len(set(steps.values())) > 1:
            aligned = on_each(types, lambda topology: f"multiples of {steps[topology]}")  # noqa: B023
        fact = f"pin {_quoted(pin)} begins at core {pin.cores.first}; tp_degree {tp} must begin at {aligned}"
        least = min(steps.values())
        first = pin.cores.first // least * least
        near = [CorePin(CoreRange.of_length(start, tp), pin.host) for start in (first, first + least)]
        free = next((other for other in near if _works(case, i, other)), None)
        hint = "pin to other cores" if free is None else f"pin to {_quoted(free)}"
        yield case.problem("pin-misaligned", ("cores", i), fact, hint)


PIN_RULES: tuple[Rule, ...] = (
    pins_within_max,
    pins_have_effect,
    pins_on_known_hosts,
    pins_inside_host,
    pins_off_reserved,
    pins_as_long_as_tp,
    pins_have_their_degree,
    pins_are_aligned,
)


class _Claim(NamedTuple):
    """A pin with its model."""

    model: str
    number: int  # index into the model's pins
    pin: CorePin


def pins_do_not_overlap(spec: Spec, hosts: Sequence[Host]) -> Iterator[Problem]:
    """No two pins share a core of one host. Reported at the later one.

    With several hosts, pins without a host overlap only if no assignment to hosts avoids it.
    """
    cored = {host.name: FreeCores.of(host) for host in hosts if host.cores}
    claims = sorted(_claims(spec, hosts, cored), key=lambda claim: _position(spec, claim))
    movable: list[_Claim] = []
    for later, claim in enumerate(claims):
        clashes = [other for other in claims[:later] if _clash(other, claim, surely=len(cored) <= 1)]
        for other in clashes:
            yield _overlap(spec, claim, other)
        if not clashes and any(free.holds(claim.pin.cores) for free in cored.values()):
            movable.append(claim)
    for later, host in enumerate(assign([claim.pin for claim in movable], cored)):
        rival = next((other for other in movable[:later] if _clash(other, movable[later], surely=True)), None)
        if host is None and rival is not None:
            yield _overlap(
                spec, movable[later], rival, f", and none of {counted(len(cored), 'host')} has the cores free"
            )


def pins_are_free(case: Case) -> Iterator[Problem]:
    """No pin of the model shares a core with another pin. For values that hints name: it does not read all pairs."""
    cored = {host.name: FreeCores.of(host) for host in case.all_hosts.hosts if host.cores}
    claims = list(_claims(case.spec, case.all_hosts.hosts, cored))
    own = [claim for claim in claims if claim.model == case.model.name]
    for claim in own:
        for other in claims:
            if other is not claim and _clash(other, claim, surely=len(cored) <= 1):
                yield case.problem("pin-overlap", ("cores", claim.number), "it shares a core")
    if own and len(cored) > 1 and None in assign([claim.pin for claim in claims], cored):
        yield case.problem("pin-overlap", ("cores",), "not all pins have a host")


def _claims(spec: Spec, hosts: Sequence[Host], cored: Mapping[str, FreeCores]) -> Iterator[_Claim]:
    for model in spec.models:
        if any(host.topology and not takes_cores(model.engine, host) for host in hosts):
            continue  # pins without effect
        for number, pin in enumerate(model.cores):
            if pin.host is None or pin.host in cored:
                yield _Claim(model.name, number, pin)


def _position(spec: Spec, claim: _Claim) -> tuple[int, int]:
    position = spec.places.positions.get(("models", claim.model, "cores", claim.number))
    return (position.line, position.column) if position else (0, 0)


def _clash(claim: _Claim, other: _Claim, *, surely: bool) -> bool:
    """Returns whether two pins share a core on one host. ``surely``: pins without a host count as on the same host."""
    if claim.pin.cores.overlap(other.pin.cores) is None:
        return False
    if claim.pin.host is None or other.pin.host is None:
        return surely
    return claim.pin.host == other.pin.host


def _overlap(spec: Spec, later: _Claim, earlier: _Claim, further: str = "") -> Problem:
    shared = later.pin.cores.overlap(earlier.pin.cores)
    cores = f"{plural(len(shared or ()), 'core')} {shared}"
    other = f'another pin of "{earlier.model}"' if later.model == earlier.model else f'"{earlier.model}"'
    fact = f'pin {_quoted(later.pin)} of "{later.model}" shares {cores} with {other}, {_quoted(earlier.pin)}{further}'
    position = spec.where("models", later.model, "cores", later.number)
    return Problem("pin-overlap", "error", position, fact, "move one of the two")


def _works(case: Case, number: int, pin: CorePin) -> bool:
    """Returns whether another pin in place of one is without new errors."""
    pins = case.model.cores
    return case.works("cores", number, cores=(*pins[:number], pin, *pins[number + 1 :]))


def _single_cores(case: Case) -> bool:
    """Returns whether the pins list the cores of replicas one by one."""
    return (
        case.model.tp_degree > 1 and len(case.model.cores) > 1 and all(len(pin.cores) == 1 for pin in case.model.cores)
    )


def _ranges(case: Case) -> tuple[CorePin, ...]:
    """Returns the ranges that a list of single cores means; () if they are none that a model may have."""
    tp, hosts = case.model.tp_degree, {pin.host for pin in case.model.cores}
    cores = sorted({pin.cores.first for pin in case.model.cores})
    firsts = cores[::tp]
    if len(hosts) > 1 or [core for first in firsts for core in CoreRange.of_length(first, tp)] != cores:
        return ()
    pins = tuple(CorePin(CoreRange.of_length(first, tp), next(iter(hosts))) for first in firsts)
    return pins if case.works(cores=pins) else ()


def _pinned(case: Case) -> Iterator[tuple[int, CorePin, list[Host]]]:
    """Yields each pin with its possible hosts, if there are any, one of each kind."""
    every = [host for host, _ in case.fleet.kinds]
    for i, pin in enumerate(case.model.cores):
        named = case.fleet.names.get(pin.host) if pin.host is not None else None
        hosts = every if pin.host is None else [named] if named is not None else []
        if hosts:
            yield i, pin, hosts


def _types(types: Sequence[Topology]) -> str:
    return " or ".join(topology.instance for topology in types)


def _quoted(pin: CorePin) -> str:
    return f'"{pin}"'


def _some(words: Sequence[str], separator: str = ", ") -> str:
    listed = separator.join(words[:4])
    return f"{listed}{separator}and {len(words) - 4} more" if len(words) > 4 else listed
