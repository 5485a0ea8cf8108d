"""The status of a fleet: one typed value, from which commands, the console and the metrics read.

Its JSON is the answer of GET /admin/v1/status, and what `corewright status -o json` prints. Times are in seconds since
the epoch, durations in seconds. None means unknown or not applicable.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from orchestrator.messages.replica_states import ModelState, State
from workers.artifacts.fetch.progress import FetchStatus, size_text
from workers.messages.status import ServerLoad


class StatusFields(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the status."""


class ConditionStatus(StatusFields, frozen=True, kw_only=True):
    """One condition, in the form of Kubernetes."""

    type: str
    status: bool
    reason: str  # CamelCase, one word
    message: str
    since: float  # when it got its present value


class FetchProgress(StatusFields, frozen=True, kw_only=True):
    """The progress of a fetch."""

    source: str
    phase: str
    bytes: int
    total: int | None
    bytes_per_s: int | None
    left_s: float | None
    trouble: str | None  # why it makes no progress

    @classmethod
    def of(cls, status: FetchStatus) -> FetchProgress:
        """Returns the progress of a host's fetch."""
        return cls(
            source=status.source,
            phase=status.phase,
            bytes=status.done,
            total=status.total or None,
            bytes_per_s=round(status.rate) if status.rate else None,
            left_s=None if status.left_s is None else round(status.left_s, 1),
            trouble=status.trouble or None,
        )

    @property
    def tenths(self) -> int | None:
        """How many tenths are done."""
        return int(10 * self.bytes / self.total) if self.total else None

    @property
    def text(self) -> str:
        """The progress as text, such as "fetching s3://models/chat: 1.2 GB of 13.5 GB, 210.0 MB/s, 58 s left"."""
        numbers = self.numbers()
        return f"{self.phase} {self.source}" + (f": {numbers}" if numbers else "")

    def numbers(self, *, left: bool = True) -> str:
        """Returns the numbers as text, such as "1.2 GB of 13.5 GB, 210.0 MB/s, 58 s left"; ``left``: with the time that
        is left."""
        parts = []
        if self.total:
            parts.append(f"{size_text(self.bytes)} of {size_text(self.total)}")
        if self.bytes_per_s:
            parts.append(f"{size_text(self.bytes_per_s)}/s")
        if self.left_s is not None and left:
            parts.append(f"{self.left_s:.0f} s left")
        if self.trouble:
            parts.append(self.trouble)
        return ", ".join(parts)


class SpeculationStatus(StatusFields, frozen=True, kw_only=True):
    """The drafted and accepted tokens of a replica, since its start."""

    drafted: int
    accepted: int
    acceptance: float  # accepted / drafted


class ReplicaInFleet(StatusFields, frozen=True, kw_only=True):
    """One replica, as the controller last saw it."""

    id: str  # MODEL/NUMBER
    engine: str | None
    host: str
    cores: str | None  # as NEURON_RT_VISIBLE_CORES; None if the engine uses none
    state: State
    since: float
    phase: str | None  # of the load in progress
    pid: int | None
    epoch: int  # counts the starts of all replicas of the model
    version: str  # of its configuration
    restarts: int
    reason: str | None  # why it is not ready
    failures: int  # starts in a row that failed
    pause_s: float | None  # until the next attempt, from its failure
    stopped: bool  # its failure is permanent
    load_s: float | None  # of the last start, without fetching and compiling ahead
    load_phases: dict[str, float]
    compile_s: float
    compiled: bool | None  # whether that start compiled something
    fetch: FetchProgress | None
    live: int
    waiting: int
    speculation: SpeculationStatus | None
    server: ServerLoad | None  # of an engine that is a server
    log: list[str]  # the last lines, after a failure
    log_file: str

    @property
    def model(self) -> str:
        """The name of its model."""
        return self.id.rpartition("/")[0]

    @property
    def number(self) -> int:
        """Its number within the model."""
        return int(self.id.rpartition("/")[2])

    @property
    def ready(self) -> bool:
        """Whether it serves."""
        return self.state is State.READY


class ManualScale(StatusFields, frozen=True, kw_only=True):
    """A number of replicas that an operator has set; None: that of the spec."""

    count: int | None
    by: str


class DemandStatus(StatusFields, frozen=True, kw_only=True):
    """The demand for a model at all gateways."""

    arrivals_per_s: float
    waiting: int
    live: int
    items_per_s_of_replica: float | UnsetType = UNSET  # of an encoder: inputs per second that a replica encodes


class ScalingStatus(StatusFields, frozen=True, kw_only=True):
    """What the autoscaler does with a model."""

    auto: bool
    min: int
    max: int
    target: int
    why: str | None  # the last reason
    demand: DemandStatus | None  # None without a gateway that reports


class ParkedStatus(StatusFields, frozen=True, kw_only=True):
    """The host that the last replica of a model without replicas was on, and the expected time of a start."""

    host: str
    start_s: float


class PreparationStatus(StatusFields, frozen=True, kw_only=True):
    """What an update of a model waits for on a host while the old replicas serve."""

    host: str
    version: str
    state: str
    failures: int
    reason: str | None


class ModelInFleet(StatusFields, frozen=True, kw_only=True):
    """One model of the running revision."""

    name: str
    kind: str
    state: ModelState
    reason: str | None  # why it is not ready
    parked: ParkedStatus | None
    wanted: int  # replicas
    scaled: ManualScale | None
    scaling: ScalingStatus
    version: str
    preparing: list[PreparationStatus]
    conditions: list[ConditionStatus]
    replicas: list[ReplicaInFleet]

    def holds(self, condition: str) -> bool:
        """Returns whether a condition holds."""
        return any(item.status for item in self.conditions if item.type == condition)

    @property
    def ready(self) -> int:
        """The number of ready replicas."""
        return sum(replica.ready for replica in self.replicas)


class StartingHost(StatusFields, frozen=True, kw_only=True):
    """A host whose machine is requested and has not joined."""

    since: float
    reason: str | None


class AnnouncedEnd(StatusFields, frozen=True, kw_only=True):
    """A host that was announced to end."""

    cause: str
    until: float | None


class QuarantinedCore(StatusFields, frozen=True, kw_only=True):
    """A core without a replica: a foreign process holds it, or it has failed (``cause``)."""

    core: int
    pid: int | None
    command: str | None
    cause: str | None


class CoreLease(StatusFields, frozen=True, kw_only=True):
    """The cores of a replica."""

    replica: str
    cores: str


class HostInFleet(StatusFields, frozen=True, kw_only=True):
    """One host, and its cores by state: together all of its cores."""

    name: str
    instance: str | None
    emulated: bool
    lost: bool
    starting: StartingHost | None
    cores: int
    leased: int
    free: int
    free_cordoned: int
    quarantined: int
    reserved: int
    reserved_cores: list[str]  # ranges
    balanced: bool  # whether the counts add up
    cordoned: str | list[str]  # "all", or ranges
    draining: bool
    busy: int  # its replicas, and the requests in its gateways: without any, its machine can be stopped
    node: str | None  # its Ray node, a new one after a restart of Ray
    leaving: AnnouncedEnd | None
    quarantine: list[QuarantinedCore]
    fetches: list[FetchProgress]
    leases: list[CoreLease]

    @property
    def cores_by_state(self) -> dict[str, int]:
        """The numbers of cores, which add up to all cores of the host."""
        return {
            "leased": self.leased,
            "free": self.free,
            "cordoned": self.free_cordoned,
            "quarantined": self.quarantined,
            "reserved": self.reserved,
        }

    @property
    def state(self) -> str:
        """Its state in one word."""
        return "lost" if self.lost else "starting" if self.starting else "ready"


class GatewayInFleet(StatusFields, frozen=True, kw_only=True):
    """The gateway of one machine of a joined cluster."""

    machine: str
    host: str | None
    address: str | None
    state: str
    reason: str | None
    version: str | None
    routes_age_s: float | None


class ModelRollout(StatusFields, frozen=True, kw_only=True):
    """The progress of one model's update."""

    model: str
    strategy: str | None
    wanted: int
    updated: int
    ready: int
    old: int
    state: str


class RolloutStatus(StatusFields, frozen=True, kw_only=True):
    """The progress of the newest revision."""

    revision: int
    state: str
    reason: str
    since: float
    canary: float | None  # its share of the requests
    models: list[ModelRollout]


class RolloutReport(RolloutStatus, frozen=True, kw_only=True):
    """The progress of the newest revision, and the earlier one that an undo applies."""

    undo: int | None  # the revision that `rollout undo` applies; None: there is none
    undo_skips: list[int]  # later ones that it does not return to, since they failed


class RevisionRow(StatusFields, frozen=True, kw_only=True):
    """A revision of the journal."""

    revision: int
    at: float
    by: str
    cause: str
    of: int | None  # the revision that it restores
    state: str
    reason: str
    changes: str  # in one line


class RevisionText(RevisionRow, frozen=True, kw_only=True):
    """A revision with its spec, and the summary of its plan."""

    text: str
    file: str
    base_dir: str
    plan: dict[str, Any]  # as the journal has it: older versions wrote other keys


class EventRow(StatusFields, frozen=True, kw_only=True):
    """An event of the journal."""

    seq: int
    at: float
    level: str
    reason: str  # CamelCase, one word
    message: str
    model: str | None
    replica: str | None
    host: str | None


class EventPage(StatusFields, frozen=True, kw_only=True):
    """Events, oldest first, and the ``after`` of the next request."""

    events: list[EventRow]
    next: int


class FleetStatus(StatusFields, frozen=True, kw_only=True):
    """A fleet at one time."""

    name: str
    ready: bool
    revision: int
    index: int  # of the journal's last change of what the fleet should be
    settled: bool  # every replica that has a place is ready, by a plan that knows this change
    rollout: RolloutStatus
    conditions: list[ConditionStatus]
    models: list[ModelInFleet]
    hosts: list[HostInFleet]
    gateways: list[GatewayInFleet]

    @property
    def replicas(self) -> list[ReplicaInFleet]:
        """All replicas, by model."""
        return [replica for model in self.models for replica in model.replicas]

    @property
    def hold(self) -> str:
        """Why the fleet carries out no actions until an operator confirms its revision; empty: it does."""
        broken = (item for item in self.conditions if item.type == "JournalIntact" and not item.status)
        return next((item.message for item in broken), "")
