"""Explains why a model is placed where it is, or why it is not placed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter, itemgetter

from placements.engines.registry import capabilities, may_run, resolve
from placements.explain.explanation import (
    Constraint,
    ExplainedPlacement,
    Explanation,
    Question,
    changed,
    place_text,
    without,
)
from placements.explain.remedies import remedies
from placements.facts.core_range import CoreRange, ranges
from placements.facts.known_failures import KNOWN_FAILURE
from placements.facts.plural import counted
from placements.facts.topology import DEGREES, Host, alignment
from placements.planner.plan import Placement, Running, Unplaced, plan
from placements.planner.replica_demand import demands, kinds_of, suits
from placements.resources.environ import arithmetic
from placements.resources.memory import estimate, usable_hbm
from placements.rules.checks import check
from placements.spec.problems import Problem
from placements.spec.schema import ModelSpec, Spec

_MOST_HOLDERS = 6  # models listed as holding cores
_MOST_HOSTS = 3  # hosts listed in a line
_MEMORY_HINT = "set host_memory_gib if you measured that it needs less, or add a host"
_SKIPPED = "unknown-key"  # an unknown key is ignored, so that the rest of the spec can be judged
_ORDER = ("no-suitable-host", "pin-taken", "spread-blocks", "host-memory-short", "vcpus-short", "no-room")
_ENGINE = frozenset({"engine-unsupported-here", "family-unsupported"})
_DIMENSIONS: Mapping[str, frozenset[str]] = {  # constraint -> the problems that report its violation
    "degree": frozenset({"degree-exceeds-host", "illegal-degree"}),
    "heads": frozenset({"heads-not-divisible", "gqa-not-divisible", "experts-not-divisible"}),
    "memory": frozenset({"hbm-exceeded", "no-suitable-host"}),
    "host memory": frozenset({"host-memory-short", "host-memory-exceeded"}),
    "threads": frozenset({"vcpus-short"}),
    "pins": frozenset({"pin-taken", "pin-overlap", "pin-reserved", "pin-length", "pin-misaligned"})
    | {"pin-outside-host", "pin-unknown-host", "too-many-pins"},
    "spread": frozenset({"spread-blocks", "spread-too-narrow"}),
    "cores": frozenset({"no-room", "pin-taken"}),
}


def explain(question: Question, problems: Iterable[Problem] = ()) -> Explanation:
    """Explains why the model is placed as it is, or why replicas are missing, and suggests changes that fix it.

    ``problems`` are problems of the file that `check` does not report.

    Every suggestion has been tried: `check` reports no new error, `plan` places all wanted replicas of the model, and
    no other model has fewer replicas than before, except one whose ``min`` the change lowers. The order, with one
    suggestion of each kind:

    1. uncordon cores; move 1, 2 or 4 running replicas                                (the spec stays the same)
    2. padded heads; other pins or none; a smaller tp_degree, a greater one; more replicas on a host
                                                                                      (the same service)
    3. fewer threads; fewer slots; a shorter max_len; int8 weights                    (reduced or different service)
    4. fewer replicas; other pins of a rival, or none; a lower ``min`` of a rival     (another model has less)
    5. more hosts
    6. if none of these helps: two of them together

    Unknown keys are ignored. With other unreadable fields or wrong reserves, no changes are tried. See
    `remedies.remedies` for how many changes are tried.
    """
    problems = tuple(problems)
    judged, errors, hopeless = _judged(question, problems)
    facts = _Facts(judged)
    failed = (*errors, *facts.refusals(errors))
    search = None
    if any(constraint.id != _SKIPPED for constraint in failed) and not hopeless:
        search = remedies(judged)
    return Explanation(
        question.model.name,
        judged.model.priority,
        judged.model.replicas.min,
        judged.target,
        ()
        if errors
        else tuple(ExplainedPlacement(placement, tuple(facts.reasons(placement))) for placement in judged.placed),
        failed,
        (
            *facts.holds({constraint.id for constraint in failed}),
            *(
                Constraint(problem.id, problem.what, (problem.hint,))
                for problem in problems
                if problem.id == KNOWN_FAILURE and _concerns(question.spec, question.model.name, problem)
            ),
        ),
        search.suggestions if search else (),
        ("all" if search.exhaustive else "some") if search else "nothing",
    )


def _judged(question: Question, problems: tuple[Problem, ...]) -> tuple[Question, tuple[Constraint, ...], bool]:
    """Returns the question, the errors of the model's part of the spec, and whether no change of a field fixes them."""
    spec, model, name = question.spec, question.model, question.model.name
    hosts = (*question.hosts, *question.absent)

    def errors_of(part: Spec) -> list[Problem]:
        return [
            problem
            for problem in check(part, hosts, question.checkpoints, question.drafts, room=False)
            if problem.severity == "error"
        ]

    every = errors_of(spec)
    beyond = [problem for problem in problems if problem.severity == "error" and problem not in every]
    unreadable = [problem for problem in beyond if _concerns(spec, name, problem)]
    unread = [problem for problem in unreadable if problem.id != _SKIPPED]
    elsewhere = set(errors_of(without(spec, name))) if every else set()
    own = [problem for problem in every if problem not in elsewhere or _about_hosts(problem)]
    others = [problem for problem in every if problem not in own]
    sound = spec
    for rival in spec.models if others or beyond else ():
        alone = spec.model_copy(update={"models": (rival,)})
        wrong = any(not _about_hosts(problem) for problem in errors_of(alone)) or any(
            _concerns(spec, rival.name, problem)
            for problem in beyond
            if problem not in unreadable and problem.id != _SKIPPED
        )
        if rival is not model and wrong:
            sound = without(sound, rival.name)
    count = question.wanted.get(name, model.replicas.min) or 1
    judged = replace(
        question,
        spec=sound,
        running=tuple(dict.fromkeys(question.running)),
        wanted={**question.wanted, name: max(1, min(count, model.replicas.max))},
        wrong=bool(unread or own),
        tolerated=frozenset((problem.id, problem.what) for problem in others),
    )
    constraints = tuple(
        Constraint(problem.id, problem.what, (problem.where,) if problem.where else (), problem.hint)
        for problem in (*unreadable, *own)
    )
    return judged, constraints, bool(unread) or any(map(_about_hosts, own))


def _about_hosts(problem: Problem) -> bool:
    return problem.id.startswith("reserve-")


def _concerns(spec: Spec, name: str, problem: Problem) -> bool:
    """Returns whether a problem of the file lies in the model's own lines, or outside of all models."""
    _, line, column = (":::" + problem.where).rsplit(":", 2)
    if not line.isdecimal():
        return True
    positions = spec.places.positions
    models = {path[1]: positions[path] for path in positions if len(path) == 2 and path[0] == "models"}
    starts = {model: position.line for model, position in models.items()}
    if column.isdecimal() and all(position.column > int(column) for position in models.values()):
        return True  # outside of ``models``
    above = [(start, model) for model, start in starts.items() if start <= int(line)]
    return not above or max(above, key=itemgetter(0))[1] == name


@dataclass(frozen=True)
class _Facts:
    """What follows from a question: unmet demands, met demands, and the reasons for places."""

    question: Question

    @property
    def model(self) -> ModelSpec:
        return self.question.model

    # Unmet demands

    def refusals(self, errors: Sequence[Constraint]) -> tuple[Constraint, ...]:
        """Why replicas are missing: the problems that `plan` reports, and every other demand that no host meets."""
        missing = self.question.target - len(self.question.placed)
        if missing <= 0:
            return ()
        by_id = {constraint.id: constraint for constraint in self._unmet()}
        more = "" if missing == 1 else f"; {missing} of {counted(self.question.target, 'replica')} have no place"
        reported: set[str] = set()
        for problem in (problem for unplaced in self._missing for problem in unplaced.problems):
            if problem.id not in reported:  # the text of `plan`, for the first replica
                reported.add(problem.id)
                refusal = by_id.get(problem.id, Constraint(problem.id, "", (), problem.hint))
                by_id[problem.id] = replace(refusal, what=problem.what + more)
                more = ""
        wrong = {constraint.id for constraint in errors}
        if wrong & (_DIMENSIONS["degree"] | _ENGINE | {"hbm-exceeded"}):
            by_id.pop("no-suitable-host", None)  # the same fact
        for name in ("host memory", "spread"):
            if wrong & _DIMENSIONS[name]:
                by_id = {id: constraint for id, constraint in by_id.items() if id not in _DIMENSIONS[name]}
        if by_id.keys() & {"no-room", "pin-taken"}:
            last = max(by_id.keys() & {"no-room", "pin-taken"}, key=_ORDER.index)
            by_id[last] = replace(by_id[last], details=(*by_id[last].details, *self._holders()))
        return tuple(sorted(by_id.values(), key=lambda constraint: (*_ORDER, constraint.id).index(constraint.id)))

    @cached_property
    def _missing(self) -> list[Unplaced]:
        """The model's replicas without a place, ascending."""
        return sorted(
            (replica for replica in self.question.drawn.unplaced if replica.model == self.model.name),
            key=attrgetter("replica"),
        )

    def _unmet(self) -> Iterator[Constraint]:
        """Judges each demand by itself, for one replica more than are placed."""
        question, model = self.question, self.model
        checkpoint = question.checkpoints.get(model.name)
        suited = [host for host in question.own_hosts if suits(model, host, checkpoint)]
        name = f"{model.name}/{self._missing[0].replica if self._missing else len(question.placed)}"
        if not any(suits(model, host, checkpoint) for host in question.kinds):
            lines = tuple(line for host in question.kinds for line in [self._why_unsuited(host)] if line)
            fact = f"{name}: no host is suitable"
            yield Constraint("no-suitable-host", fact, lines, "use another tp_degree or instance type")
        judged = suited or question.own_hosts
        on = Counter(placement.host for placement in question.placed)
        spread = model.spread
        if judged and spread is not None and all(on[host.name] >= spread.host for host in judged):
            limit = f"at most {counted(spread.host, 'replica')} on one host"
            fact = f"{name}: {limit}, and each of {counted(len(judged), 'host')} has as many"
            yield Constraint("spread-blocks", fact, (), "add a host, or raise spread")
        kinds = kinds_of(question.hosts)
        kind_of = {host.name: kind for host, kind in zip(question.hosts, kinds.of, strict=True)}
        names = [other.name for other in question.spec.models]
        demand_of = dict(zip(names, demands(question.spec, kinds.hosts, question.checkpoints), strict=True))
        memory = {host.name: host.memory_gib for host in judged if host.memory_gib is not None}
        cpus = {host.name: float(len(host.usable_cpus)) for host in judged if not host.emulated}
        for placement in question.drawn.placements:
            kind, rival = kind_of[placement.host], demand_of[placement.model]
            if placement.host in memory and rival.memory:
                memory[placement.host] -= rival.memory[kind]
            if placement.host in cpus:
                cpus[placement.host] -= placement.threads
        own = demand_of[model.name]
        for id, demand, supply, unit, hint in (
            ("host-memory-short", own.memory, memory, "GiB of host memory", _MEMORY_HINT),
            ("vcpus-short", own.cpus, cpus, "CPUs for its threads", "lower threads, or add a host"),
        ):
            if (
                judged
                and demand
                and len(supply) == len(judged)
                and all(supply[host.name] < demand[kind_of[host.name]] for host in judged)
            ):
                best = max(judged, key=lambda host: supply[host.name])
                fact = f"{name} needs {demand[kind_of[best.name]]:.4g} {unit}"
                yield Constraint(id, f"{fact}; {best.name} has {max(0.0, supply[best.name]):.4g} left", (), hint)
        room = self._room()
        if room is not None:
            yield room

    def _why_unsuited(self, host: Host) -> str:
        model, checkpoint = self.model, self.question.checkpoints.get(self.model.name)
        if host.topology is None:
            return f"{host.name} has no NeuronCores"
        topology = host.topology
        if model.tp_degree > host.cores:
            return f"{topology.instance} has {host.cores} cores, fewer than tp_degree {model.tp_degree}"
        if model.tp_degree not in (*DEGREES[topology.family], *model.allow_degrees):
            return f"{topology.instance}: {topology.family} supports the degrees {_listed(DEGREES[topology.family])}"
        family = checkpoint.model_type if checkpoint else None
        if not may_run(resolve(model.engine, host, model.kind), host, family):
            runs = capabilities(model.engine).runs_in(topology.family)
            return f"{topology.instance}: {model.engine} " + (
                f"does not serve {family} there" if runs else "does not run there"
            )
        if checkpoint is None:
            return ""
        need = estimate(
            model, checkpoint, resolve(model.engine, host, model.kind), self.question.drafts.get(model.name)
        )
        on_cores = need.on_cores(model.tp_degree)
        return f"{_instance(host)}: {need} {on_cores}; each core has {usable_hbm(topology, need):.2f} GiB usable"

    def _room(self) -> Constraint | None:
        """The shortage of cores that remains if all other demands are ignored; None if there is none."""
        question, model = self.question, self.model
        fields: dict[str, object] = {
            "allow_degrees": (*model.allow_degrees, model.tp_degree),
            "spread": None,
            "host_memory_gib": None,
            "threads": "share",
            "cores": (),
        }
        relaxed = changed(question.spec, model.name, fields)
        known = {name: checkpoint for name, checkpoint in question.checkpoints.items() if name != model.name}
        drawn = plan(relaxed, question.hosts, known, question.running, question.wanted, question.blocked)
        refused = [replica for replica in drawn.unplaced if replica.model == model.name]
        if not refused or not refused[0].problems:
            return None
        problem = refused[0].problems[0]
        if problem.id != "no-room":
            return None
        return Constraint(problem.id, problem.what, (), problem.hint)

    def _holders(self) -> Iterator[str]:
        """Lists free cores, then the cores of each model with its priority, then cores that are not available."""
        question = self.question
        tp = self.model.tp_degree
        for topology in dict.fromkeys(host.topology for host in question.own_hosts if host.topology):
            same = [host for host in question.own_hosts if host.topology == topology]
            free = {host.name: self._free[host.name] for host in same}
            runs = [(CoreRange.parse(run), name) for name, cores_left in free.items() for run in ranges(cores_left)]
            longest, where = max(runs, key=lambda run: len(run[0]), default=(None, ""))
            run = "" if longest is None else f", the longest free run is {len(longest)} ({longest} of {where})"
            total, cores = sum(map(len, free.values())), sum(host.cores for host in same)
            step = alignment(topology.family, tp).legal
            needs = f"{tp} contiguous cores that begin at a multiple of {step}" if tp > 1 else "1 core"
            yield f"{topology.instance}: {total} of {cores} cores are free{run}; it needs {needs}"
        held: Counter[str] = Counter()
        count: Counter[str] = Counter()
        for placement in question.drawn.placements:
            held[placement.model] += len(placement.cores or ())
            count[placement.model] += placement.cores is not None
        holders = [(name, cores) for name, cores in held.most_common() if cores]
        for name, cores in holders[:_MOST_HOLDERS]:
            rival = question.spec.model(name)
            owner = "itself" if rival is self.model or rival is None else f"priority {rival.priority}"
            with_replicas = counted(count[name], "replica")
            yield f"{name} ({owner}) holds {counted(cores, 'core')} with {with_replicas}"
        if len(holders) > _MOST_HOLDERS:
            other_cores = sum(cores for _, cores in holders[_MOST_HOLDERS:])
            yield f"{len(holders) - _MOST_HOLDERS} more models hold {other_cores} cores"
        yield from self._forbidden()

    def _forbidden(self) -> Iterator[str]:
        """Lists reserved, cordoned and quarantined cores."""
        question = self.question
        quarantined = {
            name: cores - question.cordoned.get(name, frozenset()) for name, cores in question.blocked.items()
        }
        reserved = {host.name: host.reserved_cores for host in question.own_hosts}
        for word, cores_of in (("reserved", reserved), ("cordoned", question.cordoned), ("quarantined", quarantined)):
            where = [f"{','.join(ranges(cores))} of {name}" for name, cores in cores_of.items() if cores]
            if where:
                total = sum(map(len, cores_of.values()))
                more = f" and {counted(len(where) - _MOST_HOSTS, 'more host')}" if len(where) > _MOST_HOSTS else ""
                verb = "is" if total == 1 else "are"
                yield f"{counted(total, 'core')} {verb} {word}: {', '.join(where[:_MOST_HOSTS])}{more}"

    @cached_property
    def _free(self) -> dict[str, set[int]]:
        """Free and available cores, by host."""
        free = {host.name: set(range(host.cores)) - self.question.unusable(host) for host in self.question.hosts}
        for placement in self.question.drawn.placements:
            free[placement.host] -= set(placement.cores or ())
        return free

    # Met demands

    def holds(self, failed: set[str]) -> Iterator[Constraint]:
        """Yields the demands that are met, with their numbers."""
        numbers = {name: (fact, details) for name, fact, details in self._numbers()}
        for name, ids in _DIMENSIONS.items():
            if name in numbers and not ids & failed:
                yield Constraint(name, *numbers[name])

    def _numbers(self) -> Iterator[tuple[str, str, tuple[str, ...]]]:
        """Yields (name, what, details), with a detail for each type of host where they differ."""
        question, model, tp = self.question, self.model, self.model.tp_degree
        checkpoint, draft = question.checkpoints.get(model.name), question.drafts.get(model.name)
        suited = [host for host in question.kinds if suits(model, host, checkpoint)]
        families = dict.fromkeys(host.topology.family for host in question.kinds if host.topology)
        if families:
            supported = tuple(f"{family} supports {_listed(DEGREES[family])}" for family in families)
            yield "degree", *_lines(f"tp_degree {tp}", supported, ": ")
        if checkpoint is not None and families:
            each = f"{checkpoint.heads // tp} on each core" if checkpoint.heads % tp == 0 else "padded with zeros"
            yield "heads", f"{checkpoint.heads} attention heads, {checkpoint.kv_heads} KV heads: {each}", ()
            if suited:  # a fleet is either real or emulated, so all hosts have the same engine
                need = estimate(model, checkpoint, resolve(model.engine, suited[0], model.kind), draft)
                where = dict.fromkeys(
                    f"of {usable_hbm(host.topology, need):.2f} {need.on_cores(tp)} of {_kind(host)}"
                    for host in suited
                    if host.topology
                )
                yield "memory", *_lines(str(need), tuple(where), " ")
        kinds = kinds_of(question.own_hosts)
        order = [other.name for other in question.spec.models].index(model.name)
        demand = demands(question.spec, kinds.hosts, question.checkpoints)[order]
        loads = [
            (need, host)
            for need, host in zip(demand.memory, kinds.hosts, strict=False)
            if need and (not suited or suits(model, host, checkpoint))
        ]
        if loads:
            limits = dict.fromkeys(f"of the {host.memory_gib:g} GiB of {_instance(host)}" for _, host in loads)
            yield "host memory", *_lines(f"{loads[0][0]:.1f} GiB to load", tuple(limits), ", ")
        used = {placement.host for placement in question.placed}
        hosts_used = (
            [host for host in question.hosts if host.name in used]
            or suited
            or [*question.own_hosts, *question.hosts][:1]
        )
        sums = dict.fromkeys(f"{arithmetic(model.threads, tp, host)} on {_instance(host)}" for host in hosts_used)
        if sums:
            first, *other_sums = sums
            yield "threads", first, tuple(other_sums)
        if model.cores:
            yield "pins", ", ".join(f'"{pin}"' for pin in model.cores), ()
        if model.spread is not None:
            hosts = counted(len(question.own_hosts), "host")
            yield "spread", f"at most {counted(model.spread.host, 'replica')} on one of {hosts}", ()
        if question.own_hosts:
            free = sum(len(self._free[host.name]) for host in question.own_hosts)
            yield "cores", f"{free} of {sum(host.cores for host in question.own_hosts)} stay free", ()

    # Reasons for places

    def reasons(self, placement: Placement) -> Iterator[str]:
        """Yields the reasons for the place of one replica."""
        question, model, cores = self.question, self.model, placement.cores
        if placement.running in question.running:
            yield "it runs there already; running replicas stay"
        pins = [pin for pin in model.cores if pin.cores == cores and pin.host in (None, placement.host)]
        if pins:
            yield f'pinned to "{pins[0]}"'
        host = self._hosts.get(placement.host)
        if cores is None or host is None or host.topology is None:
            yield "its engine uses no cores there"
        else:
            per = host.topology.cores_per_device
            first, last = cores.first // per, cores.last // per
            devices = f"device {first}" if first == last else f"devices {first} to {last}"
            row = alignment(host.topology.family, model.tp_degree)
            if len(cores) == 1:
                yield devices
            elif cores.aligned(row.preferred):
                yield f"{devices}; begins at a multiple of {row.preferred}, preferred for tp_degree {len(cores)}"
            else:
                legal = f"begins at a multiple of {row.legal}, which is legal"
                yield f"{devices}; {legal}; a multiple of {row.preferred} is preferred"
        surplus = self._order[placement.replica] >= model.replicas.min
        yield f"priority {model.priority}, " + ("beyond its min" if surplus else "required by its min")
        yield from self._displaced(placement)
        if self._order[placement.replica] == 0 and self._would_gain:
            yield f"without this model {', '.join(self._would_gain)} would have a place"

    @cached_property
    def _hosts(self) -> dict[str, Host]:
        return {host.name: host for host in self.question.hosts}

    @cached_property
    def _order(self) -> dict[int, int]:
        """The position of each placed replica among them."""
        return {placement.replica: i for i, placement in enumerate(self.question.placed)}

    @cached_property
    def _leaving(self) -> dict[str, list[Running]]:
        """Running replicas of other models that stop or move, by host."""
        staying = {replica.running for replica in self.question.drawn.placements}
        by_host: dict[str, list[Running]] = {}
        for replica in self.question.running:
            if replica not in staying and replica.model != self.model.name:
                by_host.setdefault(replica.host, []).append(replica)
        return by_host

    def _displaced(self, placement: Placement) -> Iterator[str]:
        """Yields those whose cores this replica gets."""
        moved = {move.before: move.after for move in self.question.drawn.moves}
        for replica in self._leaving.get(placement.host, ()):
            if placement.cores is not None and replica.cores is not None and placement.cores.overlap(replica.cores):
                rival = self.question.spec.model(replica.model)
                fact = f"priority {rival.priority}" if rival else "not in the spec"
                goes = moved.get(replica)
                where = "stopped" if goes is None else f"moved to {place_text(goes.host, goes.cores)}"
                yield f"it displaces {replica.model}/{replica.replica} ({fact}) from {replica.cores}: {where}"

    @cached_property
    def _would_gain(self) -> list[str]:
        """Replicas of other models that have no place because of this model."""
        question = self.question
        missing = Counter(replica.model for replica in question.drawn.unplaced if replica.model != self.model.name)
        if not missing:
            return []
        none = {**question.wanted, self.model.name: 0}
        alone = plan(question.spec, question.hosts, question.checkpoints, question.running, none, question.blocked)
        gained = missing - Counter(replica.model for replica in alone.unplaced)
        return [f"{counted(count, 'replica')} of {model}" for model, count in gained.items()]


def _kind(host: Host) -> str:
    """The host's type, marked if it is emulated: its memory counts for planning and is never filled."""
    return f"an emulated {_instance(host)}" if host.emulated else _instance(host)


def _instance(host: Host) -> str:
    """The host's instance type and LNC, or its name if it has no type."""
    topology = host.topology
    if topology is None:
        return host.name
    return topology.instance if topology.lnc is None else f"{topology.instance} lnc {topology.lnc}"


def _lines(fact: str, each: tuple[str, ...], joint: str) -> tuple[str, tuple[str, ...]]:
    """Returns (what, details): a single part on the same line, several parts as details."""
    return (f"{fact}{joint}{each[0]}", ()) if len(each) == 1 else (fact, each)


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))
