"""The fields of a model that control its scaling: objectives, schedules and bounds."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from placements.spec.notation import CRON_WANTED, Cron, Frozen, Milliseconds, Reported, Seconds, Zone, in_words


class Objectives(Frozen):
    """Objectives of a model's requests."""

    wanted = "a mapping, like {ttft_ms: 500}"
    ttft_ms: Annotated[Milliseconds, Field(gt=0, le=86_400_000)] | None = None
    """Milliseconds until the first token; of encoders, until the answer. Later requests count as late, and the
    autoscaler minimizes them."""
    tpot_ms: Annotated[Milliseconds, Field(gt=0, le=86_400_000)] | None = None
    """Milliseconds between tokens."""
    queue_ms: Annotated[Milliseconds, Field(gt=0, le=86_400_000)] | None = None
    """Milliseconds that a request may wait for a slot."""
    items_per_second: Annotated[float, Field(gt=0, le=1_000_000_000)] | None = None
    """Inputs per second that the replicas of an encoder should be able to encode, whatever the demand. The autoscaler
    measures what one replica encodes, and raises `min` accordingly, up to `max`. A model with `min: 0` still scales to
    zero."""


class Schedule(Frozen):
    """Other bounds of a model's replicas from each ``start`` to the next ``end``."""

    wanted = 'a mapping with a start and an end, like {start: "0 8 * * *", end: "0 18 * * *", min: 2}'
    start: Annotated[Cron, Reported(CRON_WANTED, id="bad-cron", hint='write it like "0 8 * * MON-FRI"')]
    """When it begins: a cron expression of five fields, like `0 8 * * MON-FRI`."""
    end: Annotated[Cron, Reported(CRON_WANTED, id="bad-cron", hint='write it like "0 18 * * MON-FRI"')]
    """When it ends: a cron expression of five fields, like `0 18 * * MON-FRI`."""
    timezone: Zone = "UTC"
    """The time zone of `start` and `end`, like `Europe/Berlin`."""
    min: Annotated[int, Field(ge=0, le=1000)] | None = None
    """The least replicas during the schedule. Unset: `replicas.min`."""
    max: Annotated[int, Field(ge=0, le=1000)] | None = None
    """The most replicas during the schedule. Unset: `replicas.max`."""


class Scaling(Frozen):
    """Automatic scaling of a model's replicas."""

    wanted = "a mapping, like {idle_s: 600}"
    auto: bool = True
    """Makes the number of replicas follow the load, between `replicas.min` and `replicas.max`. With false, `min`
    replicas run; the first request still starts a model with `min: 0`."""
    idle_s: Seconds[Annotated[float, Field(ge=0, le=31_536_000)]] = 600.0
    """Seconds without an inference request after which a model with `min: 0` scales to zero, counted from when its
    first replica was ready."""
    hold_s: Seconds[Annotated[float, Field(ge=0, le=86_400)]] = 300.0
    """The most seconds that a request waits for a model without a ready replica: one with `min: 0` that it
    starts, one whose replica an update swaps with `hold`, or one whose replicas cannot be reached."""
    schedules: Annotated[
        tuple[Schedule, ...],
        Reported('a list, like [{start: "0 8 * * *", end: "0 18 * * *", min: 2}]'),
    ] = Field((), strict=False, json_schema_extra=in_words("list of mappings"))
    """Other bounds on a schedule. See Schedules."""
    worth_per_1000: Annotated[float, Field(ge=0, le=1_000_000_000)] | None = None
    """The value of 1000 requests, in the currency of `hosts.price_per_core_hour`. A replica beyond `min` then starts
    only on a host where its value exceeds the cost of its cores. Unset: on priced hosts it starts only if the load
    exceeds the running replicas."""
