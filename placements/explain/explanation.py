"""The explanation of a model's placement: places with their reasons, unmet and met demands, suggestions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from placements.explain.question import Suggestion
from placements.planner.plan import Placement


@dataclass(frozen=True)
class Constraint:
    """One demand of a model. ``id`` is a problem id if the demand is not met, else the dimension's name."""

    id: str
    what: str  # with its numbers
    details: tuple[str, ...] = ()
    hint: str = ""

    def as_dict(self) -> dict[str, Any]:
        return {"id": self.id, "what": self.what, "details": list(self.details), "hint": self.hint}


@dataclass(frozen=True)
class ExplainedPlacement:
    """A placed replica, and the reasons for its place."""

    placement: Placement
    why: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        placement = self.placement
        return {
            "replica": f"{placement.model}/{placement.replica}",
            "host": placement.host,
            "cores": None if placement.cores is None else str(placement.cores),
            "threads": placement.threads,
            "why": list(self.why),
        }


@dataclass(frozen=True)
class Explanation:
    """The explanation of one model's placement on these hosts."""

    model: str
    priority: int
    required: int  # ``replicas.min``
    wanted: int  # replicas that were planned for; 1 for a model scaled to zero
    places: tuple[ExplainedPlacement, ...] = ()
    failed: tuple[Constraint, ...] = ()  # in the order in which they are judged
    holds: tuple[Constraint, ...] = ()
    suggestions: tuple[Suggestion, ...] = ()  # the smallest change first
    tried: Literal["nothing", "some", "all"] = (
        "nothing"  # which of the known changes were tried; "some": the budget of plans was used up
    )

    @property
    def fits(self) -> bool:
        """Returns whether the model has its ``min`` replicas, or one replica if it is scaled to zero."""
        return len(self.places) >= (min(self.required, self.wanted) or self.wanted) and not self.broken

    @property
    def broken(self) -> bool:
        """Returns whether the model's part of the spec has errors, so that none of its replicas are placed."""
        return not self.places and bool(self.failed)

    def as_dict(self) -> dict[str, Any]:
        """The JSON of `corewright explain`."""
        return {
            "model": self.model,
            "fits": self.fits,
            "priority": self.priority,
            "min": self.required,
            "wanted": self.wanted,
            "replicas": [place.as_dict() for place in self.places],
            "failed": [constraint.as_dict() for constraint in self.failed],
            "holds": [constraint.as_dict() for constraint in self.holds],
            "suggestions": [suggestion.as_dict() for suggestion in self.suggestions],
            "tried": self.tried,
        }
