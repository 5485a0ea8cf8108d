"""How long starts take: the phases of each model's last starts, and the expected end of a start. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from orchestrator.control.decisions.snapshot import ReplicaView
from orchestrator.control.journal.journal_records import ReadyStart
from orchestrator.messages.replica_states import STARTING, State

OLD_S = 6 * 3600.0  # a start that is so much older than the newest does not count
BEFORE_WEIGHTS = ("actor", "process", "imports")


def phases_again(view: ReplicaView) -> dict[str, float]:
    """Returns the seconds of a ready replica's start by `start_phases.PHASES`, without what only this start had to do:
    fetching and compiling."""
    load_s = view.load_s or 0.0
    phases = dict(view.load_phases) or {"engine": load_s}  # an engine that reports none
    longest = max(phases, key=phases.__getitem__)  # the one that has compiled, or waited for the fetch, if any did
    once_s = max(0.0, sum(phases.values()) - max(0.0, load_s - view.compile_s))
    phases[longest] = max(0.0, phases[longest] - once_s)
    return phases


@dataclass(frozen=True)
class StartTimes:
    """The last starts of a model on its engine, the newest first."""

    starts: Sequence[ReadyStart] = ()

    @classmethod
    def of(cls, starts: Sequence[ReadyStart], engine: str | None) -> StartTimes:
        """Returns those that tell about the next start on this engine."""
        own = [start for start in starts if start.engine == engine]
        return cls([start for start in own if own[0].at - start.at <= OLD_S])

    @cached_property
    def phases(self) -> Mapping[str, float]:
        """The expected seconds of the next start by phase: the lower median of the last starts. Empty without any."""
        names = dict.fromkeys(name for start in self.starts for name in start.phases)
        return {name: statistics.median_low(start.phases.get(name, 0.0) for start in self.starts) for name in names}

    @property
    def expected_s(self) -> float | None:
        """The expected duration of the next start, without fetching and compiling; None: none was measured."""
        return sum(self.phases.values()) if self.starts else None

    @property
    def before_weights_s(self) -> float | None:
        """The expected time from the next start's decision until it reads weights; None: it was not measured."""
        known = [self.phases[name] for name in BEFORE_WEIGHTS if name in self.phases]
        return sum(known) if known else None


def ready_at(view: ReplicaView, expected_s: float, now: float) -> float | None:
    """Returns when a replica that starts, or that has served and will be restarted, is expected to be ready, on the
    clock of ``now``; None if it does neither. ``expected_s``: of its whole start, without fetching and compiling. The
    rest of a compilation is unknown: it counts as if it ended now."""
    if view.state is State.FAILED and view.served and not view.stopped:
        return view.since + view.pause_s + expected_s
    if view.state not in STARTING:
        return None
    left_s = (view.fetch.left_s or 0.0) if view.fetch is not None else 0.0
    return view.begun + view.aside(now) + left_s + expected_s
