"""The controller's replies to `up` about a spec, and to a gateway about a model to load or unload."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from placements.spec.problems import Problem
from workers.messages.actor_message import actor_message


@actor_message
class SpecReply(msgspec.Struct, frozen=True, kw_only=True):
    """The controller's answer to a spec of `up`: its revision, or the error for which nothing was applied."""

    revision: int | None = None
    changed: bool = False
    error: Problem | None = None
    problems: tuple[Problem, ...] = ()  # of the spec, which have led to the error
    is_failure: bool = False  # the error has a cause outside the spec, such as a full disk: a retry may succeed


class Hosting(NamedTuple):
    """An HTTP status of SageMaker's contract for containers with several models, and its message. 202: ask again."""

    status: int
    message: str
