"""One function for each rule that judges a spec. Range notation and types are judged by `parse`, room by `plan`."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from placements.checkpoints import Checkpoint
from placements.cores import CoreRange
from placements.engines import ENGINE_OPTIONS, needs_neuron, resolve, takes_cores
from placements.memory import USABLE_HBM, estimate
from placements.packing import Free
from placements.pins import assign
from placements.places import Path
from placements.plan import plan
from placements.problems import Problem, Severity, in_order
from placements.spec import ModelSpec, Pin, Spec
from placements.threads import arithmetic, threads
from placements.topology import DEGREES, Host, alignment, degree


@dataclass(frozen=True)
class _Case:
    """One model to be judged. ``hosts`` are those where it takes cores."""

    spec: Spec
    model: ModelSpec
    hosts: Sequence[Host]
    all_hosts: Sequence[Host]
    checkpoint: Checkpoint | None
    draft: Checkpoint | None = None

    def problem(self, id: str, path: Path, what: str, hint: str = "", severity: Severity = "error") -> Problem:
        return Problem(id, severity, self.spec.where("models", self.model.name, *path), what, hint)


Rule = Callable[[_Case], Iterator[Problem]]


class _Judged(NamedTuple):
    """A rule, and the fields it reads: it is skipped when one of them could not be read."""

    rule: Rule
    needs: frozenset[str]


def check(
    spec: Spec,
    hosts: Sequence[Host],
    checkpoints: Mapping[str, Checkpoint] | None = None,
    drafts: Mapping[str, Checkpoint] | None = None,
) -> tuple[Problem, ...]:
    """Every finding about a spec, in the order of the file.

    ``checkpoints``, and those of ``drafts``, by model name; rules that need one are skipped for a model without.
    ``hosts`` may be empty when the spec's hosts could not be read; then only rules about the spec alone are judged.
    """
    problems: list[Problem] = []
    for model in spec.models:
        own_hosts = [host for host in hosts if takes_cores(model.engine, host)]
        checkpoint, draft = (checkpoints or {}).get(model.name), (drafts or {}).get(model.name)
        case = _Case(spec, model, own_hosts, hosts, checkpoint, draft)
        for judged in _RULES:
            if not judged.needs & model.broken:
                problems.extend(judged.rule(case))
    problems.extend(reserve_within_host(spec, hosts))
    problems.extend(pins_do_not_overlap(spec, hosts))
    problems.extend(threads_within_budget(spec, hosts))
    if not any(problem.severity == "error" for problem in problems) and not any(model.broken for model in spec.models):
        problems.extend(max_can_fit(spec, hosts))
    return in_order(problems)


# Rules about one model


def min_within_max(case: _Case) -> Iterator[Problem]:
    """replicas.min is at most replicas.max."""
    replicas = case.model.replicas
    if replicas.min > replicas.max:
        what = f"replicas: min {replicas.min} exceeds max {replicas.max}"
        yield case.problem("min-exceeds-max", ("replicas", "min"), what, f"raise max to {replicas.min} or lower min")


def pins_within_max(case: _Case) -> Iterator[Problem]:
    """There are no more pins than replicas that could use them."""
    pins, most = case.model.cores, case.model.replicas.max
    if len(pins) > most:
        what = f"{len(pins)} pins for at most {_count(most, 'replica')}; {_quoted(pins[most])} has no replica"
        hint = f"raise replicas.max to {len(pins)}, or remove pins"
        yield case.problem("too-many-pins", ("cores", most), what, hint)


def pins_have_effect(case: _Case) -> Iterator[Problem]:
    """A model that takes no cores has no use for pins."""
    if case.model.cores and case.all_hosts and not case.hosts:
        engine = resolve(case.model.engine, case.all_hosts[0])
        what = f"pin {_quoted(case.model.cores[0])} has no effect: the {engine} engine takes no cores of a real host"
        yield case.problem("pin-without-effect", ("cores",), what, "remove the pins", "warning")


def pins_on_known_hosts(case: _Case) -> Iterator[Problem]:
    """A pin names a host that is there."""
    names = [host.name for host in case.all_hosts]
    for i, pin in enumerate(case.model.cores):
        if names and pin.host is not None and pin.host not in names:
            what = f'pin {_quoted(pin)} names the host "{pin.host}"; hosts are {_some(names)}'
            yield case.problem("pin-unknown-host", ("cores", i), what, f'write "{names[0]}:{pin.cores}"')


def pins_inside_host(case: _Case) -> Iterator[Problem]:
    """A pin's cores exist."""
    for i, pin, hosts in _pinned(case):
        host = max(hosts, key=lambda host: host.cores)
        if pin.cores.last >= host.cores:
            what = f"pin {_quoted(pin)} ends at core {pin.cores.last}; {host.name} has cores 0-{host.cores - 1}"
            yield case.problem("pin-outside-host", ("cores", i), what, "pin to cores that exist")


def pins_off_reserved(case: _Case) -> Iterator[Problem]:
    """A pin takes no core that the spec reserves."""
    for i, pin, hosts in _pinned(case):
        taken = [sorted(set(pin.cores) & host.reserved_cores) for host in hosts if pin.cores.last < host.cores]
        if taken and all(taken):
            what = f"pin {_quoted(pin)} takes reserved {_cores(taken[0])}"
            yield case.problem(
                "pin-reserved", ("cores", i), what, "move the pin, or take the core out of reserve.cores"
            )


def pins_as_long_as_tp(case: _Case) -> Iterator[Problem]:
    """A pin has one core for each shard."""
    tp = case.model.tp_degree
    for i, pin in enumerate(case.model.cores):
        if len(pin.cores) != tp and case.hosts:
            what = f"pin {_quoted(pin)} has {_count(len(pin.cores), 'core')}, and tp_degree is {tp}"
            fitting = CoreRange.of_length(pin.cores.first, tp)
            yield case.problem(
                "pin-length", ("cores", i), what, f'pin to "{fitting}", or set tp_degree to {len(pin.cores)}'
            )


def degree_is_legal(case: _Case) -> Iterator[Problem]:
    """The tensor-parallel degree is one that the family has, and no more than a host's cores."""
    tp = case.model.tp_degree
    if not case.hosts:
        return
    host = max(case.hosts, key=lambda host: host.cores)
    family = _family(host)
    path = ("tp_degree",)
    legal = [known for known in DEGREES[family] if known <= host.cores]
    known = degree(family, tp)
    if tp > host.cores:
        what = f"tp_degree {tp} exceeds the {_count(host.cores, 'core')} of {host.name}"
        yield case.problem(
            "degree-exceeds-host", path, what, f"take one of {_listed(legal)}, or a larger instance type"
        )
    elif tp in case.model.allow_degrees:
        return
    elif known is None:
        what = f"tp_degree {tp} is not a degree of {family}, which has {_listed(legal)}"
        hint = f"take one of these, or add allow_degrees: [{tp}] if you know that it works"
        yield case.problem("illegal-degree", path, what, hint)
    elif not known.documented:
        what = f"tp_degree {tp} is named on one page of AWS's only, not in the guides of the engines"
        yield case.problem("undocumented-degree", path, what, f"allow_degrees: [{tp}] silences this", "warning")


def pins_are_aligned(case: _Case) -> Iterator[Problem]:
    """A pin begins where the hardware lets its degree begin."""
    tp = case.model.tp_degree
    for i, pin, hosts in _pinned(case):
        if len(pin.cores) != tp or tp > max(host.cores for host in hosts):
            continue  # told already
        step = alignment(_family(hosts[0]), tp).legal
        if not pin.cores.aligned(step):
            lower = pin.cores.first // step * step
            what = f"pin {_quoted(pin)} begins at core {pin.cores.first}; tp_degree {tp} begins at a multiple of {step}"
            yield case.problem("pin-misaligned", ("cores", i), what, f'pin to "{CoreRange.of_length(lower, tp)}"')


def heads_divisible(case: _Case) -> Iterator[Problem]:
    """tp_degree divides the attention heads, unless the spec allows padding them."""
    tp, checkpoint = case.model.tp_degree, case.checkpoint
    if checkpoint is None or not case.hosts or case.model.allow_head_padding or checkpoint.heads % tp == 0:
        return
    largest = max(host.cores for host in case.hosts)
    family = _family(case.hosts[0])
    dividing = [known for known in DEGREES[family] if checkpoint.heads % known == 0 and known <= largest]
    what = f"tp_degree {tp} does not divide the {checkpoint.heads} attention heads of {case.model.name}"
    hint = f"take {_listed(dividing, 'or')}, or add allow_head_padding: true for an engine that pads with zeros"
    yield case.problem("heads-not-divisible", ("tp_degree",), what, hint)


def fits_memory(case: _Case) -> Iterator[Problem]:
    """Weights, KV cache and overhead fit into a core's HBM."""
    model, checkpoint = case.model, case.checkpoint
    if checkpoint is None or not case.hosts:
        return
    host = max(case.hosts, key=lambda host: host.topology.hbm_per_core_gib if host.topology else 0)
    if host.topology is None:
        return
    hbm = host.topology.hbm_per_core_gib
    limit = USABLE_HBM * hbm
    engine = resolve(model.engine, host)
    need = estimate(model, checkpoint, engine, case.draft)
    if need.total <= limit:
        return
    terms = f"{need} on each core, more than {USABLE_HBM} x {hbm} = {limit:.2f} GiB of HBM"
    setting = f"tp_degree {model.tp_degree}, max_batch {model.max_batch}, max_len {model.length(checkpoint)}"
    what = f"{model.name} does not fit into memory with {setting}, {model.dtype_on(engine)}: {terms}"
    hint = "lower max_batch or max_len, or set hbm_overhead_gib if you measured the overhead"
    for tp in sorted(DEGREES[_family(host)]):
        larger = model.model_copy(update={"tp_degree": tp})
        if model.tp_degree < tp <= host.cores and checkpoint.heads % tp == 0:
            total = estimate(larger, checkpoint, engine, case.draft).total
            if total <= limit:
                hint = f"tp_degree {tp} needs {total:.2f} GiB on each core; or {hint}"
                break
    yield case.problem("hbm-exceeded", ("tp_degree",), what, hint)


def length_within_positions(case: _Case) -> Iterator[Problem]:
    """max_len is within the positions that the checkpoint was made for."""
    checkpoint, length = case.checkpoint, case.model.max_len
    if checkpoint and checkpoint.max_positions and length and length > checkpoint.max_positions:
        what = f"max_len {length} exceeds the {checkpoint.max_positions} positions of {case.model.name}"
        hint = f"set max_len to {checkpoint.max_positions} or less"
        yield case.problem("max-len-exceeds-positions", ("max_len",), what, hint)


def engine_options_are_known(case: _Case) -> Iterator[Problem]:
    """engine_options holds only what the engine understands, in its type and range."""
    engine = resolve(case.model.engine, case.all_hosts[0]) if case.all_hosts else case.model.engine
    known = ENGINE_OPTIONS.get(engine, {})
    for name, value in case.model.engine_options.items():
        path, option = ("engine_options", name), known.get(name)
        if option is None:
            close = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {close[0]}?" if close else f"known for {engine}: {', '.join(known) or 'none'}"
            what = f'engine_options: "{name}" is no option of the engine {engine}'
            yield case.problem("unknown-engine-option", path, what, hint)
        elif isinstance(value, bool | str) or (option.whole and not isinstance(value, int)):
            wanted = "a whole number" if option.whole else "a number"
            shown = str(value).lower() if isinstance(value, bool) else value
            yield case.problem("wrong-type", path, f"engine_options.{name} is {shown}; it must be {wanted}")
        elif not option.least <= value <= option.most:
            what = f"engine_options.{name} is {value}; it must be from {option.least} to {option.most}"
            yield case.problem("out-of-range", path, what)


def engine_can_draft(case: _Case) -> Iterator[Problem]:
    """A draft is asked only of the engine that uses one."""
    engine = resolve(case.model.engine, case.all_hosts[0]) if case.all_hosts else case.model.engine
    if case.model.draft is not None and engine not in ("auto", "cpu"):
        what = f"draft has no effect: the engine {engine} drafts nothing, only cpu does"
        yield case.problem("draft-unsupported", ("draft",), what, "remove draft, or take the engine cpu")


def engine_can_run(case: _Case) -> Iterator[Problem]:
    """An engine of Neuron devices is not asked of hosts that have none."""
    hosts = case.all_hosts
    if needs_neuron(case.model.engine) and hosts and all(host.emulated or host.topology is None for host in hosts):
        what = f"engine {case.model.engine} needs Neuron devices, and the hosts are emulated or have none"
        yield case.problem("engine-needs-neuron", ("engine",), what, "engine: auto takes cpu there", "warning")


_RULES: tuple[_Judged, ...] = (
    _Judged(min_within_max, frozenset({"replicas"})),
    _Judged(pins_within_max, frozenset({"replicas", "cores"})),
    _Judged(pins_have_effect, frozenset({"engine"})),
    _Judged(pins_on_known_hosts, frozenset()),
    _Judged(pins_inside_host, frozenset({"engine"})),
    _Judged(pins_off_reserved, frozenset({"engine"})),
    _Judged(pins_as_long_as_tp, frozenset({"engine", "tp_degree"})),
    _Judged(degree_is_legal, frozenset({"engine", "tp_degree", "allow_degrees"})),
    _Judged(pins_are_aligned, frozenset({"engine", "tp_degree"})),
    _Judged(heads_divisible, frozenset({"engine", "tp_degree", "allow_head_padding"})),
    _Judged(
        fits_memory,
        frozenset({"engine", "dtype", "tp_degree", "max_batch", "max_len", "hbm_overhead_gib"}),
    ),
    _Judged(length_within_positions, frozenset({"max_len"})),
    _Judged(engine_can_draft, frozenset({"engine", "draft"})),
    _Judged(engine_options_are_known, frozenset({"engine", "engine_options"})),
    _Judged(engine_can_run, frozenset({"engine"})),
)


# Rules about the whole spec


def reserve_within_host(spec: Spec, hosts: Sequence[Host]) -> Iterator[Problem]:
    """Reserved cores exist, and reserved vCPUs leave some."""
    if not hosts or not spec.hosts:
        return
    host = hosts[0]
    outside = [core for core in sorted(host.reserved_cores) if core >= host.cores]
    if outside:
        what = f"reserve.cores names {_cores(outside)}; {host.name} has cores 0-{host.cores - 1}"
        yield _hosts_problem(spec, "reserve-outside-host", "cores", what, "reserve cores that exist")
    if host.reserve_vcpus >= len(host.cpus):
        what = (
            f"reserve.vcpus {host.reserve_vcpus} leaves nothing of the {_count(len(host.cpus), 'CPU')} of {host.name}"
        )
        yield _hosts_problem(spec, "reserve-exceeds-host", "vcpus", what, f"reserve at most {len(host.cpus) - 1}")


def _hosts_problem(spec: Spec, id: str, key: str, what: str, hint: str) -> Problem:
    return Problem(id, "error", spec.where("hosts", "reserve", key), what, hint)


class _Claim(NamedTuple):
    """A pin with the model it belongs to."""

    model: str
    number: int  # index into the model's pins
    pin: Pin


def pins_do_not_overlap(spec: Spec, hosts: Sequence[Host]) -> Iterator[Problem]:
    """No two pins share a core of one host. Told at the later one.

    With several hosts, pins that name none may part: they overlap only when no way of spreading them avoids it.
    """
    cored = {host.name: Free.of(host)._replace(mask=(1 << host.cores) - 1) for host in hosts if host.cores}
    claims = sorted(_claims(spec, hosts, cored), key=lambda claim: _place(spec, claim))
    parting: list[_Claim] = []
    for later, claim in enumerate(claims):
        clashes = [other for other in claims[:later] if _clash(other, claim, surely=len(cored) <= 1)]
        for other in clashes:
            yield _overlap(spec, claim, other)
        if not clashes and any(claim.pin.cores.last < free.cores for free in cored.values()):
            parting.append(claim)
    for later, host in enumerate(assign([claim.pin for claim in parting], cored)):
        rival = next((other for other in parting[:later] if _clash(other, parting[later], surely=True)), None)
        if host is None and rival is not None:
            yield _overlap(
                spec, parting[later], rival, f", and no other of {_count(len(cored), 'host')} is left for it"
            )


def _claims(spec: Spec, hosts: Sequence[Host], cored: Mapping[str, Free]) -> Iterator[_Claim]:
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
    """The replicas that a host can hold do not run more threads than it has CPUs for them."""
    models = [model for model in spec.models if not model.broken & {"threads", "tp_degree", "replicas", "engine"}]
    seen: set[tuple[object, ...]] = set()
    for host in hosts:
        kind = (host.topology, len(host.cpus), host.reserve_vcpus, host.emulated, len(host.reserved_cores))
        budget = len(host.usable_cpus)
        if kind in seen or budget < 1:
            continue
        seen.add(kind)
        total = _most_threads(models, host)
        if total > budget:
            sums = dict.fromkeys(
                f"tp {model.tp_degree}: {arithmetic(model.threads, model.tp_degree, host)}" for model in models
            )
            what = (
                f"replicas of this spec could run {total} threads together on {host.name}, which has "
                f"{len(host.cpus)} - {host.reserve_vcpus} = {_count(budget, 'CPU')} for them ({_some([*sums], '; ')})"
            )
            hint = (
                "they take turns on the CPUs and slow each other down; use fewer replicas or a machine with more CPUs"
            )
            yield Problem("threads-oversubscribed", "warning", spec.where("hosts"), what, hint)


def _most_threads(models: Sequence[ModelSpec], host: Host) -> int:
    """The most threads that replicas of these models, each up to its max, can run on the host's cores at once."""
    cores = host.cores - len(host.reserved_cores)
    best = [0] * (cores + 1)  # by cores used
    floating = 0  # threads of replicas that take no cores
    for model in models:
        count = threads(model.threads, model.tp_degree, host)
        if not takes_cores(model.engine, host):
            floating += count * model.replicas.max
            continue
        for _ in range(min(model.replicas.max, cores // model.tp_degree)):
            for used in range(cores, model.tp_degree - 1, -1):
                best[used] = max(best[used], best[used - model.tp_degree] + count)
    return max(best) + floating


def max_can_fit(spec: Spec, hosts: Sequence[Host]) -> Iterator[Problem]:
    """Each model's ``max`` fits beside the ``min`` of all models that do not rank below it."""
    if not hosts or not plan(spec, hosts, wanted={model.name: model.replicas.max for model in spec.models}).unplaced:
        return
    for model in spec.models:
        most = model.replicas.max
        rivals = {other.name: other.replicas.min if other.priority >= model.priority else 0 for other in spec.models}
        drawn = plan(spec, hosts, wanted={**rivals, model.name: most})
        placed = sum(placement.model == model.name for placement in drawn.placements)
        if placed < most:
            what = f"max {most} of {model.name} can never fit: there is room for {placed} beside the min of the others"
            hint = f"set replicas.max to {max(1, placed)}, or add hosts"
            yield Problem("max-never-fits", "warning", spec.where("models", model.name, "replicas", "max"), what, hint)


# Words


def _pinned(case: _Case) -> Iterator[tuple[int, Pin, list[Host]]]:
    """Each pin with the hosts that it may lie on, where there are any."""
    for i, pin in enumerate(case.model.cores):
        hosts = [host for host in case.hosts if pin.host in (None, host.name)]
        if hosts:
            yield i, pin, hosts


def _family(host: Host) -> str:
    return host.topology.family if host.topology else ""


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
