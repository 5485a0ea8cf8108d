"""The previews of an apply, of a defragmentation and of changes by hand, and explanations: nothing is changed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import msgspec

from orchestrator.access.source_policy import BARRED
from orchestrator.api.operation import (
    OperatedFleet,
    is_host,
    missing_object,
    model_of,
    refuse_frozen,
    refuse_on_hold,
    refuse_over_max,
    view_of,
)
from orchestrator.api.schemas import (
    ActionToPreview,
    ApplyPreview,
    ChangePreview,
    CountChange,
    DefragPreview,
    ModelExplanation,
    OperationRefused,
    PlannedModel,
    SpecText,
    SpecToExplain,
    SpecToPlan,
)
from orchestrator.control.decisions.changes import Action, ModelChange, Tag, difference
from orchestrator.control.decisions.decide import FleetDecision, FleetSnapshot, decide
from orchestrator.control.decisions.host_demand import HostDemand, drained, refusal
from orchestrator.control.decisions.projection import Projection, project
from orchestrator.control.decisions.relocation import RunningFleet, defragmentation, load_times, traffic
from orchestrator.control.decisions.rollout_step import DesiredModel
from orchestrator.control.decisions.update_strategy import UpdateStrategy
from orchestrator.control.fleet_goal import situation_of, snapshot_of
from orchestrator.control.host_conditions import blocked_cores, cordoned_cores, quarantined_cores
from orchestrator.control.journal.journal_records import Revision
from orchestrator.control.resolve.resolved_revision import ResolvedRevision, resolve_spec
from orchestrator.control.resolve.spec_file import SpecFile, examine, start_problems
from orchestrator.messages.replica_states import LEAVING
from placements.explain.explain import explain as explain_placement
from placements.explain.explanation import Question
from placements.facts.plural import counted
from placements.facts.topology import Host
from placements.planner.host_choice import HostChoice
from placements.planner.ledger import ledger
from placements.planner.plan import Running, plan
from placements.planner.spec_hosts import HostGroup
from placements.resources.calibration import speed_rows
from placements.spec.problems import Problem, has_errors

Cause = Literal["up", "apply", "undo", "watch"]


@dataclass(frozen=True)
class Outlook:
    """The effects of installing a revision."""

    index: int  # of the journal, before them
    decision: FleetDecision  # that the controller carries out if nothing changes before
    end: Projection  # of its rollout, on present and coming hosts and those to add
    choice: HostChoice  # the hosts whose machines are requested for it

    @property
    def desired_models(self) -> Mapping[str, DesiredModel]:
        return self.decision.after.situation.desired_models

    @property
    def choices(self) -> Mapping[str, UpdateStrategy]:
        """The strategies of the models with old replicas."""
        return self.decision.after.memory.strategies


# Reading a spec


async def read_spec(
    fleet: OperatedFleet,
    spec: SpecText,
    *,
    by: str,
    cause: Cause,
    canary: float | None = None,
    of: int | None = None,
) -> tuple[SpecFile, ResolvedRevision]:
    """Reads a spec for a new revision. Raises OperationRefused for one that can never be applied to this fleet."""
    state = fleet.state
    spec_file = await state.in_thread(examine, spec.text, spec.file, spec.base_dir, state.machine, fleet.allowed)
    if spec_file.spec is not None and not has_errors(spec_file.problems):
        _refuse_other_hosts(fleet, spec_file)  # before problems with starting them on this machine
    problems = (*spec_file.problems, *start_problems(spec_file), *_other_name(fleet, spec_file))
    if spec_file.spec is None or has_errors(problems):
        count = sum(problem.severity == "error" for problem in problems)
        complaint = f"has {counted(count, 'error')}: nothing was applied"
        raise _spec_refused(fleet, spec.file, complaint, problems)
    revision = Revision(
        number=state.next_number,
        fleet=fleet.settings.fleet,
        cause=cause,
        by=by,
        text=spec.text,
        file=spec.file,
        base_dir=spec.base_dir,
        of=of,
        plan={},
        canary=canary,
    )
    resolved = await state.in_thread(resolve_spec, revision, spec_file.spec, state.machine)
    return dataclasses.replace(spec_file, problems=problems), resolved


async def _refuse_oversized(fleet: OperatedFleet, spec_file: SpecFile) -> None:
    """Refuses a spec whose required replicas do not fit on an empty fleet."""
    empty_fleet = await fleet.state.in_thread(plan, spec_file.spec, spec_file.hosts, spec_file.checkpoints)
    missing = [problem for group in empty_fleet.unplaced if group.required for problem in group.problems]
    if missing:
        fact = f"{spec_file.name} does not fit even on an empty fleet"
        hint = "reduce the replicas or the tp_degree, or add hosts"
        raise OperationRefused("never-fits", fact, hint, status=422, problems=missing)


def _spec_refused(fleet: OperatedFleet, file: str, complaint: str, problems: Sequence[Problem]) -> OperationRefused:
    hint = "corewright validate SPEC shows the problems"
    if fleet.by_key and (barred := [problem for problem in problems if problem.id in BARRED]):
        complaint, problems = "names sources or programs that an API key may not use", barred
        hint = "apply it on the fleet's host, with the token of fleet.json"
    return OperationRefused("spec-invalid", f"{file} {complaint}", hint, status=422, problems=problems)


def _other_name(fleet: OperatedFleet, spec_file: SpecFile) -> Iterator[Problem]:
    """Yields a warning for the spec of another fleet, or one that renames this fleet."""
    spec, own = spec_file.spec, fleet.state.current.spec.name
    if spec is not None and spec.name != own:
        fact = f"the spec is of the fleet {spec.name}, and this fleet is {own}"
        hint = f"apply it to the other fleet, or set name: {own}"
        yield Problem("fleet-name-differs", "warning", spec.where("name"), fact, hint)


def _refuse_other_hosts(fleet: OperatedFleet, spec_file: SpecFile) -> None:
    if _machines(spec_file.hosts) != _machines(fleet.state.hosts):
        fact = f"the hosts of {spec_file.name} are not the hosts of this fleet"
        hint = "restart the fleet with corewright down and up, which starts its nodes"
        raise OperationRefused("hosts-changed", fact, hint)


def _machines(hosts: Sequence[Host]) -> list[tuple[str, int, bool]]:
    return [(host.name, host.cores, host.emulated) for host in hosts]


# An apply


async def propose(fleet: OperatedFleet, request: SpecToPlan) -> ApplyPreview | DefragPreview:
    """Previews an apply; with ``defrag``, the moves that free that many contiguous cores."""
    spec_file, generation = await read_spec(fleet, request, by="", cause="apply")
    if request.defrag is not None:
        await _refuse_oversized(fleet, spec_file)
        return await _defragmentation(fleet, spec_file, request.defrag)
    outlook = await outlook_of(fleet, spec_file, generation)
    return await apply_preview(fleet, spec_file, generation, outlook)


async def outlook_of(fleet: OperatedFleet, spec_file: SpecFile, generation: ResolvedRevision) -> Outlook:
    """Returns the effects of installing the generation now. Raises OperationRefused if it can never fit."""
    state = fleet.state
    index, snapshot = state.records.state.index, snapshot_of(state, generation)
    uses = state.kept, state.uses.avoided()
    outlook: Outlook = await state.in_thread(_outlook, index, snapshot, generation.groups, *uses)
    fewer = any(desired.count < desired.model.replicas.min for desired in outlook.desired_models.values())
    if outlook.end.plan.unplaced or fewer:  # else it has just been placed
        await _refuse_oversized(fleet, spec_file)
    return outlook


def _outlook(
    index: int, snapshot: FleetSnapshot, groups: tuple[HostGroup, ...], used: frozenset[str], avoided: frozenset[str]
) -> Outlook:
    decision = decide(snapshot)
    end = project(_promoted(decision))
    demand = HostDemand(end.situation, groups, used, avoided)
    end = end.on_hosts(demand.with_hosts(()).hosts)
    demand = dataclasses.replace(demand, situation=end.situation)
    choice = demand.choose(end.last.goal.plan)
    return Outlook(index, decision, end.on_hosts(demand.with_hosts(choice.hosts).hosts), choice)


def _promoted(decision: FleetDecision) -> FleetDecision:
    """Returns the decision about a canary as if the canary was promoted right after it."""
    situation = decision.after.situation
    desired_models = {
        name: dataclasses.replace(desired, canary=False) for name, desired in situation.desired_models.items()
    }
    situation = dataclasses.replace(situation, desired_models=desired_models)
    return dataclasses.replace(
        decision, after=dataclasses.replace(decision.after, situation=situation, in_canary=False)
    )


async def apply_preview(
    fleet: OperatedFleet, spec_file: SpecFile, generation: ResolvedRevision, outlook: Outlook
) -> ApplyPreview:
    """Returns the effects of installing the generation now, as the admin API does."""
    state, end = fleet.state, outlook.end
    planned = end.plan
    accounts = await state.in_thread(
        ledger,
        spec_file.spec,
        end.situation.hosts,
        planned,
        spec_file.checkpoints,
        spec_file.drafts,
        quarantined_cores(state),
        cordoned_cores(state),
    )
    measured = fleet.controller.speeds.measured()
    changes = difference(state.current.spec, generation.spec, generation.engines)
    parts = {
        "index": outlook.index,
        "revision": state.current.number,
        **planned.as_dict(),
        "problems": (*spec_file.problems, *planned.problems),
        "changes": end.changes,
        "models": [_planned_model(fleet, change, outlook) for change in changes],
        "hosts_to_add": [host.as_dict() for host in outlook.choice.added() if host.host not in state.kept],
        "speeds": speed_rows(generation.spec, generation.hosts, spec_file.checkpoints, measured),
        **accounts.as_dict(),
    }
    return msgspec.convert(parts, ApplyPreview)


def _planned_model(fleet: OperatedFleet, change: ModelChange, outlook: Outlook) -> PlannedModel:
    choice = outlook.choices.get(change.model)
    desired = outlook.desired_models.get(change.model)
    tag = max(change.tag, Tag.RESTART, key=list(Tag).index) if choice is not None else change.tag
    current = fleet.state.current.spec.model(change.model)
    before = 0 if current is None else fleet.state.counts.desired(current)
    after = 0 if desired is None else desired.count
    action = change.action
    if action in (Action.NONE, Action.UPDATE):
        action = Action.REPLACE if choice is not None else Action.UPDATE if before != after else action
    return PlannedModel(
        model=change.model,
        action=action.value,
        tag=tag.value,
        fields=list(change.fields),
        replicas=CountChange(before=before, after=after),
        strategy=None if choice is None else choice.strategy,
        outage_s=None if choice is None else choice.outage_s,
        predicted_s=None if choice is None else choice.predicted_s,
        why="" if choice is None else choice.why,
        possible=choice is None or choice.possible,
    )


async def _defragmentation(fleet: OperatedFleet, spec_file: SpecFile, cores: int) -> DefragPreview:
    state = fleet.state
    situation = situation_of(state)
    running = RunningFleet(
        _running(fleet),
        quarantined_cores(state),
        cordoned_cores(state),
        load_s=load_times(situation),
        traffic=traffic(situation),
    )
    moves = await state.in_thread(
        defragmentation, spec_file.spec, state.living_hosts, spec_file.checkpoints, running, cores
    )
    at = {"index": state.records.state.index, "revision": state.current.number}
    return msgspec.convert({**at, **moves}, DefragPreview)


# The placement of a model


async def explain(fleet: OperatedFleet, request: SpecToExplain) -> ModelExplanation:
    """Explains the placement of a model of that spec: why it is there or unplaced, and the remedies."""
    state = fleet.state
    spec_file = await state.in_thread(
        partial(examine, folders="ignore"), request.text, request.file, request.base_dir, state.machine, fleet.allowed
    )
    barred = [problem for problem in spec_file.problems if problem.id in BARRED]
    if spec_file.spec is None or barred:
        complaint = "names sources or programs that are not allowed" if barred else "is not a spec"
        raise _spec_refused(fleet, request.file, complaint, spec_file.problems)
    _refuse_other_hosts(fleet, spec_file)
    spec = spec_file.spec.model(request.model)
    if spec is None:
        raise missing_object("model-unknown", request.model, [candidate.name for candidate in spec_file.spec.models])
    question = Question(
        spec,
        spec_file.spec,
        state.living_hosts,
        spec_file.checkpoints,
        spec_file.drafts,
        _running(fleet),
        {candidate.name: state.counts.desired(candidate) for candidate in spec_file.spec.models},
        blocked_cores(state),
        cordoned_cores(state),
    )
    explanation = await state.in_thread(explain_placement, question, spec_file.problems)
    at = {"index": state.records.state.index, "revision": state.current.number}
    return msgspec.convert({**at, **explanation.as_dict()}, ModelExplanation)


def _running(fleet: OperatedFleet) -> tuple[Running, ...]:
    """Returns the replicas that hold cores, without those that are stopping."""
    return tuple(
        Running(view.model, view.replica, view.host, view.cores)
        for view in fleet.state.views.values()
        if view.state not in LEAVING and view.host not in fleet.state.lost
    )


# A change by hand


async def preview(fleet: OperatedFleet, request: ActionToPreview) -> ChangePreview:
    """Returns what scaling, loading, unloading, restarting or draining would do now."""
    action, target = request.action, request.target
    if action in ("restart", "drain"):
        refuse_frozen(fleet, action)
    else:
        refuse_on_hold(fleet)
    state = fleet.state
    index, snapshot = state.records.state.index, snapshot_of(state)
    before, cause = snapshot.situation, None
    if action == "drain" and is_host(fleet, target):
        after = drained(before, target)
        cause = await state.in_thread(refusal, before, target, partly=False)
    elif action in ("restart", "drain"):
        views = state.views.of_model(model_of(fleet, target).name) if action == "restart" else [view_of(fleet, target)]
        after = dataclasses.replace(before, replaced=before.replaced | {(view.id, view.epoch) for view in views})
    else:
        desired = before.desired_models[model_of(fleet, target).name]
        after = before.with_desired(dataclasses.replace(desired, count=_count_after(fleet, request)))
        snapshot = dataclasses.replace(snapshot, scaled=snapshot.scaled | {target})
    decision = await state.in_thread(decide, dataclasses.replace(snapshot, situation=after))
    end = await state.in_thread(project, decision)
    strategies = decision.after.memory.strategies
    replaced = sorted({id.partition("/")[0] for id, _ in after.replaced - before.replaced} & strategies.keys())
    parts = {
        "index": index,
        "revision": state.current.number,
        "changes": end.changes,
        **end.plan.as_dict(),
        "strategies": [{"model": name, **dataclasses.asdict(strategies[name])} for name in replaced],
        "refusal": cause,
    }
    return msgspec.convert(parts, ChangePreview)


def _count_after(fleet: OperatedFleet, request: ActionToPreview) -> int:
    """Returns the number of replicas that the operation of that name would request. Raises OperationRefused."""
    model, counts = model_of(fleet, request.target), fleet.state.counts
    if request.action == "unload":
        return 0
    if request.action == "load":
        return counts.desired(model) or max(model.replicas.min, 1)
    refuse_over_max(model, request.count)
    return counts.target(model) if request.count is None else request.count
