"""The gateway's trace spans of one request: the whole request, its time in the queue, and each replica it was sent to.

Names and attributes follow OpenTelemetry's semantic conventions for generative AI, plus vLLM's, so that dashboards for
either work.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from workers.serving.spans import Span, SpanId, SpanSink, open_sink

SERVICE = "corewright-gateway"
GOOD_ENDS = frozenset({"stop", "length", "tool_calls", "function_call", "cancelled"})


class RequestTracing:
    """Starts the traces of sampled requests. One for each gateway."""

    def __init__(self, sink: SpanSink) -> None:
        self._sink = sink

    @classmethod
    def from_environment(cls, instance: str = "0") -> RequestTracing | None:
        """Returns None when the environment does not enable traces; ``instance`` identifies this gateway."""
        sink = open_sink(SERVICE, {"service.instance.id": f"gateway/{instance}"})
        return None if sink is None else cls(sink)

    def start(
        self, headers: Mapping[bytes, bytes], model: str, operation: str = "chat", request_id: str = ""
    ) -> TraceHandle | None:
        """Starts the trace of a request with these ``headers``, names in lower case. Returns None when the request is
        not sampled, by the caller's `traceparent` or else by the sampler. ``operation``: chat, text_completion,
        embeddings."""
        traceparent = headers.get(b"traceparent")
        parent = None
        if traceparent is not None:
            state = headers.get(b"tracestate", b"").decode("latin-1")
            parent = SpanId.parse(traceparent.decode("latin-1"), state)
        id = self._sink.begin(parent, f"{operation} {model}")
        return None if id is None else TraceHandle(self._sink, id, parent, operation, model, request_id)

    def close(self) -> None:
        """Exports the remaining spans and closes the exporter."""
        self._sink.close()


@dataclass(eq=False)
class TraceHandle:
    """One traced request. Each call records a time; ``end`` makes the spans."""

    _sink: SpanSink
    _id: SpanId
    _parent: SpanId | None
    _operation: str
    _model: str
    _request_id: str
    _began: int = field(default_factory=time.time_ns)
    _queued: int = 0  # when it entered the queue; 0: it is not queued
    _waits: list[tuple[int, int]] = field(default_factory=list)
    _attempts: list[tuple[SpanId, str, int, int]] = field(default_factory=list)  # id, replica, start, end (0: not yet)
    _first: int = 0

    def queued(self) -> None:
        """Records that the request waits for a slot; called again after its replica is lost."""
        now = time.time_ns()
        self._leave_replica(now)
        self._queued = now

    def sent(self, replica: str) -> str:
        """Records that the request goes to ``replica``. Returns the value for its `GenerateRequest.trace`."""
        now = time.time_ns()
        self._leave_replica(now)
        self._leave_queue(now)
        attempt = self._id.child()
        self._attempts.append((attempt, replica, now, 0))
        return str(attempt)

    def first_token(self) -> None:
        """Records the time of the first token."""
        self._first = self._first or time.time_ns()

    def end(self, reason: str, usage: tuple[int, int] | None = None, status: int = 200) -> None:
        """Ends the trace. ``reason`` is the finish reason or the error code, ``usage`` the tokens of prompt and answer,
        ``status`` the HTTP status."""
        now = time.time_ns()
        answered_by = self._attempts[-1][1] if self._attempts else None
        failed = reason not in GOOD_ENDS
        last = len(self._attempts) - 1
        self._leave_queue(now)
        self._leave_replica(now)
        waits = [
            Span(name="queue", id=self._id.child(), parent=self._id, kind="internal", start=start, end=end)
            for start, end in self._waits
        ]
        attempts = [
            Span(
                name=f"replica {replica}",
                id=id,
                parent=self._id,
                kind="client",
                start=start,
                end=end,
                attributes={"corewright.replica": replica},
                error=reason if failed and i == last else None if i == last else "it went to another replica",
            )
            for i, (id, replica, start, end) in enumerate(self._attempts)
        ]
        root = Span(
            name=f"{self._operation} {self._model}",
            id=self._id,
            parent=self._parent,
            kind="server",
            start=self._began,
            end=now,
            attributes=self._attributes(reason, usage, status, answered_by, now),
            error=reason if failed else None,
        )
        self._sink.end(*waits, *attempts, root)

    def _attributes(
        self, reason: str, usage: tuple[int, int] | None, status: int, replica: str | None, now: int
    ) -> dict[str, Any]:
        attributes: dict[str, Any] = {
            "gen_ai.operation.name": self._operation,
            "gen_ai.provider.name": "corewright",
            "gen_ai.request.model": self._model,
            "gen_ai.response.model": self._model,
            "gen_ai.request.id": self._request_id,
            "gen_ai.response.finish_reasons": (reason,),
            "gen_ai.latency.e2e": (now - self._began) / 1e9,
            "gen_ai.latency.time_in_queue": sum(end - start for start, end in self._waits) / 1e9,
            "http.response.status_code": status,
        }
        if replica is not None:
            attributes["corewright.replica"] = replica
        if reason not in GOOD_ENDS:
            attributes["error.type"] = reason
        if self._first:
            attributes["gen_ai.latency.time_to_first_token"] = (self._first - self._began) / 1e9
        if usage is not None:
            prompt, completion = usage
            attributes |= {"gen_ai.usage.input_tokens": prompt, "gen_ai.usage.output_tokens": completion}
            attributes |= {"gen_ai.usage.prompt_tokens": prompt, "gen_ai.usage.completion_tokens": completion}
        return attributes

    def _leave_queue(self, now: int) -> None:
        if self._queued:
            self._waits.append((self._queued, now))
            self._queued = 0

    def _leave_replica(self, now: int) -> None:
        if self._attempts and not self._attempts[-1][3]:
            id, replica, start, _ = self._attempts[-1]
            self._attempts[-1] = id, replica, start, now
