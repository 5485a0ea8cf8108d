"""Builds the replica configurations of a spec on this machine, without a fleet."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from orchestrator.control.journal.journal_records import Revision
from orchestrator.control.resolve.checkpoint_reader import SourcePart
from orchestrator.control.resolve.engine_resolution import resolve_engine
from orchestrator.control.resolve.resolved_revision import replica_config, resolve_revision
from orchestrator.control.resolve.spec_file import SpecFile
from orchestrator.process.failure import Failed
from orchestrator.process.home import Home
from placements.engines.registry import Engine, needs_neuron
from placements.facts.topology import Host
from placements.planner.placement import Placement
from placements.planner.plan import plan
from placements.spec.problems import Problem
from placements.spec.schema import ModelSpec, Replicas
from workers.artifacts.fetch.artifact_fetcher import FetchedArtifact, wanted_by, with_folders
from workers.compiled import neuron_target
from workers.host import host_facts as this_host
from workers.host.interpreter import Interpreter, Interpreters
from workers.messages.replica_config import ReplicaConfig
from workers.messages.status import Failure


class ThisMachine:
    """The interpreters of this machine, in place of a cluster's."""

    def __init__(self) -> None:
        self._interpreters = Interpreters()

    async def interpreter(self, python: str | None, host: str) -> Interpreter:
        return self._interpreters.ask(python)


def revision_of(file: SpecFile) -> Revision:
    """Returns the spec as the first revision of a fleet."""
    return Revision(
        number=0, cause="apply", by="", text=file.text, file=file.name, base_dir=file.base_dir, of=None, plan={}
    )


@dataclass(frozen=True, kw_only=True)
class OfflineConfig:
    """The configuration of a model's replicas on hosts of one target, or why there is none."""

    model: str
    target: str = ""  # set if the model has several targets; see `target_of`
    source: str = ""  # as the spec names it
    draft_source: str = ""
    config: ReplicaConfig | Failure

    @property
    def label(self) -> str:
        return self.model + (f" for {self.target}" if self.target else "")


class OfflineConfigs:
    """The placements and configurations of a spec's replicas, for commands that check, fetch, compile or load without a
    fleet. Compiled artifacts do not depend on the cores. Blocks."""

    def __init__(self, file: SpecFile, home: Home) -> None:
        """``file`` has no errors."""
        assert file.spec is not None
        self._file, self._home, self._spec = file, home, file.spec
        self.generation = resolve_revision(revision_of(file), file.machine)
        self._plan = plan(file.spec, file.hosts, file.checkpoints)
        self._machine = ThisMachine()

    def places(self, model: ModelSpec) -> dict[str, Placement] | Failure:
        """Returns one placement for each target of the model; or why there is none.

        1. For each target the model's first replica in the plan.
        2. If the plan has none (``min: 0``, or other models fill the hosts): from a plan of this model alone.
        """
        placements = self._by_target(model, self._plan.placements)  # 1
        if placements:
            return placements
        count = max(1, len(model.cores))
        wanted = model.model_copy(update={"replicas": Replicas(min=count, max=count)})
        alone = plan(self._spec.model_copy(update={"models": (wanted,)}), self._file.hosts, self._file.checkpoints)  # 2
        placements = self._by_target(model, alone.placements)
        if placements:
            return placements
        problems = [problem for missing in alone.unplaced for problem in missing.problems]
        if not problems:
            return Failure("no-room", f"{model.name} has no place on these hosts")
        return Failure(problems[0].id, problems[0].what, problems[0].hint)

    def unplaced(self, model: str) -> tuple[Problem, ...]:
        """Returns why the plan has no replica of the model; empty if it has one, or if ``min`` is 0."""
        if any(placement.model == model for placement in self._plan.placements):
            return ()
        missing = (unplaced for unplaced in self._plan.unplaced if unplaced.model == model)
        return tuple(problem for unplaced in missing for problem in unplaced.problems)

    def config(self, placement: Placement) -> ReplicaConfig | Failure:
        """Returns the configuration with its engine resolved, its interpreter checked, and its compiler target set."""
        config = replica_config(self.generation, placement, self._home)
        resolved = asyncio.run(resolve_engine(config, self.generation, self._machine))
        return resolved if isinstance(resolved, Failure) else for_the_target(resolved, self._host(placement.host))

    def with_heads(self, config: ReplicaConfig) -> ReplicaConfig | Failure:
        """Returns the configuration with remote sources replaced by the folders of their small files; or why these are
        unknown."""
        model = self._spec.model(config.model.name)
        assert model is not None
        landed = {}
        for keys in wanted_by(config):
            part = SourcePart(model, keys)
            head = self.generation.heads.get(part.key)
            if head is None:
                return self._unknown(part)
            landed[keys] = FetchedArtifact(folder=head.folder, artifact="", bytes=0)
        return with_folders(config, landed)

    def _by_target(self, model: ModelSpec, placements: Sequence[Placement]) -> dict[str, Placement]:
        engine: Engine = self.generation.engines[model.name]
        by_target: dict[str, Placement] = {}
        for placement in placements:
            if placement.model == model.name:
                by_target.setdefault(target_of(self._host(placement.host), engine), placement)
        return by_target

    def _host(self, name: str) -> Host:
        return next(host for host in self._file.hosts if host.name == name)

    def _unknown(self, part: SourcePart) -> Failure:
        where = part.where(self._spec)
        for problem in self._file.problems:
            if problem.where == where and problem.id == "checkpoint-unreadable":
                return Failure(problem.id, problem.what, problem.hint)
        message = f"{part.model.name}: the small files of {part.source} are not available"
        return Failure("checkpoint-unreadable", message, "check access to it with `corewright validate SPEC`")


def configs(file: SpecFile, home: Home, models: Sequence[str] = (), *, heads: bool) -> Iterator[OfflineConfig]:
    """Yields the configuration of each model (or of ``models``) for each of its targets. Blocks.

    ``file`` has no errors. With ``heads`` remote sources are replaced by the folders of their small files. Raises
    Failed for a model that the spec does not have.
    """
    spec = file.spec
    assert spec is not None
    names = [model.name for model in spec.models]
    for name in models:
        if name not in names:
            raise Failed("model-unknown", f"{file.name} has no model {name}", f"it has {', '.join(names)}")
    offline = OfflineConfigs(file, home)
    for model in spec.models:
        if models and model.name not in models:
            continue
        sources = {"source": model.source, "draft_source": "" if model.draft is None else model.draft.source}
        places = offline.places(model)
        if isinstance(places, Failure):
            yield OfflineConfig(model=model.name, **sources, config=places)
            continue
        for target, placement in places.items():
            config = offline.config(placement)
            if heads and not isinstance(config, Failure):
                config = offline.with_heads(config)
            yield OfflineConfig(model=model.name, target=target if len(places) > 1 else "", **sources, config=config)


def target_of(host: Host, engine: Engine) -> str:
    """Returns the compilation target of a host: equal for hosts that share compiled artifacts. Empty for engines on the
    host's CPUs, which compile only on that host.

    For ``auto`` it is the exact instance type, on which the engine may depend.
    """
    topology = host.topology
    if topology is None or not (needs_neuron(engine) or engine == "auto"):
        return ""
    name = topology.instance if engine == "auto" else neuron_target.target_of(topology.instance)
    return name if topology.lnc is None else f"{name}-lnc{topology.lnc}"


def for_the_target(config: ReplicaConfig, host: Host) -> ReplicaConfig:
    """Returns the configuration with the compiler's target set, if this machine does not have the devices of the spec's
    host. An emulated host is this machine itself."""
    if not needs_neuron(config.model.engine) or host.topology is None or host.emulated:
        return config
    target = neuron_target.target_of(host.topology.instance)
    if os.environ.get(neuron_target.OVERRIDE) or neuron_target.target_of(this_host.instance_type() or "") == target:
        return config
    place = msgspec.structs.replace(config.place, env={**config.place.env, neuron_target.OVERRIDE: target})
    return msgspec.structs.replace(config, place=place)
