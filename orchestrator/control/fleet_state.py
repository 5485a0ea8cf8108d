"""The controller's observed and desired state of the fleet, persisted in the journal. No other effects."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from orchestrator.control.content_pins import ContentPins
from orchestrator.control.decisions.decide import RELOCATION_S, FleetDecision, FleetSnapshot, UpdateMemory, decide
from orchestrator.control.decisions.departures import LeavingHost, leaving_hosts, replicas_to_end
from orchestrator.control.decisions.effects import CoreOwner, FailedCore
from orchestrator.control.decisions.preparation import Key, Preparation, takes_long
from orchestrator.control.decisions.rollout_step import (
    DesiredModel,
    FormerVersion,
    Goal,
    ReplicaTarget,
    Situation,
    merged,
)
from orchestrator.control.decisions.snapshot import ReplicaView
from orchestrator.control.host_uses import HostUses
from orchestrator.control.journal.journal_fold import failed_cores
from orchestrator.control.journal.journal_records import Cordoned, ReadyStart, Replace, RolloutState, Target
from orchestrator.control.record_writer import RecordWriter
from orchestrator.control.replica_counts import ReplicaCounts
from orchestrator.control.replica_views import Reachability, ReplicaViews
from orchestrator.control.resolve.resolved_revision import ResolvedRevision
from orchestrator.control.shared_compiles import SharedCompiles
from orchestrator.control.start_times import StartTimes, phases_again
from orchestrator.messages.controller_settings import ControllerSettings
from orchestrator.messages.replica_states import State
from placements.facts.topology import Host
from placements.spec.problems import Problem
from placements.spec.schema import ModelSpec
from placements.spec.sections import Deadlines
from workers.artifacts.fetch.progress import FetchStatus
from workers.messages.replica_config import ReplicaConfig

log = logging.getLogger(__name__)


class FleetState:
    """The state of one fleet. Used from one event loop."""

    def __init__(
        self,
        settings: ControllerSettings,
        records: RecordWriter,
        current: ResolvedRevision,
        stable: ResolvedRevision | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self.records = records
        self.current = current
        self.stable = stable  # the revision that a failed rollout restores
        self.clock = clock
        self.wall = records.wall
        self.in_thread = records.in_thread
        self.deciding = asyncio.Lock()  # of a round or an operation, from its first read of the state to its record
        self.machine = settings.machine
        self.failed_cores: dict[str, dict[int, FailedCore]] = {}  # by host and core
        for record in failed_cores(records.state):
            self.failed_cores.setdefault(record.host, {})[record.core] = FailedCore(record.cause)
        self.views = ReplicaViews()
        self.configs: dict[str, ReplicaConfig] = {}  # of each replica
        self.epochs: dict[str, int] = dict(records.state.epochs)  # the last epoch of every replica that ever existed
        self.foreign_cores: dict[str, dict[int, CoreOwner]] = {host.name: {} for host in self.current.hosts}
        self.lost: frozenset[str] = frozenset()
        self.reach = Reachability()
        self.unreachable: frozenset[str] = frozenset()  # replicas that a gateway cannot connect to, as of this round
        self.counts = ReplicaCounts(records)
        self.uses = HostUses(records)
        self.memory = UpdateMemory()  # of the last decision
        self.upcoming: tuple[ReplicaTarget, ...] = ()  # they displace others once their hosts are prepared
        self.preparations: dict[tuple[str, str, str], Preparation] = {}
        self.preparing: Mapping[tuple[str, str, str], str] = {}  # those in progress, with their phase
        self.compiled_on: set[tuple[str, str, str]] = set()  # (model, version, host) whose start has nothing to compile
        self.shared_compiles = SharedCompiles()
        self.pins = ContentPins(records)
        self.source_refreshes: Counter[str] = Counter()  # by model, how often its source was refreshed
        self.fetches: dict[Key, FetchStatus] = {}  # of preparations in progress
        self.held: Mapping[str, frozenset[str]] = {}  # by host, the remote sources that are complete there
        self.goal = Goal()
        self._relocated_at = float("-inf")
        self._planned_index = -1  # of the records that the goal follows from
        self._decided: tuple[int, FleetSnapshot] | None = None  # changes of views, and the last outcome
        self._numbers: dict[str, int] = {}
        self.progress: tuple[Any, float] = ((), clock())  # the last steps, and when they or a start last changed
        self.late: set[str] = set()  # models past their progress deadline that cannot be rolled back

    def start_times(self, model: str) -> StartTimes:
        """Returns how long the last starts of a model took."""
        return StartTimes.of(self.records.state.ready_starts.get(model, ()), self.current.engines.get(model))

    def record_ready(self, view: ReplicaView) -> None:
        """Record the start of a replica that is ready now."""
        start = ReadyStart(
            model=view.model,
            version=view.version,
            engine=self.revision_of_version(view.model, view.version).engines.get(view.model, ""),
            host=view.host,
            phases=phases_again(view),
        )
        self.records.note(start)

    @property
    def hold(self) -> Problem | None:
        """Why no replica is started, stopped or moved: until an operator applies a spec, or, if the journal's file is
        gone, until the end of the fleet. None: the fleet is not held."""
        if self.records.lost:
            text = (
                f"the journal in {self.settings.home} is gone or was replaced: no replica is started, stopped or moved"
            )
            return Problem("journal-lost", "error", "", text, "corewright down, then corewright up SPEC")
        damage, number = self.records.state.held, self.current.number
        if damage is None:
            return None
        text = f"{damage}: a revision newer than {number} may be lost, so no replica is started, stopped or moved"
        hint = f"corewright apply SPEC; or corewright rollout undo --to {number}, to accept revision {number}"
        return Problem("journal-damaged", "error", "", text, hint)

    @property
    def next_number(self) -> int:
        """The number of the next revision."""
        return max(self.current.number + 1, self.records.state.next_revision)

    # Desired state

    @property
    def hosts(self) -> tuple[Host, ...]:
        """All hosts of the spec."""
        return self.current.hosts

    @property
    def living_hosts(self) -> tuple[Host, ...]:
        living = self.kept - self.lost
        return tuple(host for host in self.hosts if host.name in living)

    @property
    def kept(self) -> frozenset[str]:
        """The names of the hosts that the fleet uses; of a spec without ``max`` all."""
        return self.uses.kept(self.current.groups)

    def awaited_hosts(self, model: str) -> str | None:
        """Returns for which machines replicas of the model wait; None if they would not have a place there, either."""
        expected = sum(item.model == model for item in self.uses.expected)
        if not expected:
            return None
        placed = sum(target.model == model for target in self.goal.targets)
        return self.uses.awaited() if expected > placed else None

    @property
    def settled_everywhere(self) -> bool:
        """Returns whether every replica that has a place is ready, by a goal that follows from the present records."""
        if self._planned_index != self.records.state.index:
            return False
        views = (self.views.get(target.id) for target in self.goal.targets)
        return all(view is not None and view.state is State.READY for view in views)

    def settled(self, model: ModelSpec) -> bool:
        """Returns whether the rollout of the model is finished."""
        step = self.goal.steps.get(model.name)
        ready = step is not None and step.old == 0 and step.ready >= self.counts.required(model)
        return ready and not self.with_other_adapters(model)

    def with_other_adapters(self, model: ModelSpec) -> list[ReplicaView]:
        """Returns the ready replicas of the current version whose LoRA adapters are not those of the spec."""
        version, places = self.current.versions[model.name], model.adapter_places
        views = [view for view in self.replicas_of(model.name) if view.state is State.READY and view.version == version]
        return [view for view in views if self.configs[view.id].adapter_sources != places]

    @property
    def outcome(self) -> RolloutState | None:
        """The last recorded state of the current revision's rollout."""
        return self.records.state.outcomes.get(self.current.number)

    @property
    def in_canary(self) -> bool:
        """Returns whether the current revision is a canary that was not promoted."""
        return self.current.revision.canary is not None and self.records.state.promoted != self.current.number

    @property
    def frozen(self) -> bool:
        """Returns whether the rollout is stopped: paused, or failed without a revision to restore."""
        return self.outcome is not None and self.outcome.state in ("paused", "failed")

    def desired_model(self, model: ModelSpec, revision: ResolvedRevision | None = None) -> DesiredModel:
        """Returns the desired state of the model, now or right after the installation of another revision."""
        generation, count = revision or self.current, self.counts.desired(model)
        strategy = None if revision is not None else self.memory.strategies.get(model.name)
        canary = self.in_canary if revision is None else revision.revision.canary is not None
        frozen = revision is None and self.frozen
        limited = revision is None and (model.name in self.late or self._is_complete)
        return DesiredModel(
            model,
            count,
            generation.versions[model.name],
            strategy="surge" if strategy is None else strategy.strategy,
            mixes=self.mixes(generation, model),
            canary=canary,
            frozen=frozen,
            former=self._former(model, generation) if canary or frozen else None,
            reachable=limited or count > self.counts.required(model),
        )

    @property
    def _is_complete(self) -> bool:
        """Returns whether the rollout of the current revision has ended well."""
        return self.records.state.completed == self.current.number

    def _former(self, model: ModelSpec, generation: ResolvedRevision) -> FormerVersion | None:
        """Returns the version in which lost replicas restart during a canary or a frozen rollout of ``generation``."""
        before = self.current if generation is not self.current and self._is_complete else self.stable
        old = None if before is None else before.spec.model(model.name)
        if before is None or old is None or before.versions[model.name] == generation.versions[model.name]:
            return None
        return FormerVersion(old, before.versions[model.name], before.checkpoints.get(model.name))

    def revision_of_version(self, model: str, version: str) -> ResolvedRevision:
        """Returns the revision from which a replica of that version is started."""
        before = self.stable
        if before is None or version == self.current.versions.get(model) or version != before.versions.get(model):
            return self.current
        return before

    def mixes(self, generation: ResolvedRevision, model: ModelSpec) -> bool:
        """Returns whether all running versions of the model have the same tokenizer as ``generation``."""
        version, own = generation.versions[model.name], generation.tokenizers[model.name]
        return all(
            self.configs[view.id].tokenizer == own
            for view in self.views.of_model(model.name)
            if view.version != version and view.id in self.configs
        )

    def blocked(self) -> dict[str, frozenset[int]]:
        """Returns the cores by host where no replica may be placed."""
        return merged(self.cordoned(), self.quarantined())

    def cordoned(self) -> dict[str, frozenset[int]]:
        """Returns the cordoned cores by host."""
        cordons = {host: cordon for host in self.hosts if (cordon := self.cordon(host.name))}
        return {
            host.name: frozenset(range(host.cores)) if cordon == "whole" else frozenset(cordon)
            for host, cordon in cordons.items()
        }

    def cordon(self, host: str) -> Cordoned:
        """Returns the cordoned cores of a host; one that departs is cordoned as a whole."""
        records = self.records.state
        return "whole" if host in records.departures else records.cordons.get(host, frozenset())

    def quarantined(self) -> dict[str, frozenset[int]]:
        """Returns the cores that foreign processes hold or that have failed, by host."""
        return {host.name: frozenset(cores) for host in self.hosts if (cores := self.quarantine(host.name))}

    def quarantine(self, host: str) -> dict[int, CoreOwner | FailedCore]:
        """Returns the quarantined cores of a host, each with its foreign owner or the failure that caused it."""
        return {**self.foreign_cores.get(host, {}), **self.failed_cores.get(host, {})}

    def drained(self) -> dict[str, frozenset[int]]:
        """Returns the cores by host whose replicas have to move."""
        drains = self.records.state.drains | self.records.state.departures.keys()
        return {host.name: frozenset(range(host.cores)) for host in self.hosts if host.name in drains}

    def leaving(self) -> dict[str, LeavingHost]:
        """Returns the hosts that end at a known time."""
        return leaving_hosts(self.records.state.departures, self.clock() - self.wall())

    def ending(self) -> frozenset[tuple[str, int]]:
        """Returns the (id, epoch) of replicas that have to end now, by their hosts."""
        leaving = self.leaving()
        return replicas_to_end(self.views.values(), leaving, self.clock()) if leaving else frozenset()

    def replaced(self) -> frozenset[tuple[str, int]]:
        """Returns the (id, epoch) of replicas that need a new process."""
        replaces = ((self.views.get(id), epoch) for id, epoch in self.records.state.replaces.items())
        return frozenset((view.id, view.epoch) for view, epoch in replaces if view is not None and view.epoch <= epoch)

    def situation(self, revision: ResolvedRevision | None = None) -> Situation:
        """Returns the input of `compute_goal`, now or right after the installation of another revision."""
        generation = revision or self.current
        return Situation(
            generation.spec,
            self.living_hosts,
            generation.checkpoints,
            {model.name: self.desired_model(model, revision) for model in generation.spec.models},
            tuple(self.views.values()),
            self.blocked(),
            self.drained(),
            self.replaced(),
            self._models_held(generation),
            frozenset(self.leaving()),
            self.ending(),
        )

    def sources(self, model: ModelSpec, revision: ResolvedRevision | None = None) -> frozenset[str]:
        """Returns the remote sources of the model and its draft."""
        if not takes_long(model, (revision or self.current).engines[model.name]):
            return frozenset()
        elsewhere = {model.source} if model.source_kind != "path" else set()
        draft = {model.draft.source} if model.draft is not None and model.draft_kind != "path" else set()
        return frozenset(elsewhere | draft)

    def _models_held(self, generation: ResolvedRevision) -> dict[str, frozenset[str]]:
        """Returns the models of a revision by host that have nothing to fetch there."""
        sources_of = {
            model.name: sources for model in generation.spec.models if (sources := self.sources(model, generation))
        }
        if not sources_of:
            return {}
        return {
            host: frozenset(name for name, sources in sources_of.items() if sources <= stored)
            for host, stored in self.held.items()
        }

    def refresh_source(self, model: str) -> None:
        """Forget the pinned content of the model, so that new processes load what its source has now."""
        self.source_refreshes[model] += 1
        self.pins.unpin(lambda pin: pin.model == model)
        self.compiled_on = {key for key in self.compiled_on if key[0] != model}
        self.preparations = {key: preparation for key, preparation in self.preparations.items() if key[0] != model}

    def snapshot(self, revision: ResolvedRevision | None = None) -> FleetSnapshot:
        """Returns the input of `decide`, now or right after the installation of another revision."""
        generation, now = revision or self.current, self.clock()
        memory = self.memory if revision is None else dataclasses.replace(self.memory, strategies={})
        relocation = memory.relocation
        limit_s = 0.0
        if relocation is not None:
            limit_s = RELOCATION_S + max(view.deadlines.start_s for view in relocation.moving)
        return FleetSnapshot(
            situation=self.situation(revision),
            memory=memory,
            engines=generation.engines,
            preparations=self._preparations_of(generation),
            compiled_on=self._compiled_on(generation),
            lost_hosts=self.lost,
            scaled=frozenset(self.records.state.scales),
            held=revision is None and self.hold is not None,
            frozen=revision is None and self.frozen,
            in_canary=self.in_canary if revision is None else revision.revision.canary is not None,
            may_relocate=now - self._relocated_at >= RELOCATION_S,
            relocation_late=relocation is not None and now - self._relocated_at > limit_s,
        )

    def _preparations_of(self, generation: ResolvedRevision) -> dict[Key, Preparation]:
        """Returns the preparations for the versions of a revision."""
        versions = set(generation.versions.items())
        return {key: preparation for key, preparation in self.preparations.items() if key[:2] in versions}

    def _compiled_on(self, generation: ResolvedRevision) -> frozenset[Key]:
        """Returns where starts of running versions, or of those of a revision, have nothing to compile."""
        used = {(view.model, view.version) for view in self.views.values()}.union(generation.versions.items())
        return frozenset(key for key in self.compiled_on if key[:2] in used)

    async def update_goal(self) -> Goal:
        """Decide anew, again if cores or a ready replica that the decision counts on are lost meanwhile. Most rounds of
        a large fleet at rest have the snapshot of the last one, and its decision."""
        while True:
            index, changes, snapshot = self.records.state.index, self.views.changes, self.snapshot()
            if self._decided == (changes, snapshot):
                self._planned_index = index
                return self.goal
            blocked, ready = self.blocked(), _ready_processes(self.views.values())
            decision: FleetDecision = await self.in_thread(decide, snapshot)
            keeps = changes == self.views.changes or ready <= _ready_processes(self.views.values())
            if keeps and blocked == self.blocked():
                recorded = self.records.state.index
                self._commit(decision)
                self._planned_index = self.records.state.index if recorded == index else index
                self._decided = changes, decision.after
                return self.goal

    def _commit(self, decision: FleetDecision) -> None:
        self.goal, self.upcoming, self.memory = decision.goal, decision.upcoming, decision.after.memory
        if decision.moved:
            self._relocated_at = self.clock()
        for view in decision.moved:
            self.records.note(Replace(model=view.model, replica=view.replica, epoch=view.epoch, by="the controller"))
        for event in decision.events:
            self.records.note_event(event)

    def holds(self, model: ModelSpec) -> bool:
        """Returns whether requests wait while the model has no ready replica: it is being updated or rolled back with
        `hold`. A restarted controller decides by the spec alone."""
        held = model.name in self.memory.holding or (model.update.strategy == "hold" and self.stable is not None)
        failed = self.outcome is not None and self.outcome.state == "failed"  # no more attempts follow
        return held and not failed and self.counts.desired(model) > 0

    def install(self, generation: ResolvedRevision, decision: FleetDecision) -> None:
        """Make an applied revision the current one; ``decision`` is that about its `snapshot`."""
        if self._is_complete:
            self.stable = self.current
        self.current = generation
        for view in list(self.views.values()):  # the change may have fixed the cause of a stop
            model = generation.spec.model(view.model)
            deadlines = view.deadlines if model is None else model.deadlines
            self.views[view.id] = dataclasses.replace(view, stopped=False, deadlines=deadlines)
        self.late.clear()
        used = {(view.model, view.version) for view in self.views.values()}.union(generation.versions.items())
        self.preparations = self._preparations_of(generation)
        self.pins.unpin(lambda pin: (pin.model, pin.version) not in used)
        self.compiled_on = set(self._compiled_on(generation))
        self._commit(decision)
        self._decided = self.views.changes, decision.after
        self.restart_progress()
        names = {model.name for model in generation.spec.models}
        self.counts.woken &= names
        for name in self.records.state.targets.keys() - names:
            self.records.note(Target(model=name, count=None))

    def reserve_epochs(self, epochs: Mapping[str, int]) -> None:
        """Ensure that later starts have higher epochs than these, by replica."""
        for id, epoch in epochs.items():
            self.epochs[id] = max(epoch, self.epochs.get(id, 0))

    def adopt(self, view: ReplicaView, config: ReplicaConfig) -> None:
        """Add a replica that outlived its controller."""
        self.views[view.id] = view
        self.configs[view.id] = config
        self.pins.adopt(config)
        self._numbers[config.model] = int(Path(config.socket).name.partition("-")[0])
        self.reserve_epochs({view.id: config.epoch})
        model = self.current.spec.model(config.model)
        asleep = model is not None and self.counts.desired(model) == 0 and view.state is not State.DRAINING
        if asleep and not self.counts.is_unloaded(config.model):
            self.counts.woken.add(config.model)
        self.records.event("info", "Adopted", f"epoch {config.epoch}, pid {view.pid}", view=view)

    def restart_progress(self) -> None:
        """Restart the progress deadline."""
        self.progress = ((), self.clock())

    # Lookups

    def model_number(self, name: str) -> int:
        """Returns a small number for the model, constant while the fleet runs."""
        if name not in self._numbers:
            self._numbers[name] = next(i for i in itertools.count() if i not in self._numbers.values())
        return self._numbers[name]

    def deadlines(self, name: str) -> Deadlines:
        """Returns the deadlines of a model; the defaults if the spec does not have it."""
        model = self.current.spec.model(name)
        return Deadlines() if model is None else model.deadlines

    def replicas_of(self, name: str) -> list[ReplicaView]:
        """Returns the replicas of a model in the order of their numbers."""
        return self.views.of_model(name)

    def ready(self, name: str) -> int:
        return sum(view.state is State.READY for view in self.views.of_model(name))


def _ready_processes(views: Iterable[ReplicaView]) -> set[tuple[str, int]]:
    return {(view.id, view.epoch) for view in views if view.state is State.READY}
