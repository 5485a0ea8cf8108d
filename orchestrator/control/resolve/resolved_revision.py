"""A revision with its parsed spec, its hosts and the facts of its checkpoints, and the one that a rollback makes."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import msgspec.structs
import yaml

from orchestrator.control.decisions.changes import adapters_at_start, interpreters, version_of
from orchestrator.control.journal.journal_records import Revision
from orchestrator.control.resolve.checkpoint_reader import (
    CheckpointFacts,
    SourcePart,
    is_hub_source,
    read_facts,
    source_metadata_store,
    source_parts,
    source_query,
    tokenizer_key,
)
from orchestrator.messages.controller_settings import ControllerSettings
from orchestrator.process.home import Home
from placements.engines.registry import SERVER_ENGINES, Engine, resolve
from placements.facts.adapters import Adapter
from placements.facts.checkpoints import Checkpoint
from placements.facts.topology import Host, Machine
from placements.planner.placement import Placement
from placements.planner.plan import plan
from placements.planner.spec_hosts import HostGroup, host_groups, hosts_for
from placements.rules.checks import check
from placements.spec.notation import is_path
from placements.spec.parse import parse
from placements.spec.problems import has_errors
from placements.spec.schema import ModelSpec, Spec
from placements.spec.yaml_tree import read
from workers.messages.replica_config import (
    ADAPTERS,
    SOURCE,
    Keys,
    Origin,
    ReplicaConfig,
    ReplicaPlace,
    ReplicaRun,
    key_of,
)

if TYPE_CHECKING:
    from workers.artifacts.sources.source_metadata import Metadata


@dataclass(frozen=True)
class ResolvedRevision:
    """A revision, and what was derived from its text on this machine."""

    revision: Revision
    spec: Spec
    hosts: tuple[Host, ...]
    checkpoints: Mapping[str, Checkpoint]
    tokenizers: Mapping[str, str]  # keys by model: equal if the same text gives the same tokens
    heads: Mapping[tuple[str, ...], Metadata] = field(default_factory=lambda: MappingProxyType({}))
    """The small files of sources elsewhere, by `SourcePart.key`."""
    adapters: Mapping[str, Mapping[str, Adapter]] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def number(self) -> int:
        return self.revision.number

    @cached_property
    def groups(self) -> tuple[HostGroup, ...]:
        """The hosts by entry of the spec."""
        return host_groups(self.spec, self.hosts)

    @cached_property
    def engines(self) -> Mapping[str, Engine]:
        """The resolved engines by model."""
        return {model.name: resolve(model.engine, self.hosts[0], model.kind) for model in self.spec.models}

    @cached_property
    def versions(self) -> Mapping[str, str]:
        """The version by model: a hash of its replicas' configuration."""
        return {model.name: self.version(model) for model in self.spec.models}

    def version(self, model: ModelSpec) -> str:
        """Returns the version of a model of the spec, or of a changed copy."""
        resolved, adapters = self.resolved(model), self.adapters.get(model.name, {})
        loaded = adapters_at_start(model, adapters.values(), live=self.hosts[0].emulated)
        return version_of(resolved, interpreters(self.spec, resolved.engine), loaded)

    def resolved(self, model: ModelSpec) -> ModelSpec:
        """Returns the record of the model that its replicas get."""
        return model.resolved(self.engines[model.name], self.checkpoints.get(model.name))

    def length(self, model: ModelSpec) -> int:
        """Returns the tokens of a slot."""
        return model.length(self.checkpoints.get(model.name))

    def origins(self, model: ModelSpec) -> dict[str, Origin]:
        """Returns the sources of the model that are not local folders, by `key_of`."""
        parts = (part for part in source_parts(self.spec) if part.model.name == model.name)
        return {
            key_of(part.keys): Origin(source=part.source, revision=self.commit(model, part.keys))
            for part in parts
            if not is_path(part.source)
        }

    def with_adapters(self, config: ReplicaConfig) -> ReplicaConfig:
        """Returns the configuration of a running replica with the adapters of this revision, still to be fetched except
        those that it has."""
        model = self.spec.model(config.model.name)
        assert model is not None
        origins = self.origins(model) | {
            key: origin for key, origin in config.origins.items() if not key.startswith(ADAPTERS)
        }
        for name, place in model.adapter_places.items():
            key = key_of((ADAPTERS, name))
            if config.model.adapters.get(name) == place and key in config.origins:
                origins[key] = config.origins[key]
        resolved = config.model.model_copy(update={"adapters": model.adapter_places})
        return msgspec.structs.replace(config, model=resolved, origins=origins)

    def commit(self, model: ModelSpec, keys: Keys = SOURCE) -> str | None:
        """Returns the commit of a hub id that all replicas of this fleet load; the spec's revision if the hub was never
        reached; None for other sources."""
        part = SourcePart(model, keys)
        head = self.heads.get(part.key)
        return part.revision if head is None else head.commit

    def folder(self, model: ModelSpec) -> str | None:
        """Returns the local folder with config and tokenizer: the checkpoint, or its small files. None without
        a checkpoint, and for remote sources that were never reached."""
        if not model.has_source:
            return None
        head = self.heads.get(SourcePart(model).key)
        return model.source_path if head is None else head.folder


def resolve_revision(revision: Revision, machine: Machine) -> ResolvedRevision:
    """Resolve a revision. Blocks. Raises ValueError if its text has errors; an apply has checked it.

    Remote sources are queried only without stored metadata: an apply has queried them. The commit of a hub's branch
    stays what it was when the fleet first resolved it.
    """
    parsed = parse(revision.text, revision.file, revision.base_dir)
    if parsed.spec is None:
        raise ValueError(f"{revision.file} has errors")
    return resolve_spec(revision, parsed.spec, machine)


def resolve_spec(revision: Revision, spec: Spec, machine: Machine) -> ResolvedRevision:
    """Resolve a revision whose text was read as ``spec``. See `resolve_revision`."""
    hosts = hosts_for(spec, machine)
    facts = _pinned_facts(spec, revision.fleet)
    tokenizers = {}
    for model in spec.models:
        engine = resolve(model.engine, hosts[0], model.kind)
        head = facts.heads.get(SourcePart(model).key)
        folder = model.source_path if head is None else head.folder
        tokenizers[model.name] = tokenizer_key(engine, folder if model.has_source else None)
    return ResolvedRevision(revision, spec, hosts, facts.checkpoints, tokenizers, facts.heads, facts.adapters)


def _pinned_facts(spec: Spec, fleet: str) -> CheckpointFacts:
    hub = {part.key: source_query(part).digest for part in source_parts(spec) if is_hub_source(part)}
    if not hub or not fleet:
        return read_facts(spec, fresh=False)
    heads = source_metadata_store()
    pins = heads.pins(fleet)
    facts = read_facts(spec, fresh=False, pinned={key: pins[digest] for key, digest in hub.items() if digest in pins})
    more = {digest: facts.heads[key] for key, digest in hub.items() if digest not in pins and key in facts.heads}
    if more:
        with contextlib.suppress(OSError):  # they are then resolved again
            heads.pin(fleet, more)
    return facts


_ABSENT = object()


def revert_change(now: Any, after: Any, before: Any) -> Any:
    """Returns ``now`` without the change from ``before`` to ``after``, key by key; later changes of a key stay."""
    if now == after:
        return before
    if not (isinstance(now, dict) and isinstance(after, dict) and isinstance(before, dict)):
        return now
    merged = {
        key: revert_change(now.get(key, _ABSENT), after.get(key, _ABSENT), before.get(key, _ABSENT))
        for key in dict.fromkeys((*now, *before))
    }
    return {key: value for key, value in merged.items() if value is not _ABSENT}


def changing_specs(specs: Sequence[Spec], model: str) -> list[int]:
    """Returns the indexes, last first, of the specs that changed the configuration of the model's replicas.

    Considers only those after its last return to the first spec's configuration.
    """
    kinds = [_process(spec, model) for spec in specs]
    indexes = []
    for place in range(len(specs) - 1, 0, -1):
        if kinds[place] == kinds[0]:
            break
        if kinds[place] != kinds[place - 1]:
            indexes.append(place)
    return indexes


def _process(spec: Spec, name: str) -> object:
    model = spec.model(name)
    return None if model is None else (model.started_with, interpreters(spec, model.engine))


def revert_changes(
    revisions: Sequence[Revision], model: str, machine: Machine
) -> tuple[ResolvedRevision, list[int]] | None:
    """Returns the last revision without those that changed the failed model, and their numbers. Blocks.

    ``revisions`` begins with the last complete one. Returns None if all later ones must be reverted, or if the result
    is not a spec that the fleet can run: then only the first one is known to work.
    """
    first, last = revisions[0], revisions[-1]
    specs = [parse(revision.text, revision.file, revision.base_dir).spec for revision in revisions]
    parsed = [spec for spec in specs if spec is not None]
    if len(parsed) < len(specs) or any(revision.base_dir != first.base_dir for revision in revisions):
        return None
    places = changing_specs(parsed, model)
    if not places or len(places) == len(revisions) - 1:
        return None
    data = [read(revision.text, revision.file).value for revision in revisions]
    merged = data[-1]
    for place in places:
        merged = revert_change(merged, data[place], data[place - 1])
    numbers = sorted(revisions[place].number for place in places)
    title = f"# revision {last.number} without the changes of {', '.join(map(str, numbers))}\n"
    text = title + yaml.safe_dump(merged, sort_keys=False, allow_unicode=True, width=120)
    spec = parse(text, last.file, last.base_dir).spec
    if spec is None or _process(spec, model) != _process(parsed[0], model):
        return None
    try:
        generation = resolve_revision(msgspec.structs.replace(last, text=text), machine)
    except ValueError:
        return None
    problems = check(generation.spec, generation.hosts, generation.checkpoints, {})
    ever = plan(generation.spec, generation.hosts, generation.checkpoints)
    if has_errors(problems) or any(revision.required for revision in ever.unplaced):
        return None
    return generation, numbers


def replica_config(
    generation: ResolvedRevision,
    placement: Placement,
    home: Home,
    fleet: ControllerSettings | None = None,
) -> ReplicaConfig:
    """Returns the configuration of a replica without an epoch and a socket; ``fleet`` None: it gets no requests.

    Remote sources are still to be fetched (`artifact_fetcher.py`).
    """
    spec = generation.spec
    model = spec.model(placement.model)
    assert model is not None
    index, host = next((i, host) for i, host in enumerate(generation.hosts) if host.name == placement.host)
    engine = generation.engines[model.name]
    place = ReplicaPlace(
        replica=placement.replica,
        host=placement.host,
        cores=[] if placement.cores is None else list(placement.cores),
        env=dict(placement.env),
        claims=str(home.claims(index)) if host.emulated else None,
    )
    run = ReplicaRun(
        version=generation.versions[model.name],
        tokenizer=generation.tokenizers[model.name],
        log=str(home.log(model.name, placement.replica)),
        compiled=str(home.compiled),
        python=None if engine in SERVER_ENGINES else spec.python_for(engine),
        server_python=spec.python_for(engine) if engine in SERVER_ENGINES else None,
        server_launch=spec.launch_of(engine) if engine in SERVER_ENGINES else [],
        warm=spec.is_warm(engine),
    )
    if fleet is not None:
        over_tcp = fleet.data_plane == "tcp"
        run = msgspec.structs.replace(
            run,
            uses_socket=not over_tcp,
            listen="tls" if over_tcp else "",
            token=fleet.token,
            credentials=fleet.replica,
        )
    return ReplicaConfig(model=generation.resolved(model), place=place, run=run, origins=generation.origins(model))
