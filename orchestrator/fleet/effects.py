"""Every side effect of the controller on its fleet, as one small Protocol: Ray behind it, or a fake in a test."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from workers.artifacts.fetch.progress import FetchStatus
from workers.host.interpreter import Interpreter
from workers.messages.metric_family import MetricFamily
from workers.messages.replica_config import ReplicaConfig
from workers.messages.status import Failure, ReplicaStatus


class ReplicaDied(Exception):
    """The replica's process is gone, or was never made; the text says why."""


class HostLost(Exception):
    """The host's Ray node is dead or absent; the text names it."""


@dataclass(frozen=True)
class CoreOwner:
    """Who holds a core; None for what cannot be found out."""

    pid: int | None
    command: str | None = None


@dataclass(frozen=True)
class Suspect:
    """Why a core gets no replica although nobody holds it."""

    cause: str
    until: float | None = None  # on the controller's clock; None: until an operator says that it is sound


@dataclass(frozen=True)
class Survivor:
    """A replica that outlived its controller."""

    config: ReplicaConfig
    status: ReplicaStatus


@dataclass(frozen=True)
class Fetched:
    """All that a replica loads is on its host."""

    config: ReplicaConfig  # as its process is to be told
    bytes: int  # of it all
    moved: int = 0  # bytes that came over the network for it
    seconds: float = 0.0
    warning: str = ""  # it may not be what the sources have now


@dataclass(frozen=True)
class FetchedFiles:
    """The last of what a replica loads is on its way, into a folder that can be loaded from meanwhile."""

    config: ReplicaConfig  # as its process could be told now
    left: int  # bytes that are still to come
    moved: int  # bytes that came over the network so far


Arrives = Callable[[FetchedFiles], None]


def actor_name(model: str, replica: int, epoch: int) -> str:
    """New for each start, so that nothing can take the dying one for the new one."""
    return f"{model}/{replica}.{epoch}"


class ClusterClient(Protocol):
    """What the controller does to replicas and asks of hosts. ``name`` is an ``actor_name``; ``host`` is the planner's
    name of a host, and without it the controller's own is asked."""

    async def fetch(self, config: ReplicaConfig, arrives: Arrives | None = None) -> Fetched | Failure:
        """Bring what the replica loads to ``config.host``, where it is not a folder already; each artifact once at a
        time, however many ask. Who cancels the call waits no longer, and what nobody waits for is stopped.

        ``arrives`` hears every moment how far it is, where all but the last artifact are there, and that one comes into
        the folder that it will be loaded from, with the very content that ``config`` means. Raises HostLost.
        """
        ...

    async def progress(self, host: str) -> Sequence[FetchStatus]:
        """How far each fetch is that goes on there."""
        ...

    async def held_sources(self, sources: Collection[str]) -> Mapping[str, frozenset[str]]:
        """By host, which of these sources are there as a whole, of whatever date. Nobody is asked over the network."""
        ...

    async def check(self, config: ReplicaConfig) -> Failure | None:
        """Why the replica could not load what it names, as far as that shows without cores: its tokenizer, its config,
        the header of each file of weights, the engine's package in its interpreter. What it names is on its host. Reads
        no weights, in a process of its own. Raises HostLost."""
        ...

    async def foresee(self, config: ReplicaConfig) -> Sequence[str] | Failure:
        """What the start of a replica would have to compile that can be compiled ahead, each in words. Claims no core
        and reads no weights. A Failure (foresee-failed) where that cannot be told. Raises HostLost."""
        ...

    async def compile(self, config: ReplicaConfig) -> Failure | None:
        """Compile that, on its host and in a process of its own; once at a time, however many ask. As for ``fetch``,
        who cancels the call waits no longer. Raises HostLost."""
        ...

    async def start(self, config: ReplicaConfig) -> None:
        """Ask for the replica's process on ``config.host``. Returns at once; ``watch`` tells how it goes.

        Raises HostLost when that host is known to be gone.
        """
        ...

    async def watch(self, name: str, seen: int) -> ReplicaStatus:
        """The replica's status once it is newer than ``seen``, or as it is after a while. Raises ReplicaDied."""
        ...

    async def drain(self, name: str, timeout_s: float) -> bool:
        """Wait for the replica's live requests to end. True when none is left, or when it is gone."""
        ...

    async def end(self, name: str, pid: int | None, started: float | None, host: str | None = None) -> bool:
        """Kill the replica; true once its host has seen its process gone (or that there never was one).

        The process is killed by pid and start time too: it outlives its actor for a moment when its raylet has died.
        Of a lost host another one on the same machine is asked; a lost machine has no processes.
        """
        ...

    async def log_tail(self, path: str, lines: int, host: str | None = None) -> list[str]:
        """The last lines of a log; none when the host is lost."""
        ...

    async def log_part(
        self, path: str, offset: int | None, most: int, lines: int, host: str | None = None
    ) -> tuple[str, int]:
        """At most ``most`` bytes of a log from ``offset`` on, or without one its last ``lines``; and the next offset.

        A log that is not there, or shorter than ``offset``, begins anew.
        """
        ...

    async def fault_in_log(self, path: str, host: str | None = None) -> Failure | None:
        """What the last words of a replica that is gone tell of its death, where it is a known fault."""
        ...

    async def interpreter(self, python: str | None, host: str | None = None) -> Interpreter:
        """What the Python at that path on the host holds; None: of the one that replicas run in there by default.

        Raises HostLost when nobody answers for the host.
        """
        ...

    async def held_cores(self, claims: str | None, host: str | None = None) -> dict[int, CoreOwner]:
        """The cores that any process holds: on an emulated host by its ``claims``, else as the Neuron tools tell."""
        ...

    async def device_metrics(self, host: str) -> list[MetricFamily]:
        """What that host's Neuron devices measure, under neuron-monitor's names; nothing where the tool is not."""
        ...

    async def lost_hosts(self) -> frozenset[str]:
        """The planner's names of the hosts whose Ray node is dead or absent. Cheap enough for every second."""
        ...

    async def survivors(self) -> tuple[Sequence[Survivor], Mapping[str, int]]:
        """Replicas that a former controller started and that still live; and of those that do not answer, which are
        ended, the epoch by id."""
        ...
