"""The types of the admin API: requests, answers and refusals. Their JSON Schemas are in its OpenAPI document.

Times are in seconds since the epoch, durations in seconds. None means unknown or not applicable.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec

from orchestrator.control.decisions.changes import FieldChange
from orchestrator.messages.controller_settings import LONGEST_WAIT_S
from orchestrator.messages.fleet_status import RevisionRow
from orchestrator.process.failure import Failed
from orchestrator.scaling.demand_report import LiveRequest, RoutingDecision
from placements.explain.explanation import Constraint
from placements.spec.problems import Problem

# Requests. An unknown field is rejected.


class Fields(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fields of a request; as it is, a request without fields."""


class EmptyBody(Fields, frozen=True):
    """No fields."""


class SpecText(Fields, frozen=True, kw_only=True):
    """The text of a spec file."""

    text: str
    file: Annotated[str, msgspec.Meta(min_length=1, description="The file's name in problems.")]
    base_dir: Annotated[
        str, msgspec.Meta(pattern="^/", description="The folder that relative paths in the spec refer to.")
    ]


class SpecToPlan(SpecText, frozen=True, kw_only=True):
    """A spec, and optionally the number of contiguous cores to free."""

    defrag: (
        Annotated[int, msgspec.Meta(ge=1, le=1000, description="Show the moves that free this many contiguous cores.")]
        | None
    ) = None


class SpecToExplain(SpecText, frozen=True, kw_only=True):
    """A spec and one of its models."""

    model: str


CheckIndex = Annotated[int, msgspec.Meta(ge=0, description="Refuse if the fleet's index differs.")] | None


class SpecToApply(SpecText, frozen=True, kw_only=True):
    """A spec and the options of an apply."""

    check_index: CheckIndex = None
    canary: (
        Annotated[float, msgspec.Meta(gt=0, lt=1, description="The share of requests for the new version.")] | None
    ) = None


class ModelName(Fields, frozen=True, kw_only=True):
    model: str
    check_index: CheckIndex = None


class ActionToPreview(Fields, frozen=True, kw_only=True):
    """A manual change, and what it is about."""

    action: Literal["scale", "load", "unload", "restart", "drain"]
    target: Annotated[str, msgspec.Meta(description="A model; of a drain a host's name or a replica's id.")]
    count: Annotated[int, msgspec.Meta(ge=0, description="Of scale; null: the number of the spec.")] | None = None


class ReplicaCount(Fields, frozen=True, kw_only=True):
    model: str
    count: Annotated[int, msgspec.Meta(ge=0, description="null: the number of the spec.")] | None
    check_index: CheckIndex = None


class RequestId(Fields, frozen=True, kw_only=True):
    request: Annotated[str, msgspec.Meta(min_length=1, description="The x-request-id of its response.")]


class UndoTarget(Fields, frozen=True, kw_only=True):
    to: Annotated[int, msgspec.Meta(ge=1, description="null: the previous revision.")] | None = None
    check_index: CheckIndex = None


class HostCores(Fields, frozen=True, kw_only=True):
    host: str
    cores: (
        Annotated[
            str, msgspec.Meta(pattern=r"^\d+(-\d+)?$", description='For example "3" or "0-3"; null: the whole host.')
        ]
        | None
    ) = None


class HostOrReplica(Fields, frozen=True, kw_only=True):
    target: Annotated[str, msgspec.Meta(description="A host's name or a replica's id.")]
    deadline_s: (
        Annotated[float, msgspec.Meta(gt=0, le=31_536_000, description="The host is empty after so many seconds.")]
        | None
    ) = None
    keep_served: Annotated[
        bool, msgspec.Meta(description="Refuse a deadline by which a model would have no replica at all.")
    ] = False
    check_index: CheckIndex = None


class RevisionNumber(Fields, frozen=True, kw_only=True):
    number: Annotated[int, msgspec.Meta(ge=1)]


Wait = Annotated[float, msgspec.Meta(ge=0, le=LONGEST_WAIT_S, description="Seconds to wait for new data.")]


class EventsQuery(Fields, frozen=True, kw_only=True):
    after: Annotated[int, msgspec.Meta(ge=0, description="Return only events with a greater seq.")] = 0
    limit: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 100
    wait_s: Wait = 0.0
    model: str | None = None


class LogQuery(Fields, frozen=True, kw_only=True):
    model: str
    replica: Annotated[int, msgspec.Meta(ge=0)] | None = None
    offset: Annotated[int, msgspec.Meta(ge=0, description="Return only what follows this byte offset.")] | None = None
    wait_s: Wait = 0.0


class TraceQuery(Fields, frozen=True, kw_only=True):
    after: Annotated[
        str, msgspec.Meta(description="The `next` of an earlier response; empty: start with the oldest.")
    ] = ""
    limit: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 1000


# Answers


class AdminAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON object of a response."""


class RunningSpec(AdminAnswer, frozen=True, kw_only=True):
    """The spec of the running revision."""

    file: str
    base_dir: str
    text: str
    revision: int


class RevisionList(AdminAnswer, frozen=True, kw_only=True):
    """All revisions in the journal, newest first."""

    revisions: list[RevisionRow]


class LogPart(AdminAnswer, frozen=True, kw_only=True):
    """A part of a replica's log, and the byte offset at its end."""

    replica: str
    file: str
    offset: int
    text: str


class RecordedRequest(AdminAnswer, frozen=True, kw_only=True):
    """A request of the trace, without texts."""

    time: float
    model: str
    prompt_tokens: int
    output_tokens: int
    key: str
    first_ms: float
    decode_ms: float


class ReplicaShape(AdminAnswer, frozen=True, kw_only=True):
    """The load time of a model's replicas, since when they run so, and their shape."""

    load_s: float | None
    since: float
    shape: dict[str, Any]  # of `calibration.shape_of`


class TracePage(AdminAnswer, frozen=True, kw_only=True):
    """Recorded requests, and the ``after`` of the next page."""

    requests: list[RecordedRequest]
    next: str
    more: bool
    speeds: dict[str, ReplicaShape]


class ShapeSpeeds(AdminAnswer, frozen=True, kw_only=True):
    """The measured speeds of replicas of one shape."""

    speeds: dict[str, float]
    requests: int | None
    shape: dict[str, Any] | None


class SpeedList(AdminAnswer, frozen=True, kw_only=True):
    """The speeds that the fleet has measured."""

    speeds: list[ShapeSpeeds]


class LoadSamples(AdminAnswer, frozen=True, kw_only=True):
    """The times of the samples, and a list of values for each figure of each model."""

    at: list[float]
    models: dict[str, dict[str, list[float | None]]]


class DecisionRow(RoutingDecision, frozen=True, kw_only=True, omit_defaults=False):
    """How a request was routed to its replica."""


class RequestRow(LiveRequest, frozen=True, kw_only=True, omit_defaults=False):
    """A request in a queue or a slot, or one that has ended."""

    decision: DecisionRow | None = None


class RequestList(AdminAnswer, frozen=True, kw_only=True):
    """The open requests, the oldest first, then those that have ended, the last first."""

    requests: list[RequestRow]


class SettingValue(AdminAnswer, frozen=True, kw_only=True):
    """A setting of `up`."""

    name: str
    value: Any
    origin: Annotated[str, msgspec.Meta(description="flag, environment, file or default")]
    where: str = ""


class SettingList(AdminAnswer, frozen=True, kw_only=True):
    """The settings of this fleet."""

    values: list[SettingValue]


class CancelledRequest(AdminAnswer, frozen=True, kw_only=True):
    """The request; its gateway ends it, and others of the same id, within a second or so."""

    request: str


class ModelScale(AdminAnswer, frozen=True, kw_only=True):
    """The replicas of a model after a change by hand; ``scaled`` null: as in the spec."""

    model: str
    scaled: int | None
    wanted: int


class ReplacedReplica(AdminAnswer, frozen=True, kw_only=True):
    """A replica that gets a new process, and the epoch of its present one."""

    replica: str
    epoch: int


class Stopping(AdminAnswer, frozen=True, kw_only=True):
    """The fleet drains and stops."""

    stopping: bool = True


# Answers: plans


class PlacedReplica(AdminAnswer, frozen=True, kw_only=True):
    """A replica with its cores and its environment."""

    model: str
    replica: int
    host: str
    cores: str | None
    threads: int
    env: dict[str, str]


class UnplacedReplica(AdminAnswer, frozen=True, kw_only=True):
    """A replica without a place, and why."""

    model: str
    replica: int
    problems: list[Problem]


class CoreSpot(AdminAnswer, frozen=True, kw_only=True):
    """Cores of a host."""

    host: str
    cores: str | None


class CoreMove(AdminAnswer, frozen=True, kw_only=True):
    """A running replica that gets other cores."""

    model: str
    replica: int
    from_: CoreSpot = msgspec.field(name="from")
    to: CoreSpot


class TimedMove(CoreMove, frozen=True, kw_only=True):
    """A move, and the time that the replica needs to load."""

    load_s: float | None


class ThreadAccount(AdminAnswer, frozen=True, kw_only=True):
    """The threads of a model's replicas on a host."""

    model: str
    replicas: int
    each: int
    arithmetic: str
    together: int


class HostAccount(AdminAnswer, frozen=True, kw_only=True):
    """A host, and what its replicas use of it."""

    name: str
    instance: str | None
    emulated: bool
    lnc: int | None
    cores: int
    reserved: list[str]
    cordoned: list[str]
    quarantined: list[str]
    cpus: int
    reserve_vcpus: int
    threads: int
    thread_ledger: list[ThreadAccount]
    memory_gib: float | None
    load_gib: float


class MemoryClass(AdminAnswer, frozen=True, kw_only=True):
    """What a core's memory is used for."""

    name: str = msgspec.field(name="class")
    gib: float


class ReplicaHostMemory(AdminAnswer, frozen=True, kw_only=True):
    """The memory of the host that a replica needs."""

    load_gib: float
    serving_gib: float
    compile_gib: float


class MeasuredSurplus(AdminAnswer, frozen=True, kw_only=True):
    """The memory that `corewright verify` measured beyond the estimates. ``usable_gib`` excludes it, and the host's
    memory includes it."""

    hbm_gib: float
    host_gib: float


class MemoryAccount(AdminAnswer, frozen=True, kw_only=True):
    """The memory that a replica needs on one type of host."""

    model: str
    instance: str
    lnc: int | None
    engine: str
    classes: list[MemoryClass]
    total_gib: float
    others_gib: float
    usable_gib: float
    hbm_gib: float
    host: ReplicaHostMemory
    measured: MeasuredSurplus


class SpeedRow(AdminAnswer, frozen=True, kw_only=True):
    """The speed of a model's replicas, as estimated or measured."""

    model: str
    tokens_per_s: float
    step_ms: float
    prefill_base_ms: float
    prefill_token_ms: float
    prefill_square_ns: float
    load_s: float
    decode_error: float
    prefill_error: float
    measured_requests: int | None
    source: str


class HostToAdd(AdminAnswer, frozen=True, kw_only=True):
    """A host whose machine is requested."""

    host: str
    instance: str
    price_per_hour: float
    replicas: list[str]


class ReplicaChange(AdminAnswer, frozen=True, kw_only=True):
    """What happens to a replica."""

    replica: str
    change: Literal["start", "stop", "move", "restart"]


class CountChange(AdminAnswer, frozen=True, kw_only=True):
    """The numbers of a model's replicas."""

    before: int
    after: int


class PlannedModel(AdminAnswer, frozen=True, kw_only=True):
    """What an apply does to a model."""

    model: str
    action: str
    tag: str
    fields: list[FieldChange]
    replicas: CountChange
    strategy: str | None
    outage_s: float | None
    predicted_s: float | None
    why: str
    possible: bool


class AtIndex(AdminAnswer, frozen=True, kw_only=True):
    """A preview of a fleet with this index and revision."""

    index: int
    revision: int


class ApplyPreview(AtIndex, frozen=True, kw_only=True):
    """What an apply would change."""

    placements: list[PlacedReplica]
    unplaced: list[UnplacedReplica]
    moves: list[CoreMove]
    problems: list[Problem]
    changes: list[ReplicaChange]
    models: list[PlannedModel]
    hosts_to_add: list[HostToAdd]
    speeds: list[SpeedRow]
    hosts: list[HostAccount]
    memory: list[MemoryAccount]


class DefragPreview(AtIndex, frozen=True, kw_only=True):
    """The moves that free contiguous cores; ``window`` null: there are none."""

    cores: int
    window: CoreSpot | None
    moves: list[TimedMove]
    load_s: float | None
    placements: list[PlacedReplica]
    hosts: list[HostAccount]
    problems: list[Problem]


class PlannedUpdate(AdminAnswer, frozen=True, kw_only=True):
    """How the replicas of a model are replaced."""

    model: str
    strategy: str
    outage_s: float | None
    why: str


class ChangePreview(AtIndex, frozen=True, kw_only=True):
    """What a change by hand would do; ``refusal``: why it would be refused."""

    changes: list[ReplicaChange]
    placements: list[PlacedReplica]
    unplaced: list[UnplacedReplica]
    strategies: list[PlannedUpdate]
    refusal: str | None


class ExplainedReplica(AdminAnswer, frozen=True, kw_only=True):
    """A placed replica, and the reasons for its place."""

    replica: str
    host: str
    cores: str | None
    threads: int
    why: list[str]


class SuggestionRow(AdminAnswer, frozen=True, kw_only=True):
    """A change that would help."""

    id: str
    change: str
    gives: str
    moves: list[CoreMove]


class ModelExplanation(AtIndex, frozen=True, kw_only=True):
    """Why a model is placed where it is, or is not placed."""

    model: str
    fits: bool
    priority: int
    min: int
    wanted: int
    replicas: list[ExplainedReplica]
    failed: list[Constraint]
    holds: list[Constraint]
    suggestions: list[SuggestionRow]
    tried: str


class Applied(AtIndex, frozen=True, kw_only=True):
    """The revision, and the plan that it follows."""

    changed: bool
    plan: ApplyPreview


class Undone(Applied, frozen=True, kw_only=True):
    """The revision, its plan, and the revision that it repeats."""

    of: int


# Refusals


class Reason(msgspec.Struct, frozen=True, kw_only=True):
    code: Annotated[str, msgspec.Meta(description="Listed in docs/errors.md.")]
    message: str
    hint: str = ""


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """The body of every response with a status of 400 or above."""

    error: Reason
    problems: list[Problem] = []


class OperationRefused(Failed):
    """An operation that was refused and has changed nothing; ``problems`` are those of the spec, if there is one."""

    def __init__(self, id: str, what: str, hint: str, *, status: int = 409, problems: Sequence[Problem] = ()) -> None:
        """``status`` is the HTTP status: 400 for a malformed request, 404 for an unknown object, 409 if the state of
        the fleet does not allow it, 422 for a spec with errors, 507 if the journal cannot be written."""
        super().__init__(id, what, hint)
        self.status = status
        self.problems = tuple(problems)
