"""Defines every side effect of the controller on its fleet as one Protocol: Ray implements it, tests fake it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import msgspec

from orchestrator.messages.gateway_places import ClusterMachine, GatewayPlace
from placements.facts.topology import Host
from workers.artifacts.fetch.artifact_fetcher import FetchedArtifact, WantedArtifact
from workers.artifacts.fetch.progress import FetchStatus
from workers.host.interpreter import Interpreter
from workers.messages.actor_message import actor_message
from workers.messages.metric_family import MetricFamily
from workers.messages.replica_config import ReplicaConfig
from workers.messages.status import Failure, Notice, ReplicaStatus

StartStep = Literal["check", "foresee", "compile"]


class ReplicaDied(Exception):
    """The replica's process is gone or never started; the text is the cause."""


class HostLost(Exception):
    """The host's Ray node is dead or missing; the text names it."""


@dataclass(frozen=True)
class CoreOwner:
    """The process that holds a core; None where unknown."""

    pid: int | None
    command: str | None = None


@dataclass(frozen=True)
class FailedCore:
    """A core in quarantine after a failure."""

    cause: str
    until: float | None = None  # on the controller's clock; None: until an operator clears it


@dataclass(frozen=True)
class Survivor:
    """A replica that outlived its controller."""

    config: ReplicaConfig
    status: ReplicaStatus


@dataclass(frozen=True)
class Loss:
    """Why a host is lost."""

    cause: str
    expected: bool = False  # Ray's autoscaler ended its node, which was idle


@dataclass(frozen=True)
class HostReport:
    """A living host."""

    node: str  # the id of its Ray node: another one after a restart of its machine
    notice: Notice | None = None  # it will end


@actor_message
class LogText(msgspec.Struct, frozen=True):
    """A part of a log."""

    text: str
    offset: int = 0  # of what follows, in bytes
    fault: Failure | None = None  # the known fault at the end of a dead process's log


class ClusterClient(Protocol):
    """The controller's operations on the cluster, its hosts and their replicas.

    ``name`` is an ``actor_name``; ``host`` is the planner's name of a host, by default the controller's own.
    """

    # The cluster

    async def lost_hosts(self) -> Mapping[str, Loss]:
        """Returns the hosts whose Ray node is dead or missing, by the planner's names, also those that are not kept: by
        Ray's last word, while its head is away. Cheap enough for every second."""
        ...

    def living_machines(self) -> Sequence[ClusterMachine]:
        """Returns the living machines of the joined cluster, as of the last ``lost_hosts``."""
        ...

    async def keep_hosts(self, hosts: Collection[str], elastic: Collection[Host]) -> Mapping[str, str]:
        """Use exactly these hosts. Request a machine for each of the ``elastic`` ones that has none, withdraw all
        other requests, and end what the fleet runs on machines that it does not use any more, so that they can be given
        back. Returns why machines are not started, by instance type. To be called again and again."""
        ...

    async def run_gateways(self, places: Collection[GatewayPlace]) -> Mapping[str, str]:
        """Run gateways at these places of the joined cluster, and none anywhere else. Returns once they run, or cannot
        start: with the reasons, by the labels of their machines."""
        ...

    async def host_reports(self) -> Mapping[str, HostReport]:
        """Returns the living hosts that reply, by the planner's names, with the notices that they or Ray have."""
        ...

    async def held_sources(self, sources: Collection[str]) -> Mapping[str, frozenset[str]]:
        """Returns which of these sources are completely stored, by host, of any date. Does not query the sources."""
        ...

    async def survivors(self) -> tuple[Sequence[Survivor], Mapping[str, int]]:
        """Returns the live replicas that an earlier controller started, and the epochs by id of those that did not
        answer and were killed."""
        ...

    # One host

    def fetch(self, wanted: WantedArtifact, host: str) -> AsyncGenerator[FetchStatus | FetchedArtifact | Failure, None]:
        """Fetch an artifact to the host; yield its status until its outcome. Concurrent fetches of an artifact are
        shared; one whose callers have all closed the generator is stopped. Raises HostLost."""
        ...

    async def prepare(self, step: StartStep, config: ReplicaConfig) -> Sequence[str] | Failure:
        """Run one step before a start on the replica's host, which has its artifacts, in a separate process that claims
        no core and reads no weights. Returns the failure, if any. Raises HostLost.

        ``check``: whether the replica can load its tokenizer, its config, the header of each weights file, and the
        engine's package in its interpreter. ``foresee``: returns descriptions of what a start would have to compile and
        can be compiled ahead, or a Failure (foresee-failed). ``compile``: compile that ahead; shared like ``fetch``,
        and stopped when all callers are cancelled.
        """
        ...

    async def stand_by(self, host: str, engines: Mapping[str, str | None]) -> None:
        """Keep the host ready for starts: a warm process of each of these engines and of no other, by the engine's
        Python, as far as its memory allows. To be called again and again. Raises HostLost."""
        ...

    async def interpreter(self, python: str | None, host: str | None = None) -> Interpreter:
        """Returns what the Python at that path on the host has installed; None: the default one of replicas there.

        Raises HostLost if the host does not answer.
        """
        ...

    async def held_cores(self, claims: str | None, host: str | None = None) -> dict[int, CoreOwner]:
        """Returns the cores that processes hold: by the ``claims`` of an emulated host, else from the Neuron tools."""
        ...

    async def device_metrics(self, host: str) -> list[MetricFamily]:
        """Returns the Neuron device metrics of the host, under neuron-monitor's names; none if the tool is missing."""
        ...

    async def read_log(
        self, path: str, lines: int, host: str | None = None, offset: int | None = None, *, ended: bool = False
    ) -> LogText:
        """Returns a part of a log from the byte ``offset``, by default its last ``lines``; empty if the host is lost.

        A log that is missing or shorter than ``offset`` is read from its beginning. ``ended``: the process has, so that
        its last line may be incomplete, and its fault is looked for.
        """
        ...

    # One replica

    async def start(self, config: ReplicaConfig) -> None:
        """Start the replica's process on ``config.host``. Returns at once; ``watch`` returns its status.

        Raises HostLost if the host is known to be lost.
        """
        ...

    async def watch(self, name: str, seen: int) -> ReplicaStatus:
        """Returns the replica's status once it is newer than ``seen``, or after a few seconds. Raises ReplicaDied."""
        ...

    async def set_adapters(self, config: ReplicaConfig) -> Failure | None:
        """Give a ready replica the adapters of the config, which are on its host. Returns the failure, if any. Raises
        ReplicaDied."""
        ...

    async def drain(self, name: str, timeout_s: float) -> bool:
        """Wait for the replica's live requests to end. Returns True if none is left, or if the replica is gone."""
        ...

    async def end(self, name: str, pid: int | None, started: float | None, host: str | None = None) -> bool:
        """Kill the replica. Returns True once its host has confirmed that no process is left.

        The process is also killed by pid and start time: it can outlive its actor briefly if its raylet has died. For
        a lost host, another host on the same machine confirms; a lost machine has no processes.
        """
        ...

    def actor_ids(self) -> Mapping[str, tuple[str, str]]:
        """Returns Ray's ids of each replica's actor and of its node, by the names of the actors."""
        ...
