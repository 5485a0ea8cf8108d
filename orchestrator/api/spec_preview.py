"""The previews of a spec on a running fleet: its plan, the moves of a defragmentation, and explanations."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from orchestrator.access.source_policy import BARRED
from orchestrator.api.fleet_operation import FleetOperation, missing_object
from orchestrator.api.refused import OperationRefused
from orchestrator.fleet.replica_states import LEAVING
from orchestrator.records.journal_records import Revision
from orchestrator.revisions.resolved_revision import ResolvedRevision, resolve_revision
from orchestrator.revisions.spec_file import SpecFile, examine, start_problems
from orchestrator.rollout.changes import Action, Tag, difference, replica_changes
from orchestrator.rollout.defragmentation import defragmentation
from orchestrator.rollout.host_demand import HostDemand
from orchestrator.rollout.relocation import load_times, traffic
from orchestrator.rollout.rollout_step import Goal, Situation, compute_goal
from orchestrator.rollout.update_strategy import UpdateStrategy, choose_strategy
from placements.explain.explain import explain
from placements.explain.question import Question
from placements.facts.plural import counted
from placements.facts.topology import Host
from placements.planner.host_choice import HostChoice
from placements.planner.host_groups import HostGroup
from placements.planner.ledger import ledger
from placements.planner.plan import plan
from placements.resources.calibration import speed_rows
from placements.spec.problems import Problem, has_errors

VALIDATE = "corewright validate SPEC shows the problems"


@dataclass(frozen=True)
class Outlook:
    """The effects of installing a revision."""

    index: int  # of the journal, before them
    situation: Situation  # with the chosen strategies
    choices: Mapping[str, UpdateStrategy]  # of models with old replicas
    first: Goal  # before the choices
    next: Goal
    settled: Goal  # after the rollout: only new versions, and whatever fits stays where it is
    choice: HostChoice  # the hosts whose machines are requested for it
    hosts: tuple[Host, ...]  # present, coming or to add


class SpecPreview(FleetOperation):
    """The effects that a spec would have, without a change."""

    async def propose(self, text: str, file: str, base_dir: str, defrag: int | None = None) -> dict[str, Any]:
        """Previews an apply: placements, unplaced, moves, problems, changes by replica, models, hosts, memory, index,
        revision. With ``defrag``: the moves that free that many contiguous cores."""
        spec_file, generation = await self._read(text, file, base_dir, by="", cause="apply")
        if defrag is not None:
            return await self._defragmentation(spec_file, defrag)
        return await self._proposal(spec_file, generation, await self._outlook(generation))

    async def explain(self, text: str, file: str, base_dir: str, model: str) -> dict[str, Any]:
        """Explains the placement of a model of that spec: why it is there or unplaced, and the remedies."""
        state = self._state
        spec_file = await self._state.in_thread(
            partial(examine, folders="ignore"), text, file, base_dir, state.machine, self._allowed
        )
        barred = [problem for problem in spec_file.problems if problem.id in BARRED]
        if spec_file.spec is None or barred:
            what = f"{file} names sources or programs that are not allowed" if barred else f"{file} is not a spec"
            raise OperationRefused("spec-invalid", what, VALIDATE, status=422, problems=spec_file.problems)
        self._refuse_other_hosts(spec_file)
        spec = spec_file.spec.model(model)
        if spec is None:
            raise missing_object("model-unknown", model, [candidate.name for candidate in spec_file.spec.models])
        replica_counts = {candidate.name: state.counts.desired(candidate) for candidate in spec_file.spec.models}
        question = Question(
            spec,
            spec_file.spec,
            state.living_hosts,
            spec_file.checkpoints,
            spec_file.drafts,
            self._running(),
            replica_counts,
            state.blocked(),
            state.cordoned(),
        )
        explanation = await self._state.in_thread(explain, question, spec_file.problems)
        return {"index": state.records.state.index, "revision": state.current.number, **explanation.as_dict()}

    async def _defragmentation(self, spec_file: SpecFile, cores: int) -> dict[str, Any]:
        state = self._state
        assert spec_file.spec is not None
        situation = state.situation()
        moves = await state.in_thread(
            partial(defragmentation, quarantined=state.quarantined(), cordoned=state.cordoned()),
            spec_file.spec,
            state.living_hosts,
            spec_file.checkpoints,
            self._running(),
            cores,
            load_s=load_times(situation),
            traffic=traffic(situation),
        )
        return {"index": state.records.state.index, "revision": state.current.number, **moves}

    async def _read(
        self,
        text: str,
        file: str,
        base_dir: str,
        *,
        by: str,
        cause: Any,
        canary: float | None = None,
        of: int | None = None,
    ) -> tuple[SpecFile, ResolvedRevision]:
        """Reads a spec for a new revision. Raises Refused for one that can never be applied to this fleet."""
        state = self._state
        spec_file = await self._state.in_thread(examine, text, file, base_dir, state.machine, self._allowed)
        if spec_file.spec is not None and not has_errors(spec_file.problems):
            self._refuse_other_hosts(spec_file)  # before problems with starting them on this machine
        problems = (*spec_file.problems, *start_problems(spec_file), *self._other_name(spec_file))
        if spec_file.spec is None or has_errors(problems):
            count = sum(problem.severity == "error" for problem in problems)
            what = f"{file} has {counted(count, 'error')}: nothing was applied"
            raise OperationRefused("spec-invalid", what, VALIDATE, status=422, problems=problems)
        empty_fleet = await state.in_thread(plan, spec_file.spec, spec_file.hosts, spec_file.checkpoints)
        missing = [problem for group in empty_fleet.unplaced if group.required for problem in group.problems]
        if missing:
            what = f"{file} does not fit even on an empty fleet"
            hint = "reduce the replicas or the tp_degree, or add hosts"
            raise OperationRefused("never-fits", what, hint, status=422, problems=missing)
        revision = Revision(
            number=state.next_number,
            fleet=self.settings.fleet,
            cause=cause,
            by=by,
            text=text,
            file=file,
            base_dir=base_dir,
            of=of,
            plan={},
            canary=canary,
        )
        return dataclasses.replace(spec_file, problems=problems), await self._state.in_thread(
            resolve_revision, revision, state.machine
        )

    def _other_name(self, spec_file: SpecFile) -> Iterator[Problem]:
        """Yields a warning for the spec of another fleet, or one that renames this fleet."""
        spec, own = spec_file.spec, self._state.current.spec.name
        if spec is not None and spec.name != own:
            what = f"the spec is of the fleet {spec.name}, and this fleet is {own}"
            hint = f"apply it to the other fleet, or set name: {own}"
            yield Problem("fleet-name-differs", "warning", spec.where("name"), what, hint)

    def _refuse_other_hosts(self, spec_file: SpecFile) -> None:
        if _machines(spec_file.hosts) != _machines(self._state.hosts):
            what = f"the hosts of {spec_file.name} are not the hosts of this fleet"
            raise OperationRefused(
                "hosts-changed", what, "restart the fleet with corewright down and up, which starts its nodes"
            )

    async def _outlook(self, generation: ResolvedRevision) -> Outlook:
        """Returns the effects of installing the generation now."""
        index, situation = self._state.records.state.index, self._state.situation(generation)
        uses = self._state.kept, self._state.uses.avoided()
        outlook: Outlook = await self._state.in_thread(_outlook, index, situation, generation.groups, *uses)
        return outlook

    async def _proposal(self, spec_file: SpecFile, generation: ResolvedRevision, outlook: Outlook) -> dict[str, Any]:
        """Returns the effects of installing the generation now, as the admin API does."""
        state, situation, choices, settled = self._state, outlook.situation, outlook.choices, outlook.settled
        accounts = await state.in_thread(
            ledger,
            spec_file.spec,
            outlook.hosts,
            settled.plan,
            spec_file.checkpoints,
            spec_file.drafts,
            state.quarantined(),
            state.cordoned(),
        )
        measured = self._controller.speeds.measured()
        models = []
        for change in difference(state.current.spec, generation.spec, generation.engines):
            choice = choices.get(change.model)
            after = situation.desired_models.get(change.model)
            tag = max(change.tag, Tag.RESTART, key=list(Tag).index) if choice is not None else change.tag
            before, count = len(state.replicas_of(change.model)), 0 if after is None else after.count
            action = change.action
            if action in (Action.NONE, Action.UPDATE):
                action = Action.REPLACE if choice is not None else Action.UPDATE if before != count else action
            models.append(
                {
                    "model": change.model,
                    "action": action.value,
                    "tag": tag.value,
                    "fields": [msgspec.to_builtins(field) for field in change.fields],
                    "replicas": {"before": before, "after": count},
                    "strategy": None if choice is None else choice.strategy,
                    "outage_s": None if choice is None else choice.outage_s,
                    "predicted_s": None if choice is None else choice.predicted_s,
                    "why": "" if choice is None else choice.why,
                    "possible": choice is None or choice.possible,
                }
            )
        return {
            "index": outlook.index,
            "revision": state.current.number,
            **settled.plan.as_dict(),
            "problems": [problem.as_dict() for problem in (*spec_file.problems, *settled.plan.problems)],
            "changes": replica_changes(outlook.next, list(state.views.values()), settled),
            "models": models,
            "hosts_to_add": [host.as_dict() for host in outlook.choice.added() if host.host not in state.kept],
            "speeds": speed_rows(generation.spec, generation.hosts, spec_file.checkpoints, measured),
            **accounts.as_dict(),
        }


def _outlook(
    index: int, situation: Situation, groups: tuple[HostGroup, ...], used: frozenset[str], avoided: frozenset[str]
) -> Outlook:
    first = compute_goal(situation)
    choices = {name: choose_strategy(situation, name) for name, step in first.steps.items() if step.old}
    for name, chosen in choices.items():
        desired = situation.desired_models[name]
        situation = situation.with_desired(dataclasses.replace(desired, strategy=chosen.strategy))
    views = tuple(
        dataclasses.replace(view, version=situation.desired_models[view.model].version)
        for view in situation.views
        if view.model in situation.desired_models and view.state not in LEAVING
    )
    desired_models = {
        name: dataclasses.replace(desired, canary=False) for name, desired in situation.desired_models.items()
    }
    settled = dataclasses.replace(situation, views=views, desired_models=desired_models, replaced=frozenset())
    demand = HostDemand(settled, groups, used, avoided)
    choice = demand.choose()
    hosts = demand.with_hosts(choice.hosts).hosts
    final = compute_goal(dataclasses.replace(settled, hosts=hosts))
    return Outlook(index, situation, choices, first, compute_goal(situation), final, choice, hosts)


def _machines(hosts: Any) -> list[tuple[str, int, bool]]:
    return [(host.name, host.cores, host.emulated) for host in hosts]
