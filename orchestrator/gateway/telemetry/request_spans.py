"""The gateway's trace spans of one request: the whole request, its time in the queue, and each replica it was sent to.

Names and attributes follow OpenTelemetry's semantic conventions for generative AI, plus vLLM's, so that dashboards for
either work.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from workers.serving.spans import TRACER, below, context_of, end, open_provider, start, traceparent_of

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span, Tracer

SERVICE = "corewright-gateway"
GOOD_ENDS = frozenset({"stop", "length", "tool_calls", "function_call", "cancelled"})
LOST = "it went to another replica"


class RequestTracing:
    """Starts the traces of sampled requests. One for each gateway."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer(TRACER)

    @classmethod
    def from_environment(cls, instance: str = "0") -> RequestTracing | None:
        """Returns None when the environment does not enable traces; ``instance`` identifies this gateway."""
        provider = open_provider(SERVICE, {"service.instance.id": f"gateway/{instance}"})
        return None if provider is None else cls(provider)

    def start(
        self, headers: Mapping[bytes, bytes], model: str, operation: str = "chat", request_id: str = ""
    ) -> TraceHandle | None:
        """Starts the trace of a request with these ``headers``, names in lower case. Returns None when the request is
        not sampled, by the caller's `traceparent` or else by the sampler. ``operation``: chat, text_completion,
        embeddings."""
        parent = (headers.get(name, b"").decode("latin-1") for name in (b"traceparent", b"tracestate"))
        began = time.time_ns()
        span = start(self._tracer, f"{operation} {model}", context_of(*parent), "SERVER", began)
        return TraceHandle(self._tracer, span, began, operation, model, request_id) if span.is_recording() else None

    def close(self) -> None:
        """Exports the remaining spans and closes the exporter."""
        self._provider.shutdown()


class TraceHandle:
    """One traced request."""

    def __init__(self, tracer: Tracer, span: Span, began: int, operation: str, model: str, request_id: str) -> None:
        self._tracer = tracer
        self._span = span
        self._began = began
        self._operation = operation
        self._model = model
        self._request_id = request_id
        self._queued = 0  # when it entered the queue; 0: it is not queued
        self._waited = 0  # nanoseconds in the queue
        self._attempt: Span | None = None  # at a replica, now
        self._replica: str | None = None  # the last one
        self._first = 0

    def queued(self) -> None:
        """Records that the request waits for a slot; called again after its replica is lost."""
        now = time.time_ns()
        self._leave_replica(now, LOST)
        self._queued = now

    def sent(self, replica: str) -> str:
        """Records that the request goes to ``replica``. Returns the value for its `GenerateRequest.trace`."""
        now = time.time_ns()
        self._leave_replica(now, LOST)
        self._leave_queue(now)
        self._replica = replica
        self._attempt = start(self._tracer, f"replica {replica}", below(self._span), "CLIENT", now)
        self._attempt.set_attribute("corewright.replica", replica)
        return traceparent_of(self._attempt)

    def first_token(self) -> None:
        """Records the time of the first token."""
        self._first = self._first or time.time_ns()

    def end(self, reason: str, usage: tuple[int, int] | None = None, status: int = 200) -> None:
        """Ends the trace. ``reason`` is the finish reason or the error code, ``usage`` the tokens of prompt and answer,
        ``status`` the HTTP status."""
        now = time.time_ns()
        error = None if reason in GOOD_ENDS else reason
        self._leave_queue(now)
        self._leave_replica(now, error)
        self._span.set_attributes(self._attributes(reason, usage, status, now))
        end(self._span, now, error)

    def _attributes(self, reason: str, usage: tuple[int, int] | None, status: int, now: int) -> dict[str, Any]:
        attributes: dict[str, Any] = {
            "gen_ai.operation.name": self._operation,
            "gen_ai.provider.name": "corewright",
            "gen_ai.request.model": self._model,
            "gen_ai.response.model": self._model,
            "gen_ai.request.id": self._request_id,
            "gen_ai.response.finish_reasons": (reason,),
            "gen_ai.latency.e2e": (now - self._began) / 1e9,
            "gen_ai.latency.time_in_queue": self._waited / 1e9,
            "http.response.status_code": status,
        }
        if self._replica is not None:
            attributes["corewright.replica"] = self._replica
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
            end(start(self._tracer, "queue", below(self._span), "INTERNAL", self._queued), now)
            self._waited += now - self._queued
            self._queued = 0

    def _leave_replica(self, now: int, error: str | None) -> None:
        if self._attempt is not None:
            end(self._attempt, now, error)
            self._attempt = None
