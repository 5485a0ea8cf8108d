"""The schemas of the admin API: bodies and queries of requests, and the body of a refusal."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from orchestrator.fleet.controller_settings import LONGEST_WAIT_S

# Requests. An unknown field is rejected.


class Fields(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fields of a request."""


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


# Refusals


class Reason(msgspec.Struct, frozen=True, kw_only=True):
    code: Annotated[str, msgspec.Meta(description="Listed in docs/errors.md.")]
    message: str
    hint: str = ""


class SpecProblem(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    severity: str
    where: str
    what: str
    hint: str


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """The body of every response with a status of 400 or above."""

    error: Reason
    problems: list[SpecProblem] = []
