"""The fleet as it was seen at one time: what the controller decides from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from orchestrator.fleet.lifecycle import AHEAD, State
from orchestrator.process.awake_clock import AGAIN_S
from placements.facts.core_range import CoreRange
from placements.spec.schema import Deadlines
from workers.artifacts.fetch.progress import FetchStatus

FIRST_BACKOFF_S = 1.0
SETTLED_S = 60.0  # a replica that dies earlier after it was ready is taken to fail again: crash loops need pauses too
IDLE_S = 60.0  # without a request for so long a replica may lend its cores
LOOKING_S = 600.0  # for all that is found out before a process is asked for: on a small host they wait for each other
BREAKER_AFTER = 6  # failed starts in a row, after 31 s of pauses: from then on it is tried seldom
BREAKER_PAUSE_S = 600.0


@dataclass(frozen=True)
class ReplicaView:
    """One start of one replica."""

    model: str
    replica: int
    epoch: int
    host: str
    cores: CoreRange | None
    state: State
    since: float  # when it came into this state, on the snapshot's clock
    pid: int | None = None
    started: float | None = None  # the process's start, by `lifetime.process_start`; with the pid it names the process
    version: str = ""  # of what its process was told
    gone: bool = False  # the host has seen that the process is dead; only then are the cores free
    reason: str | None = None
    log: tuple[str, ...] = ()  # the last lines of its log, when it failed
    socket: str | None = None
    restarts: int = 0
    begun: float = 0.0  # when it was decided to start it, on the snapshot's clock
    asked: bool = False  # its process was asked for: from here on it may hold its cores
    served: bool = False  # it has been ready since this start
    failures: int = 0  # starts in a row of which none served for long
    stopped: bool = False  # its failure would only come again: it is not started before somebody changes something
    aside_s: float = 0.0  # of this start: how long it was fetching and compiling ahead, until it came into this state
    fetch: FetchStatus | None = None  # how far that is, while it is fetching
    load_s: float | None = None  # from ``begun`` to its first generation, without what is aside; of the last start
    # until this one is ready
    live: int = 0  # requests in slots
    waiting: int = 0  # requests that it has accepted beyond them
    idle_s: float = 0.0  # since its last request ended; 0 while it has one
    step_s: float = 0.0  # how long the engine step that runs now has been running; 0 between steps
    compile_s: float = 0.0  # of this start: how long it has compiled, or waited for another that compiles the same
    heard: float = 0.0  # when it reported last, on the snapshot's clock
    drafted: int = 0  # tokens, since this start
    accepted: int = 0  # of the drafted ones, those that the model agreed with
    deadlines: Deadlines = field(default_factory=Deadlines)

    @property
    def id(self) -> str:
        return f"{self.model}/{self.replica}"

    @property
    def idle(self) -> bool:
        """Whether nobody would miss it for a while."""
        return self.live == 0 and self.waiting == 0 and self.idle_s >= IDLE_S

    def overdue(self, now: float) -> str | None:
        """Why a start that is not over yet has taken too long; None while it has not. Fetching and compiling have their
        own times."""
        here_s = now - self.since
        if self.state is State.FETCHING:
            late = here_s > self.deadlines.fetch_s
            return f"fetch-deadline: it is not here after {self.deadlines.fetch_s:.0f} s" if late else None
        if self.state is State.COMPILING:
            late = here_s > self.deadlines.compile_s
            told = f"compile-deadline: it has compiled ahead for more than {self.deadlines.compile_s:.0f} s"
            return told if late else None
        if self.state is State.PENDING and not self.asked:
            late = here_s > max(LOOKING_S, self.deadlines.start_s)
            return f"start-deadline: what it needs was not found out in {here_s:.0f} s" if late else None
        if self.compile_s > self.deadlines.compile_s:
            return f"compile-deadline: it has compiled for more than {self.deadlines.compile_s:.0f} s"
        aside_s = self.aside_s + self.compile_s
        if now - self.begun - aside_s > self.deadlines.start_s:
            beside = f", {aside_s:.0f} s of fetching and compiling not counted" if aside_s else ""
            return f"start-deadline: not ready after {self.deadlines.start_s:.0f} s{beside}"
        return None

    def aside(self, now: float) -> float:
        """``aside_s`` as it is now."""
        return self.aside_s + (now - self.since if self.state in AHEAD else 0.0)

    def touches(self, cores: frozenset[int]) -> bool:
        """Whether it lies on any of them."""
        return self.cores is not None and any(core in cores for core in self.cores)

    @property
    def outlook(self) -> State:
        """What counts for its model: a replica that has served and died is started again at once, so it is pending."""
        return State.PENDING if self.state is State.FAILED and self.pause_s == 0 else self.state

    @property
    def pause_s(self) -> float:
        """How long a failed replica waits for its next start: not at all when it had served, then ever longer; once
        the breaker is open, until the pause that only sees whether the cause is gone. For ever when it is stopped."""
        if self.stopped:
            return math.inf
        if self.failures == 0 or (self.served and self.failures == 1):
            return 0.0
        if self.breaker_open:
            return BREAKER_PAUSE_S
        return FIRST_BACKOFF_S * 2.0 ** (self.failures - 1)

    @property
    def breaker_open(self) -> bool:
        """Whether so many starts in a row have failed that the cause will not go away by itself."""
        return self.failures >= BREAKER_AFTER

    @property
    def retry_at(self) -> float:
        """When a failed replica may be started again."""
        return self.since + self.pause_s


@dataclass(frozen=True)
class Observed:
    """All replicas, by id, at the time ``now`` (seconds of a monotonic clock)."""

    now: float
    replicas: Mapping[str, ReplicaView] = field(default_factory=lambda: MappingProxyType({}))
    resumed: float = -math.inf  # when the controller was scheduled again after its last pause

    @property
    def settled(self) -> bool:
        """Whether what looks late has had its time to report after the controller's last pause."""
        return self.now - self.resumed >= AGAIN_S
