"""The controller's view of one replica, and of all replicas at one time."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType

from orchestrator.messages.replica_states import AHEAD, State
from orchestrator.process.awake_clock import AGAIN_S
from placements.facts.core_range import CoreRange
from placements.spec.sections import Deadlines
from workers.artifacts.fetch.progress import FetchStatus
from workers.messages.status import Failure, Phase, Reaction, ReplicaStatus, ServerLoad

FIRST_BACKOFF_S = 1.0
SETTLED_S = 60.0  # a replica that dies sooner after readiness counts as failed again: crash loops need pauses
LOOKING_S = 600.0  # deadline of the checks before a process starts: on a small host they queue
BREAKER_AFTER = 6  # failed starts in a row, after 31 s of pauses; further retries are rare
BREAKER_PAUSE_S = 600.0
MAX_REFUSALS = 4
"""Starts in a row on cores that the runtime refuses although no process holds them, with pauses of 1, 2, 4 and 8 s
before the next: the driver may free the cores of a dead process late (aws-neuron-sdk#1338)."""


def actor_name(model: str, replica: int, epoch: int) -> str:
    """Returns a name that is unique for each start, so that a dying actor is not mistaken for its successor."""
    return f"{model}/{replica}.{epoch}"


def backoff_s(failures: int) -> float:
    """Returns the pause after so many failed attempts in a row, in seconds."""
    return BREAKER_PAUSE_S if failures >= BREAKER_AFTER else FIRST_BACKOFF_S * 2.0 ** (failures - 1)


@dataclass(frozen=True)
class EarlyStart:
    """A process that was started before its fetch has ended. Times are on the snapshot's clock."""

    fetch_since: float  # when the fetch began
    waits_since: float  # from then on, the process only waits for the fetch


@dataclass(frozen=True)
class ReplicaView:
    """One start of one replica, as the controller last observed it."""

    model: str
    replica: int
    epoch: int
    host: str
    cores: CoreRange | None
    state: State
    since: float  # when it entered this state, on the snapshot's clock
    pid: int | None = None
    started: float | None = None  # the process's start, by `lifetime.process_start`; with the pid it names the process
    version: str = ""  # of its configuration
    gone: bool = False  # the host has confirmed its death; only then are the cores free
    reason: str | None = None
    log: tuple[str, ...] = ()  # the last lines of its log, when it failed
    socket: str | None = None  # for gateways of its machine
    remote: str = ""  # its address for other gateways, once it is ready
    restarts: int = 0
    begun: float = 0.0  # when its start was decided, on the snapshot's clock
    requested: bool = False  # its process was requested: it may hold its cores
    served: bool = False  # it has been ready since this start
    failures: int = 0  # starts in a row that did not serve for long
    refusals: int = 0  # starts in a row that the runtime refused on these cores, at most MAX_REFUSALS; no failures
    stopped: bool = False  # its failure is permanent: it is not restarted before an operator acts
    aside_s: float = 0.0  # fetching and compiling ahead in this start, before this state
    fetch: FetchStatus | None = None  # progress while it is fetching
    early: EarlyStart | None = None  # until the fetch has ended
    load_s: float | None = None  # from ``begun`` to its first generation, without ``aside_s``; of the last ready
    # start
    load_phases: Mapping[str, float] = field(default_factory=dict)  # seconds of it, by `start_phases.PHASES`
    compiled: bool | None = None  # that start compiled something; None: its engine does not, or it is unknown
    ended_phases: tuple[str, ...] = ()  # of the load in progress
    ahead_s: float = 0.0  # compiling ahead in this start
    live: int = 0  # requests in slots
    waiting: int = 0  # accepted requests without a slot
    step_s: float = 0.0  # age of the running engine step; 0 between steps
    compile_s: float = 0.0  # compiling in this start, or waiting for a process that compiles the same
    heard: float = 0.0  # time of its last report, on the snapshot's clock
    drafted: int = 0  # tokens, since this start
    accepted: int = 0  # drafted tokens that the model accepted
    server: ServerLoad | None = None  # of an engine that is a server
    deadlines: Deadlines = field(default_factory=Deadlines)

    @cached_property  # each round reads it several times for each of thousands of replicas
    def id(self) -> str:
        return f"{self.model}/{self.replica}"

    @property
    def actor(self) -> str:
        """The name of its actor."""
        return actor_name(self.model, self.replica, self.epoch)

    def following(self, previous: ReplicaView) -> ReplicaView:
        """Returns the view with what is known of the previous start of the replica."""
        return replace(
            self,
            restarts=previous.restarts + 1,
            failures=previous.failures,
            refusals=previous.refusals if (self.host, self.cores) == (previous.host, previous.cores) else 0,
            reason=previous.reason,
            log=previous.log,
            load_s=previous.load_s,
            load_phases=previous.load_phases,
            compiled=previous.compiled,
        )

    def after(self, status: ReplicaStatus, now: float) -> ReplicaView:
        """Returns the view updated with the work that the replica reports.

        The replica's clock includes pauses, so durations grow by at most the time since its last report.
        """
        passed = max(0.0, now - self.heard)
        return replace(
            self,
            heard=now,
            live=status.live,
            waiting=status.waiting,
            step_s=min(status.step_s, self.step_s + passed),
            compile_s=min(status.compile_s, self.compile_s + passed),
            ended_phases=tuple(status.load_phases) if status.phase is Phase.LOADING else (),
            drafted=status.drafted,
            accepted=status.accepted,
            server=status.server,
        )

    def without_work(self) -> ReplicaView:
        """Returns the view of a dead process."""
        return replace(self, live=0, waiting=0, step_s=0.0, server=None)

    def overdue(self, now: float) -> str | None:
        """Returns why a start in progress is overdue, or None. Fetching and compiling have their own deadlines."""
        here_s = now - self.since
        if self.state is State.FETCHING:
            late = here_s > self.deadlines.fetch_s
            return f"fetch-deadline: the fetch did not end within {self.deadlines.fetch_s:.0f} s" if late else None
        if self.state is State.COMPILING:
            late = here_s > self.deadlines.compile_s
            text = f"compile-deadline: it has compiled ahead for more than {self.deadlines.compile_s:.0f} s"
            return text if late else None
        if self.state is State.PENDING and not self.requested:
            late = here_s > max(LOOKING_S, self.deadlines.start_s)
            return f"start-deadline: its needs were not determined within {here_s:.0f} s" if late else None
        if self.compile_s > self.deadlines.compile_s:
            return f"compile-deadline: it has compiled for more than {self.deadlines.compile_s:.0f} s"
        if self.early is not None and now - self.early.fetch_since > self.deadlines.fetch_s:
            fetch_s = self.deadlines.fetch_s
            return f"fetch-deadline: the fetch did not end within {fetch_s:.0f} s, while its process waits"
        aside_s = self.aside(now) + self.compile_s
        if now - self.begun - aside_s > self.deadlines.start_s:
            beside = f", {aside_s:.0f} s of fetching and compiling not counted" if aside_s else ""
            return f"start-deadline: not ready after {self.deadlines.start_s:.0f} s{beside}"
        return None

    def aside(self, now: float) -> float:
        """Returns ``aside_s`` including the current state, and the time that its process waits for the fetch."""
        waits_s = 0.0 if self.early is None else max(0.0, now - self.early.waits_since)
        return self.aside_s + waits_s + (now - self.since if self.state in AHEAD else 0.0)

    def touches(self, cores: Container[int]) -> bool:
        """Returns whether the replica is on any of these cores."""
        return self.cores is not None and any(core in cores for core in self.cores)

    def refusals_after(self, failure: Failure) -> int:
        """Returns ``refusals`` after a failure; 0: the failure is not a refusal of cores, or no retry is left."""
        refused = failure.reaction is Reaction.ELSEWHERE and not failure.held and self.cores is not None
        refusals = 0 if self.served else self.refusals
        return refusals + 1 if refused and refusals < MAX_REFUSALS else 0

    @property
    def outlook(self) -> State:
        """The state that counts for its model: a replica that is restarted at once counts as pending."""
        return State.PENDING if self.state is State.FAILED and self.pause_s == 0 else self.state

    @property
    def pause_s(self) -> float:
        """The pause before a failed replica's next start, in seconds: 0 after serving, then doubling; constant once the
        breaker is open; infinite if it is stopped."""
        if self.stopped:
            return math.inf
        if self.refusals:
            return backoff_s(self.refusals)
        if self.failures == 0 or (self.served and self.failures == 1):
            return 0.0
        return backoff_s(self.failures)

    @property
    def breaker_open(self) -> bool:
        """Returns whether so many starts in a row failed that retries are rare."""
        return self.failures >= BREAKER_AFTER

    @property
    def retry_at(self) -> float:
        """When a failed replica may be restarted."""
        return self.since + self.pause_s


@dataclass(frozen=True)
class Observed:
    """All replicas, by id, at the time ``now`` (seconds of a monotonic clock)."""

    now: float
    replicas: Mapping[str, ReplicaView] = field(default_factory=lambda: MappingProxyType({}))
    resumed: float = -math.inf  # when the controller was scheduled again after its last pause
    stop_at: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))  # by host that ends

    @property
    def settled(self) -> bool:
        """Returns whether replicas have had time to report since the controller's last pause."""
        return self.now - self.resumed >= AGAIN_S
