"""OpenTelemetry spans, and the tracing of a replica's requests.

The packages (extra `otel`) are imported only where the environment enables tracing; all standard OTEL_... variables
apply. Without tracing a request costs one check.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from workers.messages.requests import FinishReason, GenerateRequest, TokenEvent

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span, Tracer

    from workers.serving.dataplane import RequestTable

log = logging.getLogger(__name__)

TRACER = "corewright"
ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
FLUSH_MS = 2000


def open_provider(service: str, attributes: Mapping[str, str] | None = None) -> TracerProvider | None:
    """Returns the provider that the environment configures, or None where it configures none.

    Tracing is enabled by an OTLP endpoint, or by OTEL_TRACES_EXPORTER=otlp. ``service`` and ``attributes`` describe
    this process where OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES do not.
    """
    if not is_enabled(os.environ):
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        log.warning("tracing is configured, but unavailable: %s; pip install 'corewright[otel]'", error)
        return None
    own = Resource({"service.name": service, **(attributes or {})})
    provider = TracerProvider(resource=Resource.create().merge(own).merge(OTELResourceDetector().detect()))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider


def is_enabled(environ: Mapping[str, str]) -> bool:
    """Returns whether the environment enables tracing."""
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    exporter = environ.get("OTEL_TRACES_EXPORTER", "").strip().lower()
    return exporter == "otlp" or (not exporter and any(environ.get(name) for name in ENDPOINTS))


def context_of(traceparent: str, state: str = "") -> Context:
    """Returns the context of W3C's headers; an empty one if they are invalid, so that a new trace begins."""
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract({"traceparent": traceparent, "tracestate": state}, Context())


def traceparent_of(span: Span) -> str:
    """Returns W3C's header by which another process continues the trace below the span."""
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier, below(span))
    return carrier["traceparent"]


def below(span: Span) -> Context:
    """Returns the context of the span's children."""
    from opentelemetry.context import Context
    from opentelemetry.trace import set_span_in_context

    return set_span_in_context(span, Context())


def start(
    tracer: Tracer, name: str, context: Context, kind: Literal["INTERNAL", "SERVER", "CLIENT"], began: int
) -> Span:
    """Returns a new span; ``began`` in nanoseconds since the epoch."""
    from opentelemetry.trace import SpanKind

    return tracer.start_span(name, context, SpanKind[kind], start_time=began)


def end(span: Span, ended: int, error: str | None = None) -> None:
    """End a span, with an error or without; ``ended`` in nanoseconds since the epoch."""
    from opentelemetry.trace import Status, StatusCode

    if error is not None:
        span.set_status(Status(StatusCode.ERROR, error))
    span.end(ended)


class _Open(msgspec.Struct):
    """A traced request in this replica."""

    request: GenerateRequest
    span: Any
    accepted: int
    began: int = 0  # start of its prefill
    first: int = 0  # time of its first token
    tokens: int = 0


class ReplicaTracing:
    """Wraps a batcher: records the arrival of traced requests and the results of each step."""

    def __init__(self, provider: TracerProvider, requests: RequestTable, *, model: str, replica: int) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer(TRACER)
        self._requests = requests
        self._about = {"gen_ai.response.model": model, "corewright.replica": f"{model}/{replica}"}
        self._open: dict[str, _Open] = {}
        self._last_step = 0  # end of the previous step: the next one begins then, or when a request arrives

    def submit(self, request: GenerateRequest) -> None:
        """Submit to the batcher; an exception also ends the request's span."""
        span = None if request.trace is None else self._span_of(request.trace)
        if span is None:
            self._requests.submit(request)
            return
        open_ = self._open[request.id] = _Open(request, span, time.time_ns())
        try:
            self._requests.submit(request)
        except Exception as error:
            del self._open[request.id]
            self._end(open_, FinishReason.REFUSED, str(error))
            raise

    def _span_of(self, traceparent: str) -> Span | None:
        """Returns vLLM's span `llm_request`; None if the parent is not sampled."""
        from opentelemetry.trace import get_current_span

        context = context_of(traceparent)
        if not get_current_span(context).get_span_context().trace_flags.sampled:
            return None
        return start(self._tracer, "llm_request", context, "SERVER", time.time_ns())

    def cancel(self, id: str) -> None:
        self._requests.cancel(id)

    def emitted(self, events: Sequence[TokenEvent]) -> None:
        """Record the events of one step. Called on the batcher's thread."""
        before, self._last_step = self._last_step, time.time_ns()
        if not self._open:
            return
        for event in events:
            open_ = self._open.get(event.id)
            if open_ is None:
                continue
            tokens = len(event.token_ids) if event.part is None else event.part.tokens
            if tokens and not open_.first:
                open_.first, open_.began = self._last_step, max(before, open_.accepted)
            open_.tokens += tokens
            if event.finish is not None:
                del self._open[event.id]
                self._end(open_, event.finish, event.error)

    def flush(self) -> None:
        """Send pending spans: this process may be killed soon."""
        self._provider.force_flush(FLUSH_MS)

    def _end(self, open_: _Open, finish: FinishReason, error: str | None) -> None:
        """End the span with vLLM's attributes, and add children for prefill and decode."""
        now, request = time.time_ns(), open_.request
        attributes: dict[str, Any] = {
            **self._about,
            "gen_ai.request.id": request.id,
            "gen_ai.request.max_tokens": request.max_tokens,
            "gen_ai.request.temperature": request.temperature,
            "gen_ai.request.top_p": request.top_p,
            "gen_ai.usage.prompt_tokens": len(request.prompt_ids),
            "gen_ai.usage.completion_tokens": open_.tokens,
            "gen_ai.response.finish_reasons": (finish.value,),
            "gen_ai.latency.e2e": (now - open_.accepted) / 1e9,
        }
        if open_.first:
            attributes |= {
                "gen_ai.latency.time_in_queue": (open_.began - open_.accepted) / 1e9,
                "gen_ai.latency.time_to_first_token": (open_.first - open_.accepted) / 1e9,
                "gen_ai.latency.time_in_model_prefill": (open_.first - open_.began) / 1e9,
                "gen_ai.latency.time_in_model_decode": (now - open_.first) / 1e9,
                "gen_ai.latency.time_in_model_inference": (now - open_.began) / 1e9,
            }
            for name, began, ended in (("prefill", open_.began, open_.first), ("decode", open_.first, now)):
                end(start(self._tracer, name, below(open_.span), "INTERNAL", began), ended)
        open_.span.set_attributes(attributes)
        failed = finish in (FinishReason.ERROR, FinishReason.INVALID, FinishReason.REFUSED, FinishReason.UNSERVED)
        end(open_.span, now, (error or finish.value) if failed else None)
