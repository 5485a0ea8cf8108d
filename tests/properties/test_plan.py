"""What holds for every plan, whatever the spec, the hosts, what runs and what is quarantined."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

from hypothesis import event, example, given
from hypothesis import strategies as st

from placements.engines.registry import may_run, resolve, takes_cores
from placements.facts.checkpoints import Checkpoint
from placements.facts.core_range import CoreRange
from placements.facts.topology import DEGREES, TOPOLOGIES, Host, alignment
from placements.planner.plan import Placement, Plan, Running, defragment, diff, plan
from placements.resources.host_memory import host_memory
from placements.resources.memory import estimate, fits
from placements.rules.checks import check, threads_within_budget
from placements.spec.notation import CorePin
from placements.spec.schema import HostsSpec, ModelSpec, Spec
from tests.placements.fleets import GPT2_XL, LLAMA_2_7B
from tests.searches import EXAMPLES, search

SHAPES = (GPT2_XL, LLAMA_2_7B)


@dataclass(frozen=True)
class Case:
    """Everything that a plan depends on."""

    spec: Spec
    hosts: tuple[Host, ...]
    wanted: Mapping[str, int]
    blocked: Mapping[str, frozenset[int]]
    running: tuple[Running, ...] = ()
    checkpoints: Mapping[str, Checkpoint] = field(default_factory=dict)
    moves: int | None = 0
    held: Mapping[str, frozenset[str]] = field(default_factory=dict)

    def plan(self) -> Plan:
        given = (self.spec, self.hosts, self.checkpoints, self.running, self.wanted, self.blocked)
        return plan(*given, moves=self.moves, held=self.held)

    def host(self, name: str) -> Host:
        return next(host for host in self.hosts if host.name == name)

    def model(self, name: str) -> ModelSpec:
        model = self.spec.model(name)
        if model is None:
            raise LookupError(name)
        return model

    def forbidden(self, host: str) -> set[int]:
        return set(self.host(host).reserved_cores | self.blocked.get(host, frozenset()))


TYPES = ("inf2.48xlarge", "inf2.48xlarge", "inf2.24xlarge", "inf2.xlarge", "trn1.32xlarge", "trn2.48xlarge")


@st.composite
def hosts(draw: st.DrawFn) -> tuple[Host, ...]:
    """One to three of them, of one type or of several."""
    emulated = draw(st.booleans())
    kinds = draw(st.lists(st.sampled_from(TYPES), min_size=1, max_size=draw(st.sampled_from([1, 1, 2]))))
    return tuple(draw(machine(kinds[i % len(kinds)], i, emulated)) for i in range(draw(st.integers(1, 3))))


@st.composite
def machine(draw: st.DrawFn, instance: str, i: int, emulated: bool) -> Host:
    topology = TOPOLOGIES[instance]
    topology = topology.at_lnc(draw(st.sampled_from([1, 2])) if topology.lnc else None)
    cpus = draw(st.sampled_from([1, 2, 24, topology.vcpus]))
    reserve = draw(st.integers(0, max(0, cpus - 1)))
    reserved = frozenset(draw(st.sets(st.integers(0, topology.cores - 1), max_size=3)))
    memory = None if emulated else float(topology.memory_gib)
    return Host(f"{instance}/{i}", topology, tuple(range(cpus)), reserve, reserved, emulated, memory)


def family(host: Host) -> str:
    assert host.topology is not None
    return host.topology.family


def legal_starts(host: Host, tp: int) -> range:
    """Where the hardware lets a range begin."""
    return range(0, host.cores - tp + 1, alignment(family(host), tp).legal)


@st.composite
def pins(draw: st.DrawFn, tp: int, where: Sequence[Host]) -> CorePin | None:
    host = draw(st.sampled_from(where))
    starts = legal_starts(host, tp)
    if not starts:
        return None
    cores = CoreRange.of_length(draw(st.sampled_from(starts)), tp)
    alike = {family(other) for other in where} == {family(host)}
    return CorePin(cores, draw(st.sampled_from([None, host.name])) if alike else host.name)


@st.composite
def models(draw: st.DrawFn, name: str, where: Sequence[Host], pinned: bool) -> ModelSpec:
    known = sorted({tp for host in where for tp in DEGREES[family(host)]})
    tp = draw(st.sampled_from((1, 2) if pinned else (*known, 6)))
    low = draw(st.integers(0, 4))
    high = max(1, low + draw(st.integers(0, 2)))
    wished = [draw(pins(tp, where)) for _ in range(2 if pinned else draw(st.sampled_from([0, 0, 0, 1, 2])))]
    return ModelSpec(
        name=name,
        source="./m",
        tp_degree=tp,
        engine=draw(st.sampled_from(["auto", "auto", "auto", "cpu", "nxd-inference"])),
        replicas={"min": low, "max": high},  # type: ignore[arg-type]
        cores=tuple(pin for pin in wished if pin is not None)[:high],
        priority=draw(st.integers(0, 2)),
        allow_degrees=(6,),
        threads=draw(st.sampled_from(["share", "share", "share", "lmi", 3])),
        spread=draw(st.sampled_from([None, None, None, "host", {"host": 2}])),  # type: ignore[arg-type]
        host_memory_gib=draw(st.sampled_from([None, None, 10.0, 200.0, 400.0])),
    )


@st.composite
def cases(draw: st.DrawFn, pinned: bool = False) -> Case:
    """``pinned``: small models with two pins each."""
    where = draw(hosts())
    fleet = tuple(draw(models(f"m{i}", where, pinned)) for i in range(draw(st.integers(1, 5))))
    wanted = draw(st.dictionaries(st.sampled_from([model.name for model in fleet]), st.integers(-1, 7), max_size=3))
    blocked = {
        host.name: frozenset(draw(st.sets(st.integers(0, host.cores - 1), max_size=3)))
        for host in where
        if draw(st.booleans())
    }
    shapes = {model.name: draw(st.sampled_from([None, *SHAPES])) for model in fleet}
    known = {name: shape for name, shape in shapes.items() if shape is not None}
    moves = draw(st.sampled_from([0, 0, 1, 3, None]))
    names = st.frozensets(st.sampled_from([model.name for model in fleet]))
    held = draw(st.dictionaries(st.sampled_from([host.name for host in where]), names, max_size=3))
    return Case(Spec(models=fleet), where, wanted, blocked, checkpoints=known, moves=moves, held=held)


@st.composite
def running_cases(draw: st.DrawFn) -> Case:
    """A fleet on which some of an earlier plan runs, and some of nothing known."""
    case = draw(cases())
    earlier = case.plan().placements
    kept = tuple(placement.running for placement in earlier if draw(st.booleans()))
    host = draw(st.sampled_from(case.hosts))
    first = draw(st.integers(0, host.cores - 1))
    odd = Running(
        draw(st.sampled_from(["gone", "m0", "m1"])),
        draw(st.integers(0, 3)),
        host.name,
        CoreRange(first, draw(st.integers(first, host.cores + 1))),
    )
    later = draw(cases())
    strangers = (odd,) if draw(st.booleans()) else ()
    return replace(case, running=kept + strangers, wanted=later.wanted, blocked=case.blocked)


def cored(drawn: Plan) -> list[tuple[Placement, CoreRange]]:
    return [(placement, placement.cores) for placement in drawn.placements if placement.cores is not None]


def started(case: Case, drawn: Plan) -> list[tuple[Placement, CoreRange]]:
    """Those that do not run yet."""
    return [(placement, cores) for placement, cores in cored(drawn) if placement.running not in case.running]


def free_windows(case: Case, drawn: Plan, tp: int) -> list[tuple[Host, CoreRange]]:
    """Legal ranges of ``tp`` cores that a plan leaves free."""
    spots = []
    for host in case.hosts:
        taken = case.forbidden(host.name) | {core for p, cores in cored(drawn) if p.host == host.name for core in cores}
        for first in legal_starts(host, tp):
            cores = CoreRange.of_length(first, tp)
            if not taken & set(cores):
                spots.append((host, cores))
    return spots


quick = search(20, derandomize=not EXAMPLES)


@quick
@given(running_cases())
def test_no_core_belongs_to_two_replicas(case: Case) -> None:
    """Ranges on one host are disjoint."""
    drawn = cored(case.plan())
    assert not [(a, b) for (a, x), (b, y) in combinations(drawn, 2) if a.host == b.host and x.overlap(y)]


@quick
@given(running_cases())
def test_ranges_lie_inside_their_host_and_are_as_long_as_tp(case: Case) -> None:
    """A range has tp_degree cores, and they exist."""
    drawn = cored(case.plan())
    assert not [p for p, c in drawn if len(c) != case.model(p.model).tp_degree or c.last >= case.host(p.host).cores]


@quick
@given(running_cases())
def test_new_replicas_are_legally_aligned_and_off_reserved_and_quarantined_cores(case: Case) -> None:
    """What is started keeps to the hardware's rules; what runs is left alone."""
    new = started(case, case.plan())
    assert not [p for p, cores in new if cores.first not in legal_starts(case.host(p.host), len(cores))]
    assert not [p for p, cores in new if set(cores) & case.forbidden(p.host)]


@quick
@given(running_cases())
def test_nothing_lies_on_reserved_cores(case: Case) -> None:
    """Not even what runs."""
    assert not [p for p, cores in cored(case.plan()) if set(cores) & case.host(p.host).reserved_cores]


@quick
@given(cases())
def test_pins_are_exact(case: Case) -> None:
    """Of a model's replicas as many as it has pins lie on different pins, or are not placed."""
    drawn = case.plan()
    for model in case.spec.models:
        own = [p for p in drawn.placements if p.model == model.name and p.cores is not None]
        missing = sum(un.model == model.name for un in drawn.unplaced)
        left = list(model.cores)
        off_pin = 0
        for placement in own:
            pin = next((p for p in left if p.cores == placement.cores and p.host in (None, placement.host)), None)
            if pin is None:
                off_pin += 1
            else:
                left.remove(pin)
        count = len(own) + missing
        event(f"pins {len(model.cores)}, off pin {off_pin}")
        assert off_pin <= max(0, count - len(model.cores)) or not own


@quick
@given(running_cases())
def test_each_model_gets_the_number_that_is_wanted_or_reasons(case: Case) -> None:
    """Placed and unplaced replicas of a model are as many as wanted, each index once."""
    drawn = case.plan()
    for model in case.spec.models:
        indices = [p.replica for p in drawn.placements if p.model == model.name]
        indices += [un.replica for un in drawn.unplaced if un.model == model.name]
        count = max(0, min(case.wanted.get(model.name, model.replicas.min), model.replicas.max))
        assert (len(indices), len(set(indices))) == (count, count)
    assert all(un.problems for un in drawn.unplaced)


@quick
@given(running_cases())
def test_planning_its_own_result_changes_nothing(case: Case) -> None:
    """Deterministic and idempotent: the same plan again, and nothing to do, unless further moves are allowed."""
    case = replace(case, moves=0)
    drawn = case.plan()
    again = replace(case, running=tuple(placement.running for placement in drawn.placements))
    assert case.plan() == drawn
    assert again.plan().placements == drawn.placements
    assert not diff(again.plan(), again.running)


@quick
@given(running_cases())
def test_what_runs_and_fits_the_spec_is_never_moved(case: Case) -> None:
    """A replica that is started does not have the model and index of one that the plan could have kept.

    With one priority and no more than ``min`` wanted, so that nothing gives way to a higher grade.
    """
    fleet = tuple(model.model_copy(update={"priority": 0}) for model in case.spec.models)
    case = replace(case, spec=Spec(models=fleet), wanted={}, moves=0)
    drawn = case.plan()
    kept = {placement.running for placement in drawn.placements} & set(case.running)
    for replica in case.running:
        model = case.spec.model(replica.model)
        if model is None or model.cores or replica in kept:
            continue
        count = max(0, min(case.wanted.get(model.name, model.replicas.min), model.replicas.max))
        own = [r for r in kept if r.model == model.name]
        host = case.host(replica.host)
        fits = (
            takes_cores(model.engine, host)
            and replica.cores is not None
            and len(replica.cores) == model.tp_degree
            and replica.cores.last < host.cores
            and not set(replica.cores) & host.reserved_cores
        )
        clash = any(
            (other.replica == replica.replica and other.model == replica.model)
            or (other.host == replica.host and other.cores and replica.cores and other.cores.overlap(replica.cores))
            for other in kept
        )
        assert len(own) >= count or not fits or clash


@quick
@given(running_cases())
def test_what_hosts_hold_changes_only_where_new_replicas_lie(case: Case) -> None:
    """As many of each model are placed, for the same reasons some are not, and what runs lies where it lay."""
    blind, drawn = replace(case, held={}).plan(), case.plan()
    alike = [(p.model, p.replica) for p in blind.placements] == [(p.model, p.replica) for p in drawn.placements]
    assert alike
    assert [(missing.model, missing.replica) for missing in blind.unplaced] == [
        (missing.model, missing.replica) for missing in drawn.unplaced
    ]
    ran = set(case.running)
    assert {p.running for p in blind.placements} & ran == {p.running for p in drawn.placements} & ran

    def near(plan: Plan) -> int:
        return sum(p.model in case.held.get(p.host, ()) for p in plan.placements)

    event(f"{near(drawn) - near(blind)} more lie where they are held")
    assert near(drawn) >= near(blind)


def load_gib(case: Case, model: ModelSpec) -> float:
    """Of the host, for one replica."""
    if model.host_memory_gib is not None:
        return model.host_memory_gib
    known = case.checkpoints.get(model.name)
    return 0.0 if known is None else host_memory(model, known, model.engine).load


def suits(case: Case, model: ModelSpec, host: Host) -> bool:
    """Returns whether the model may lie on an empty one of such a host."""
    assert host.topology is not None
    known = case.checkpoints.get(model.name)
    if model.tp_degree > host.cores or model.tp_degree not in (*DEGREES[family(host)], *model.allow_degrees):
        return False
    if not may_run(model.engine, host, known.model_type if known else None):
        return False
    return known is None or fits(estimate(model, known, resolve(model.engine, host, model.kind)), host.topology)


def refused_by(case: Case, drawn: Plan, model: ModelSpec, host: Host) -> set[str]:
    """What else than cores keeps a replica off a host."""
    own = [p for p in drawn.placements if p.host == host.name and p.cores is not None]
    reasons = set()
    if model.spread and sum(p.model == model.name for p in own) >= model.spread.host:
        reasons.add("spread-blocks")
    used = sum(load_gib(case, case.model(p.model)) for p in own)
    if host.memory_gib is not None and load_gib(case, model) and used + load_gib(case, model) > host.memory_gib + 1e-6:
        reasons.add("host-memory-short")
    if isinstance(model.threads, int) and not host.emulated:
        counts = sum(p.threads for p in own) + model.threads
        reasons |= {"vcpus-short"} if counts > len(host.usable_cpus) else set()
    return reasons


@quick
@given(running_cases())
def test_nothing_is_unplaced_that_a_free_legal_block_would_hold(case: Case) -> None:
    """A replica without a pin is refused only where no window of its degree is left on a host that would take it."""
    drawn = case.plan()
    for un in drawn.unplaced:
        model = case.model(un.model)
        if un.problems[0].id == "pin-taken":
            continue
        windows = free_windows(case, drawn, model.tp_degree)
        takers = [host for host, _ in windows if suits(case, model, host) and not refused_by(case, drawn, model, host)]
        assert takers == []


@quick
@given(running_cases())
def test_a_refusal_names_what_is_missing(case: Case) -> None:
    """Cores, or on every host where cores are free the thing that it names or another of its kind."""
    drawn = case.plan()
    for un in drawn.unplaced:
        model, id = case.model(un.model), un.problems[0].id
        event(id)
        open_hosts = [host for host, _ in free_windows(case, drawn, model.tp_degree) if suits(case, model, host)]
        if id in ("spread-blocks", "host-memory-short", "vcpus-short"):
            assert open_hosts
            assert all(refused_by(case, drawn, model, host) for host in open_hosts)
        if id == "no-suitable-host":
            assert not any(suits(case, model, host) for host in case.hosts)


@quick
@given(running_cases())
def test_what_is_started_fits_its_host(case: Case) -> None:
    """HBM of the type, the host's memory, and at most so many of one model as spread says."""
    drawn = case.plan()
    for host in case.hosts:
        own = [p for p in drawn.placements if p.host == host.name and p.cores is not None]
        new = [p for p in own if p.running not in case.running]
        assert all(suits(case, case.model(p.model), host) or case.model(p.model).cores for p in new)
        used = sum(load_gib(case, case.model(p.model)) for p in own)
        needy = [p for p in new if load_gib(case, case.model(p.model)) and not case.model(p.model).cores]
        assert host.memory_gib is None or used <= host.memory_gib + 1e-6 or not needy
        for placement in new:
            spread = case.model(placement.model).spread
            pinned = case.model(placement.model).cores
            assert spread is None or pinned or sum(p.model == placement.model for p in own) <= spread.host


@quick
@given(running_cases())
def test_no_more_replicas_move_than_may(case: Case) -> None:
    """With one priority and no more than ``min`` wanted, so that nothing gives way to a higher grade; and each move is
    one of a replica that ran."""
    fleet = tuple(model.model_copy(update={"priority": 0}) for model in case.spec.models)
    case = replace(case, spec=Spec(models=fleet), wanted={})
    drawn = case.plan()
    event(f"moves {len(drawn.moves)}")
    assert case.moves is None or len(drawn.moves) <= case.moves
    assert all(move.before in case.running and move.after in drawn.placements for move in drawn.moves)
    assert all(move.before != move.after.running for move in drawn.moves)


@quick
@given(running_cases(), st.sampled_from([1, 2, 4, 8, 24]))
def test_a_window_is_open_once_its_moves_are_made(case: Case, cores: int) -> None:
    """It is legal, free of what stays and of what moves, and nothing else moves."""
    result = defragment(case.spec, case.hosts, case.checkpoints, case.running, case.blocked, cores=cores)
    if result is None:
        return
    host = case.host(result.host)
    event(f"moves {len(result.moves)}")
    assert len(result.cores) == cores
    assert result.cores.first in legal_starts(host, cores)
    assert not set(result.cores) & case.forbidden(host.name)
    gone = {move.before for move in result.moves}
    known = {model.name: model for model in case.spec.models}
    stay = [job for job in case.running if job not in gone and job.model in known and job.host == host.name]
    kept = {p.running for p in plan(case.spec, case.hosts, {}, case.running, counts(case), case.blocked).placements}
    assert not [
        replica for replica in stay if replica in kept and replica.cores and replica.cores.overlap(result.cores)
    ]
    assert not [
        m for m in result.moves if m.after.host == host.name and m.after.cores and m.after.cores.overlap(result.cores)
    ]


def counts(case: Case) -> dict[str, int]:
    """As many of each model as run."""
    return {model.name: sum(job.model == model.name for job in case.running) for model in case.spec.models}


@quick
@given(cases(pinned=True))
def test_a_pin_is_refused_only_where_its_cores_are_taken(case: Case) -> None:
    """With one host the refusal is plain to check."""
    case = replace(case, hosts=case.hosts[:1])
    drawn = case.plan()
    name = case.hosts[0].name
    taken = case.forbidden(name) | {core for _, cores in cored(drawn) for core in cores}
    for un in drawn.unplaced:
        if un.problems[0].id == "pin-taken":
            pinned = re.search(r"is pinned to cores ([0-9-]+)", un.problems[0].what)
            assert pinned
            cores = CoreRange.parse(pinned[1])
            known = "no host has that name" not in un.problems[0].what
            assert set(cores) & taken or cores.last >= case.hosts[0].cores or not known


@quick
@given(running_cases())
def test_a_lower_priority_never_costs_a_higher_one_a_core(case: Case) -> None:
    """Without the lower classes the highest one serves no more cores. Pins come first whatever their class.

    Without moves: with them the search is bounded, and may stop earlier in the larger fleet.
    """
    bare = tuple(model.model_copy(update={"cores": ()}) for model in case.spec.models)
    top = max(model.priority for model in bare)
    lows = {model.name: model.replicas.min for model in bare}
    wanted = {name: min(count, lows[name]) for name, count in case.wanted.items() if name in lows}
    full = replace(case, spec=Spec(models=bare), wanted=wanted, moves=0)
    alone = replace(full, spec=Spec(models=tuple(model for model in bare if model.priority == top)))
    high = {model.name for model in bare if model.priority == top}
    assert sum(len(c) for p, c in cored(full.plan()) if p.model in high) == sum(len(c) for _, c in cored(alone.plan()))


def most_cores(free: frozenset[int], sizes: tuple[int, ...], cores: int) -> int:
    """The most cores that replicas of these degrees can use, by trying everything. Memo on what is left."""
    memo: dict[tuple[frozenset[int], tuple[int, ...]], int] = {}

    def best(left: frozenset[int], rest: tuple[int, ...]) -> int:
        if not rest:
            return 0
        key = (left, rest)
        if key not in memo:
            tp = rest[0]
            top = best(left, rest[1:])
            for first in range(0, cores - tp + 1, alignment("inf2", tp).legal):
                window = frozenset(range(first, first + tp))
                if window <= left:
                    top = max(top, tp + best(left - window, rest[1:]))
            memo[key] = top
        return memo[key]

    return best(free, tuple(sorted(sizes, reverse=True)))


@quick
@given(
    spoilt=st.sets(st.integers(0, 23), max_size=3),
    first=st.integers(0, 10),
    last=st.integers(11, 23),
    sizes=st.lists(st.sampled_from(sorted(DEGREES["inf2"])), min_size=1, max_size=5),
)
@example(spoilt=set(), first=2, last=13, sizes=[4, 4, 4])
@example(spoilt=set(), first=0, last=23, sizes=[12, 8, 8, 8])
def test_inside_a_class_most_cores_are_served(spoilt: set[int], first: int, last: int, sizes: list[int]) -> None:
    """Equal to trying every placement, on one host with any cores taken."""
    topology = TOPOLOGIES["inf2.48xlarge"]
    taken = spoilt | (set(range(24)) - set(range(first, last + 1)))
    host = Host("h", topology, tuple(range(192)), 8, frozenset(taken))
    fleet = tuple(ModelSpec(name=f"m{i}", source="./m", tp_degree=tp) for i, tp in enumerate(sizes))
    served = sum(len(cores) for _, cores in cored(plan(Spec(models=fleet), [host])))
    assert served == most_cores(frozenset(range(24)) - taken, tuple(sizes), 24)


@quick
@given(cases())
def test_threads_stay_within_the_budget_unless_a_warning_says_so(case: Case) -> None:
    """The sum over a host of what is placed, at most its usable CPUs; else threads-oversubscribed.

    Shares of at least one CPU never need the warning, and on an emulated host no share does.
    """
    drawn = case.plan()
    warned = list(threads_within_budget(case.spec, case.hosts))
    for host in case.hosts:
        own = [placement for placement in drawn.placements if placement.host == host.name]
        budget = len(host.usable_cpus)
        assert sum(placement.threads for placement in own) <= budget or warned or host.emulated
        shares = [p for p in own if p.cores and case.model(p.model).threads == "share"]
        whole = [p.threads for p in shares if budget * case.model(p.model).tp_degree >= host.cores]
        assert sum(whole) <= budget


@quick
@given(cases())
def test_masks_are_disjoint_and_hold_the_threads(case: Case) -> None:
    """CPU masks of two replicas on one host share no CPU, and keep off the reserve."""
    bound = [placement for placement in case.plan().placements if placement.cpus]
    assert not [(a, b) for a, b in combinations(bound, 2) if a.host == b.host and set(a.cpus) & set(b.cpus)]
    assert not [p for p in bound if p.threads > len(p.cpus) or set(p.cpus) - set(case.host(p.host).usable_cpus)]


@quick
@given(cases())
def test_the_environment_matches_the_placement(case: Case) -> None:
    """NEURON_RT_VISIBLE_CORES equals cores in the JSON, and NEURON_RT_NUM_CORES is never there."""
    for entry in case.plan().as_dict()["placements"]:
        assert entry["env"].get("NEURON_RT_VISIBLE_CORES") == entry["cores"]
        assert entry["env"]["OMP_NUM_THREADS"] == str(entry["threads"])
        assert "NEURON_RT_NUM_CORES" not in entry["env"]


@quick
@given(cases())
def test_a_spec_without_errors_never_loses_a_pin_on_an_empty_fleet(case: Case) -> None:
    """What `check` passes, `plan` places, as far as pins go."""
    named = (HostsSpec(instance="inf2.48xlarge"),)
    spec = case.spec.model_copy(update={"hosts": named})
    errors = [problem for problem in check(spec, case.hosts) if problem.severity == "error"]
    event(f"errors: {bool(errors)}")
    drawn = plan(spec, case.hosts)
    assert errors or not [un for un in drawn.unplaced if un.problems[0].id == "pin-taken"]
