"""A revision as it is acted upon: its spec, the hosts that it means, and what was read of its checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from orchestrator.changes import interpreters, version_of
from orchestrator.journal import Revision
from orchestrator.sources import read_facts, tokenizer_key
from placements.checkpoints import Checkpoint
from placements.engines import Engine, resolve
from placements.hosts import Machine, hosts_for
from placements.parse import parse
from placements.spec import ModelSpec, Spec
from placements.topology import Host


@dataclass(frozen=True)
class Generation:
    """``revision.text`` and what follows from it on this machine."""

    revision: Revision
    spec: Spec
    hosts: tuple[Host, ...]
    checkpoints: Mapping[str, Checkpoint]
    tokenizers: Mapping[str, str]  # by model: equal where the same text gives the same tokens

    @property
    def number(self) -> int:
        return self.revision.number

    @cached_property
    def engines(self) -> Mapping[str, Engine]:
        """Resolved, by model."""
        return {model.name: resolve(model.engine, self.hosts[0]) for model in self.spec.models}

    @cached_property
    def versions(self) -> Mapping[str, str]:
        """Of each model: what its replicas are told, as a short name."""
        return {model.name: self.version(model) for model in self.spec.models}

    def version(self, model: ModelSpec) -> str:
        engine = self.engines[model.name]
        return version_of(model, engine, self.length(model), interpreters(self.spec, engine))

    def length(self, model: ModelSpec) -> int:
        """Tokens of a slot."""
        return model.length(self.checkpoints.get(model.name))

    def source(self, model: ModelSpec) -> str | None:
        """The folder of its checkpoint; None for the echo engine. Raises ValueError for what must be fetched."""
        if self.engines[model.name] == "echo":
            return None
        if model.source_path is None:
            raise ValueError(f"{model.name}: {model.source!r} is not a folder, and this version fetches nothing")
        return model.source_path


def read_generation(revision: Revision, machine: Machine) -> Generation:
    """Read what the revision names. Blocks. Raises ValueError when its text has errors: an apply has checked it."""
    parsed = parse(revision.text, revision.file, revision.base_dir)
    if parsed.spec is None:
        raise ValueError(f"{revision.file} has errors")
    spec = parsed.spec
    hosts = hosts_for(spec, machine)
    tokenizers = {
        model.name: tokenizer_key(resolve(model.engine, hosts[0]), model.source_path) for model in spec.models
    }
    return Generation(revision, spec, hosts, read_facts(spec).checkpoints, tokenizers)
