"""What holds for every explanation: it never lies about what would help, whatever the spec, the hosts and the fleet."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from hypothesis import event, example, given
from hypothesis import strategies as st

from placements.explain.explain import explain
from placements.explain.explanation import Explanation, Question
from placements.facts.checkpoints import Checkpoint
from placements.facts.core_range import CoreRange
from placements.facts.topology import TOPOLOGIES, Host, Machine
from placements.planner.plan import Placement, Plan, Running, plan
from placements.planner.spec_hosts import hosts_for
from placements.rules.checks import check
from placements.spec.notation import CorePin
from placements.spec.schema import HostsSpec, ModelSpec, Replicas, Reserve, Spec, Spread
from tests.placements.fleets import GPT2_XL, LLAMA_2_7B
from tests.searches import search

MACHINE = Machine(cpus=(0, 1))
TYPES = ("inf2.xlarge", "inf2.24xlarge", "inf2.48xlarge", "trn1.2xlarge", "trn1.32xlarge", "trn2.48xlarge")
LLAMA_70B = Checkpoint("llama", 64, 8, 80, 8192, 28672, 128, 32000, 4096, False, 68_976_648_192)


@dataclass(frozen=True)
class Case:
    """A question about the first model."""

    spec: Spec
    checkpoints: Mapping[str, Checkpoint]
    running: tuple[Running, ...] = ()
    cordoned: Mapping[str, frozenset[int]] = ()  # type: ignore[assignment]
    quarantined: Mapping[str, frozenset[int]] = ()  # type: ignore[assignment]

    @property
    def hosts(self) -> tuple[Host, ...]:
        return hosts_for(self.spec, MACHINE)

    @property
    def blocked(self) -> dict[str, frozenset[int]]:
        cordoned, quarantined = dict(self.cordoned), dict(self.quarantined)
        names = {*cordoned, *quarantined}
        return {name: cordoned.get(name, frozenset()) | quarantined.get(name, frozenset()) for name in names}

    def explain(self) -> Explanation:
        question = Question(self.spec.models[0], self.spec, self.hosts, self.checkpoints, running=self.running)
        return explain(replace(question, blocked=self.blocked, cordoned=dict(self.cordoned)))


@st.composite
def models(draw: st.DrawFn, name: str) -> ModelSpec:
    tp = draw(st.sampled_from((1, 2, 2, 4, 8, 8, 16, 24, 5)))
    low = draw(st.integers(0, 4))
    pins = draw(st.lists(st.integers(0, 3), max_size=1)) if draw(st.booleans()) else []
    return ModelSpec(
        name=name,
        source="./m",
        tp_degree=tp,
        engine=draw(st.sampled_from(["auto", "transformers-neuronx", "nxd-inference", "cpu"])),
        max_batch=draw(st.sampled_from((1, 8, 64))),
        max_len=draw(st.sampled_from((None, 512, 4096))),
        replicas=Replicas(min=low, max=max(1, low)),
        priority=draw(st.sampled_from((0, 0, 1, -1))),
        spread=draw(st.sampled_from((None, None, None, Spread(host=1)))),
        threads=draw(st.sampled_from(("share", "share", 40))),
        host_memory_gib=draw(st.sampled_from((None, None, 100.0, 9000.0))),
        cores=tuple(CorePin(CoreRange.of_length(first * tp, tp)) for first in pins),
    )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    names = draw(st.lists(st.sampled_from(TYPES), min_size=1, max_size=2, unique=True))
    key = draw(st.sampled_from(["instance", "instance", "emulate"]))
    reserve = Reserve(cores=draw(st.sampled_from(((), (), (1,)))))
    wishes = tuple(
        HostsSpec.model_validate({key: name, "count": draw(st.integers(1, 2)), "reserve": reserve}) for name in names
    )
    wanted = tuple(draw(models(name)) for name in "abc"[: draw(st.integers(1, 3))])
    spec = Spec(hosts=wishes, models=wanted)
    known = {model.name: draw(st.sampled_from((None, LLAMA_2_7B, GPT2_XL, LLAMA_70B))) for model in wanted}
    checkpoints = {name: checkpoint for name, checkpoint in known.items() if checkpoint is not None}
    hosts = hosts_for(spec, MACHINE)
    running = []
    for model in wanted[1:]:  # scattered, as a fleet is that has lived for a while
        for replica, place in enumerate(draw(st.lists(st.integers(0, 23), max_size=4, unique=True))):
            host = hosts[place % len(hosts)]
            first = place // 2 * model.tp_degree
            if first + model.tp_degree <= host.cores:
                cores = CoreRange.of_length(first, model.tp_degree)
                running.append(Running(model.name, replica, host.name, cores))
    blocked = [
        {host.name: frozenset(draw(st.sets(st.integers(0, host.cores - 1), max_size=4))) for host in hosts}
        if draw(st.booleans())
        else {}
        for _ in range(2)
    ]
    return Case(spec, checkpoints, tuple(running), *blocked)


def counts(drawn: Plan) -> Counter[str]:
    return Counter(placement.model for placement in drawn.placements)


def sound(placements: tuple[Placement, ...], hosts: tuple[Host, ...], blocked: Mapping[str, frozenset[int]]) -> bool:
    """Returns whether nobody shares a core or lies where nobody may."""
    taken = Counter((placement.host, core) for placement in placements for core in placement.cores or ())
    cores = {host.name: set(range(host.cores)) - host.reserved_cores for host in hosts}
    ran = {(name, core) for name, item in blocked.items() for core in item}
    return (
        max(taken.values(), default=0) <= 1
        and all(core in cores[host] for host, core in taken)
        and not (set(taken) & ran)
    )


FULL = Spec(
    hosts=(HostsSpec(instance="inf2.xlarge"),),
    models=(ModelSpec(name="a", source="./m", tp_degree=2), ModelSpec(name="b", source="./m", priority=1)),
)

OUSTING = Spec(  # a greater degree of the first would fit, and cost the second its place
    hosts=(HostsSpec(instance="inf2.24xlarge"),),
    models=(
        ModelSpec(name="a", source="./m", tp_degree=2, max_batch=32, max_len=4096, priority=1),
        ModelSpec(name="b", source="./m", tp_degree=8),
    ),
)


@search(12)
@given(cases())
@example(Case(FULL, {}))
@example(Case(OUSTING, {"a": LLAMA_2_7B}))
def test_every_suggestion_works_when_it_is_planned_anew(case: Case) -> None:
    """`check` has nothing new against it, the model gets its replicas, and no other model loses one by it."""
    explanation = case.explain()
    event(f"failed: {bool(explanation.failed)}, suggestions: {len(explanation.suggestions)}")
    name = case.spec.models[0].name
    known = {
        (problem.id, problem.what)
        for problem in check(case.spec, case.hosts, case.checkpoints)
        if problem.severity == "error"
    }
    target = {name: max(1, case.spec.models[0].replicas.min)}
    before = counts(plan(case.spec, case.hosts, case.checkpoints, case.running, target, case.blocked))
    for suggestion in explanation.suggestions:
        trial = suggestion.trial
        problems = check(trial.spec, trial.hosts, case.checkpoints)
        errors = {(row.id, row.what) for row in problems if row.severity == "error"}
        assert errors <= known, suggestion.trial.change
        drawn = plan(
            trial.spec, trial.hosts, case.checkpoints, case.running, trial.wanted, trial.blocked, moves=trial.moves
        )
        assert drawn == suggestion.plan
        rivals = {model.name for model in trial.spec.models} - {name} - trial.losers
        assert all(counts(drawn)[rival] >= before[rival] for rival in rivals), suggestion.trial.change
        assert counts(drawn)[name] >= trial.wanted[name]
        assert sound([p for p in drawn.placements if p.running not in case.running], trial.hosts, trial.blocked)  # type: ignore[arg-type]
        ranks = {model.name: model.priority for model in trial.spec.models}
        equals = [move for move in drawn.moves if ranks[move.after.model] >= ranks[name]]
        assert len(equals) <= trial.moves


@search(12)
@given(cases())
def test_an_explanation_names_a_constraint_if_and_only_if_one_fails(case: Case) -> None:
    """And its JSON can be written."""
    explanation = case.explain()
    json.dumps(explanation.as_dict())
    name = case.spec.models[0].name
    errors = [problem for problem in check(case.spec, case.hosts, case.checkpoints) if problem.severity == "error"]
    if not errors:
        count = max(1, case.spec.models[0].replicas.min)
        drawn = plan(case.spec, case.hosts, case.checkpoints, case.running, {name: count}, case.blocked)
        assert len(explanation.places) == counts(drawn)[name]
        assert bool(explanation.failed) == (counts(drawn)[name] < count)
    assert explanation.fits == (not explanation.failed)
    assert all(constraint.what for constraint in (*explanation.failed, *explanation.holds))


def test_every_type_that_is_tried_is_known() -> None:
    """The strategies use no type that the planner does not have."""
    assert set(TYPES) <= set(TOPOLOGIES)
