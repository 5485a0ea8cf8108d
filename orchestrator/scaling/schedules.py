"""The bounds of a model's number of replicas at a time, from its spec and the active schedules. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import datetime
from functools import lru_cache
from typing import NamedTuple
from zoneinfo import ZoneInfo

from cronsim import CronSim

from placements.spec.schema import ModelSpec, Replicas
from placements.spec.sections import Schedule

TWICE_S = 7200
"""More than the largest backward step of any zone's clock."""


class Bounds(NamedTuple):
    """The minimum and maximum number of replicas of a model."""

    min: int
    max: int


def bounds(model: ModelSpec, at: float) -> Bounds:
    """Returns the bounds of a model at ``at``, in seconds since the epoch; they change on whole minutes only.

    Of several active schedules, the greatest ``min`` and the least ``max`` count; ``min`` takes precedence over
    ``max``, and `replicas.max` over both.
    """
    return _bounds(model.replicas, model.scaling.schedules, at // 60 * 60)


@lru_cache(maxsize=256)
def _bounds(replicas: Replicas, schedules: Sequence[Schedule], minute: float) -> Bounds:
    active = [schedule for schedule in schedules if is_active(schedule, minute)]
    least = [schedule.min for schedule in active if schedule.min is not None]
    most = [schedule.max for schedule in active if schedule.max is not None]
    low = min(max(least, default=replicas.min), replicas.max)
    return Bounds(low, max(low, min([*most, replicas.max])))


def is_active(schedule: Schedule, at: float) -> bool:
    """Returns whether ``at`` is between a start and the next end; a start precedes an end at the same moment."""
    zone = ZoneInfo(schedule.timezone)
    began, ended = (_last(cron, at, zone) for cron in (schedule.start, schedule.end))
    return began is not None and (ended is None or ended <= began)


def _last(cron: str, at: float, zone: ZoneInfo) -> float | None:
    """Returns the last moment of a cron expression up to ``at``, in seconds since the epoch; None if there is none.

    The search starts later than ``at``: in the hour that local clocks show twice, moments of the first pass would
    otherwise count as future ones.
    """
    later = datetime.fromtimestamp(math.floor(at) + TWICE_S, zone)
    moments = (moment.timestamp() for moment in CronSim(cron, later, reverse=True))
    return next((moment for moment in moments if moment <= at), None)
