"""OpenTelemetry spans, and the tracing of a replica's requests.

The packages (extra `otel`) are imported only where the environment enables tracing; all standard OTEL_... variables
apply. Spans are created when they end, from recorded times: an untraced request costs one check of its header, and a
traced one nothing until it ends.
"""

from __future__ import annotations

import logging
import os
import random
import re
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from workers.host.task_boundary import task_boundary
from workers.messages.requests import FinishReason, GenerateRequest, TokenEvent

if TYPE_CHECKING:
    from workers.serving.dataplane import RequestTable

log = logging.getLogger(__name__)

Kind = Literal["internal", "server", "client"]
Attributes = Mapping[str, "str | int | float | bool | Sequence[str]"]
ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
FLUSH_S = 2.0
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
# `random` itself gives each process its own numbers, also a fork; an instance of this module would not.


class SpanId(msgspec.Struct, frozen=True):
    """The identity of a span, as in W3C's `traceparent`."""

    trace: int
    span: int
    sampled: bool = True
    state: str = ""  # W3C's `tracestate`, passed on unchanged

    def __str__(self) -> str:
        return f"00-{self.trace:032x}-{self.span:016x}-{'01' if self.sampled else '00'}"

    def child(self) -> SpanId:
        """Returns the id of a new span of the same trace."""
        return SpanId(self.trace, new_id(64), self.sampled, self.state)

    @classmethod
    def parse(cls, traceparent: str, state: str = "") -> SpanId | None:
        """Returns None for an invalid header: then a new trace begins, as W3C specifies."""
        match = _TRACEPARENT.fullmatch(traceparent.strip())
        if match is None or match[1] == "ff" or (match[1] == "00" and match[5] is not None):
            return None
        trace, span = int(match[2], 16), int(match[3], 16)
        return cls(trace, span, bool(int(match[4], 16) & 1), state) if trace and span else None


def new_id(bits: int) -> int:
    """Returns a random nonzero id."""
    return random.getrandbits(bits) or 1


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """One finished span. Times in nanoseconds since the epoch."""

    name: str
    id: SpanId
    parent: SpanId | None
    kind: Kind
    start: int
    end: int
    attributes: dict[str, Any] = {}
    error: str | None = None


class SpanSink:
    """The destination of this process's spans. Created by ``open_sink``."""

    def __init__(self, processor: Any, provider: Any) -> None:
        """``processor`` is the SDK's; of ``provider``, a TracerProvider, only resource and sampler are used."""
        from opentelemetry.sdk.trace.sampling import ParentBased
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        self._processor = processor
        self._resource = provider.resource
        self._sampler = provider.sampler
        self._parent_decides = isinstance(provider.sampler, ParentBased)
        self._scope = InstrumentationScope("corewright")

    def begin(self, parent: SpanId | None, name: str) -> SpanId | None:
        """Returns the id of a new span, or None when the sampler drops it."""
        if parent is not None and self._parent_decides and not parent.sampled:
            return None
        trace = new_id(128) if parent is None else parent.trace
        if parent is None or not self._parent_decides:
            from opentelemetry.trace import NonRecordingSpan, set_span_in_context

            span = None if parent is None else NonRecordingSpan(_context(parent, remote=True))
            context = None if span is None else set_span_in_context(span)
            if not self._sampler.should_sample(context, trace, name).decision.is_sampled():
                return None
        return SpanId(trace, new_id(64), state="" if parent is None else parent.state)

    def end(self, *spans: Span) -> None:
        """Export finished spans. Never raises: an error is logged, and serving continues."""
        with task_boundary(log, "cannot export a span"):
            for span in spans:
                self._processor.on_end(self._readable(span))

    def flush(self, deadline_s: float = FLUSH_S) -> None:
        """Send pending spans, within ``deadline_s``."""
        self._processor.force_flush(int(deadline_s * 1000))

    def close(self) -> None:
        """Send pending spans and stop."""
        self._processor.shutdown()

    def _readable(self, span: Span) -> Any:
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.trace import SpanKind, Status, StatusCode

        return ReadableSpan(
            name=span.name,
            context=_context(span.id, remote=False),
            parent=None if span.parent is None else _context(span.parent, remote=span.kind == "server"),
            resource=self._resource,
            attributes=span.attributes,
            kind=SpanKind[span.kind.upper()],
            status=Status() if span.error is None else Status(StatusCode.ERROR, span.error),
            start_time=span.start,
            end_time=span.end,
            instrumentation_scope=self._scope,
        )


def open_sink(service: str, attributes: Attributes | None = None) -> SpanSink | None:
    """Returns the sink that the environment configures, or None where it configures none.

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
    resource = Resource.create().merge(own).merge(OTELResourceDetector().detect())
    return SpanSink(BatchSpanProcessor(OTLPSpanExporter()), TracerProvider(resource=resource))


def is_enabled(environ: Mapping[str, str]) -> bool:
    """Returns whether the environment enables tracing."""
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    exporter = environ.get("OTEL_TRACES_EXPORTER", "").strip().lower()
    return exporter == "otlp" or (not exporter and any(environ.get(name) for name in ENDPOINTS))


class _Open(msgspec.Struct):
    """A traced request in this replica."""

    request: GenerateRequest
    parent: SpanId
    accepted: int
    began: int = 0  # start of its prefill
    first: int = 0  # time of its first token
    tokens: int = 0


class ReplicaTracing:
    """Wraps a batcher: records the arrival of traced requests and the results of each step."""

    def __init__(self, sink: SpanSink, requests: RequestTable, *, model: str, replica: int) -> None:
        self._sink = sink
        self._requests = requests
        self._about = {"gen_ai.response.model": model, "corewright.replica": f"{model}/{replica}"}
        self._open: dict[str, _Open] = {}
        self._last_step = 0  # end of the previous step: the next one begins then, or when a request arrives

    def submit(self, request: GenerateRequest) -> None:
        """Submit to the batcher; an exception also ends the request's span."""
        parent = None if request.trace is None else SpanId.parse(request.trace)
        if parent is None or not parent.sampled:
            self._requests.submit(request)
            return
        open_ = self._open[request.id] = _Open(request, parent, time.time_ns())
        try:
            self._requests.submit(request)
        except Exception as error:
            del self._open[request.id]
            self._end(open_, FinishReason.REFUSED, str(error))
            raise

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
        self._sink.flush()

    def _end(self, open_: _Open, finish: FinishReason, error: str | None) -> None:
        """Export vLLM's span `llm_request` with vLLM's attributes, and child spans for prefill and decode."""
        now, request = time.time_ns(), open_.request
        id = open_.parent.child()
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
        parts = []
        if open_.first:
            attributes |= {
                "gen_ai.latency.time_in_queue": (open_.began - open_.accepted) / 1e9,
                "gen_ai.latency.time_to_first_token": (open_.first - open_.accepted) / 1e9,
                "gen_ai.latency.time_in_model_prefill": (open_.first - open_.began) / 1e9,
                "gen_ai.latency.time_in_model_decode": (now - open_.first) / 1e9,
                "gen_ai.latency.time_in_model_inference": (now - open_.began) / 1e9,
            }
            parts = [("prefill", open_.began, open_.first), ("decode", open_.first, now)]
        failed = finish in (FinishReason.ERROR, FinishReason.INVALID, FinishReason.REFUSED, FinishReason.UNSERVED)
        self._sink.end(
            *(
                Span(name=name, id=id.child(), parent=id, kind="internal", start=start, end=end)
                for name, start, end in parts
            ),
            Span(
                name="llm_request",
                id=id,
                parent=open_.parent,
                kind="server",
                start=open_.accepted,
                end=now,
                attributes=attributes,
                error=(error or finish.value) if failed else None,
            ),
        )


def _context(id: SpanId, *, remote: bool) -> Any:
    from opentelemetry.trace import SpanContext, TraceFlags, TraceState

    state = TraceState.from_header([id.state]) if id.state else None
    flags = TraceFlags(TraceFlags.SAMPLED if id.sampled else TraceFlags.DEFAULT)
    return SpanContext(id.trace, id.span, remote, flags, state)
