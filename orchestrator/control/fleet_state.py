"""The controller's observed and desired state of the fleet, persisted in the journal. No other effects."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from orchestrator.control.decisions.decide import FleetSnapshot, UpdateMemory
from orchestrator.control.decisions.preparation import Key, Preparation
from orchestrator.control.decisions.replica_view import ReplicaView
from orchestrator.control.decisions.rollout_step import (
    Goal,
    ReplicaTarget,
)
from orchestrator.control.effects import CoreOwner, FailedCore
from orchestrator.control.host_uses import HostUses
from orchestrator.control.journal.journal_fold import failed_cores
from orchestrator.control.journal.journal_records import RolloutState
from orchestrator.control.record_writer import RecordWriter
from orchestrator.control.replica_counts import ReplicaCounts
from orchestrator.control.replica_views import Reachability, ReplicaViews
from orchestrator.control.resolve.resolved_revision import ResolvedRevision
from orchestrator.control.shared_content import ContentPins, SharedCompiles
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
        self.relocated_at = float("-inf")
        self.planned_index = -1  # of the records that the goal follows from
        self.decided: tuple[int, FleetSnapshot] | None = None  # changes of views, and the last outcome
        self._numbers: dict[str, int] = {}
        self.progress: tuple[Any, float] = ((), clock())  # the last steps, and when they or a start last changed
        self.late: set[str] = set()  # models past their progress deadline that cannot be rolled back

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

    @property
    def is_complete(self) -> bool:
        """Returns whether the rollout of the current revision has ended well."""
        return self.records.state.completed == self.current.number

    def revision_of_version(self, model: str, version: str) -> ResolvedRevision:
        """Returns the revision from which a replica of that version is started."""
        before = self.stable
        if before is None or version == self.current.versions.get(model) or version != before.versions.get(model):
            return self.current
        return before

    def refresh_source(self, model: str) -> None:
        """Forget the pinned content of the model, so that new processes load what its source has now."""
        self.source_refreshes[model] += 1
        self.pins.unpin(lambda pin: pin.model == model)
        self.compiled_on = {key for key in self.compiled_on if key[0] != model}
        self.preparations = {key: preparation for key, preparation in self.preparations.items() if key[0] != model}

    def holds(self, model: ModelSpec) -> bool:
        """Returns whether requests wait while the model has no ready replica: it is being updated or rolled back with
        `hold`. A restarted controller decides by the spec alone."""
        held = model.name in self.memory.holding or (model.update.strategy == "hold" and self.stable is not None)
        failed = self.outcome is not None and self.outcome.state == "failed"  # no more attempts follow
        return held and not failed and self.counts.desired(model) > 0

    def reserve_epochs(self, epochs: Mapping[str, int]) -> None:
        """Ensure that later starts have higher epochs than these, by replica."""
        for id, epoch in epochs.items():
            self.epochs[id] = max(epoch, self.epochs.get(id, 0))

    def adopt(self, view: ReplicaView, config: ReplicaConfig) -> None:
        """Add a replica that outlived its controller."""
        self.views[view.id] = view
        self.configs[view.id] = config
        self.pins.adopt(config)
        self._numbers[config.model.name] = int(Path(config.run.socket).name.partition("-")[0])
        self.reserve_epochs({view.id: config.run.epoch})
        model = self.current.spec.model(config.model.name)
        asleep = model is not None and self.counts.desired(model) == 0 and view.state is not State.DRAINING
        if asleep and not self.counts.is_unloaded(config.model.name):
            self.counts.woken.add(config.model.name)
        self.records.event("info", "Adopted", f"epoch {config.run.epoch}, pid {view.pid}", view=view)

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

    def ready(self, name: str) -> int:
        return sum(view.state is State.READY for view in self.views.of_model(name))
