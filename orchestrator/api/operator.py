"""The operations on a running fleet (`operations.Operations`): each is checked, journaled, then carried out.

An operation that raises has changed nothing. From the last check of the state to the end it is exclusive: no other
operation and no round of the controller decides meanwhile, and it is finished even if its caller is gone.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial, wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import msgspec

from orchestrator.access.source_policy import BARRED, allowed_by_setting
from orchestrator.api.operator_protocol import Refused
from orchestrator.control.controller import Controller
from orchestrator.control.status import rollout
from orchestrator.fleet.effects import ClusterClient
from orchestrator.fleet.replica_states import State
from orchestrator.fleet.snapshot import ReplicaView
from orchestrator.process.home import Home
from orchestrator.records.journal import JournalUnwritable
from orchestrator.records.journal_records import Cordon, R, Replace, Revision, RolloutState, Scale
from orchestrator.records.request_traces import read_page
from orchestrator.revisions.resolved_revision import ResolvedRevision, resolve_revision
from orchestrator.revisions.spec_file import SpecFile, examine, start_problems
from orchestrator.rollout.changes import Action, Tag, difference, replica_changes
from orchestrator.rollout.defragmentation import defragmentation
from orchestrator.rollout.relocation import load_times, traffic
from orchestrator.rollout.rollout_step import DesiredModel, Goal, Situation, compute_goal
from orchestrator.rollout.update_strategy import choose_strategy
from orchestrator.state.quarantine import clear
from placements.explain.explain import explain
from placements.explain.remedies import Question
from placements.facts.core_range import CoreRange
from placements.facts.plural import counted
from placements.planner.ledger import Ledger, ledger
from placements.planner.plan import Running, plan
from placements.spec.problems import has_errors
from placements.spec.schema import ModelSpec

LOG_BYTES = 64 * 2**10  # per response
LOG_POLL_S = 0.25
FIRST_LINES = 100
VALIDATE = "corewright validate SPEC shows the problems"
ROLLOUT_STATUS = "corewright rollout status shows the rollout"

P = ParamSpec("P")
T = TypeVar("T")


def _exclusive(
    operation: Callable[Concatenate[Operator, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Operator, P], Coroutine[Any, Any, T]]:
    async def run(operator: Operator, /, *args: P.args, **kwargs: P.kwargs) -> T:
        async with operator._state.deciding:
            return await operation(operator, *args, **kwargs)

    @wraps(operation)
    async def exclusive(operator: Operator, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.shield(asyncio.ensure_future(run(operator, *args, **kwargs)))

    return exclusive


class Operator:
    """Implements `Operations` for one controller, on its event loop."""

    def __init__(self, controller: Controller, cluster: ClusterClient) -> None:
        self._controller = controller
        self._cluster = cluster
        self._state = controller.state
        self.settings = controller.settings
        self._allowed = allowed_by_setting(controller.settings)

    def status(self) -> dict[str, Any]:
        return self._controller.status()

    # Revisions

    async def propose(self, text: str, file: str, base_dir: str, defrag: int | None = None) -> dict[str, Any]:
        spec_file, generation = await self._read(text, file, base_dir, by="", cause="apply")
        return self._proposal(spec_file, generation) if defrag is None else self._defragmentation(spec_file, defrag)

    async def explain(self, text: str, file: str, base_dir: str, model: str) -> dict[str, Any]:
        state = self._state
        spec_file = await self._state.in_thread(
            partial(examine, folders="ignore"), text, file, base_dir, state.machine, self._allowed
        )
        barred = [problem for problem in spec_file.problems if problem.id in BARRED]
        if spec_file.spec is None or barred:
            what = f"{file} names sources or programs that are not allowed" if barred else f"{file} is not a spec"
            raise Refused("spec-invalid", what, VALIDATE, status=422, problems=spec_file.problems)
        self._refuse_other_hosts(spec_file)
        spec = spec_file.spec.model(model)
        if spec is None:
            raise _missing_object("model-unknown", model, [candidate.name for candidate in spec_file.spec.models])
        replica_counts = {candidate.name: state.desired_count(candidate) for candidate in spec_file.spec.models}
        question = Question(
            spec,
            spec_file.spec,
            state.living_hosts,
            spec_file.checkpoints,
            spec_file.drafts,
            self._running(),
            replica_counts,
            state.blocked(),
            self._cordoned(),
        )
        explanation = await self._state.in_thread(explain, question, spec_file.problems)
        return {"index": state.records.state.index, "revision": state.current.number, **explanation.as_dict()}

    def _running(self) -> tuple[Running, ...]:
        """Returns the replicas that hold cores, without those that are stopping."""
        return tuple(
            Running(view.model, view.replica, view.host, view.cores)
            for view in self._state.views.values()
            if view.state not in (State.DRAINING, State.STOPPING) and view.host not in self._state.lost
        )

    def _cordoned(self) -> dict[str, frozenset[int]]:
        """Returns the cordoned cores by host."""
        cordons = self._state.records.state.cordons
        hosts = {host.name: (host, cordons[host.name]) for host in self._state.hosts if host.name in cordons}
        return {
            name: frozenset(range(host.cores)) if cordoned == "whole" else frozenset(cordoned)
            for name, (host, cordoned) in hosts.items()
        }

    def _quarantined(self) -> dict[str, frozenset[int]]:
        """Returns the cores that foreign processes hold or that have failed, by host."""
        quarantined = {host.name: frozenset(self._state.quarantine(host.name)) for host in self._state.hosts}
        return {name: cores for name, cores in quarantined.items() if cores}

    def _defragmentation(self, spec_file: SpecFile, cores: int) -> dict[str, Any]:
        state = self._state
        assert spec_file.spec is not None
        situation = state.situation()
        moves = defragmentation(
            spec_file.spec,
            state.living_hosts,
            spec_file.checkpoints,
            self._running(),
            cores,
            quarantined=self._quarantined(),
            cordoned=self._cordoned(),
            load_s=load_times(situation),
            traffic=traffic(situation),
        )
        return {"index": state.records.state.index, "revision": state.current.number, **moves}

    async def apply(
        self,
        text: str,
        file: str,
        base_dir: str,
        *,
        by: str,
        cause: str = "apply",
        check_index: int | None = None,
        canary: float | None = None,
    ) -> dict[str, Any]:
        spec_file, generation = await self._read(text, file, base_dir, by=by, cause=cause, canary=canary)
        return await self._install(spec_file, generation, check_index)

    async def undo(self, to: int | None, by: str) -> dict[str, Any]:
        number = self._previous_revision() if to is None else to
        before = self._revision(number)
        spec_file, generation = await self._read(
            before.text, before.file, before.base_dir, by=by, cause="undo", of=before.number
        )
        return {**await self._install(spec_file, generation, None), "of": before.number}

    @_exclusive
    async def _install(
        self, spec_file: SpecFile, generation: ResolvedRevision, check_index: int | None
    ) -> dict[str, Any]:
        state = self._state
        index = state.records.state.index
        if check_index is not None and check_index != index:
            what = f"the fleet's index is {index}, not {check_index}: the fleet has changed since the plan"
            raise Refused("index-changed", what, "run corewright plan SPEC again")
        proposal = self._proposal(spec_file, generation)
        revision = generation.revision
        same = (revision.text, revision.base_dir) == (state.current.revision.text, state.current.revision.base_dir)
        is_current = (
            state.hold is None and state.rollout_state()[0] in ("complete", "progressing") and not state.in_canary
        )
        if same and revision.canary is None and is_current:
            return {"changed": False, "revision": state.current.number, "index": index, "plan": proposal}
        self._refuse_impossible(proposal, generation)
        summary = {"models": proposal["models"], "changes": proposal["changes"]}
        revision = msgspec.structs.replace(revision, number=state.next_number, plan=summary)
        revision = await self._write(revision)
        state.install(dataclasses.replace(generation, revision=revision))
        self._controller.renew_deadlines()
        state.records.event("info", "Applied", f"revision {revision.number} by {revision.by}, {_summary(proposal)}")
        self._controller.wake_up()
        return {"changed": True, "revision": revision.number, "index": state.records.state.index, "plan": proposal}

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
        problems = (*spec_file.problems, *start_problems(spec_file))
        if spec_file.spec is None or has_errors(problems):
            count = sum(problem.severity == "error" for problem in problems)
            what = f"{file} has {counted(count, 'error')}: nothing was applied"
            raise Refused("spec-invalid", what, VALIDATE, status=422, problems=problems)
        empty_fleet = plan(spec_file.spec, spec_file.hosts, spec_file.checkpoints)
        missing = [problem for group in empty_fleet.unplaced if group.required for problem in group.problems]
        if missing:
            what = f"{file} does not fit even on an empty fleet"
            hint = "reduce the replicas or the tp_degree, or add hosts"
            raise Refused("never-fits", what, hint, status=422, problems=missing)
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

    def _refuse_other_hosts(self, spec_file: SpecFile) -> None:
        if _machines(spec_file.hosts) != _machines(self._state.hosts):
            what = f"the hosts of {spec_file.name} are not the hosts of this fleet"
            raise Refused(
                "hosts-changed", what, "restart the fleet with corewright down and up, which starts its nodes"
            )

    def _proposal(self, spec_file: SpecFile, generation: ResolvedRevision) -> dict[str, Any]:
        """Returns the effects of installing the generation now."""
        state = self._state
        situation = self._situation(generation)
        first = compute_goal(situation)
        choices = {name: choose_strategy(situation, name) for name, step in first.steps.items() if step.old}
        for name, chosen in choices.items():
            desired = dataclasses.replace(
                situation.desired_models[name], strategy=chosen.strategy, lender=chosen.lender
            )
            situation = situation.with_desired(desired)
        first_step, settled = compute_goal(situation), self._settled(situation)
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
                    "predicted_s": None if choice is None else situation.load_s(change.model),
                    "why": "" if choice is None else choice.why,
                    "borrow": None if choice is None else choice.lender,
                    "possible": choice is None or choice.possible,
                }
            )
        return {
            "index": state.records.state.index,
            "revision": state.current.number,
            **settled.plan.as_dict(),
            "problems": [problem.as_dict() for problem in (*spec_file.problems, *settled.plan.problems)],
            "changes": replica_changes(first_step, list(state.views.values()), settled),
            "models": models,
            **self._ledger(spec_file, settled).as_dict(),
        }

    def _ledger(self, spec_file: SpecFile, settled: Goal) -> Ledger:
        state = self._state
        assert spec_file.spec is not None
        return ledger(
            spec_file.spec,
            state.living_hosts,
            settled.plan,
            spec_file.checkpoints,
            spec_file.drafts,
            self._quarantined(),
            self._cordoned(),
        )

    def _situation(self, generation: ResolvedRevision) -> Situation:
        """Returns the situation of the fleet right after the generation is installed."""
        state = self._state
        now = state.situation()
        desired_models = {}
        for model in generation.spec.models:
            desired_models[model.name] = DesiredModel(
                model,
                state.desired_count(model),
                generation.versions[model.name],
                mixes=state.mixes(generation, model),
                canary=generation.revision.canary is not None,
            )
        return dataclasses.replace(
            now, spec=generation.spec, checkpoints=generation.checkpoints, desired_models=desired_models
        )

    def _settled(self, situation: Situation) -> Goal:
        """Returns the goal after the rollout: only new versions, and whatever fits stays where it is."""
        views = tuple(
            dataclasses.replace(view, version=situation.desired_models[view.model].version)
            for view in situation.views
            if view.model in situation.desired_models and view.state not in (State.DRAINING, State.STOPPING)
        )
        desired_models = {
            name: dataclasses.replace(desired, canary=False) for name, desired in situation.desired_models.items()
        }
        return compute_goal(
            dataclasses.replace(situation, views=views, desired_models=desired_models, replaced=frozenset())
        )

    def _refuse_impossible(self, proposal: dict[str, Any], generation: ResolvedRevision) -> None:
        for model in proposal["models"]:
            if not model["possible"]:
                what = f"{model['model']}: update.strategy is {model['strategy']}, and {model['why']}"
                raise Refused("update-impossible", what, "update: {strategy: auto}")
        if generation.revision.canary is None:
            return
        situation = self._situation(generation)
        for name, step in compute_goal(situation).steps.items():
            desired = situation.desired_models[name]
            if step.old and not desired.mixes:
                what = f"{name}: the tokenizer changes, so the two versions cannot share requests"
                raise Refused("canary-impossible", what, "apply without --canary")
            if step.old and choose_strategy(situation, name).strategy not in ("surge", "borrow") and desired.count < 2:
                why = choose_strategy(situation, name).why
                what = f"{name}: there is no room for a canary beside its only replica: {why}"
                raise Refused("canary-impossible", what, "apply without --canary, or free some cores")

    def _previous_revision(self) -> int:
        """Returns the newest earlier revision of this fleet with another text: the newest complete one, else the newest
        that did not fail."""
        journal = self._state.records.state
        earlier = [
            revision
            for number, revision in sorted(journal.revisions.items(), reverse=True)
            if number < self._state.current.number
            and revision.fleet == self.settings.fleet
            and revision.text != self._state.current.revision.text
        ]
        outcomes = {revision.number: journal.outcomes.get(revision.number) for revision in earlier}
        ends = {number: outcome.state if outcome is not None else "" for number, outcome in outcomes.items()}
        for revision in earlier:
            if ends[revision.number] == "complete":
                return revision.number
        earlier = [revision for revision in earlier if ends[revision.number] not in ("failed", "rolled_back")]
        if not earlier:
            what = f"no revision before {self._state.current.number} differs from it and did not fail"
            hint = "choose one of corewright rollout history: corewright rollout undo --to REVISION"
            raise Refused("nothing-to-undo", what, hint)
        return earlier[0].number

    def rollout(self) -> dict[str, Any]:
        try:
            undone = self._previous_revision()
        except Refused:
            undone = None
        return {**rollout(self._state), "undo": undone}

    def revisions(self) -> list[dict[str, Any]]:
        journal = self._state.records.state
        return [self._revision_row(journal.revisions[number]) for number in sorted(journal.revisions, reverse=True)]

    def revision(self, number: int | None) -> dict[str, Any]:
        revision = self._revision(self._previous_revision() if number is None else number)
        extra = {"text": revision.text, "file": revision.file, "base_dir": revision.base_dir, "plan": revision.plan}
        return {**self._revision_row(revision), **extra}

    def _revision(self, number: int) -> Revision:
        revisions = self._state.records.state.revisions
        if number == self._state.current.number:
            return revisions.get(number, self._state.current.revision)
        if number not in revisions:
            what = f"there is no revision {number}"
            hint = f"existing revisions: {min(revisions)} to {max(revisions)}" if revisions else "the journal has none"
            raise Refused("revision-unknown", what, hint, status=404)
        return revisions[number]

    def _revision_row(self, revision: Revision) -> dict[str, Any]:
        journal = self._state.records.state
        outcome = journal.outcomes.get(revision.number)
        if revision.number == self._state.current.number:
            state = self._state.rollout_state()[0]
        else:
            state = outcome.state if outcome is not None and outcome.state != "progressing" else "superseded"  # type: ignore[assignment]
        return {
            "revision": revision.number,
            "at": round(revision.at, 3),
            "by": revision.by,
            "cause": revision.cause,
            "of": revision.of,
            "state": state,
            "reason": outcome.reason if outcome is not None else "",
            "changes": _summary(revision.plan) if revision.plan else "",
        }

    # The rollout

    @_exclusive
    async def pause(self, by: str) -> dict[str, Any]:
        self._refuse_on_hold()
        now, _ = self._state.rollout_state()
        if now not in ("progressing", "canary"):
            raise Refused("rollout-not-running", f"the rollout is {now}: there is nothing to pause", ROLLOUT_STATUS)
        return await self._set_rollout("paused", f"by {by}", "RolloutPaused")

    @_exclusive
    async def resume(self, by: str) -> dict[str, Any]:
        self._refuse_on_hold()
        now, _ = self._state.rollout_state()
        if now not in ("paused", "failed"):
            raise Refused("rollout-not-paused", f"the rollout is {now}: there is nothing to resume", ROLLOUT_STATUS)
        self._controller.reset_failures()
        return await self._set_rollout("progressing", f"resumed by {by}", "RolloutResumed")

    @_exclusive
    async def promote(self, by: str) -> dict[str, Any]:
        self._refuse_on_hold()
        if not self._state.in_canary:
            raise Refused("no-canary", "there is no canary", "start one: corewright apply --canary SHARE SPEC")
        return await self._set_rollout("progressing", f"promoted by {by}", "CanaryPromoted", promoted=True)

    async def _set_rollout(self, rollout_state: Any, reason: str, event: str, promoted: bool = False) -> dict[str, Any]:
        number = self._state.current.number
        await self._write(RolloutState(revision=number, state=rollout_state, reason=reason, promoted=promoted))
        self._state.restart_progress()
        self._state.goal = compute_goal(self._state.situation())  # so that the response shows the new rollout
        self._state.records.event("info", event, f"revision {number}, {reason}")
        self._controller.wake_up()
        return self.rollout()

    @_exclusive
    async def restart(self, model: str, by: str) -> dict[str, Any]:
        self._model(model)
        self._refuse_frozen("restart")
        for view in self._state.replicas_of(model):
            await self._replace(view, by)
        self._state.refresh_source(model)
        return await self._set_rollout("progressing", f"restart of {model} by {by}", "RolloutRestarted")

    # Models, hosts and replicas

    @_exclusive
    async def scale(self, model: str, count: int | None, by: str) -> dict[str, Any]:
        return await self._scale(model, count, by)

    async def _scale(self, model: str, count: int | None, by: str) -> dict[str, Any]:
        self._refuse_on_hold()
        spec = self._model(model)
        if count is not None and count > spec.replicas.max:
            what = f"{model}: {count} replicas are more than the spec's max of {spec.replicas.max}"
            raise Refused("scale-over-max", what, "raise replicas.max in the spec and apply it")
        before = self._state.desired_count(spec)
        await self._write(Scale(model=model, count=count, by=by))
        self._state.woken.discard(model)
        self._controller.scaler.end_manual_scaling(spec, before if count is None else 0)
        wanted = self._state.desired_count(spec)
        target = "as in the spec" if count is None else str(count)
        self._state.records.event("info", "Scaled", f"{target} by {by}", model=model)
        self._controller.wake_up()
        return {"model": model, "scaled": count, "wanted": wanted}

    @_exclusive
    async def load(self, model: str, by: str) -> dict[str, Any]:
        self._refuse_on_hold()
        spec = self._model(model)
        if wanted := self._state.desired_count(spec):
            return {"model": model, "scaled": None, "wanted": wanted}
        return await self._scale(model, None if spec.replicas.min else 1, by)

    @_exclusive
    async def unload(self, model: str, by: str) -> dict[str, Any]:
        self._refuse_on_hold()
        spec = self._model(model)
        await self._write(Scale(model=model, count=None, by=by, sleep=True))
        self._state.woken.discard(model)
        self._controller.scaler.end_manual_scaling(spec, 0)
        self._state.records.event(
            "info", "Unloaded", f"by {by}: nothing starts it until `corewright load`", model=model
        )
        self._controller.wake_up()
        return {"model": model, "scaled": 0, "wanted": 0}

    @_exclusive
    async def cordon(self, host: str, cores: str | None, on: bool, by: str) -> dict[str, Any]:
        chosen = self._cores_of(host, cores)
        if chosen is not None and not on and self._state.records.state.cordons.get(host) == "whole":
            what = f"{host} is cordoned as a whole: single cores cannot be uncordoned"
            raise Refused("cordoned-whole", what, f"run corewright uncordon {host}, then cordon the other cores")
        await self._write(Cordon(host=host, cores=chosen, on=on, by=by))
        which = "the host" if cores is None else f"cores {cores}"
        self._state.records.event("info", "Cordoned" if on else "Uncordoned", f"{which} by {by}", host=host)
        if not on:
            clear(self._state, host, chosen)
        self._controller.wake_up()
        return self._host_status(host)

    @_exclusive
    async def drain(self, target: str, by: str) -> dict[str, Any]:
        self._refuse_frozen("drain")
        if any(host.name == target for host in self._state.hosts):
            self._refuse_without_room(target)
            await self._write(Cordon(host=target, cores=None, on=True, by=by, drain=True))
            self._state.records.event("info", "HostDraining", f"by {by}: its replicas move to other hosts", host=target)
            self._controller.wake_up()
            return self._host_status(target)
        view = self._state.views.get(target)
        if view is None:
            targets = ", ".join([host.name for host in self._state.hosts] + sorted(self._state.views))
            what = f"there is no host or replica {target}"
            raise Refused("target-unknown", what, f"hosts and replicas: {targets}", status=404)
        await self._replace(view, by)
        await self._set_rollout("progressing", f"{view.id} is replaced, by {by}", "RolloutRestarted")
        return {"replica": view.id, "epoch": view.epoch}

    def _refuse_on_hold(self) -> None:
        """Refuses changes of models or replicas while the newest revision is unknown."""
        hold = self._state.hold
        if hold is not None:
            raise Refused(hold.id, hold.what, hold.hint)

    def _refuse_frozen(self, verb: str) -> None:
        self._refuse_on_hold()
        if self._state.frozen:
            now = self._state.rollout_state()[0]
            what = f"the rollout is {now}, so a {verb} would replace nothing"
            raise Refused("rollout-paused", what, "run corewright rollout resume or rollout undo first")

    def _refuse_without_room(self, host: str) -> None:
        """Refuses to drain a host whose ready replicas do not fit on the others."""
        situation = self._state.situation()
        every = frozenset(
            core for candidate in self._state.hosts if candidate.name == host for core in range(candidate.cores)
        )
        staying = tuple(view for view in situation.views if view.host != host)
        blocked = {**situation.blocked, host: every}
        goal = compute_goal(dataclasses.replace(situation, views=staying, blocked=blocked))
        served = {view.model for view in situation.views if view.host == host and view.state is State.READY}
        missing = [problem.what for group in goal.plan.unplaced if group.model in served for problem in group.problems]
        if missing:
            what = f"{host} cannot be drained: {'; '.join(dict.fromkeys(missing))}"
            raise Refused("drain-no-room", what, "scale down or unload a model first")

    async def _replace(self, view: ReplicaView, by: str) -> None:
        await self._write(Replace(model=view.model, replica=view.replica, epoch=view.epoch, by=by))
        self._state.records.event("info", "Replacing", f"by {by}: with a new process", view=view)

    def _cores_of(self, host: str, cores: str | None) -> list[int] | None:
        machine = next((candidate for candidate in self._state.hosts if candidate.name == host), None)
        if machine is None:
            raise _missing_object("host-unknown", host, [candidate.name for candidate in self._state.hosts])
        if cores is None:
            return None
        try:
            chosen = CoreRange.parse(cores)
        except ValueError as error:
            raise Refused("bad-range", str(error), "use a core or a range, like 3 or 4-7", status=422) from None
        if chosen.last >= machine.cores:
            what = f"{cores} is not on {host}, which has the cores 0-{machine.cores - 1}"
            raise Refused("bad-range", what, "corewright get hosts lists the hosts", status=422)
        return list(chosen)

    def _host_status(self, name: str) -> dict[str, Any]:
        status: dict[str, Any] = next(host for host in self.status()["hosts"] if host["name"] == name)
        return status

    def _model(self, name: str) -> ModelSpec:
        model = self._state.current.spec.model(name)
        if model is None:
            raise _missing_object(
                "model-unknown", name, [candidate.name for candidate in self._state.current.spec.models]
            )
        return model

    async def _write(self, record: R) -> R:
        try:
            return await self._state.records.record(record)
        except JournalUnwritable as error:
            what = f"the journal cannot be written: {error.strerror}"
            hint = "free disk space; running replicas are not affected"
            raise Refused("journal-unwritable", what, hint, status=507) from None

    # Queries

    async def events(self, after: int, limit: int, wait_s: float, model: str | None) -> dict[str, Any]:
        if model is not None:
            self._model(model)
        journal = self._state.records.journal
        deadline = time.monotonic() + wait_s
        version = 0
        while not (events := journal.events(after, limit, model)) and (remaining_s := deadline - time.monotonic()) > 0:
            version = await self._controller.change(version, min(remaining_s, LOG_POLL_S))
        listed = [
            {
                "seq": event.seq,
                "at": round(event.at, 3),
                "level": event.level,
                "reason": event.reason,
                "message": event.message,
                "model": event.model,
                "replica": event.replica,
                "host": event.host,
            }
            for event in events
        ]
        return {"events": listed, "next": events[-1].seq if events else after}

    async def logs(self, model: str, replica: int | None, offset: int | None, wait_s: float) -> dict[str, Any]:
        self._model(model)
        views = self._state.replicas_of(model)
        number = replica if replica is not None else _first_running(views)
        view = next((view for view in views if view.replica == number), None)
        if replica is not None and view is None and not Home(Path(self.settings.home)).log(model, number).exists():
            raise _missing_object("replica-unknown", f"{model}/{number}", [view.id for view in views])
        path = Home(Path(self.settings.home)).log(model, number)
        host = None if view is None else view.host
        deadline = time.monotonic() + wait_s
        while True:
            text, end = await self._cluster.log_part(str(path), offset, LOG_BYTES, FIRST_LINES, host)
            if text or time.monotonic() >= deadline:
                return {"replica": f"{model}/{number}", "file": str(path), "offset": end, "text": text}
            offset = end
            await asyncio.sleep(LOG_POLL_S)

    async def trace(self, after: str, limit: int) -> dict[str, Any]:
        folder = Home(Path(self.settings.home)).traces
        try:
            page = await self._state.in_thread(read_page, folder, after, limit)
        except ValueError as error:
            hint = "use the `next` of an earlier response, or omit it"
            raise Refused("trace-cursor-wrong", str(error), hint, status=400) from None
        speeds = {name: {"load_s": load_s} for name, load_s in self._controller.scaler.load_times().items()}
        return {"requests": page.requests, "next": page.next, "more": page.more, "speeds": speeds}

    def config(self) -> dict[str, Any]:
        return {"values": list(self.settings.config)}


def _first_running(views: list[ReplicaView]) -> int:
    """Returns the number of the first replica that is not stopping, else of the first one."""
    running = [view for view in views if not view.gone and view.state not in (State.DRAINING, State.STOPPING)]
    return next((view.replica for view in (*running, *views)), 0)


def _missing_object(id: str, name: str, names: Sequence[str]) -> Refused:
    kind = id.removesuffix("-unknown")
    hint = f"existing {kind}s: {', '.join(names) or 'none'}"
    return Refused(id, f"there is no {kind} {name}", hint, status=404)


def _machines(hosts: Any) -> list[tuple[str, int, bool]]:
    return [(host.name, host.cores, host.emulated) for host in hosts]


def _summary(proposal: dict[str, Any]) -> str:
    """Returns the changes in one line, like "chat: replace by surge; code: update"."""
    actions = [
        (model, model.get("action", model["tag"])) for model in proposal["models"]
    ]  # older records have only the tag
    parts = [
        f"{model['model']}: {action}" + (f" by {model['strategy']}" if model["strategy"] else "")
        for model, action in actions
        if action != Action.NONE.value
    ]
    return "; ".join(parts) or "nothing changes"
