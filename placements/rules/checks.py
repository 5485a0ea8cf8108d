"""Checks a spec with one function for each rule. `parse` checks notation and types, `plan` checks room."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

from placements.engines.registry import AUTO_ENGINES, NAMES, Engine, takes_cores
from placements.facts.adapters import Adapter
from placements.facts.checkpoints import Checkpoint
from placements.facts.plural import counted
from placements.facts.topology import Host
from placements.planner.plan import plan
from placements.planner.replica_demand import has_degree
from placements.resources.environ import threads
from placements.rules.case import Case, Fleet, PartlyReadModel, Rule, Trials, core_list, rules_of
from placements.rules.engine_rules import ENGINE_RULES
from placements.rules.pin_rules import PIN_RULES, pins_are_free, pins_do_not_overlap
from placements.rules.size_rules import SIZE_RULES
from placements.rules.unused_settings import UNUSED_SETTINGS
from placements.spec.notation import SourceKind
from placements.spec.problems import Path, Problem, has_errors, in_order
from placements.spec.schema import ModelSpec, Spec


def check(
    spec: Spec,
    hosts: Sequence[Host],
    checkpoints: Mapping[str, Checkpoint] | None = None,
    drafts: Mapping[str, Checkpoint] | None = None,
    adapters: Mapping[str, Mapping[str, Adapter]] | None = None,
    *,
    room: bool = True,
    installed: Mapping[Engine, Mapping[str, str]] = MappingProxyType({}),
) -> tuple[Problem, ...]:
    """Returns all problems of a spec, in the order of the file.

    ``checkpoints``, ``drafts`` and ``adapters`` are keyed by model name; rules that need one are skipped without it.
    ``hosts`` is empty if the spec's hosts could not be read; then only rules about the spec alone apply. Without
    ``room``, the check that every ``max`` can fit is skipped; it needs several plans and gives only warnings.
    ``installed``: distributions in the interpreters of engines, where known; the known failures depend on them.
    """
    problems: list[Problem] = []
    everywhere, trials = Fleet(hosts), Trials((*_RULES, pins_are_free), spec)
    fleets: dict[Engine, Fleet] = {}
    for model in spec.models:
        if model.engine not in fleets:
            fleets[model.engine] = Fleet([host for host in hosts if takes_cores(model.engine, host)])
        checkpoint, draft = (checkpoints or {}).get(model.name), (drafts or {}).get(model.name)
        case = Case(
            spec,
            PartlyReadModel.model_construct(**vars(model)) if model.broken else model,
            fleets[model.engine],
            everywhere,
            checkpoint,
            draft,
            (adapters or {}).get(model.name, {}),
            trials,
            installed=installed,
        )
        problems.extend(case.problems_by(_RULES))
    for rule in (rule for name in NAMES for rule in rules_of(name).of_spec):
        problems.extend(rule(spec))
    problems.extend(reserve_within_host(spec, hosts))
    problems.extend(pins_do_not_overlap(spec, hosts))
    problems.extend(names_are_of_one_model(spec))
    problems.extend(threads_within_budget(spec, hosts))
    if room and not has_errors(problems) and not any(model.broken for model in spec.models):
        problems.extend(max_can_fit(spec, hosts, checkpoints))
    return in_order(problems)


# Rules about one model


def min_within_max(case: Case) -> Iterator[Problem]:
    """replicas.min is at most replicas.max."""
    replicas = case.model.replicas
    if replicas.min > replicas.max:
        fact = f"replicas: min {replicas.min} exceeds max {replicas.max}"
        yield case.problem("min-exceeds-max", ("replicas", "min"), fact, f"raise max to {replicas.min} or lower min")


def schedules_within_bounds(case: Case) -> Iterator[Problem]:
    """A schedule's bounds are within replicas.max, and its min is at most its max."""
    replicas = case.model.replicas
    for i, schedule in enumerate(case.model.scaling.schedules):
        path = ("scaling", "schedules", i)
        for key, count in (("min", schedule.min), ("max", schedule.max)):
            if count is not None and count > replicas.max:
                fact = f"a schedule's {key} {count} exceeds replicas.max {replicas.max}"
                hint = f"raise replicas.max to {count}, or lower the schedule's {key}"
                yield case.problem("schedule-exceeds-max", (*path, key), fact, hint)
        least = replicas.min if schedule.min is None else schedule.min
        if schedule.max is not None and least > schedule.max:
            fact = f"a schedule's max {schedule.max} is less than min {least}, which applies at that time"
            hint = f"set the schedule's min to {schedule.max}"
            hint = f"raise it to {least}, or {hint}" if least <= replicas.max else hint
            yield case.problem("min-exceeds-max", (*path, "max"), fact, hint)
        if schedule.min is None and schedule.max is None:
            fact = "a schedule without min and max has no effect"
            yield case.problem("schedule-without-effect", path, fact, "set its min or max", "warning")


def revisions_are_of_the_hub(case: Case) -> Iterator[Problem]:
    """A revision is set only for sources on the Hugging Face Hub."""
    model = case.model
    revisions: list[tuple[Path, str | None, SourceKind]] = [(("revision",), model.revision, model.source_kind)]
    if model.draft is not None and model.draft_kind is not None:
        revisions.append((("draft", "revision"), model.draft.revision, model.draft_kind))
    for keys, revision, kind in revisions:
        if revision is not None and kind != "hub":
            fact = f"{'.'.join(map(str, keys))} is {revision!r}, but the source is {_NOT_ON_THE_HUB[kind]}"
            hint = "remove it; use a folder for each version instead"
            yield case.problem("revision-without-hub", keys, fact, hint)


_NOT_ON_THE_HUB = {"path": "a folder", "s3": "in S3"}


def spread_leaves_room(case: Case) -> Iterator[Problem]:
    """``spread`` allows ``min`` replicas on the hosts, and the pins on each host."""
    model, spread = case.model, case.model.spread
    if spread is None or not case.all_hosts.hosts:
        return
    kinds = (case.fleet if case.hosts else case.all_hosts).kinds
    hosts = sum(count for host, count in kinds if case.suits(host))
    least = model.replicas.min
    if hosts and least > spread.host * hosts:
        places = counted(hosts, "suitable host")
        fact = f"min {least} of {model.name} exceeds {spread.host} on each of {places}"
        hint = f"add hosts, raise spread.host to {-(-least // hosts)}, or lower replicas.min to {spread.host * hosts}"
        yield case.problem("spread-too-narrow", ("spread",), fact, hint)
    only = case.hosts[0].name if len(case.hosts) == 1 else None
    pins: dict[str, int] = {}
    for i, pin in enumerate(model.cores):
        name = pin.host or only
        if name is not None and case.hosts:
            pins[name] = pins.get(name, 0) + 1
            if pins[name] == spread.host + 1:
                fact = f'pin "{pin}" is number {pins[name]} on {name}, but spread allows {spread.host} on a host'
                hint = "pin to another host, or raise spread.host"
                yield case.problem("spread-too-narrow", ("cores", i), fact, hint)


def length_within_positions(case: Case) -> Iterator[Problem]:
    """max_len is within the checkpoint's positions."""
    checkpoint, length = case.checkpoint, case.model.max_len
    if checkpoint and checkpoint.max_positions and length and length > checkpoint.max_positions:
        fact = f"max_len {length} exceeds the {checkpoint.max_positions} positions of {case.model.name}"
        most = checkpoint.max_positions
        hint = f"set max_len to {most} or less" if case.works(max_len=most) else "lower max_len and buckets"
        yield case.problem("max-len-exceeds-positions", ("max_len",), fact, hint)


def _when(applies: Callable[[Case], bool], rules: Iterable[Rule]) -> Iterator[Rule]:
    """Yields the rules for the models to which they apply."""
    for rule in rules:
        yield lambda case, rule=rule: rule(case) if applies(case) else iter(())  # type: ignore[misc]


def _of_engine(name: Engine) -> Iterator[Rule]:
    """Yields the rules of an engine."""
    rules = rules_of(name)
    yield from _when(lambda case: case.engine == name, rules.rules)
    yield from _when(lambda case: case.candidates == (name,), rules.if_chosen)
    yield from _when(lambda case: case.engine == "auto", rules.of_auto if name in AUTO_ENGINES else ())
    yield from rules.of_every_model


_RULES: tuple[Rule, ...] = (
    min_within_max,
    schedules_within_bounds,
    revisions_are_of_the_hub,
    *SIZE_RULES,
    spread_leaves_room,
    length_within_positions,
    *PIN_RULES,
    *ENGINE_RULES,
    *(rule for name in NAMES for rule in _of_engine(name)),
    *UNUSED_SETTINGS,
)


# Rules about the whole spec


def names_are_of_one_model(spec: Spec) -> Iterator[Problem]:
    """An alias is not the name of a model or another alias. Reported at the later one."""
    names = {model.name for model in spec.models}
    adapters = {name for model in spec.models for name in model.served_adapters}
    owners: dict[str, str] = {}
    for model in spec.models:
        for i, alias in enumerate(model.aliases):
            where = spec.where("models", model.name, "aliases", alias if isinstance(model.aliases, Mapping) else i)
            if alias in names:
                fact = f'the alias "{alias}" of "{model.name}" is the name of a model'
                yield Problem("alias-taken", "error", where, fact, "use another alias, or rename the model")
            elif alias in adapters:
                fact = f'the alias "{alias}" of "{model.name}" is the name of an adapter'
                yield Problem("alias-taken", "error", where, fact, "use another alias, or rename the adapter")
            elif alias in owners:
                other = owners[alias]
                whose = "a duplicate" if other == model.name else f'also an alias of "{other}"'
                fact = f'the alias "{alias}" of "{model.name}" is {whose}'
                yield Problem("alias-taken", "error", where, fact, "remove one of the two")
            owners.setdefault(alias, model.name)


def reserve_within_host(spec: Spec, hosts: Sequence[Host]) -> Iterator[Problem]:
    """For each entry of ``hosts``: reserved cores exist, and some vCPUs and memory are not reserved."""
    first = 0
    for i, wish in enumerate(spec.hosts):
        if first >= len(hosts):
            return
        host, first = hosts[first], first + wish.most
        path: Path = ("hosts", i, "reserve") if ("hosts", i) in spec.places.positions else ("hosts", "reserve")
        outside = [core for core in sorted(host.reserved_cores) if core >= host.cores]
        if outside:
            fact = f"reserve.cores names {core_list(outside)}; {host.name} has cores 0-{host.cores - 1}"
            where = spec.where(*path, "cores")
            yield Problem("reserve-outside-host", "error", where, fact, "reserve cores that exist")
        if host.reserve_vcpus >= len(host.cpus):
            cpus = counted(len(host.cpus), "CPU")
            fact = f"reserve.vcpus {host.reserve_vcpus} leaves none of the {cpus} of {host.name}"
            hint = f"reserve at most {len(host.cpus) - 1}"
            yield Problem("reserve-exceeds-host", "error", spec.where(*path, "vcpus"), fact, hint)
        if host.topology and host.memory_gib is not None and wish.reserve.memory_gib >= host.topology.memory_gib:
            memory = host.topology.memory_gib
            fact = f"reserve.memory_gib {wish.reserve.memory_gib:g} leaves none of the {memory} GiB of {host.name}"
            where = spec.where(*path, "memory_gib")
            yield Problem("reserve-exceeds-host", "error", where, fact, f"reserve less than {memory}")


def threads_within_budget(spec: Spec, hosts: Sequence[Host]) -> Iterator[Problem]:
    """The replicas that a host can hold do not run more threads than it has CPUs. Reports the worst host.

    On an emulated host only a fixed number of threads counts: a share is at least 1, and its CPUs may be few.
    """
    models = [model for model in spec.models if not model.broken & {"threads", "tp_degree", "replicas", "engine"}]
    over: dict[tuple[object, ...], tuple[int, int, Host]] = {}
    for host in hosts:
        budget = len(host.usable_cpus)
        kind = (host.topology, budget, len(host.physical_cores), host.emulated, len(host.reserved_cores))
        if kind not in over and budget >= 1:
            able = [
                model for model in models if _suits(model, host) and not (host.emulated and model.threads == "share")
            ]
            over[kind] = (_most_threads(able, host), budget, host)
    worst = max(over.values(), key=lambda load: load[0] - load[1], default=None)
    if worst is not None and worst[0] > worst[1]:
        total, budget, host = worst
        fact = (
            f"replicas could run {total} threads on the {counted(budget, 'CPU')} of {host.name} "
            "and slow each other down: use fewer replicas or threads"
        )
        yield Problem("threads-oversubscribed", "warning", spec.where("hosts"), fact)


def _suits(model: ModelSpec, host: Host) -> bool:
    """Returns whether the host supports the model's degree and, if it is real, has the CPUs for a fixed number of
    threads, without which a plan places no replica, except on pins. True if the model uses no cores."""
    if host.topology is None or not takes_cores(model.engine, host):
        return True
    if _insists(model, host) and threads(model.threads, model.tp_degree, host) > len(host.usable_cpus):
        return False
    return has_degree(model, host.topology)


def _most_threads(models: Sequence[ModelSpec], host: Host) -> int:
    """Returns the most threads that replicas of these models, each up to its max, can run on the host at once.

    Fixed numbers on a real host count up to its CPUs: a plan refuses the rest.
    """
    cores = host.cores - len(host.reserved_cores)
    best = [0] * (cores + 1)  # by cores used
    within = (1 << len(host.usable_cpus) + 1) - 1
    granted = [1] * (cores + 1)  # possible sums of fixed numbers, as bits; by cores used
    floating = 0  # threads of replicas that use no cores
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
    """Returns whether a plan places replicas only where CPUs for their threads are free."""
    return isinstance(model.threads, int) and not model.cores and not host.emulated


NEVER_FIT = frozenset({"min-never-fits", "model-never-fits"})
"""Warnings that a spec cannot run as it is written on its hosts. `validate` reports them as errors if the spec names
its hosts; `plan` and `explain` still show what would help."""

MOST_TRIED = 5_000
"""The most replicas in all plans of `max_can_fit` after the first, which bounds its time. Further warnings are
omitted."""


def max_can_fit(
    spec: Spec, hosts: Sequence[Host], checkpoints: Mapping[str, Checkpoint] | None = None
) -> Iterator[Problem]:
    """Each model's ``min`` and ``max`` fit beside the ``min`` of all models of the same or a higher priority."""
    total = sum(model.replicas.max for model in spec.models)
    if not hosts or not spec.models or total > MOST_TRIED:
        return
    drawn = plan(spec, hosts, checkpoints, wanted={model.name: model.replicas.max for model in spec.models})
    lacking = {unplaced.model for unplaced in drawn.unplaced}  # the others fit even beside every max
    for model in [model for model in spec.models if model.name in lacking][: max(1, MOST_TRIED // total)]:
        most = model.replicas.max
        rivals = {other.name: other.replicas.min if other.priority >= model.priority else 0 for other in spec.models}
        drawn = plan(spec, hosts, checkpoints, wanted={**rivals, model.name: most})
        placed = sum(placement.model == model.name for placement in drawn.placements)
        least = model.replicas.min
        crowded = any(count for name, count in rivals.items() if name != model.name)
        more = "lower the min of the others, or add hosts" if crowded else "add hosts"
        if placed < least:
            fact = f"min {least} of {model.name} can never fit: there is room for {placed} beside the min of the others"
            hint = f"set replicas.min to {placed}, or add hosts" if placed else more
            hint += f"; `corewright explain {model.name}` tries more"
            where = spec.where("models", model.name, "replicas", "min")
            yield Problem("min-never-fits", "warning", where, fact, hint)
        elif not placed:
            fact = f"{model.name} can never start: there is no room for a replica beside the min of the others"
            hint = f"{more}; `corewright explain {model.name}` tries more"
            yield Problem("model-never-fits", "warning", spec.where("models", model.name), fact, hint)
        elif placed < most:
            fact = f"max {most} of {model.name} can never fit: there is room for {placed} beside the min of the others"
            hint = f"set replicas.max to {placed}, or add hosts"
            yield Problem("max-never-fits", "warning", spec.where("models", model.name, "replicas", "max"), fact, hint)
