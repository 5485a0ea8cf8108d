"""Opens what answers a replica's requests: a batcher over an engine, or a relay to a server; and names its failures."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import msgspec.structs

from placements.engines.registry import ENGINES
from workers.artifacts.sources.listing import SourceError
from workers.batching.batcher import Batcher
from workers.batching.encode_batcher import EncodeBatcher
from workers.batching.step_loop import BatcherStats
from workers.engines.checkpoint_files import contents_of
from workers.engines.open_engine import open_encoder, open_engine, runner_of
from workers.host.core_claims import CoreClaim, CoresTaken
from workers.host.facts.reading import who_holds
from workers.host.memory_limits import is_out_of_memory, out_of_memory
from workers.host.neuron_faults import explained
from workers.host.start_phases import START
from workers.messages.engine_protocol import EngineLoadError, EngineSpec
from workers.messages.replica_config import ReplicaConfig
from workers.messages.requests import GenerateRequest, TokenEvent
from workers.messages.status import Failure, Reaction
from workers.text.tokenizer import load_tokenizer


class Backend(Protocol):
    """The methods of `Batcher`, `EncodeBatcher` and `CompletionRelay` that their users call; see there."""

    @property
    def spec(self) -> EngineSpec: ...
    @property
    def stats(self) -> BatcherStats: ...
    def submit(self, request: GenerateRequest) -> None: ...
    def cancel(self, id: str) -> None: ...
    def taken(self, id: str, count: int) -> None: ...
    def drain(self, timeout_s: float = 0.0) -> bool: ...
    def close(self) -> None: ...
    def warm_guides(self) -> None: ...
    def run(self, after_step: Callable[[], None] = lambda: None) -> None: ...


def local_contents(config: ReplicaConfig) -> str:
    """Returns the fingerprint of the local folders that a replica loads; "" without any. Raises EngineLoadError if it
    is not that of the other replicas of its version."""
    folders = [Path(folder) for folder in config.local_folders()]
    contents = contents_of(folders) if folders else ""
    if config.run.contents not in ("", contents):
        fact = f"the files in {' and '.join(map(str, folders))} have changed since {config.model.name} loaded them here"
        hint = f"load them with corewright rollout restart {config.model.name}, or put the former files back"
        raise EngineLoadError("source-changed", fact, hint)
    return contents


def open_backend(config: ReplicaConfig, claim: CoreClaim | None, emit: Callable[[list[TokenEvent]], None]) -> Backend:
    """Loads the model and returns the backend, whose ``run`` is still to be called on a thread of its own. ``claim``
    stays held while a process of the backend lives. Raises EngineLoadError."""
    serve = runner_of(config.model.engine).serve
    if serve is not None:
        from workers.engines.server.completion_relay import CompletionRelay

        server = serve(config, () if claim is None else claim.descriptors)
        tokenizes = ENGINES[config.model.engine].tokenizer is not None
        return CompletionRelay(server, load_tokenizer(config.model.engine, config.source) if tokenizes else None, emit)
    if config.model.kind != "generate":
        encoder = open_encoder(config)
        encoder.load()
        START.end("engine")
        return EncodeBatcher(encoder, emit, config.model.max_wait_ms / 1000)
    engine = open_engine(config)
    engine.load()
    START.end("engine")
    tokenizer = load_tokenizer(config.model.engine, config.source)
    START.end("tokenizer")
    return Batcher(engine, tokenizer, emit)


@contextlib.contextmanager
def opened(config: ReplicaConfig, emit: Callable[[list[TokenEvent]], None]) -> Iterator[Backend]:
    """Claims the cores as a replica does, loads the model, and yields its backend; at the end it is closed and the
    cores are released. Raises CoresTaken, EngineLoadError and the engine's own errors."""
    place = config.place
    with contextlib.ExitStack() as resources:
        claim = CoreClaim(Path(place.claims), place.cores) if place.claims and place.cores else None
        if claim is not None:
            resources.callback(claim.release)
        backend = open_backend(config, claim, emit)
        resources.callback(backend.close)
        yield backend


log = logging.getLogger(__name__)

PERMANENT = ("engine-not-installed", "source-changed")  # until an operator acts
CORES_HINT = "end the process that holds the cores; corewright unload MODEL frees those of a model"


def failure_of(id: str, error: Exception, activity: str, config: ReplicaConfig) -> Failure:
    """Returns why an activity failed; ``id`` where the exception has no better one.

    A vague failure is replaced by a fault that the Neuron runtime reported, in the exception or the log.
    """
    if isinstance(error, CoresTaken):
        return Failure("cores-taken", f"{error} (held: {error.held})", CORES_HINT)
    cause = error
    if not isinstance(cause, EngineLoadError | SourceError):
        cause = EngineLoadError(id, f"{type(error).__name__}: {error}", f"the log is {config.run.log}")
        if is_out_of_memory(error):
            cause = out_of_memory(error, activity)
    reaction = Reaction.STOP if cause.id in PERMANENT else Reaction.RETRY
    failure = explained(Failure(cause.id, cause.what, cause.hint, reaction), error, config.run.log)
    if cause is not error:  # after that, since the log then ends with a traceback
        log.error("%s failed", activity, exc_info=error)
    if failure.id != "cores-taken":
        return failure
    owners = [f"nc{core} by pid {pid} ({command})" for core, (pid, command) in who_holds(config.place.cores).items()]
    what = f"{failure.what}; held: {', '.join(owners) or 'by no process now'}"
    return msgspec.structs.replace(failure, what=what, held=bool(owners))
