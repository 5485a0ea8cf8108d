"""A replica's status and failures, and the notice of a host's end, as values that cross processes."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

import msgspec
import msgspec.structs

from placements.spec.problems import printable
from workers.messages.actor_message import actor_message


class Phase(str, Enum):
    """A replica's phase, as it reports it."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


class Reaction(str, Enum):
    """How the controller reacts to a failure."""

    RETRY = "retry"  # start again the same way, after the usual back-off
    ELSEWHERE = "elsewhere"  # start on other cores; its cores are set aside for a while. If no process holds them, the
    # driver may free them late: first start on them again, up to `replica_view.MAX_REFUSALS` times
    QUARANTINE = "quarantine"  # start on other cores; the device gets no replicas until an operator releases it
    STOP = "stop"  # starting again would fail: wait until the spec changes or an operator restarts it


@actor_message
class Failure(msgspec.Struct, frozen=True):
    """Why a replica cannot serve."""

    id: str
    what: str
    hint: str = ""
    reaction: Reaction = Reaction.RETRY
    devices: tuple[int, ...] = ()  # at fault, as the host numbers them; empty where unknown
    held: bool = False  # another process held its cores

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "what", printable(self.what))
        msgspec.structs.force_setattr(self, "hint", printable(self.hint))

    def __str__(self) -> str:
        return f"{self.id}: {self.what}" + (f" ({self.hint})" if self.hint else "")


class Trouble(msgspec.Struct, frozen=True, tag="trouble"):
    """The last reply of a child process that has failed."""

    failure: Failure


class ServerLoad(msgspec.Struct, frozen=True):
    """The load of a replica's server, from its metrics."""

    kv_usage: float  # share of its KV cache in use, 0 to 1
    waiting: int  # requests that it has queued, although corewright sends no more than its slots
    preemptions: int  # requests whose KV cache it has dropped to continue others, since its start
    queues: bool = False  # it had a queue in the last readings, too: its KV cache is too small for its slots


@actor_message
class ReplicaStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One reading of a replica. ``version`` grows with each change, so that a watcher can wait for the next."""

    version: int
    phase: Phase
    pid: int
    started: float  # the process's start, by `lifetime.process_start`
    failure: Failure | None = None
    age_s: float = 0.0  # since its actor's start, as of this reading; the process may have waited as a worker before
    live: int = 0  # requests in slots, as of this reading
    waiting: int = 0  # requests accepted and not in a slot yet
    step_s: float = 0.0  # how long the engine step that runs now has been running; 0 between steps
    compile_s: float = 0.0  # how long this process has compiled, or waited for another one to compile the same
    drafted: int = 0  # tokens by the draft model, as of this reading
    accepted: int = 0  # of these, those that the model agreed with
    prefix_queries: int = 0  # prompt tokens that were looked up in KV caches, as of this reading
    prefix_hits: int = 0  # of these, those that were already there
    slots: int = 0  # requests that can run at once; 0 before it is loaded
    steps: int = 0  # of the engine, as of this reading
    tokens: int = 0  # produced, as of this reading
    server: ServerLoad | None = None  # of an engine that is a server, once it has been read
    load_s: float | None = None  # from the actor's start to its first real generation
    load_phases: dict[str, float] = msgspec.field(default_factory=dict)  # seconds, by `start_phases.PHASES`; those
    # that have ended while it loads
    contents: str = ""  # what `contents_of` its local folders gave when it loaded them; empty: it has none
    address: str = ""  # of its data plane for other hosts, `tls://host:port`; empty, or a path: only its socket


class Notice(msgspec.Struct, frozen=True, kw_only=True):
    """The cause of a host's end, and its time."""

    cause: str  # "spot interruption", "rebalance recommendation", "drain by Ray"
    until: float | None = None  # Unix time at which the host may be gone; None: it has no deadline


def earliest(notices: Iterable[Notice | None]) -> Notice | None:
    """Returns the notice with the first deadline; one without a deadline only if all have none."""
    given = [notice for notice in notices if notice is not None]
    return min(given, key=lambda notice: float("inf") if notice.until is None else notice.until, default=None)
