"""One function for each rule that judges a spec. Range notation and types are judged by `parse`, room by `plan`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from placements.facts.checkpoints import Checkpoint
from placements.facts.core_range import CoreRange
from placements.facts.engines import HOST_ENGINES, TNX_UNPADDED, Engine, runs_on, takes_cores
from placements.facts.topology import DEGREES, TOPOLOGIES, Host, Topology, alignment, degree, documented
from placements.planner.free_cores import FreeCores
from placements.planner.pins import assign
from placements.planner.plan import plan
from placements.resources.memory import USABLE_HBM, MemoryEstimate, estimate, fits, host_memory, usable_hbm
from placements.resources.threads import threads
from placements.rules.case import Case, Fleet, Judged, has_degree, has_tp
from placements.rules.engine_rules import ENGINE_RULES
from placements.spec.problems import Problem, in_order
from placements.spec.schema import ModelSpec, Pin, SourceKind, Spec
from placements.spec.source_positions import Path


def check(
    spec: Spec,
    hosts: Sequence[Host],
    checkpoints: Mapping[str, Checkpoint] | None = None,
    drafts: Mapping[str, Checkpoint] | None = None,
    *,
    room: bool = True,
) -> tuple[Problem, ...]:
    """Every finding about a spec, in the order of the file.

    ``checkpoints``, and those of ``drafts``, by model name; rules that need one are skipped for a model without.
    ``hosts`` may be empty when the spec's hosts could not be read; then only rules about the spec alone are judged.
    Without ``room`` it is not tried whether every ``max`` can fit, which takes several plans and gives warnings only.
    """
    problems: list[Problem] = []
    everywhere = Fleet.of(hosts)
    fleets: dict[Engine, Fleet] = {}
    for model in spec.models:
        if model.engine not in fleets:
            fleets[model.engine] = Fleet.of([host for host in hosts if takes_cores(model.engine, host)])
        checkpoint, draft = (checkpoints or {}).get(model.name), (drafts or {}).get(model.name)
        case = Case(spec, model, fleets[model.engine], everywhere, checkpoint, draft)
        for judged in _RULES:
            if not judged.needs & model.broken:
                problems.extend(judged.rule(case))
    problems.extend(reserve_within_host(spec, hosts))
    problems.extend(pins_do_not_overlap(spec, hosts))
    problems.extend(names_are_of_one_model(spec))
    problems.extend(threads_within_budget(spec, hosts))
    sound = not any(problem.severity == "error" for problem in problems) and not any(m.broken for m in spec.models)
    if room and sound:
        problems.extend(max_can_fit(spec, hosts, checkpoints))
    return in_order(problems)


# Rules about one model


def min_within_max(case: Case) -> Iterator[Problem]:
    """replicas.min is at most replicas.max."""
    replicas = case.model.replicas
    if replicas.min > replicas.max:
        what = f"replicas: min {replicas.min} exceeds max {replicas.max}"
        yield case.problem("min-exceeds-max", ("replicas", "min"), what, f"raise max to {replicas.min} or lower min")


def schedules_within_bounds(case: Case) -> Iterator[Problem]:
    """What a schedule asks for is within replicas.max, and its own min within its max."""
    replicas = case.model.replicas
    for i, schedule in enumerate(case.model.scaling.schedules):
        path = ("scaling", "schedules", i)
        for key, count in (("min", schedule.min), ("max", schedule.max)):
            if count is not None and count > replicas.max:
                what = f"a schedule's {key} {count} exceeds replicas.max {replicas.max}"
                hint = f"raise replicas.max to {count}, or lower the schedule's {key}"
                yield case.problem("schedule-exceeds-max", (*path, key), what, hint)
        least = replicas.min if schedule.min is None else schedule.min
        if schedule.max is not None and least > schedule.max:
            what = f"a schedule's max {schedule.max} is less than min {least}, which holds at that time"
            hint = f"raise it to {least}, or set the schedule's min to {schedule.max}"
            yield case.problem("min-exceeds-max", (*path, "max"), what, hint)
        if schedule.min is None and schedule.max is None:
            what = "a schedule without min and max changes nothing"
            yield case.problem("schedule-without-effect", path, what, "give it a min or a max", "warning")


def revisions_are_of_the_hub(case: Case) -> Iterator[Problem]:
    """Only the hub has branches, tags and commits."""
    model = case.model
    asked: list[tuple[Path, str | None, SourceKind]] = [(("revision",), model.revision, model.source_kind)]
    if model.draft is not None and model.draft_kind is not None:
        asked.append((("draft", "revision"), model.draft.revision, model.draft_kind))
    for keys, revision, kind in asked:
        if revision is not None and kind != "hub":
            what = f"{'.'.join(map(str, keys))} is {revision!r}, and the source is {_NOT_OF_THE_HUB[kind]}"
            hint = "remove it; name a folder for each version instead"
            yield case.problem("revision-without-hub", keys, what, hint)


_NOT_OF_THE_HUB = {"path": "a folder", "s3": "in S3"}


def pins_within_max(case: Case) -> Iterator[Problem]:
    """There are no more pins than replicas could use, each with another one for its next version."""
    pins, most = case.model.cores, 2 * case.model.replicas.max
    if len(pins) > most:
        replicas = _count(case.model.replicas.max, "replica")
        what = f"{len(pins)} pins for at most {replicas}; {_quoted(pins[most])} and later ones are never used"
        hint = f"raise replicas.max to {len(pins)}, or remove pins: an update uses at most one more for each replica"
        yield case.problem("too-many-pins", ("cores", most), what, hint)


def pins_have_effect(case: Case) -> Iterator[Problem]:
    """A model that takes no cores has no use for pins."""
    if case.model.cores and case.all_hosts.hosts and not case.hosts:
        what = (
            f"pin {_quoted(case.model.cores[0])} has no effect: the {case.engine} engine takes no cores of a real host"
        )
        yield case.problem("pin-without-effect", ("cores",), what, "remove the pins", "warning")


def pins_on_known_hosts(case: Case) -> Iterator[Problem]:
    """A pin names a host that is there."""
    names = case.all_hosts.names
    for i, pin in enumerate(case.model.cores):
        if names and pin.host is not None and pin.host not in names:
            what = f'pin {_quoted(pin)} names the host "{pin.host}"; hosts are {_some([*names])}'
            yield case.problem("pin-unknown-host", ("cores", i), what, f'write "{next(iter(names))}:{pin.cores}"')


def pins_inside_host(case: Case) -> Iterator[Problem]:
    """A pin's cores exist."""
    for i, pin, hosts in _pinned(case):
        host = max(hosts, key=lambda host: host.cores)
        if pin.cores.last >= host.cores:
            what = f"pin {_quoted(pin)} ends at core {pin.cores.last}; {host.name} has cores 0-{host.cores - 1}"
            yield case.problem("pin-outside-host", ("cores", i), what, "pin to cores that exist")


def pins_off_reserved(case: Case) -> Iterator[Problem]:
    """A pin takes no core that the spec reserves."""
    for i, pin, hosts in _pinned(case):
        taken = [sorted(set(pin.cores) & host.reserved_cores) for host in hosts if pin.cores.last < host.cores]
        if taken and all(taken):
            what = f"pin {_quoted(pin)} takes reserved {_cores(taken[0])}"
            yield case.problem(
                "pin-reserved", ("cores", i), what, "move the pin, or take the core out of reserve.cores"
            )


def pins_as_long_as_tp(case: Case) -> Iterator[Problem]:
    """A pin has one core for each shard."""
    tp = case.model.tp_degree
    for i, pin in enumerate(case.model.cores):
        if len(pin.cores) != tp and case.hosts:
            what = f"pin {_quoted(pin)} has {_count(len(pin.cores), 'core')}, and tp_degree is {tp}"
            fitting = Pin(CoreRange.of_length(pin.cores.first, tp), pin.host)
            hint = f"pin to {_quoted(fitting)}, or set tp_degree to {len(pin.cores)}"
            yield case.problem("pin-length", ("cores", i), what, hint)


def degree_is_legal(case: Case) -> Iterator[Problem]:
    """The tensor-parallel degree is one that a host's family has, and no more than that host's cores."""
    tp, path, types = case.model.tp_degree, ("tp_degree",), case.fleet.types
    if not types:
        return
    legal = [topology for topology in types if case.has_degree(topology)]
    known = {topology: [one for one in DEGREES[topology.family] if one <= topology.cores] for topology in types}
    if all(tp > topology.cores for topology in types):
        what = f"tp_degree {tp} exceeds the {_count(types[0].cores, 'core')} of {case.hosts[0].name}"
        if len(types) > 1:
            sizes = _each(types, lambda topology: _count(topology.cores, "core"))
            what = f"tp_degree {tp} exceeds the cores of every host: {sizes}"
        fitting = sorted({one for degrees in known.values() for one in degrees})
        hint = f"take one of {_listed(fitting)}, or a larger instance type"
        yield case.problem("degree-exceeds-host", path, what, hint)
    elif not legal:
        what = f"tp_degree {tp} is not a degree of {types[0].family}, which has {_listed(known[types[0]])}"
        if len(types) > 1:
            what = f"tp_degree {tp} is a degree of none of the hosts: {_each(types, lambda t: _listed(known[t]))}"
        hint = f"take one of these, or add allow_degrees: [{tp}] if you know that it works"
        yield case.problem("illegal-degree", path, what, hint)
    elif tp not in case.model.allow_degrees and not any(_is_documented(topology, tp) for topology in legal):
        what = f"tp_degree {tp} is named on one page of AWS's only, not in the guides of the engines"
        if legal[0].lnc == 1:
            what = f"tp_degree {tp} is documented for {legal[0].family} with lnc 2 only, and lnc is 1"
        yield case.problem("undocumented-degree", path, what, f"allow_degrees: [{tp}] silences this", "warning")


def pins_have_their_degree(case: Case) -> Iterator[Problem]:
    """A pin lies on a host whose type can take the model, where only some types can."""
    able = [topology for topology in case.fleet.types if case.has_degree(topology)]
    fitting = [host for host, _ in case.fleet.kinds if case.suits(host)]
    for i, pin, hosts in _pinned(case):
        own = ", ".join(topology.instance for topology in Fleet.of(hosts).types)
        if not able or any(case.suits(host) for host in hosts):
            continue
        if not any(host.topology and case.has_degree(host.topology) for host in hosts):
            what = f"pin {_quoted(pin)} lies on {own}, which has no tp_degree {case.model.tp_degree}"
            hint = f"pin to a host of type {_types(able)}"
            yield case.problem("illegal-degree", ("cores", i), what, hint)
        elif fitting:
            what = f"pin {_quoted(pin)} lies on {own}, whose cores have too little HBM for {case.model.name}"
            hint = f"pin to a host of type {_types(Fleet.of(fitting).types)}"
            yield case.problem("hbm-exceeded", ("cores", i), what, hint)


def pins_are_aligned(case: Case) -> Iterator[Problem]:
    """A pin begins where the hardware of one of its hosts lets its degree begin."""
    tp = case.model.tp_degree
    for i, pin, hosts in _pinned(case):
        inside = [host for host in hosts if pin.cores.last < host.cores] or hosts
        types = [topology for topology in Fleet.of(inside).types if tp <= topology.cores]
        types = [topology for topology in types if case.has_degree(topology)] or types
        if len(pin.cores) != tp or not types:
            continue  # told already
        steps = {topology: alignment(topology.family, tp).legal for topology in types}
        if any(pin.cores.aligned(step) for step in steps.values()):
            continue
        told = f"a multiple of {steps[types[0]]}"
        if len(set(steps.values())) > 1:
            told = _each(types, lambda topology: f"multiples of {steps[topology]}")  # noqa: B023
        what = f"pin {_quoted(pin)} begins at core {pin.cores.first}; tp_degree {tp} begins at {told}"
        least = min(steps.values())
        lower = Pin(CoreRange.of_length(pin.cores.first // least * least, tp), pin.host)
        yield case.problem("pin-misaligned", ("cores", i), what, f"pin to {_quoted(lower)}")


def heads_divisible(case: Case) -> Iterator[Problem]:
    """tp_degree divides the attention heads, unless the spec allows padding them."""
    tp, checkpoint = case.model.tp_degree, case.checkpoint
    if checkpoint is None or not case.hosts or case.model.allow_head_padding or checkpoint.heads % tp == 0:
        return
    dividing = [known for known in _degrees(case.fleet.types) if checkpoint.heads % known == 0]
    what = f"tp_degree {tp} does not divide the {checkpoint.heads} attention heads of {case.model.name}"
    roomy = [known for known in dividing if any(case.has_room(known, topology) for topology in case.fleet.types)]
    hint = "add allow_head_padding: true for an engine that pads with zeros"
    if roomy:
        hint = f"take {_listed(roomy, 'or')}, or {hint}"
    yield case.problem("heads-not-divisible", ("tp_degree",), what, hint)


def experts_divisible(case: Case) -> Iterator[Problem]:
    """transformers-neuronx deals whole experts out to cores, or whole groups of cores to experts."""
    tp, experts = case.model.tp_degree, case.checkpoint.experts if case.checkpoint else None
    if case.engine != "transformers-neuronx" or not experts or experts % tp == 0 or tp % experts == 0:
        return
    dividing = [known for known in _degrees(case.fleet.types) if experts % known == 0 or known % experts == 0]
    what = f"tp_degree {tp} and the {experts} experts of {case.model.name} do not divide each other"
    yield case.problem("experts-not-divisible", ("tp_degree",), what, f"take {_listed(dividing, 'or')}")


def fits_memory(case: Case) -> Iterator[Problem]:
    """Weights, KV cache and overhead fit into a core's HBM of one type at least."""
    model, checkpoint, need = case.model, case.checkpoint, case.memory()
    types = [topology for topology in case.fleet.types if case.has_degree(topology)] or case.fleet.types
    if checkpoint is None or need is None or not types or any(fits(need, topology) for topology in types):
        return
    largest = max(types, key=lambda topology: topology.hbm_per_core_gib)
    hbm, limit = largest.hbm_per_core_gib, usable_hbm(largest)
    of = f" of {largest.instance}" if len(types) > 1 else ""
    terms = f"{need} {need.on_cores(model.tp_degree)}, more than {USABLE_HBM} x {hbm} = {limit:.2f} GiB of HBM{of}"
    setting = f"tp_degree {model.tp_degree}, max_batch {model.max_batch}, max_len {model.length(checkpoint)}"
    what = f"{model.name} does not fit into memory with {setting}, {model.dtype_on(case.engine)}: {terms}"
    ways = list(_ways_to_fit(case, types))
    hint = "; or ".join(ways) or "take a larger instance type, and a greater tp_degree"
    yield case.problem("hbm-exceeded", ("tp_degree",), what, hint)


def _ways_to_fit(case: Case, types: Sequence[Topology]) -> Iterator[str]:
    """What would bring a model that exceeds the HBM of these types below it, as far as it is known to."""
    model, checkpoint = case.model, case.checkpoint
    assert checkpoint is not None

    def needs(**fields: object) -> MemoryEstimate:
        return estimate(model.model_copy(update=fields), checkpoint, case.engine, case.draft)

    for tp in _degrees(case.fleet.types):
        larger = needs(tp_degree=tp)
        divides = tp > model.tp_degree and checkpoint.heads % tp == 0
        if divides and any(fits(larger, one) for one in case.fleet.types if has_tp(one, tp)):
            yield f"tp_degree {tp} needs {larger.total:.2f} GiB {larger.on_cores(tp)}"
            break
    if any(fits(needs(max_batch=1, max_len=1), topology) for topology in types):
        yield "lower max_batch or max_len, or set hbm_overhead_gib if you measured the overhead"
        return
    smaller = needs(quantize="int8")
    supported = case.engine not in HOST_ENGINES and (
        case.engine != "transformers-neuronx" or checkpoint.model_type not in TNX_UNPADDED
    )
    if model.quantize is None and supported and any(fits(smaller, topology) for topology in types):
        yield f"quantize: int8 needs {smaller.total:.2f} GiB {smaller.on_cores(model.tp_degree)}"
    need = needs()
    for topology in TOPOLOGIES.values():
        served = not topology.note and runs_on(case.engine, topology.family)
        if served and topology not in types and case.has_degree(topology) and fits(need, topology):
            yield f"a core of {topology.instance} has {usable_hbm(topology):.2f} GiB for it"
            break


def fits_host_memory(case: Case) -> Iterator[Problem]:
    """The load of one replica fits into the memory of one host at least."""
    model, checkpoint = case.model, case.checkpoint
    hosts = [host for host, _ in (case.fleet if case.hosts else case.all_hosts).kinds]
    hosts = [host for host in hosts if case.suits(host)]
    memory = [host.memory_gib for host in hosts if host.memory_gib is not None]
    if not memory or len(memory) < len(hosts):
        return
    if model.host_memory_gib is not None:
        need, path = model.host_memory_gib, "host_memory_gib"
    elif checkpoint is not None:
        need, path = host_memory(model, checkpoint, case.engine, case.draft).load, "source"
    else:
        return
    largest = max(hosts, key=lambda host: host.memory_gib or 0.0)
    if need > max(memory):
        what = f"a replica of {model.name} needs {need:.2f} GiB of host memory to load"
        what += f", and replicas of {largest.name} may take {max(memory):g} GiB"
        hint = "take a larger instance type, or set host_memory_gib if you measured less"
        yield case.problem("host-memory-exceeded", (path,), what, hint)


def spread_leaves_room(case: Case) -> Iterator[Problem]:
    """As many replicas as ``min`` asks for have a host each, or as few on one as ``spread`` allows; pins too."""
    model, spread = case.model, case.model.spread
    if spread is None or not case.all_hosts.hosts:
        return
    kinds = (case.fleet if case.hosts else case.all_hosts).kinds
    hosts = sum(count for host, count in kinds if case.suits(host))
    least = model.replicas.min
    if hosts and least > spread.host * hosts:
        places = f"{_count(hosts, 'host')} that can take it"
        what = f"min {least} of {model.name} exceeds {spread.host} on each of {places}"
        hint = f"add hosts, raise spread.host to {-(-least // hosts)}, or lower replicas.min to {spread.host * hosts}"
        yield case.problem("spread-too-narrow", ("spread",), what, hint)
    only = case.hosts[0].name if len(case.hosts) == 1 else None
    pins: dict[str, int] = {}
    for i, pin in enumerate(model.cores):
        name = pin.host or only
        if name is not None and case.hosts:
            pins[name] = pins.get(name, 0) + 1
            if pins[name] == spread.host + 1:
                what = f"pin {_quoted(pin)} is number {pins[name]} on {name}, and spread allows {spread.host} on a host"
                hint = "pin to another host, or raise spread.host"
                yield case.problem("spread-too-narrow", ("cores", i), what, hint)


def length_within_positions(case: Case) -> Iterator[Problem]:
    """max_len is within the positions that the checkpoint was made for."""
    checkpoint, length = case.checkpoint, case.model.max_len
    if checkpoint and checkpoint.max_positions and length and length > checkpoint.max_positions:
        what = f"max_len {length} exceeds the {checkpoint.max_positions} positions of {case.model.name}"
        hint = f"set max_len to {checkpoint.max_positions} or less"
        yield case.problem("max-len-exceeds-positions", ("max_len",), what, hint)


_SIZES = frozenset(  # what decides how much memory a replica needs
    {
        "engine",
        "dtype",
        "tp_degree",
        "max_batch",
        "max_len",
        "hbm_overhead_gib",
        "draft",
        "quantize",
        "group_query_attention",
    }
)

_RULES: tuple[Judged, ...] = (
    Judged(min_within_max, frozenset({"replicas"})),
    Judged(schedules_within_bounds, frozenset({"replicas", "scaling"})),
    Judged(revisions_are_of_the_hub, frozenset({"source"})),
    Judged(pins_within_max, frozenset({"replicas", "cores"})),
    Judged(pins_have_effect, frozenset({"engine"})),
    Judged(pins_on_known_hosts, frozenset()),
    Judged(pins_inside_host, frozenset({"engine"})),
    Judged(pins_off_reserved, frozenset({"engine"})),
    Judged(pins_as_long_as_tp, frozenset({"engine", "tp_degree"})),
    Judged(degree_is_legal, frozenset({"engine", "tp_degree", "allow_degrees"})),
    Judged(pins_have_their_degree, _SIZES | {"allow_degrees"}),
    Judged(pins_are_aligned, frozenset({"engine", "tp_degree"})),
    Judged(heads_divisible, frozenset({"engine", "tp_degree", "allow_head_padding"})),
    Judged(experts_divisible, frozenset({"engine", "tp_degree"})),
    Judged(fits_memory, _SIZES),
    Judged(fits_host_memory, _SIZES | {"host_memory_gib"}),
    Judged(spread_leaves_room, _SIZES | {"spread", "replicas", "cores", "allow_degrees"}),
    Judged(length_within_positions, frozenset({"max_len"})),
    *ENGINE_RULES,
)


# Rules about the whole spec


def reserve_within_host(spec: Spec, hosts: Sequence[Host]) -> Iterator[Problem]:
    """Reserved cores exist, and reserved vCPUs and memory leave some; of each entry of ``hosts``."""
    first = 0
    for i, wish in enumerate(spec.hosts):
        if first >= len(hosts):
            return
        host, first = hosts[first], first + wish.count
        path: Path = ("hosts", i, "reserve") if ("hosts", i) in spec.places else ("hosts", "reserve")
        outside = [core for core in sorted(host.reserved_cores) if core >= host.cores]
        if outside:
            what = f"reserve.cores names {_cores(outside)}; {host.name} has cores 0-{host.cores - 1}"
            where = spec.where(*path, "cores")
            yield Problem("reserve-outside-host", "error", where, what, "reserve cores that exist")
        if host.reserve_vcpus >= len(host.cpus):
            cpus = _count(len(host.cpus), "CPU")
            what = f"reserve.vcpus {host.reserve_vcpus} leaves nothing of the {cpus} of {host.name}"
            hint = f"reserve at most {len(host.cpus) - 1}"
            yield Problem("reserve-exceeds-host", "error", spec.where(*path, "vcpus"), what, hint)
        if host.topology and host.memory_gib is not None and wish.reserve.memory_gib >= host.topology.memory_gib:
            memory = host.topology.memory_gib
            what = f"reserve.memory_gib {wish.reserve.memory_gib:g} leaves nothing of the {memory} GiB of {host.name}"
            where = spec.where(*path, "memory_gib")
            yield Problem("reserve-exceeds-host", "error", where, what, f"reserve less than {memory}")


def names_are_of_one_model(spec: Spec) -> Iterator[Problem]:
    """An alias is no model's name, and no other model's alias. Told at the later one."""
    names = {model.name for model in spec.models}
    owners: dict[str, str] = {}
    for model in spec.models:
        for i, alias in enumerate(model.aliases):
            where = spec.where("models", model.name, "aliases", i)
            if alias in names:
                what = f'the alias "{alias}" of "{model.name}" is the name of a model'
                yield Problem("alias-taken", "error", where, what, "take another one, or rename the model")
            elif alias in owners:
                other = owners[alias]
                whose = "twice among its own" if other == model.name else f'an alias of "{other}" too'
                what = f'the alias "{alias}" of "{model.name}" is {whose}'
                yield Problem("alias-taken", "error", where, what, "a name stands for one model: keep one of the two")
            owners.setdefault(alias, model.name)


class _Claim(NamedTuple):
    """A pin with the model it belongs to."""

    model: str
    number: int  # index into the model's pins
    pin: Pin


def pins_do_not_overlap(spec: Spec, hosts: Sequence[Host]) -> Iterator[Problem]:
    """No two pins share a core of one host. Told at the later one.

    With several hosts, pins that name none may part: they overlap only when no way of spreading them avoids it.
    """
    cored = {host.name: FreeCores.of(host) for host in hosts if host.cores}
    claims = sorted(_claims(spec, hosts, cored), key=lambda claim: _place(spec, claim))
    parting: list[_Claim] = []
    for later, claim in enumerate(claims):
        clashes = [other for other in claims[:later] if _clash(other, claim, surely=len(cored) <= 1)]
        for other in clashes:
            yield _overlap(spec, claim, other)
        if not clashes and any(free.holds(claim.pin.cores) for free in cored.values()):
            parting.append(claim)
    for later, host in enumerate(assign([claim.pin for claim in parting], cored)):
        rival = next((other for other in parting[:later] if _clash(other, parting[later], surely=True)), None)
        if host is None and rival is not None:
            yield _overlap(
                spec, parting[later], rival, f", and no other of {_count(len(cored), 'host')} is left for it"
            )


def _claims(spec: Spec, hosts: Sequence[Host], cored: Mapping[str, FreeCores]) -> Iterator[_Claim]:
    for model in spec.models:
        if any(host.topology and not takes_cores(model.engine, host) for host in hosts):
            continue  # its pins have no effect
        for number, pin in enumerate(model.cores):
            if pin.host is None or pin.host in cored:
                yield _Claim(model.name, number, pin)


def _place(spec: Spec, claim: _Claim) -> tuple[int, int]:
    place = spec.places.get(("models", claim.model, "cores", claim.number))
    return (place.line, place.column) if place else (0, 0)


def _clash(one: _Claim, other: _Claim, *, surely: bool) -> bool:
    """Whether two pins share a core on one host. ``surely``: pins that name no host are taken to lie on the same."""
    if one.pin.cores.overlap(other.pin.cores) is None:
        return False
    if one.pin.host is None or other.pin.host is None:
        return surely
    return one.pin.host == other.pin.host


def _overlap(spec: Spec, later: _Claim, earlier: _Claim, further: str = "") -> Problem:
    shared = later.pin.cores.overlap(earlier.pin.cores)
    cores = f"core {shared}" if shared and len(shared) == 1 else f"cores {shared}"
    other = f'another pin of "{earlier.model}"' if later.model == earlier.model else f'"{earlier.model}"'
    what = f'pin {_quoted(later.pin)} of "{later.model}" shares {cores} with {other}, {_quoted(earlier.pin)}{further}'
    place = spec.where("models", later.model, "cores", later.number)
    return Problem("pin-overlap", "error", place, what, "move one of the two; a core belongs to one replica")


def threads_within_budget(spec: Spec, hosts: Sequence[Host]) -> Iterator[Problem]:
    """The replicas that a host can hold do not run more threads than it has CPUs for them; the worst host is named.

    On an emulated host only threads that the spec asks for count: its CPUs are a laptop's, and a share is at least 1.
    """
    models = [model for model in spec.models if not model.broken & {"threads", "tp_degree", "replicas", "engine"}]
    over: dict[tuple[object, ...], tuple[int, int, Host]] = {}
    for host in hosts:
        kind = (host.topology, len(host.cpus), host.reserve_vcpus, host.emulated, len(host.reserved_cores))
        budget = len(host.usable_cpus)
        if kind not in over and budget >= 1:
            able = [one for one in models if _can_lie(one, host) and not (host.emulated and one.threads == "share")]
            over[kind] = (_most_threads(able, host), budget, host)
    worst = max(over.values(), key=lambda one: one[0] - one[1], default=None)
    if worst is not None and worst[0] > worst[1]:
        total, budget, host = worst
        what = (
            f"replicas could run {total} threads on the {_count(budget, 'CPU')} of {host.name} "
            "and slow each other down: use fewer replicas or threads"
        )
        yield Problem("threads-oversubscribed", "warning", spec.where("hosts"), what)


def _can_lie(model: ModelSpec, host: Host) -> bool:
    """Whether the host has the model's degree and, where it is real, the CPUs for a fixed number of threads: a plan
    grants these only where they are there, pins aside. Always where the model takes no cores."""
    if host.topology is None or not takes_cores(model.engine, host):
        return True
    if _insists(model, host) and threads(model.threads, model.tp_degree, host) > len(host.usable_cpus):
        return False
    return has_degree(model, host.topology)


def _most_threads(models: Sequence[ModelSpec], host: Host) -> int:
    """The most threads that replicas of these models, each up to its max, can run on the host's cores at once.

    Fixed numbers of a real host count as far as it has the CPUs for them: a plan refuses the rest.
    """
    cores = host.cores - len(host.reserved_cores)
    best = [0] * (cores + 1)  # by cores used
    within = (1 << len(host.usable_cpus) + 1) - 1
    granted = [1] * (cores + 1)  # sums, as bits, that fixed numbers can make; by cores used
    floating = 0  # threads of replicas that take no cores
    for model in models:
        count = threads(model.threads, model.tp_degree, host)
        if not takes_cores(model.engine, host):
            floating += count * model.replicas.max
            continue
        most = min(model.replicas.max, model.spread.host) if model.spread else model.replicas.max
        for _ in range(min(most, cores // model.tp_degree)):
            for used in range(cores, model.tp_degree - 1, -1):
                if _insists(model, host):
                    granted[used] |= granted[used - model.tp_degree] << count & within
                else:
                    best[used] = max(best[used], best[used - model.tp_degree] + count)
    return max(best[used] + max(granted[: cores - used + 1]).bit_length() - 1 for used in range(cores + 1)) + floating


def _insists(model: ModelSpec, host: Host) -> bool:
    """Whether a plan places replicas only where the CPUs for their threads are left."""
    return isinstance(model.threads, int) and not model.cores and not host.emulated


MOST_TRIED = 5_000
"""Replicas that `max_can_fit` may plan for, all its plans together, beside the first; the rest of its findings is left
out. It is a warning, and a fleet of thousands of replicas had better be judged in time."""


def max_can_fit(
    spec: Spec, hosts: Sequence[Host], checkpoints: Mapping[str, Checkpoint] | None = None
) -> Iterator[Problem]:
    """Each model's ``max``, its ``min`` first, fits beside the ``min`` of all models that do not rank below it."""
    asked = sum(model.replicas.max for model in spec.models)
    if not hosts or not spec.models or asked > MOST_TRIED:
        return
    drawn = plan(spec, hosts, checkpoints, wanted={model.name: model.replicas.max for model in spec.models})
    lacking = {unplaced.model for unplaced in drawn.unplaced}  # the others fit even beside every max
    for model in [model for model in spec.models if model.name in lacking][: max(1, MOST_TRIED // asked)]:
        most = model.replicas.max
        rivals = {other.name: other.replicas.min if other.priority >= model.priority else 0 for other in spec.models}
        drawn = plan(spec, hosts, checkpoints, wanted={**rivals, model.name: most})
        placed = sum(placement.model == model.name for placement in drawn.placements)
        least = model.replicas.min
        if placed < least:
            what = f"min {least} of {model.name} can never fit: there is room for {placed} beside the min of the others"
            lower = f"set replicas.min to {placed}" if placed else "lower the min of the others"
            where = spec.where("models", model.name, "replicas", "min")
            hint = f"{lower}, or add hosts; `corewright explain {model.name}` tries more"
            yield Problem("min-never-fits", "warning", where, what, hint)
        elif placed < most:
            what = f"max {most} of {model.name} can never fit: there is room for {placed} beside the min of the others"
            hint = f"set replicas.max to {max(1, placed)}, or add hosts"
            yield Problem("max-never-fits", "warning", spec.where("models", model.name, "replicas", "max"), what, hint)


# Words


def _pinned(case: Case) -> Iterator[tuple[int, Pin, list[Host]]]:
    """Each pin with the hosts that it may lie on, where there are any; of hosts that are alike one."""
    every = [host for host, _ in case.fleet.kinds]
    for i, pin in enumerate(case.model.cores):
        named = case.fleet.names.get(pin.host) if pin.host is not None else None
        hosts = every if pin.host is None else [named] if named is not None else []
        if hosts:
            yield i, pin, hosts


def _is_documented(topology: Topology, tp: int) -> bool:
    known = degree(topology.family, tp)
    return known is not None and documented(topology, known)


def _degrees(types: Sequence[Topology]) -> list[int]:
    """The degrees that some of the types have, ascending."""
    return sorted({tp for topology in types for tp in DEGREES[topology.family] if tp <= topology.cores})


def _each(types: Sequence[Topology], told: Callable[[Topology], str]) -> str:
    """ "32 cores of trn1.32xlarge, 24 cores of inf2.48xlarge"."""
    return "; ".join(f"{told(topology)} on {topology.instance}" for topology in types)


def _types(types: Sequence[Topology]) -> str:
    return " or ".join(topology.instance for topology in types)


def _quoted(pin: Pin) -> str:
    return f'"{pin}"'


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _cores(cores: Sequence[int]) -> str:
    return f"core {cores[0]}" if len(cores) == 1 else f"cores {', '.join(map(str, cores))}"


def _listed(numbers: Sequence[int], word: str = "and") -> str:
    words = [str(number) for number in numbers]
    return f"{', '.join(words[:-1])} {word} {words[-1]}" if len(words) > 1 else "".join(words)


def _some(words: Sequence[str], separator: str = ", ") -> str:
    shown = separator.join(words[:4])
    return f"{shown}{separator}and {len(words) - 4} more" if len(words) > 4 else shown
