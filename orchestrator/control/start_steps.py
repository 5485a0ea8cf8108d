"""The steps that make a host ready for the process of a replica: resolve the engine, fetch, check, compile ahead."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Protocol

from orchestrator.control.effects import ClusterClient
from orchestrator.control.fleet_state import FleetState
from orchestrator.control.host_watch import HostWatch
from orchestrator.control.record_writer import Level
from orchestrator.control.resolve.engine_resolution import resolve_engine
from placements.engines.registry import ENGINES
from workers.artifacts.fetch.artifact_fetcher import FetchedArtifact, early_start_config, wanted_by, with_folders
from workers.artifacts.fetch.progress import FetchStatus, size_text
from workers.compiled.host_sets import compiles
from workers.compiled.orders import NEEDS_DEVICE
from workers.messages.replica_config import Keys, ReplicaConfig
from workers.messages.status import Failure

PROCESS_S = 5.0
"""From the request for a process until it reads weights, until it was measured: 1 s for Ray to start it, 4 s to import
torch and transformers."""
PACE_S = 1.0  # observation time of a fetch before its remaining time is estimated
SPAN_S = 10.0  # window of that estimate


class StartFailed(Exception):
    """A step has failed: the replica cannot be started."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(str(failure))
        self.failure = failure


class StartProgress(Protocol):
    """Receives the progress of the steps of one start."""

    def enter(self, phase: str) -> None:
        """A phase begins: fetching, checking, looking (for what is to be compiled) or compiling."""
        ...

    def note(self, level: Level, reason: str, message: str) -> None:
        """Record an event."""
        ...

    def arriving(self, status: FetchStatus, config: ReplicaConfig | None) -> None:
        """The fetch goes on. ``config``: a process with it may be started already and would wait for the rest."""
        ...


@dataclass(frozen=True)
class StartSteps:
    """The steps of one start. Each raises StartFailed or HostLost; cancelled, it stops waiting for the host."""

    state: FleetState
    cluster: ClusterClient
    hosts: HostWatch
    progress: StartProgress
    while_serving: bool = False  # it prepares an update, and old replicas serve meanwhile

    async def resolve(self, config: ReplicaConfig) -> ReplicaConfig:
        """Returns the configuration with its engine, and with the content that its version has pinned."""
        revision = self.state.revision_of_version(config.model.name, config.run.version)
        resolved = await resolve_engine(config, revision, self.cluster)
        if isinstance(resolved, Failure):
            raise StartFailed(resolved)
        return self.state.pins.pinned(resolved)

    async def fetch(self, config: ReplicaConfig, *, again: bool = False) -> ReplicaConfig:
        """Returns the configuration with the folders of its artifacts, which are on its host then.

        ``again``: a former controller has begun it, so that only a transfer is an event.
        """
        began, wanted, landed = self.state.clock(), wanted_by(config), dict[Keys, FetchedArtifact]()
        sources = ", ".join(artifact.source for artifact in wanted.values())
        if not sources:
            return config
        if not again:
            self.progress.enter("fetching")
            self.progress.note("info", "Fetching", sources + (", while the old replicas serve" * self.while_serving))
        for keys, artifact in wanted.items():
            async with aclosing(self.cluster.fetch(artifact, config.place.host)) as replies:
                async for reply in replies:
                    if isinstance(reply, Failure):
                        self.progress.note("error", "FetchFailed", str(reply))
                        self.hosts.fetch_failed(config.model.name)
                        raise StartFailed(reply)
                    if isinstance(reply, FetchedArtifact):
                        landed[keys] = reply
                    else:
                        self.progress.arriving(reply, early_start_config(config, landed, reply))
        self._note_fetched(config.model.name, list(landed.values()), self.state.clock() - began, again)
        return with_folders(config, landed)

    def _note_fetched(self, model: str, artifacts: Sequence[FetchedArtifact], seconds: float, again: bool) -> None:
        moved = sum(artifact.moved for artifact in artifacts)
        if again and not moved:
            return
        warning = "; ".join(artifact.warning for artifact in artifacts if artifact.warning)
        message = _fetched_text(sum(artifact.bytes for artifact in artifacts), moved, seconds, warning)
        self.progress.note("warning" if warning else "info", "Fetched", message)
        self.hosts.fetch_ended(model, moved, seconds)

    async def check(self, config: ReplicaConfig) -> None:
        """Check without cores whether a replica can load what is on its host, before an old one stops for it."""
        self.progress.enter("checking")
        self.progress.note("info", "Checking", "what the new version loads, while the old replicas serve")
        failure = await self.cluster.prepare("check", config)
        if isinstance(failure, Failure):
            raise StartFailed(failure)

    async def compile(self, config: ReplicaConfig) -> None:
        """Compile ahead what is missing. The prediction of what the engine's package would compile takes seconds; a
        start that has nothing to compile skips it."""
        known = (
            not self.while_serving
            and (config.model.name, config.run.version, config.place.host) in self.state.compiled_on
        )
        if known or not compiles(config):
            return
        self.progress.enter("looking")
        missing, shared = await self.cluster.prepare("foresee", config), self.state.shared_compiles
        if missing and not isinstance(missing, Failure) and (elsewhere := shared.host_for(config)) is not None:
            self.progress.enter("compiling")
            message = f"{elsewhere} compiles the same and pushes it to {config.model.neff_cache}"
            self.progress.note("info", "WaitsForCompile", message)
            await shared.ended(config)
            missing = await self.cluster.prepare("foresee", config)
        if isinstance(missing, Failure):
            message = f"{missing}; the start compiles missing graphs on its cores"
            self.progress.note("warning", "ForeseeFailed", message)
        elif missing:
            self.progress.enter("compiling")
            self.progress.note("info", "WillCompile", "; ".join(missing))
            began = self.state.clock()
            with shared.compiling(config):
                failure = await self.cluster.prepare("compile", config)
            if isinstance(failure, Failure) and failure.id != NEEDS_DEVICE:
                raise StartFailed(failure)
            self.progress.note("info", "Compiled", f"ahead, in {self.state.clock() - began:.0f} s")


def lead_of(config: ReplicaConfig, before_weights_s: float | None) -> float | None:
    """Returns how long before the end of its fetch a replica's process may be started, in seconds; None: not before.

    Its engine must be able to wait for missing files, and nothing else may read them: neither code of the checkpoint
    nor compilation ahead. ``before_weights_s`` is the part of the model's last starts before they read weights; None:
    it was not measured.
    """
    if not ENGINES[config.model.engine].loads_arriving or config.model.trust_remote_code or compiles(config):
        return None
    return PROCESS_S if before_weights_s is None else before_weights_s


@dataclass
class RemainingTime:
    """Estimates the remaining time of a fetch from the recent network rate: bytes left by an earlier attempt arrive at
    the speed of the disk and do not predict the rest."""

    _samples: deque[tuple[float, int]] = field(default_factory=deque)

    def estimate(self, status: FetchStatus, now: float) -> float | None:
        """Returns the seconds until the end of the fetch; None: unknown. ``now`` is when the status was reported."""
        self._samples.append((now, status.moved))
        while len(self._samples) > 2 and self._samples[1][0] <= now - SPAN_S:
            self._samples.popleft()
        at, moved = self._samples[0]
        if now - at < PACE_S or status.moved <= moved:
            return None
        return max(0, status.total - status.done) * (now - at) / (status.moved - moved)


def _fetched_text(total: int, moved: int, seconds: float, warning: str = "") -> str:
    """Returns the result of a fetch, such as "13.5 GB in 12.3 s, 1100 MB/s"; ``moved`` bytes came over the network."""
    if moved:
        text = f"{size_text(moved)} in {seconds:.1f} s, {moved / max(seconds, 1e-3) / 1e6:.0f} MB/s"
        text += f"; {size_text(total - moved)} were here" if total > moved else ""
    else:
        text = f"0 bytes: {size_text(total)} were here"
    return f"{text}; {warning}" if warning else text
