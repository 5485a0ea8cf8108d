"""The gateway's spans of one request: all of it, its time in the queue, and each replica that it was sent to.

Names and attributes are those of OpenTelemetry's semantic conventions for generative AI, and beside them vLLM's, so
that dashboards made for either find what they ask for.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from workers.serving.spans import Span, SpanId, SpanSink, open_sink

SERVICE = "corewright-gateway"
GOOD_ENDS = frozenset({"stop", "length", "tool_calls", "function_call", "cancelled"})


class RequestTracing:
    """Decides which requests are traced. One for each gateway."""

    def __init__(self, sink: SpanSink) -> None:
        self._sink = sink

    @classmethod
    def from_environment(cls, instance: str = "0") -> RequestTracing | None:
        """None where the environment asks for no traces; ``instance`` tells several gateways apart."""
        sink = open_sink(SERVICE, {"service.instance.id": f"gateway/{instance}"})
        return None if sink is None else cls(sink)

    def start(
        self,
        headers: Mapping[bytes, bytes],
        model: str,
        operation: str = "chat",
        request_id: str = "",
    ) -> TraceHandle | None:
        """A request has come, with lower-case ``headers``. None when it is not traced, which is said by the caller's
        `traceparent`, else by the sampler. ``operation``: chat, text_completion, embeddings."""
        given = headers.get(b"traceparent")
        parent = None
        if given is not None:
            state = headers.get(b"tracestate", b"").decode("latin-1")
            parent = SpanId.parse(given.decode("latin-1"), state)
        name = f"{operation} {model}"
        id = self._sink.begin(parent, name)
        return None if id is None else TraceHandle(self._sink, id, parent, name, operation, model, request_id)

    def close(self) -> None:
        """Send what waits, and nothing more."""
        self._sink.close()


class TraceHandle:
    """One traced request. Each call notes a time; spans are made by ``end``."""

    __slots__ = (
        "_attempts",
        "_began",
        "_first",
        "_id",
        "_name",
        "_parent",
        "_queued",
        "_request",
        "_sink",
        "_waits",
    )

    def __init__(
        self,
        sink: SpanSink,
        id: SpanId,
        parent: SpanId | None,
        name: str,
        operation: str,
        model: str,
        request_id: str,
    ) -> None:
        self._sink = sink
        self._id = id
        self._parent = parent
        self._name = name
        self._request = (operation, model, request_id)
        self._began = time.time_ns()
        self._queued = 0  # when it came into the queue; 0: it is not there
        self._waits: list[tuple[int, int]] = []
        self._attempts: list[tuple[SpanId, str, int, int]] = []  # id, replica, from, to (0: still there)
        self._first = 0

    @property
    def traceparent(self) -> str:
        """Of the request as a whole."""
        return str(self._id)

    def queued(self) -> None:
        """It waits for a slot now; once more when a replica was lost under it."""
        now = time.time_ns()
        self._leave_replica(now)
        self._queued = now

    def sent(self, replica: str) -> str:
        """It goes to that replica now: what its `GenerateRequest.trace` must be."""
        now = time.time_ns()
        self._leave_replica(now)
        self._leave_queue(now)
        attempt = self._id.child()
        self._attempts.append((attempt, replica, now, 0))
        return str(attempt)

    def first_token(self) -> None:
        """The client can see something."""
        self._first = self._first or time.time_ns()

    def end(self, reason: str, usage: tuple[int, int] | None = None, status: int = 200) -> None:
        """It is over: ``reason`` is why the answer ended, or the code of the error; ``usage`` the tokens of prompt and
        answer; ``status`` the HTTP status."""
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
        whole = Span(
            name=self._name,
            id=self._id,
            parent=self._parent,
            kind="server",
            start=self._began,
            end=now,
            attributes=self._attributes(reason, usage, status, answered_by, now),
            error=reason if failed else None,
        )
        self._sink.end(*waits, *attempts, whole)

    def _attributes(
        self, reason: str, usage: tuple[int, int] | None, status: int, replica: str | None, now: int
    ) -> dict[str, Any]:
        operation, model, request_id = self._request
        told: dict[str, Any] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "corewright",
            "gen_ai.request.model": model,
            "gen_ai.response.model": model,
            "gen_ai.request.id": request_id,
            "gen_ai.response.finish_reasons": (reason,),
            "gen_ai.latency.e2e": (now - self._began) / 1e9,
            "gen_ai.latency.time_in_queue": sum(end - start for start, end in self._waits) / 1e9,
            "http.response.status_code": status,
        }
        if replica is not None:
            told["corewright.replica"] = replica
        if reason not in GOOD_ENDS:
            told["error.type"] = reason
        if self._first:
            told["gen_ai.latency.time_to_first_token"] = (self._first - self._began) / 1e9
        if usage is not None:
            prompt, completion = usage
            told |= {"gen_ai.usage.input_tokens": prompt, "gen_ai.usage.output_tokens": completion}
            told |= {"gen_ai.usage.prompt_tokens": prompt, "gen_ai.usage.completion_tokens": completion}
        return told

    def _leave_queue(self, now: int) -> None:
        if self._queued:
            self._waits.append((self._queued, now))
            self._queued = 0

    def _leave_replica(self, now: int) -> None:
        if self._attempts and not self._attempts[-1][3]:
            id, replica, start, _ = self._attempts[-1]
            self._attempts[-1] = id, replica, start, now
