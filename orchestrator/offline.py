"""What the replicas of a spec would be told, worked out on this machine without a fleet."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

import msgspec

from orchestrator.failure import Failed
from orchestrator.generation import Generation, read_generation
from orchestrator.home import Home
from orchestrator.journal import Revision
from orchestrator.replica_config import replica_config
from orchestrator.specfile import SpecFile
from orchestrator.starting import prepared
from placements.placement import Placement
from placements.plan import plan
from placements.spec import ModelSpec, Replicas
from workers.config import ReplicaConfig
from workers.interpreter import Interpreter, Interpreters
from workers.status import Failure


class ThisMachine:
    """What is asked of a cluster before a start, answered by this machine."""

    def __init__(self) -> None:
        self._interpreters = Interpreters()

    async def interpreter(self, python: str | None, host: str) -> Interpreter:
        return self._interpreters.ask(python)


def configs(
    file: SpecFile, home: Home, models: Sequence[str] = (), *, heads: bool
) -> Iterator[tuple[str, ReplicaConfig | Failure]]:
    """Of a replica of each model, or of those named, on a host of its own; or why there can be none. Blocks.

    ``file`` has no errors. With ``heads`` a source elsewhere is the folder of its small files, where that is known;
    without, it is what its host would fetch. Raises Failed for a model that the spec does not have.
    """
    spec = file.spec
    assert spec is not None
    known = [model.name for model in spec.models]
    for name in models:
        if name not in known:
            raise Failed("model-unknown", f"{file.name} has no model {name}", f"it has {', '.join(known)}")
    revision = Revision(
        number=0, cause="apply", by="", text=file.text, file=file.name, base_dir=file.base_dir, of=None, plan={}
    )
    generation = read_generation(revision, file.machine)
    machine = ThisMachine()
    for model in spec.models:
        if not models or model.name in models:
            placement = _place(model, file)
            if isinstance(placement, Failure):
                yield model.name, placement
                continue
            config = replica_config(generation, placement, home)
            if heads:
                config = _with_heads(config, generation)
            yield model.name, asyncio.run(prepared(config, generation, machine))


def _with_heads(config: ReplicaConfig, generation: Generation) -> ReplicaConfig:
    own, draft = generation.heads.get((config.model, False)), generation.heads.get((config.model, True))
    return msgspec.structs.replace(
        config,
        source=config.source if own is None else own.folder,
        draft_source=config.draft_source if draft is None else draft.folder,
    )


def _place(model: ModelSpec, file: SpecFile) -> Placement | Failure:
    """Where one replica of it would lie if it were alone: what is compiled does not depend on which cores."""
    assert file.spec is not None
    one = model.model_copy(update={"replicas": Replicas(), "cores": ()})
    found = plan(file.spec.model_copy(update={"models": (one,)}), file.hosts, file.checkpoints)
    if found.placements:
        return found.placements[0]
    problems = [problem for missing in found.unplaced for problem in missing.problems]
    if not problems:
        return Failure("no-room", f"{model.name} has no place on these hosts")
    return Failure(problems[0].id, problems[0].what, problems[0].hint)
