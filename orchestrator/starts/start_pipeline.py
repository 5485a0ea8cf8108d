"""Makes a host ready for the process of a replica: resolves the engine, fetches, checks and compiles ahead."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from orchestrator.fleet.effects import ClusterClient
from orchestrator.fleet.progress_text import fetched_text
from orchestrator.starts.early_start import RemainingTime, lead_of
from orchestrator.starts.engine_resolution import resolve_engine
from orchestrator.state.fleet_state import FleetState
from orchestrator.state.record_writer import Level
from workers.artifacts.fetch.artifact_fetcher import FetchedArtifact, early_start_config, wanted_by, with_folders
from workers.artifacts.fetch.progress import FetchStatus
from workers.compiling.build import NEEDS_DEVICE
from workers.compiling.prefetch import compiles
from workers.messages.replica_config import Keys, ReplicaConfig
from workers.messages.status import Failure


@dataclass(frozen=True, kw_only=True)
class StartEvent:
    """A step of a preparation. ``note`` is the level, reason and message of the event to record, if any."""

    phase: str = ""  # the phase that it belongs to; empty: the previous one
    note: tuple[Level, str, str] | None = None


@dataclass(frozen=True, kw_only=True)
class Resolved(StartEvent):
    """The engine and the content to load are known."""

    config: ReplicaConfig


@dataclass(frozen=True, kw_only=True)
class Fetching(StartEvent):
    """The host fetches what the replica loads. Repeated with each status."""

    phase: str = "fetching"
    status: FetchStatus | None = None  # None: the fetch begins


@dataclass(frozen=True, kw_only=True)
class Arriving(StartEvent):
    """The process may be started with ``config``: it reads weights in ``lead_s``, when about all of them are there."""

    config: ReplicaConfig
    lead_s: float


@dataclass(frozen=True, kw_only=True)
class Fetched(StartEvent):
    """Everything that the replica loads is on its host."""

    moved: int  # bytes that came over the network
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Compiling(StartEvent):
    """The host compiles ahead what is missing."""

    phase: str = "compiling"


@dataclass(frozen=True, kw_only=True)
class Ready(StartEvent):
    """The host has everything that a process with ``config`` needs. The last event."""

    config: ReplicaConfig


@dataclass(frozen=True, kw_only=True)
class StartFailed(StartEvent):
    """The replica cannot be started. The last event."""

    failure: Failure
    fetching: bool = False  # the fetch has failed


class StartPipeline:
    """The preparation of one start. It reads the state; whoever consumes its events changes it."""

    def __init__(
        self,
        state: FleetState,
        cluster: ClusterClient,
        config: ReplicaConfig,
        *,
        update: bool = False,
        adopted: bool = False,
    ) -> None:
        """``update``: old replicas serve meanwhile, so the checks of the start that need no cores run as well, and
        no process is started early. ``adopted``: its process waits, which a previous controller has started."""
        self._state = state
        self._cluster = cluster
        self._config = config
        self._update = update
        self._adopted = adopted
        self._has_process = adopted
        self._remaining = RemainingTime()

    async def events(self) -> AsyncGenerator[StartEvent, None]:
        """Yields the steps up to Ready or Failed. Raises HostLost. Closing it stops waiting for the host."""
        steps = [self._fetch] if self._adopted else [self._resolve, self._fetch, self._check, self._compile]
        for step in steps:
            async with aclosing(step()) as events:
                async for event in events:
                    yield event
                    if isinstance(event, StartFailed):
                        return
        yield Ready(config=self._config)

    async def _resolve(self) -> AsyncGenerator[StartEvent, None]:
        revision = self._state.revision_of_version(self._config.model, self._config.version)
        resolved = await resolve_engine(self._config, revision, self._cluster)
        if isinstance(resolved, Failure):
            yield StartFailed(failure=resolved)
            return
        self._config = self._state.pins.pinned(resolved)
        yield Resolved(config=self._config)

    async def _fetch(self) -> AsyncGenerator[StartEvent, None]:
        clock, began = self._state.clock, self._state.clock()
        wanted, landed = wanted_by(self._config), dict[Keys, FetchedArtifact]()
        sources = ", ".join(artifact.source for artifact in wanted.values())
        if not sources:
            return
        if not self._adopted:
            yield Fetching(note=("info", "Fetching", sources + (", while the old replicas serve" * self._update)))
        for keys, artifact in wanted.items():
            async with aclosing(self._cluster.fetch(artifact, self._config.host)) as replies:
                async for reply in replies:
                    if isinstance(reply, Failure):
                        yield StartFailed(failure=reply, fetching=True, note=("error", "FetchFailed", str(reply)))
                        return
                    if isinstance(reply, FetchedArtifact):
                        landed[keys] = reply
                        continue
                    yield Fetching(status=reply)
                    early = early_start_config(self._config, landed, reply)
                    if early is not None and (arriving := self._arriving(early, reply)) is not None:
                        yield arriving
        artifacts = landed.values()
        self._config = with_folders(self._config, landed)
        moved, seconds = sum(artifact.moved for artifact in artifacts), clock() - began
        if moved or not self._adopted:
            warning = "; ".join(artifact.warning for artifact in artifacts if artifact.warning)
            message = fetched_text(sum(artifact.bytes for artifact in artifacts), moved, seconds, warning)
            yield Fetched(moved=moved, seconds=seconds, note=("warning" if warning else "info", "Fetched", message))

    def _arriving(self, config: ReplicaConfig, status: FetchStatus) -> Arriving | None:
        """Returns the event of an early start with ``config``, once, when little enough of the fetch is left."""
        if self._update or self._has_process:
            return None
        lead_s = lead_of(config, self._state.start_times(config.model).before_weights_s)
        left_s = self._remaining.estimate(status, self._state.clock())
        if lead_s is None or left_s is None or left_s >= lead_s:
            return None
        self._has_process = True
        message = f"about {left_s:.0f} s before the end of the fetch, to load in parallel"
        return Arriving(config=config, lead_s=lead_s, note=("info", "StartsEarly", message))

    async def _check(self) -> AsyncGenerator[StartEvent, None]:
        if self._update:
            checking = "what the new version loads, while the old replicas serve"
            yield StartEvent(phase="checking", note=("info", "Checking", checking))
            failure = await self._cluster.check(self._config)
            if failure is not None:
                yield StartFailed(failure=failure)

    async def _compile(self) -> AsyncGenerator[StartEvent, None]:
        """The prediction of what the engine's package would compile takes seconds; a start that has nothing to compile
        skips it."""
        config = self._config
        compiled = not self._update and (config.model, config.version, config.host) in self._state.compiled_on
        if compiled or not compiles(config):
            return
        yield StartEvent(phase="looking")
        missing, shared = await self._cluster.foresee(config), self._state.shared_compiles
        if missing and not isinstance(missing, Failure) and (elsewhere := shared.host_for(config)) is not None:
            message = f"{elsewhere} compiles the same and pushes it to {config.neff_cache}"
            yield Compiling(note=("info", "WaitsForCompile", message))
            await shared.ended(config)
            missing = await self._cluster.foresee(config)
        if isinstance(missing, Failure):
            message = f"{missing}; the start compiles missing graphs on its cores"
            yield StartEvent(note=("warning", "ForeseeFailed", message))
        elif missing:
            yield Compiling(note=("info", "WillCompile", "; ".join(missing)))
            began = self._state.clock()
            with shared.compiling(config):
                failure = await self._cluster.compile(config)
            if failure is not None and failure.id != NEEDS_DEVICE:
                yield StartFailed(failure=failure)
            else:
                took_s = self._state.clock() - began
                yield StartEvent(note=("info", "Compiled", f"ahead, in {took_s:.0f} s"))
