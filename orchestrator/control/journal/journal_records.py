"""What the controller must remember across a crash: the records of the journal, and the state that they add up to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeVar

import msgspec

from workers.messages.replica_config import ADAPTERS, DRAFT, SOURCE, Origin, key_of


class Record(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag=str.lower):
    """Fields of every record, set by ``Journal.append``."""

    seq: int = 0  # 1, 2, ... without gaps
    at: float = 0.0  # seconds since the epoch, by the wall clock


class Revision(Record, frozen=True, kw_only=True):
    """A new revision of the spec. An apply writes exactly one, so a crash leaves either the old or the new one."""

    number: int
    fleet: str = ""  # the id of its `up`
    cause: Literal["up", "apply", "undo", "rollback", "watch"]
    by: str
    text: str  # the spec
    file: str  # the spec's file
    base_dir: str  # of its relative paths
    of: int | None  # the revision that it restores
    plan: dict[str, Any]  # the summary that `rollout history` shows
    canary: float | None = None  # share of the requests for the new version, 0 to 1


class RolloutState(Record, frozen=True, kw_only=True, tag="rollout"):
    """The state of a revision's rollout."""

    revision: int
    state: Literal["progressing", "paused", "complete", "failed", "rolled_back"]
    reason: str
    promoted: bool = False  # an operator promoted its canary


class Scale(Record, frozen=True, kw_only=True):
    """A manual scale of a model."""

    model: str
    count: int | None  # None: the spec's
    by: str
    sleep: bool = False  # unloaded manually: requests do not start it


class Target(Record, frozen=True, kw_only=True):
    """The autoscaler's target for a model."""

    model: str
    count: int | None  # None: the spec and the requests decide


class Cordon(Record, frozen=True, kw_only=True):
    """A cordon or uncordon of cores. Running replicas continue."""

    host: str
    cores: list[int] | None  # None: the whole host
    on: bool
    by: str
    drain: bool = False  # replicas there are moved


class Departure(Record, frozen=True, kw_only=True):
    """A host that will end, or no longer will: no replica is placed there, and those that it has are moved."""

    host: str
    on: bool
    cause: str = ""  # whose notice it is, or the operator
    until: float | None = None  # when the host may be gone, by the wall clock; None: it has no deadline
    noticed: bool = False  # it ends with the notice, not by an operator


class HostUse(Record, frozen=True, kw_only=True):
    """The use of a host that comes and goes."""

    host: str
    state: Literal["requested", "joined", "released"]
    start_s: float | None = None  # from the request of its machine until it joined


class Replace(Record, frozen=True, kw_only=True):
    """A request for a new process of a replica: processes up to this epoch are replaced."""

    model: str
    replica: int
    epoch: int
    by: str


class Pin(Record, frozen=True, kw_only=True):
    """The content that all replicas of a version load: that of the first one's fetch. Without one, it is removed."""

    model: str
    version: str
    origin: Origin | None
    draft_origin: Origin | None = None
    adapter_origins: dict[str, Origin] = {}  # by name
    contents: dict[str, str] = {}  # by host, the fingerprint of the local folders that its first replica loaded

    @property
    def key(self) -> str:
        return f"{self.model}@{self.version}"

    @property
    def origins(self) -> dict[str, Origin]:
        """The contents by `replica_config.key_of`."""
        named = {SOURCE: self.origin, DRAFT: self.draft_origin}
        named |= {(ADAPTERS, name): origin for name, origin in self.adapter_origins.items()}
        return {key_of(keys): origin for keys, origin in named.items() if origin is not None}


def pin_of(model: str, version: str, origins: Mapping[str, Origin], contents: Mapping[str, str] | None = None) -> Pin:
    """Returns the record that pins contents, which are the same on all hosts; without ``origins``, that ends a pin."""
    pinned = {key: msgspec.structs.replace(origin, folder="") for key, origin in origins.items()}
    source, draft = pinned.pop(key_of(SOURCE), None), pinned.pop(key_of(DRAFT), None)
    adapters = {key.removeprefix(f"{ADAPTERS}."): origin for key, origin in pinned.items()}
    return Pin(
        model=model,
        version=version,
        origin=source,
        draft_origin=draft,
        adapter_origins=adapters,
        contents=dict(contents or {}),
    )


class Quarantine(Record, frozen=True, kw_only=True):
    """The start or end of a core's quarantine: a foreign process holds it, or it has failed."""

    host: str
    core: int
    on: bool
    pid: int | None  # of its owner, if known
    command: str | None
    cause: str = ""  # of a failed core, which stays in quarantine until an operator clears it


class Decision(Record, frozen=True, kw_only=True):
    """An action on one start of a replica, recorded before it is executed."""

    action: Literal["start", "drain", "stop", "fail", "forget"]
    model: str
    replica: int
    epoch: int
    host: str
    cores: list[int]
    version: str
    reason: str


class ReadyStart(Record, frozen=True, kw_only=True):
    """A start that ended in readiness: how long the model's next one may take, and where its version has served."""

    model: str
    version: str
    engine: str
    host: str
    phases: dict[str, float]  # its seconds by `start_phases.PHASES`, without fetching and compiling


class Damage(Record, frozen=True, kw_only=True):
    """The file before this record is damaged and may have lost a newer revision, so the fleet is held until an operator
    applies a spec."""

    what: str


class Event(Record, frozen=True, kw_only=True):
    """An event for operators, shown by `corewright events`. No decision depends on it."""

    level: Literal["info", "warning", "error"]
    reason: str  # CamelCase, one word for each kind of event
    message: str
    model: str | None = None
    replica: str | None = None  # `model/n`
    host: str | None = None


Cordoned = frozenset[int] | Literal["whole"]


class JournalState(msgspec.Struct, frozen=True, kw_only=True):
    """The fold of all records up to ``seq``. Immutable."""

    seq: int = 0
    index: int = 0  # seq of the last record that is neither event nor rollout state, for `--check-index`
    revision: int | None = None  # the current one's number; None before the first
    revisions: Mapping[int, Revision] = msgspec.field(default_factory=dict)  # by number, the newest KEEP_REVISIONS
    scales: Mapping[str, Scale] = msgspec.field(default_factory=dict)  # by model; missing if the spec decides
    targets: Mapping[str, int] = msgspec.field(default_factory=dict)  # by model; missing if the spec decides
    outcomes: Mapping[int, RolloutState] = msgspec.field(default_factory=dict)  # the latest by revision, equally many
    completed: int | None = None  # the latest revision whose rollout completed
    promoted: int | None = None  # the latest revision whose canary was promoted
    cordons: Mapping[str, Cordoned] = msgspec.field(default_factory=dict)  # by host; missing if nothing is cordoned
    drains: frozenset[str] = frozenset()  # completely cordoned hosts that are to be emptied
    departures: Mapping[str, Departure] = msgspec.field(default_factory=dict)  # by host
    uses: Mapping[str, HostUse] = msgspec.field(default_factory=dict)  # by host; missing if it is not used
    host_starts: Mapping[str, float] = msgspec.field(default_factory=dict)  # seconds of the last one, by instance type
    replaces: Mapping[str, int] = msgspec.field(default_factory=dict)  # the epoch to replace, by `model/n`
    quarantines: Mapping[str, Mapping[int, Quarantine]] = msgspec.field(default_factory=dict)  # by host and core
    epochs: Mapping[str, int] = msgspec.field(default_factory=dict)  # the highest one, by `model/n`
    pins: Mapping[str, Pin] = msgspec.field(default_factory=dict)  # by `Pin.key`, since this `up`
    starts: Mapping[str, int] = msgspec.field(default_factory=dict)  # by `model/n`, since this `up` or Forget
    ready_starts: Mapping[str, tuple[ReadyStart, ...]] = msgspec.field(default_factory=dict)  # by model, since this
    # `up`; the newest KEEP_STARTS, the last one first
    held: str | None = None  # the damage that holds the fleet; None: it is not held

    @property
    def next_revision(self) -> int:
        """The next unused revision number. A lost revision may have left its outcome."""
        return max(self.revision or 0, self.completed or 0, self.promoted or 0, *self.outcomes) + 1


class Snapshot(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="snapshot"):
    """Replaces all records up to and including ``seq``: after a compaction, or on a new head by the cluster's copy."""

    seq: int
    at: float
    state: JournalState


AnyRecord = (
    Revision
    | RolloutState
    | Scale
    | Target
    | Cordon
    | Departure
    | HostUse
    | Replace
    | Pin
    | Quarantine
    | Decision
    | ReadyStart
    | Damage
    | Event
    | Snapshot
)
R = TypeVar("R", bound=Record)
