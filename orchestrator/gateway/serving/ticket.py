"""One request in a gateway: its parameters, the current attempt to answer it, and its outcome."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol

import msgspec.structs

from orchestrator.access.keys import ApiKey
from orchestrator.dispatch.dispatcher import Entry
from orchestrator.gateway.openai.errors import ApiError, invalid
from workers.messages.requests import FinishReason, GenerateRequest, TokenEvent
from workers.messages.wire import Submit, WireError, encode

if TYPE_CHECKING:
    import asyncio

    from orchestrator.gateway.serving.replica_link import ReplicaLink
    from orchestrator.gateway.telemetry.gateway_metrics import ModelMetrics
    from orchestrator.gateway.telemetry.request_spans import TraceHandle
    from orchestrator.messages.route_table import ModelRoutes
    from orchestrator.scaling.demand_report import RoutingDecision


MAX_SESSION_BYTES = 256  # bytes
MAX_DEADLINE_MS = 86_400_000.0
EXPLAIN, STRICT = b"x-corewright-explain", b"x-corewright-strict"
FLAGS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
MAX_RETRIES = 2
BYTES_OF_TOKEN = 3  # of a forwarded body: an estimate until its server reports the usage


@dataclass(frozen=True, slots=True)
class SchedulingParameters:
    """The scheduling parameters of one request; the same for all requests without keys and headers."""

    tenant: str = ""  # the id of its key, which is charged for its tokens
    weight: float = 1.0  # of the tenant
    priority: int = 0  # lower goes first
    deadline: float | None = None  # monotonic: the latest time for its first token
    session: str = ""  # requests of one session prefer one replica
    explains: bool = False  # the answer reports its routing decision


PLAIN = SchedulingParameters()


def read_scheduling_parameters(
    headers: Mapping[bytes, bytes], key: ApiKey | None, priority: int | None, now: float
) -> SchedulingParameters:
    """Returns the parameters of a request. ``priority`` is the body's; it is limited to that of the key. Raises
    ApiError 400."""
    deadline = headers.get(b"x-deadline-ms")
    session = headers.get(b"x-session-id")
    explain = headers.get(EXPLAIN)
    if key is None and deadline is None and session is None and explain is None and not priority:
        return PLAIN
    if key is not None and deadline is None and session is None and explain is None and priority is None:
        return _parameters_of_key(key.id, key.weight, key.priority)
    tenant, weight, least = ("", 1.0, None) if key is None else (key.id, key.weight, key.priority)
    requested = (least or 0) if priority is None else priority
    return SchedulingParameters(
        tenant,
        weight,
        requested if least is None else max(requested, least),
        None if deadline is None else now + _milliseconds(deadline) / 1000,
        "" if session is None else _session(session, tenant),
        explain is not None and read_flag(headers, EXPLAIN),
    )


@lru_cache(maxsize=1024)
def _parameters_of_key(tenant: str, weight: float, priority: int | None) -> SchedulingParameters:
    """Returns the parameters of a request that sets none itself."""
    return SchedulingParameters(tenant, weight, priority or 0)


def read_flag(headers: Mapping[bytes, bytes], name: bytes) -> bool:
    """Returns whether a header is sent as 1. Raises ApiError 400 for a value that is not 1 or 0."""
    value = FLAGS.get(headers.get(name, b"0").decode("latin-1").strip().lower())
    if value is None:
        message = f"The header {name.decode()} is {headers[name][:40].decode('latin-1')!r}; it must be 1 or 0."
        raise invalid(message, param=name.decode())
    return value


def _milliseconds(header: bytes) -> float:
    try:
        value = float(header)
    except ValueError:
        value = 0.0
    if not 0 < value <= MAX_DEADLINE_MS:
        text = header[:40].decode("latin-1")
        message = f"The header x-deadline-ms is {text!r}; it must be a number of milliseconds above 0, up to a day."
        raise invalid(message, param="x-deadline-ms")
    return value


def _session(header: bytes, tenant: str) -> str:
    """Returns the session, with the tenant: clients choose the names, so two keys may use the same one."""
    if len(header) > MAX_SESSION_BYTES:
        raise invalid(f"The header x-session-id has more than {MAX_SESSION_BYTES} bytes.", param="x-session-id")
    name = header.decode("latin-1").strip()
    return f"{tenant} {name}" if name else ""


class Sink(Protocol):
    """The receiver of a ticket's tokens. Called on the gateway's event loop; must not raise."""

    def on_events(self, ticket: Ticket, now: float) -> None:
        """Called when there are events to take; ``now`` (monotonic) is when they arrived."""
        ...

    def on_wait(self) -> None:
        """Called, possibly more than once, when one of its tickets waits in a queue."""
        ...

    def on_failure(self, ticket: Ticket, error: ApiError) -> None:
        """Called when no more events will come."""
        ...


class Stream(msgspec.Struct, eq=False):
    """One attempt to answer a request: what its link has received from a replica, and what the sink has made of it.
    Times are monotonic seconds, 0 before they are set.

    Events that the sink has not taken can be thrown away, and the request sent to another replica. Once an event is
    taken, the request fails with its replica."""

    link: ReplicaLink | None = None
    sent_at: float = 0.0
    events: list[TokenEvent] = msgspec.field(default_factory=list)
    produced: int = 0  # tokens so far
    touched: bool = False  # the sink will be notified of events of the current read
    taken: bool = False
    first_at: float = 0.0
    last_at: float = 0.0
    counted: int = 0  # the part of ``produced`` that is in the metrics
    work_s: float = 0.0  # of encoded inputs, as in `AnswerPart`
    batches_s: float = 0.0
    metrics: ModelMetrics | None = None  # from the first token on

    def take(self) -> list[TokenEvent]:
        """Returns the events since the last call."""
        self.taken = True
        events, self.events = self.events, []
        return events


Outcome = FinishReason | ApiError


class Ticket(Entry):
    """A request in the gateway, made by ``ticket_for``, with the current attempt to answer it and one outcome. It is a
    value of its queue: the link and the sink change only its ``stream``, the dispatcher only its record as an
    `Entry`."""

    request: GenerateRequest
    sink: Sink
    terms: SchedulingParameters
    frame: bytes
    timer: asyncio.TimerHandle | None = None  # for the end of its wait
    cold: bool = False  # no replica was ready when it arrived
    expected_s: float | None = None  # then: the wait for one that was expected
    decision: RoutingDecision | None = None  # if requested by the client or sampled
    retries: int = 0
    x_request_id: str = ""  # its id for the client and in the log; ``id`` is the replica's
    reading: str = ""  # `ModelRoutes.reading` when its prompt was tokenized
    slot_tokens: int = 0  # that its slot must hold: the prompt and the longest answer, or the longest input
    outcome: Outcome | None = None  # set once: how its answer ended, CANCELLED by the client, or why there is none
    trace: TraceHandle | None = None
    stream: Stream = msgspec.field(default_factory=Stream)

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def encoded(self) -> bool:
        """Its inputs are encoded, and all of the answer has arrived."""
        events = self.stream.events
        return bool(self.request.inputs and events) and events[-1].finish is FinishReason.STOP

    @property
    def can_retry(self) -> bool:
        return not self.stream.taken and self.outcome is None and self.retries < MAX_RETRIES

    def is_outdated(self, routes: ModelRoutes) -> bool:
        """Returns whether it must be tokenized again: the routes have another tokenizer or template, or shorter
        slots."""
        if self.request.forwarded is not None:
            return not (routes.forwards or routes.reads_parts)
        return self.reading != routes.reading or self.slot_tokens > routes.max_len

    def renew(self, request: GenerateRequest, reading: str) -> int:
        """Replaces the request of a waiting ticket, and returns by how many bytes it has grown. Raises ApiError for a
        request that no frame can hold."""
        before = self.size
        self.frame, self.tokens, self.slot_tokens = _measured(request)
        self.size, self.request, self.prompt_ids, self.reading = len(self.frame), request, request.prompt_ids, reading
        return self.size - before

    def stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def restart(self, *, lost: bool) -> None:
        """Resets the ticket for its next attempt: its replica was lost, or else had no slot for it."""
        if lost:
            self.retries += 1
            if self.stream.produced:
                self.deadline = None  # it was met
        self.stream = Stream()
        if self.trace is not None:
            self.trace.queued()

    def fail(self, error: ApiError) -> None:
        """Fails a ticket that is in no queue and on no replica."""
        if self.outcome is None:
            self.outcome = error
            self.sink.on_failure(self, error)


def ticket_for(request: GenerateRequest, sink: Sink, terms: SchedulingParameters = PLAIN) -> Ticket:
    """Returns the ticket of a new request. Raises ApiError for a request that no frame can hold."""
    frame, tokens, slot_tokens = _measured(request)
    ticket = Ticket(
        terms.tenant, terms.priority, time.monotonic(), terms.deadline, len(frame), tokens, request, sink, terms, frame
    )
    ticket.session, ticket.prompt_ids, ticket.slot_tokens = terms.session, request.prompt_ids, slot_tokens
    if request.adapter and not ticket.session:  # its replica has the adapter loaded
        ticket.session = f"{request.adapter} of all tenants"
    return ticket


def _measured(request: GenerateRequest) -> tuple[bytes, int, int]:
    """Returns the frame of a request, the tokens of the prompt or of all inputs, and those that its slot must hold.
    Raises ApiError for a request that no frame can hold."""
    try:
        frame = encode(Submit(request))
    except (OverflowError, WireError) as error:
        raise invalid(f"the request cannot be sent to a replica: {error}") from None
    if request.forwarded is not None:
        return frame, len(request.forwarded.body) // BYTES_OF_TOKEN, 0
    if request.inputs:
        lengths = [len(input.ids) for input in request.inputs]
        return frame, sum(lengths), max(lengths)
    prompt_tokens = len(request.prompt_ids)
    return frame, prompt_tokens, prompt_tokens + request.max_tokens
