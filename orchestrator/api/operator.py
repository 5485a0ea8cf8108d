"""The operator's verbs on a running fleet (`operations.Operations`): each is checked, journaled, then acted upon.

A verb that raises has changed nothing. Between the last look at the state and the record in the journal nothing is
awaited, so no two verbs can interleave.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from orchestrator.access.source_policy import BARRED, allowed_by_setting
from orchestrator.api.operations import Refused
from orchestrator.control.controller import Controller
from orchestrator.control.status import rollout
from orchestrator.fleet.effects import ClusterClient
from orchestrator.fleet.lifecycle import State
from orchestrator.fleet.snapshot import ReplicaView
from orchestrator.process.home import Home
from orchestrator.records.journal import (
    Cordon,
    JournalUnwritable,
    Record,
    Replace,
    Revision,
    RolloutState,
    Scale,
)
from orchestrator.records.request_traces import read_page
from orchestrator.revisions.resolved_revision import ResolvedRevision, read_generation
from orchestrator.revisions.spec_file import SpecFile, examine, start_problems
from orchestrator.rollout.changes import Action, Tag, difference, replica_changes
from orchestrator.rollout.defragmentation import defragmentation
from orchestrator.rollout.relocation import load_times, traffic
from orchestrator.rollout.rollout_step import DesiredModel, Goal, Situation, compute_goal
from orchestrator.rollout.update_strategy import choose
from orchestrator.state.quarantine import clear
from placements.explain.explain import explain
from placements.explain.remedies import Question
from placements.facts.core_range import CoreRange
from placements.planner.ledger import Ledger, ledger
from placements.planner.plan import Running, plan
from placements.spec.problems import has_errors
from placements.spec.schema import ModelSpec

LOG_BYTES = 64 * 2**10  # of one answer
LOG_POLL_S = 0.25
FIRST_LINES = 100


class Operator:
    """Keeps `Operations` for one controller, on its event loop."""

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
        found, generation = await self._read(text, file, base_dir, by="", cause="apply")
        return self._proposal(found, generation) if defrag is None else self._defragmentation(found, defrag)

    async def explain(self, text: str, file: str, base_dir: str, model: str) -> dict[str, Any]:
        state = self._state
        found = await self._controller.in_thread(
            partial(examine, folders="ignore"), text, file, base_dir, state.machine, self._allowed
        )
        barred = [problem for problem in found.problems if problem.id in BARRED]
        if found.spec is None or barred:
            what = f"{file} names what it may not read" if barred else f"{file} is no spec"
            raise Refused("spec-invalid", what, "corewright validate SPEC", status=422, problems=found.problems)
        self._refuse_other_hosts(found)
        spec = found.spec.model(model)
        if spec is None:
            known = ", ".join(one.name for one in found.spec.models)
            raise Refused("model-unknown", f"there is no model {model}", f"known are {known}", status=404)
        wanted = {one.name: state.desired_count(one) for one in found.spec.models}
        asked = Question(
            spec,
            found.spec,
            state.living_hosts,
            found.checkpoints,
            found.drafts,
            self._running(),
            wanted,
            state.blocked(),
            self._cordoned(),
        )
        told = await self._controller.in_thread(explain, asked, found.problems)
        return {"index": state.journal.state().index, "revision": state.current.number, **told.as_dict()}

    def _running(self) -> tuple[Running, ...]:
        """What holds cores, but for what is about to end."""
        return tuple(
            Running(view.model, view.replica, view.host, view.cores)
            for view in self._state.views.values()
            if view.state not in (State.DRAINING, State.STOPPING) and view.host not in self._state.lost
        )

    def _cordoned(self) -> dict[str, frozenset[int]]:
        """Cores that an operator has taken out of planning, by host."""
        cordons = self._state.journal.state().cordons
        told = {host.name: (host, cordons[host.name]) for host in self._state.hosts if host.name in cordons}
        return {
            name: frozenset(range(host.cores)) if cordoned == "whole" else frozenset(cordoned)
            for name, (host, cordoned) in told.items()
        }

    def _quarantined(self) -> dict[str, frozenset[int]]:
        """Cores that strangers hold, or that have failed, by host."""
        found = {host.name: frozenset(self._state.quarantine(host.name)) for host in self._state.hosts}
        return {name: cores for name, cores in found.items() if cores}

    def _defragmentation(self, found: SpecFile, cores: int) -> dict[str, Any]:
        state = self._state
        assert found.spec is not None
        situation = state.situation()
        told = defragmentation(
            found.spec,
            state.living_hosts,
            found.checkpoints,
            self._running(),
            cores,
            quarantined=self._quarantined(),
            cordoned=self._cordoned(),
            load_s=load_times(situation),
            traffic=traffic(situation),
        )
        return {"index": state.journal.state().index, "revision": state.current.number, **told}

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
        found, generation = await self._read(text, file, base_dir, by=by, cause=cause, canary=canary)
        return await self._install(found, generation, check_index)

    async def undo(self, to: int | None, by: str) -> dict[str, Any]:
        number = self._undone() if to is None else to
        before = self._revision(number)
        found, generation = await self._read(
            before.text, before.file, before.base_dir, by=by, cause="undo", of=before.number
        )
        return {**await self._install(found, generation, None), "of": before.number}

    async def _install(self, found: SpecFile, generation: ResolvedRevision, check_index: int | None) -> dict[str, Any]:
        state = self._state
        index = state.journal.state().index
        if check_index is not None and check_index != index:
            what = f"the fleet's index is {index}, not {check_index}: it has changed since the plan"
            raise Refused("index-changed", what, "corewright plan SPEC again")
        proposal = self._proposal(found, generation)
        revision = generation.revision
        same = (revision.text, revision.base_dir) == (state.current.revision.text, state.current.revision.base_dir)
        going = state.hold is None and state.rollout_state()[0] in ("complete", "progressing") and not state.in_canary
        if same and revision.canary is None and going:
            return {"changed": False, "revision": state.current.number, "index": index, "plan": proposal}
        self._refuse_impossible(proposal, generation)
        summary = {"models": proposal["models"], "changes": proposal["changes"]}
        revision = msgspec.structs.replace(revision, number=state.next_number, plan=summary)
        self._write(revision)
        revision = state.journal.state().revisions[revision.number]
        state.install(dataclasses.replace(generation, revision=revision))
        self._controller.renew_deadlines()
        state.record_event("info", "Applied", f"revision {revision.number} by {revision.by}, {_summary(proposal)}")
        self._controller.wake_up()
        return {"changed": True, "revision": revision.number, "index": state.journal.state().index, "plan": proposal}

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
        """Raises Refused for what can never be applied to this fleet."""
        state = self._state
        found = await self._controller.in_thread(examine, text, file, base_dir, state.machine, self._allowed)
        if found.spec is not None and not has_errors(found.problems):
            self._refuse_other_hosts(found)  # before what this machine cannot start of them
        problems = (*found.problems, *start_problems(found))
        if found.spec is None or has_errors(problems):
            count = sum(problem.severity == "error" for problem in problems)
            what = f"{file} has {count} error{'' if count == 1 else 's'}: nothing was applied"
            raise Refused("spec-invalid", what, "corewright validate SPEC", status=422, problems=problems)
        ever = plan(found.spec, found.hosts, found.checkpoints)
        missing = [problem for one in ever.unplaced if one.required for problem in one.problems]
        if missing:
            what = f"{file} could not be placed even on an empty fleet"
            hint = "fewer replicas, a smaller tp_degree, or more hosts"
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
        return dataclasses.replace(found, problems=problems), await self._controller.in_thread(
            read_generation, revision, state.machine
        )

    def _refuse_other_hosts(self, found: SpecFile) -> None:
        if _machines(found.hosts) != _machines(self._state.hosts):
            what = f"{found.name} is for other hosts than this fleet runs on"
            raise Refused("hosts-changed", what, "corewright down, then up: Ray's nodes are started with the fleet")

    def _proposal(self, found: SpecFile, generation: ResolvedRevision) -> dict[str, Any]:
        """What would happen if the generation were installed now."""
        state = self._state
        situation = self._situation(generation)
        first = compute_goal(situation)
        ways = {name: choose(situation, name) for name, step in first.steps.items() if step.old}
        for name, chosen in ways.items():
            desired = dataclasses.replace(
                situation.desired_models[name], strategy=chosen.strategy, lender=chosen.lender
            )
            situation = situation.with_desired(desired)
        begun, settled = compute_goal(situation), self._settled(situation)
        models = []
        for change in difference(state.current.spec, generation.spec, generation.engines):
            way = ways.get(change.model)
            after = situation.desired_models.get(change.model)
            tag = max(change.tag, Tag.RESTART, key=list(Tag).index) if way is not None else change.tag
            before, count = len(state.replicas_of(change.model)), 0 if after is None else after.count
            action = change.action
            if action in (Action.NONE, Action.UPDATE):
                action = Action.REPLACE if way is not None else Action.UPDATE if before != count else action
            models.append(
                {
                    "model": change.model,
                    "action": action.value,
                    "tag": tag.value,
                    "fields": [msgspec.to_builtins(field) for field in change.fields],
                    "replicas": {"before": before, "after": count},
                    "strategy": None if way is None else way.strategy,
                    "outage_s": None if way is None else way.outage_s,
                    "predicted_s": None if way is None else situation.load_s(change.model),
                    "why": "" if way is None else way.why,
                    "borrow": None if way is None else way.lender,
                    "possible": way is None or way.possible,
                }
            )
        return {
            "index": state.journal.state().index,
            "revision": state.current.number,
            **settled.plan.as_dict(),
            "problems": [problem.as_dict() for problem in (*found.problems, *settled.plan.problems)],
            "changes": replica_changes(begun, list(state.views.values()), settled),
            "models": models,
            **self._ledger(found, settled).as_dict(),
        }

    def _ledger(self, found: SpecFile, settled: Goal) -> Ledger:
        state = self._state
        assert found.spec is not None
        return ledger(
            found.spec,
            state.living_hosts,
            settled.plan,
            found.checkpoints,
            found.drafts,
            self._quarantined(),
            self._cordoned(),
        )

    def _situation(self, generation: ResolvedRevision) -> Situation:
        """The fleet's, as it would be right after the generation is installed."""
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
        """Where it ends: replicas of other versions are gone, what fits stays where it is."""
        kept = tuple(
            dataclasses.replace(view, version=situation.desired_models[view.model].version)
            for view in situation.views
            if view.model in situation.desired_models and view.state not in (State.DRAINING, State.STOPPING)
        )
        desired_models = {
            name: dataclasses.replace(desired, canary=False) for name, desired in situation.desired_models.items()
        }
        return compute_goal(
            dataclasses.replace(situation, views=kept, desired_models=desired_models, replaced=frozenset())
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
                what = f"{name}: its tokenizer changes, so the two versions cannot share requests"
                raise Refused("canary-impossible", what, "apply without --canary")
            if step.old and choose(situation, name).strategy not in ("surge", "borrow") and desired.count < 2:
                what = f"{name}: its one replica leaves no place for a canary: {choose(situation, name).why}"
                raise Refused("canary-impossible", what, "apply without --canary, or free some cores")

    def _undone(self) -> int:
        """The newest earlier revision of this fleet with another text: a complete one if any is, no failed one."""
        known = self._state.journal.state()
        earlier = [
            revision
            for number, revision in sorted(known.revisions.items(), reverse=True)
            if number < self._state.current.number
            and revision.fleet == self.settings.fleet
            and revision.text != self._state.current.revision.text
        ]
        outcomes = {revision.number: known.outcomes.get(revision.number) for revision in earlier}
        ends = {number: outcome.state if outcome is not None else "" for number, outcome in outcomes.items()}
        for revision in earlier:
            if ends[revision.number] == "complete":
                return revision.number
        earlier = [revision for revision in earlier if ends[revision.number] not in ("failed", "rolled_back")]
        if not earlier:
            what = f"no revision before {self._state.current.number} is another one that worked"
            raise Refused("nothing-to-undo", what, "corewright rollout undo --to REVISION; rollout history lists them")
        return earlier[0].number

    def rollout(self) -> dict[str, Any]:
        try:
            undone = self._undone()
        except Refused:
            undone = None
        return {**rollout(self._state), "undo": undone}

    def revisions(self) -> list[dict[str, Any]]:
        known = self._state.journal.state()
        return [self._told(known.revisions[number]) for number in sorted(known.revisions, reverse=True)]

    def revision(self, number: int | None) -> dict[str, Any]:
        found = self._revision(self._undone() if number is None else number)
        extra = {"text": found.text, "file": found.file, "base_dir": found.base_dir, "plan": found.plan}
        return {**self._told(found), **extra}

    def _revision(self, number: int) -> Revision:
        known = self._state.journal.state().revisions
        if number == self._state.current.number:
            return known.get(number, self._state.current.revision)
        if number not in known:
            what = f"there is no revision {number}"
            hint = f"kept are {min(known)} to {max(known)}" if known else "none is kept"
            raise Refused("revision-unknown", what, hint, status=404)
        return known[number]

    def _told(self, revision: Revision) -> dict[str, Any]:
        known = self._state.journal.state()
        outcome = known.outcomes.get(revision.number)
        if revision.number == self._state.current.number:
            told = self._state.rollout_state()[0]
        else:
            told = outcome.state if outcome is not None and outcome.state != "progressing" else "superseded"  # type: ignore[assignment]
        return {
            "revision": revision.number,
            "at": round(revision.at, 3),
            "by": revision.by,
            "cause": revision.cause,
            "of": revision.of,
            "state": told,
            "reason": outcome.reason if outcome is not None else "",
            "changes": _summary(revision.plan) if revision.plan else "",
        }

    # The rollout

    async def pause(self, by: str) -> dict[str, Any]:
        self._refuse_on_hold()
        now, _ = self._state.rollout_state()
        if now not in ("progressing", "canary"):
            raise Refused("rollout-not-running", f"the rollout is {now}: there is nothing to pause", "rollout status")
        return self._set_rollout("paused", f"by {by}", "RolloutPaused")

    async def resume(self, by: str) -> dict[str, Any]:
        self._refuse_on_hold()
        now, _ = self._state.rollout_state()
        if now not in ("paused", "failed"):
            raise Refused("rollout-not-paused", f"the rollout is {now}: there is nothing to resume", "rollout status")
        self._controller.reset_failures()
        return self._set_rollout("progressing", f"resumed by {by}", "RolloutResumed")

    async def promote(self, by: str) -> dict[str, Any]:
        self._refuse_on_hold()
        if not self._state.in_canary:
            raise Refused("no-canary", "no canary is under way", "corewright apply --canary SHARE SPEC")
        return self._set_rollout("progressing", f"promoted by {by}", "CanaryPromoted", promoted=True)

    def _set_rollout(self, told: Any, reason: str, event: str, promoted: bool = False) -> dict[str, Any]:
        number = self._state.current.number
        self._write(RolloutState(revision=number, state=told, reason=reason, promoted=promoted))
        self._state.restart_progress()
        self._state.goal = compute_goal(self._state.situation())  # the answer is about what begins now
        self._state.record_event("info", event, f"revision {number}, {reason}")
        self._controller.wake_up()
        return self.rollout()

    async def restart(self, model: str, by: str) -> dict[str, Any]:
        self._model(model)
        self._refuse_frozen("restart")
        for view in self._state.replicas_of(model):
            self._replace(view, by)
        self._state.refresh_source(model)
        return self._set_rollout("progressing", f"restart of {model} by {by}", "RolloutRestarted")

    # Models, hosts and replicas

    async def scale(self, model: str, count: int | None, by: str) -> dict[str, Any]:
        self._refuse_on_hold()
        spec = self._model(model)
        if count is not None and count > spec.replicas.max:
            what = f"{model}: {count} replicas are asked for, and the spec's max is {spec.replicas.max}"
            raise Refused("scale-over-max", what, "raise replicas.max in the spec, and apply it")
        before = self._state.desired_count(spec)
        self._write(Scale(model=model, count=count, by=by))
        self._state.woken.discard(model)
        self._controller.scaler.released(spec, before if count is None else 0)
        wanted = self._state.desired_count(spec)
        told = "as the spec says" if count is None else str(count)
        self._state.record_event("info", "Scaled", f"{told} by {by}", model=model)
        self._controller.wake_up()
        return {"model": model, "scaled": count, "wanted": wanted}

    async def load(self, model: str, by: str) -> dict[str, Any]:
        self._refuse_on_hold()
        spec = self._model(model)
        if wanted := self._state.desired_count(spec):
            return {"model": model, "scaled": None, "wanted": wanted}
        return await self.scale(model, None if spec.replicas.min else 1, by)

    async def unload(self, model: str, by: str) -> dict[str, Any]:
        self._refuse_on_hold()
        spec = self._model(model)
        self._write(Scale(model=model, count=None, by=by, sleep=True))
        self._state.woken.discard(model)
        self._controller.scaler.released(spec, 0)
        self._state.record_event("info", "Unloaded", f"by {by}: nothing starts it until `corewright load`", model=model)
        self._controller.wake_up()
        return {"model": model, "scaled": 0, "wanted": 0}

    async def cordon(self, host: str, cores: str | None, on: bool, by: str) -> dict[str, Any]:
        chosen = self._cores_of(host, cores)
        if chosen is not None and not on and self._state.journal.state().cordons.get(host) == "whole":
            what = f"{host} is cordoned as a whole: single cores of it cannot be given back"
            raise Refused("cordoned-whole", what, f"corewright uncordon {host}, then cordon the others")
        self._write(Cordon(host=host, cores=chosen, on=on, by=by))
        which = "the host" if cores is None else f"cores {cores}"
        self._state.record_event("info", "Cordoned" if on else "Uncordoned", f"{which} by {by}", host=host)
        if not on:
            clear(self._state, host, chosen)
        self._controller.wake_up()
        return self._host_status(host)

    async def drain(self, target: str, by: str) -> dict[str, Any]:
        self._refuse_frozen("drain")
        if any(host.name == target for host in self._state.hosts):
            self._refuse_homeless(target)
            self._write(Cordon(host=target, cores=None, on=True, by=by, drain=True))
            self._state.record_event("info", "HostDraining", f"by {by}: its replicas go elsewhere", host=target)
            self._controller.wake_up()
            return self._host_status(target)
        view = self._state.views.get(target)
        if view is None:
            known = ", ".join([host.name for host in self._state.hosts] + sorted(self._state.views))
            raise Refused("target-unknown", f"{target} is no host and no replica", f"known are {known}", status=404)
        self._replace(view, by)
        self._set_rollout("progressing", f"{view.id} is replaced, by {by}", "RolloutRestarted")
        return {"replica": view.id, "epoch": view.epoch}

    def _refuse_on_hold(self) -> None:
        """Changes to models or replicas refer to a revision, and the newest one is unknown."""
        hold = self._state.hold
        if hold is not None:
            raise Refused(hold.id, hold.what, hold.hint)

    def _refuse_frozen(self, verb: str) -> None:
        self._refuse_on_hold()
        if self._state.frozen:
            now = self._state.rollout_state()[0]
            what = f"the rollout is {now}, and a {verb} would replace nothing"
            raise Refused("rollout-paused", what, "corewright rollout resume, or rollout undo")

    def _refuse_homeless(self, host: str) -> None:
        """Where its replicas have no other place, nobody would serve."""
        situation = self._state.situation()
        every = frozenset(core for one in self._state.hosts if one.name == host for core in range(one.cores))
        staying = tuple(view for view in situation.views if view.host != host)
        blocked = {**situation.blocked, host: every}
        goal = compute_goal(dataclasses.replace(situation, views=staying, blocked=blocked))
        there = {view.model for view in situation.views if view.host == host and view.state is State.READY}
        missing = [problem.what for one in goal.plan.unplaced if one.model in there for problem in one.problems]
        if missing:
            what = f"{host} cannot be emptied: {'; '.join(dict.fromkeys(missing))}"
            raise Refused("drain-no-room", what, "scale something down or unload it first")

    def _replace(self, view: ReplicaView, by: str) -> None:
        self._write(Replace(model=view.model, replica=view.replica, epoch=view.epoch, by=by))
        self._state.record_event("info", "Replacing", f"by {by}: a new process for it", view=view)

    def _cores_of(self, host: str, cores: str | None) -> list[int] | None:
        found = next((one for one in self._state.hosts if one.name == host), None)
        if found is None:
            known = ", ".join(one.name for one in self._state.hosts)
            raise Refused("host-unknown", f"there is no host {host}", f"known are {known}", status=404)
        if cores is None:
            return None
        try:
            chosen = CoreRange.parse(cores)
        except ValueError as error:
            raise Refused("bad-range", str(error), "such as 3 or 4-7", status=422) from None
        if chosen.last >= found.cores:
            raise Refused("bad-range", f"{host} has the cores 0-{found.cores - 1}", "corewright get hosts", status=422)
        return list(chosen)

    def _host_status(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = next(host for host in self.status()["hosts"] if host["name"] == name)
        return found

    def _model(self, name: str) -> ModelSpec:
        found = self._state.current.spec.model(name)
        if found is None:
            known = ", ".join(model.name for model in self._state.current.spec.models)
            raise Refused("model-unknown", f"there is no model {name}", f"known are {known}", status=404)
        return found

    def _write(self, record: Record) -> None:
        try:
            self._state.record(record)
        except JournalUnwritable as error:
            what = f"the journal cannot be written: {error.strerror}"
            raise Refused("journal-unwritable", what, "free some space; what runs goes on", status=507) from None

    # Looking

    async def events(self, after: int, limit: int, wait_s: float, model: str | None) -> dict[str, Any]:
        if model is not None:
            self._model(model)
        journal = self._state.journal
        deadline = time.monotonic() + wait_s
        version = 0
        while not (found := journal.events(after, limit, model)) and (rest := deadline - time.monotonic()) > 0:
            version = await self._controller.change(version, min(rest, LOG_POLL_S))
        told = [
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
            for event in found
        ]
        return {"events": told, "next": found[-1].seq if found else after}

    async def logs(self, model: str, replica: int | None, offset: int | None, wait_s: float) -> dict[str, Any]:
        self._model(model)
        views = self._state.replicas_of(model)
        number = replica if replica is not None else _first_running(views)
        view = next((view for view in views if view.replica == number), None)
        if replica is not None and view is None and not Home(Path(self.settings.home)).log(model, number).exists():
            known = ", ".join(view.id for view in views) or "none"
            raise Refused("replica-unknown", f"there is no {model}/{number}", f"known are {known}", status=404)
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
            page = await self._controller.in_thread(read_page, folder, after, limit)
        except ValueError as error:
            hint = "take the `next` of an earlier answer, or begin without"
            raise Refused("trace-cursor-wrong", str(error), hint, status=400) from None
        speeds = {name: {"load_s": load_s} for name, load_s in self._controller.scaler.load_times().items()}
        return {"requests": page.requests, "next": page.next, "more": page.more, "speeds": speeds}

    def config(self) -> dict[str, Any]:
        return {"values": list(self.settings.config)}


def _first_running(views: list[ReplicaView]) -> int:
    """Of those that stay; where none runs, of all."""
    running = [view for view in views if not view.gone and view.state not in (State.DRAINING, State.STOPPING)]
    return next((view.replica for view in (*running, *views)), 0)


def _machines(hosts: Any) -> list[tuple[str, int, bool]]:
    return [(host.name, host.cores, host.emulated) for host in hosts]


def _summary(proposal: dict[str, Any]) -> str:
    """Such as "chat: replace by surge; code: update"."""
    actions = [(model, model.get("action", model["tag"])) for model in proposal["models"]]  # older records have the tag
    parts = [
        f"{model['model']}: {action}" + (f" by {model['strategy']}" if model["strategy"] else "")
        for model, action in actions
        if action != Action.NONE.value
    ]
    return "; ".join(parts) or "nothing changes"
