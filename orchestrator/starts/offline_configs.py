"""What the replicas of a spec would be told, worked out on this machine without a fleet."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import msgspec

from orchestrator.process.failure import Failed
from orchestrator.process.home import Home
from orchestrator.records.journal import Revision
from orchestrator.revisions.checkpoint_reader import CheckpointPart
from orchestrator.revisions.config_builder import replica_config
from orchestrator.revisions.resolved_revision import read_generation
from orchestrator.revisions.spec_file import SpecFile
from orchestrator.starts.engine_resolution import resolve_engine
from placements.facts.engines import Engine, needs_neuron
from placements.facts.topology import Host
from placements.planner.placement import Placement
from placements.planner.plan import plan
from placements.spec.problems import Problem
from placements.spec.schema import ModelSpec, Replicas
from workers.host import host_facts as this_host
from workers.host.interpreter import Interpreter, Interpreters
from workers.messages.replica_config import ReplicaConfig
from workers.messages.status import Failure
from workers.neff_cache import neuron_target


class ThisMachine:
    """What is asked of a cluster before a start, answered by this machine."""

    def __init__(self) -> None:
        self._interpreters = Interpreters()

    async def interpreter(self, python: str | None, host: str) -> Interpreter:
        return self._interpreters.ask(python)


def revision_of(file: SpecFile) -> Revision:
    """As if the spec were the first that a fleet is given."""
    return Revision(
        number=0, cause="apply", by="", text=file.text, file=file.name, base_dir=file.base_dir, of=None, plan={}
    )


@dataclass(frozen=True, kw_only=True)
class OfflineConfig:
    """What a replica of a model is told, on hosts of one target."""

    model: str
    target: str = ""  # where the model is for several; see `target_of`
    source: str = ""  # as the spec names it
    draft_source: str = ""
    config: ReplicaConfig | Failure

    @property
    def label(self) -> str:
        return self.model + (f" for {self.target}" if self.target else "")


class OfflineConfigs:
    """Where the replicas of a spec would lie, and what each would be told there: one answer for all commands that look,
    fetch, compile or load without a fleet. What is compiled does not depend on which cores. Blocks."""

    def __init__(self, file: SpecFile, home: Home) -> None:
        """``file`` has no errors."""
        assert file.spec is not None
        self._file, self._home, self._spec = file, home, file.spec
        self.generation = read_generation(revision_of(file), file.machine)
        self._plan = plan(file.spec, file.hosts, file.checkpoints)
        self._machine = ThisMachine()

    def places(self, model: ModelSpec) -> dict[str, Placement] | Failure:
        """One for each target that replicas of it are on; or why there can be none.

        1. Of each target the first replica that the plan has there.
        2. Where the plan has none, as for a model of min 0 or beside others that fill the hosts: as if it were alone.
        """
        placements = self._by_target(model, self._plan.placements)  # 1
        if placements:
            return placements
        one = model.model_copy(update={"replicas": Replicas(min=(count := max(1, len(model.cores))), max=count)})
        alone = plan(self._spec.model_copy(update={"models": (one,)}), self._file.hosts, self._file.checkpoints)  # 2
        placements = self._by_target(model, alone.placements)
        if placements:
            return placements
        problems = [problem for missing in alone.unplaced for problem in missing.problems]
        if not problems:
            return Failure("no-room", f"{model.name} has no place on these hosts")
        return Failure(problems[0].id, problems[0].what, problems[0].hint)

    def unplaced(self, model: str) -> tuple[Problem, ...]:
        """Why the plan has none of its replicas; empty where it has one, or nobody asks for any."""
        if any(placement.model == model for placement in self._plan.placements):
            return ()
        return tuple(problem for one in self._plan.unplaced if one.model == model for problem in one.problems)

    def config(self, placement: Placement) -> ReplicaConfig | Failure:
        """Its engine chosen, its interpreter looked at, and the compiler told for what it compiles."""
        config = replica_config(self.generation, placement, self._home)
        resolved = asyncio.run(resolve_engine(config, self.generation, self._machine))
        return resolved if isinstance(resolved, Failure) else for_the_target(resolved, self._host(placement.host))

    def with_heads(self, config: ReplicaConfig) -> ReplicaConfig | Failure:
        """A source elsewhere is the folder of its small files; or why these are not known."""
        model = self._spec.model(config.model)
        assert model is not None
        folders = {}
        for part in (CheckpointPart(model, False), CheckpointPart(model, True)):
            source = config.draft_source if part.is_draft else config.source
            head = self.generation.heads.get(part.key)
            if source is None or part.folder is not None:
                folders[part.is_draft] = source
            elif head is None:
                return self._unknown(part)
            else:
                folders[part.is_draft] = head.folder
        return msgspec.structs.replace(config, source=folders[False], draft_source=folders[True])

    def _by_target(self, model: ModelSpec, placements: Sequence[Placement]) -> dict[str, Placement]:
        engine: Engine = self.generation.engines[model.name]
        by_target: dict[str, Placement] = {}
        for placement in placements:
            if placement.model == model.name:
                by_target.setdefault(target_of(self._host(placement.host), engine), placement)
        return by_target

    def _host(self, name: str) -> Host:
        return next(host for host in self._file.hosts if host.name == name)

    def _unknown(self, part: CheckpointPart) -> Failure:
        where = part.where(self._spec)
        for problem in self._file.problems:
            if problem.where == where and problem.id == "checkpoint-unreadable":
                return Failure(problem.id, problem.what, problem.hint)
        what = f"{part.model.name}: nothing is known of {part.source}"
        return Failure("checkpoint-unreadable", what, "is it reached from here? `corewright validate SPEC` asks it")


def configs(file: SpecFile, home: Home, models: Sequence[str] = (), *, heads: bool) -> Iterator[OfflineConfig]:
    """Of a replica of each model, or of those named, for each of its targets. Blocks.

    ``file`` has no errors. With ``heads`` a source elsewhere is the folder of its small files; without, it is what its
    host would fetch. Raises Failed for a model that the spec does not have.
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
    """What is compiled for that host, in a word: equal for hosts whose replicas look for the same artifacts. Empty for
    engines of the host's CPUs, which can be compiled for on that host alone.

    Which engine ``auto`` is may hang on the very type.
    """
    topology = host.topology
    if topology is None or not (needs_neuron(engine) or engine == "auto"):
        return ""
    name = topology.instance if engine == "auto" else _target(topology.instance)
    return name if topology.lnc is None else f"{name}-lnc{topology.lnc}"


def for_the_target(config: ReplicaConfig, host: Host) -> ReplicaConfig:
    """Where this machine has not the devices of the spec's host, the compiler is told for which it compiles. An
    emulated host is this machine itself."""
    if not needs_neuron(cast(Engine, config.engine)) or host.topology is None or host.emulated:
        return config
    meant = _target(host.topology.instance)
    if os.environ.get(neuron_target.OVERRIDE) or _target(this_host.instance_type() or "") == meant:
        return config
    return msgspec.structs.replace(config, env={**config.env, neuron_target.OVERRIDE: meant})


def _target(instance: str) -> str:
    family = instance.partition(".")[0]
    return neuron_target.TARGETS.get(family, family)
