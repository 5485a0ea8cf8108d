"""Which bounds a model's number of replicas has at a time: those of the spec, and of the schedules that hold. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from zoneinfo import ZoneInfo

from cronsim import CronSim

from placements.spec.schema import Replicas, Schedule

TWICE_S = 7200
"""More than any zone's clock goes back at once."""


@dataclass(frozen=True)
class Bounds:
    """How many replicas a model has at least, and at most."""

    min: int
    max: int


def bounds(replicas: Replicas, schedules: Sequence[Schedule], at: float) -> Bounds:
    """Those that hold at ``at``, in seconds since the epoch; they change on whole minutes only.

    Of several schedules that hold, the greatest ``min`` and the least ``max`` count; ``min`` comes before ``max``, and
    `replicas.max` before both.
    """
    holding = [schedule for schedule in schedules if holds(schedule, at)]
    least = [schedule.min for schedule in holding if schedule.min is not None]
    most = [schedule.max for schedule in holding if schedule.max is not None]
    low = min(max(least, default=replicas.min), replicas.max)
    return Bounds(low, max(low, min([*most, replicas.max])))


def holds(schedule: Schedule, at: float) -> bool:
    """Whether ``at`` lies between a start and the next end. Start and end at the same moment: it begins."""
    zone = ZoneInfo(schedule.timezone)
    began, ended = (_last(cron, at, zone) for cron in (schedule.start, schedule.end))
    return began is not None and (ended is None or ended <= began)


def _last(cron: str, at: float, zone: ZoneInfo) -> float | None:
    """The last moment of a cron expression up to ``at``, in seconds since the epoch; None where there is none.

    It is looked for from a while later: in the hour that clocks show twice, what they have shown already would else
    seem to lie ahead.
    """
    later = datetime.fromtimestamp(math.floor(at) + TWICE_S, zone)
    moments = (moment.timestamp() for moment in CronSim(cron, later, reverse=True))
    return next((moment for moment in moments if moment <= at), None)
