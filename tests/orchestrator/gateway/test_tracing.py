"""One request is one trace across gateway, queue and replica."""

from __future__ import annotations

import http.server
import itertools
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, ParentBased, Sampler

from orchestrator.gateway.telemetry.request_spans import RequestTracing
from workers.batching.step_loop import BatcherClosed
from workers.messages.requests import FinishReason, GenerateRequest, TokenEvent
from workers.serving.spans import ReplicaTracing, is_enabled, open_provider

TRACE = "0af7651916cd43dd8448eb211c80319c"
SAMPLED = f"00-{TRACE}-b7ad6b7169203331-01"
NOT_SAMPLED = f"00-{TRACE}-b7ad6b7169203331-00"
STOPS = GenerateRequest(id="r1", prompt_ids=[1, 2, 3], max_tokens=4, temperature=0.5)


class Kept:
    """A provider whose spans stay in memory."""

    def __init__(self, sampler: Sampler | None = None) -> None:
        self.exporter = InMemorySpanExporter()
        resource = Resource({"service.name": "test"})
        self.provider = TracerProvider(sampler=sampler or ParentBased(ALWAYS_ON), resource=resource)
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))

    @property
    def spans(self) -> dict[str, ReadableSpan]:
        return {span.name: span for span in self.exporter.get_finished_spans()}


class Taken:
    """A batcher that takes what it is given, or refuses it."""

    def __init__(self, error: Exception | None = None) -> None:
        self.requests: list[GenerateRequest] = []
        self._error = error

    def submit(self, request: GenerateRequest) -> None:
        if self._error is not None:
            raise self._error
        self.requests.append(request)

    def cancel(self, id: str) -> None:
        self.requests = [request for request in self.requests if request.id != id]


def serve(
    tracing: RequestTracing, replica: ReplicaTracing | None = None, headers: dict[bytes, bytes] | None = None
) -> None:
    """One request through gateway and replica: three tokens in two steps."""
    trace = tracing.start(headers or {}, "chat", "chat", "r1")
    assert trace is not None
    trace.queued()
    sent = trace.sent("chat/0")
    if replica is not None:
        replica.submit(GenerateRequest(id="r1", prompt_ids=[1, 2, 3], max_tokens=4, trace=sent))
        replica.emitted([TokenEvent(id="r1", token_ids=[7])])
        replica.emitted([TokenEvent(id="r1", token_ids=[8, 9], finish=FinishReason.STOP)])
    trace.first_token()
    trace.end("stop", (3, 3))


def test_a_request_is_one_trace_across_gateway_queue_and_replica() -> None:
    """Each span is a child of the requesting one, and the first one of the caller's own."""
    kept = Kept()
    replica = ReplicaTracing(kept.provider, Taken(), model="chat", replica=0)
    serve(RequestTracing(kept.provider), replica, {b"traceparent": SAMPLED.encode(), b"tracestate": b"vendor=1"})

    spans = kept.spans
    above = {"chat chat": None, "queue": "chat chat", "replica chat/0": "chat chat", "llm_request": "replica chat/0"}
    above |= {"prefill": "llm_request", "decode": "llm_request"}
    assert spans.keys() == above.keys()
    assert {f"{span.context.trace_id:032x}" for span in spans.values()} == {TRACE}
    for name, parent in above.items():
        actual = spans[name].parent
        assert actual is not None
        assert actual.span_id == (0xB7AD6B7169203331 if parent is None else spans[parent].context.span_id), name
    assert spans["chat chat"].context.trace_state.get("vendor") == "1"
    assert all(span.start_time <= span.end_time for span in spans.values() if span.start_time and span.end_time)
    assert spans["prefill"].end_time == spans["decode"].start_time


def test_a_span_has_the_attributes_of_the_conventions_and_vllms() -> None:
    """Those of the request in the gateway and in the replica."""
    kept = Kept()
    serve(RequestTracing(kept.provider), ReplicaTracing(kept.provider, Taken(), model="chat", replica=0))

    whole, inner = dict(kept.spans["chat chat"].attributes or {}), dict(kept.spans["llm_request"].attributes or {})
    assert whole["gen_ai.operation.name"] == "chat"
    assert whole["gen_ai.request.model"] == whole["gen_ai.response.model"] == "chat"
    assert whole["gen_ai.request.id"] == "r1"
    assert whole["gen_ai.usage.input_tokens"] == whole["gen_ai.usage.prompt_tokens"] == 3
    assert whole["gen_ai.usage.output_tokens"] == whole["gen_ai.usage.completion_tokens"] == 3
    assert whole["gen_ai.response.finish_reasons"] == ("stop",)
    assert whole["corewright.replica"] == "chat/0"
    latency = {f"gen_ai.latency.{name}" for name in ("e2e", "time_in_queue", "time_to_first_token")}
    in_model = {f"gen_ai.latency.time_in_model_{name}" for name in ("prefill", "decode", "inference")}
    assert latency <= whole.keys()
    assert latency | in_model <= inner.keys()
    assert inner["gen_ai.request.max_tokens"] == 4
    assert inner["gen_ai.usage.completion_tokens"] == 3
    assert not any("prompt" in str(value) for value in whole.values())


def test_a_lost_replica_is_in_the_trace() -> None:
    """The request waits again and goes to another one; the first attempt is not a success."""
    kept = Kept()
    trace = RequestTracing(kept.provider).start({}, "chat")
    assert trace is not None
    trace.queued()
    first = trace.sent("chat/0")
    trace.queued()
    second = trace.sent("chat/1")
    trace.end("stop", (1, 1))

    spans = kept.exporter.get_finished_spans()
    assert [span.name for span in spans] == ["queue", "replica chat/0", "queue", "replica chat/1", "chat chat"]
    assert [span.status.is_ok for span in spans] == [True, False, True, True, True]
    ids = [f"{spans[i].context.span_id:016x}" for i in (1, 3)]
    assert [first.split("-")[2], second.split("-")[2]] == ids


def test_an_error_is_in_the_spans_that_had_it() -> None:
    """With its code, and the HTTP status."""
    kept = Kept()
    trace = RequestTracing(kept.provider).start({}, "chat")
    assert trace is not None
    trace.queued()
    trace.end("queue_full", status=429)

    whole = kept.spans["chat chat"]
    assert whole.status.description == "queue_full"
    assert whole.attributes is not None
    assert (whole.attributes["http.response.status_code"], whole.attributes["error.type"]) == (429, "queue_full")


@pytest.mark.parametrize(
    "error", [BatcherClosed("it is draining"), ValueError("the prompt is empty"), RuntimeError("a fault")]
)
def test_a_rejection_by_a_replica_is_in_the_trace(error: Exception) -> None:
    """The data plane gets it too, and nothing of the request is kept."""
    kept = Kept()
    replica = ReplicaTracing(kept.provider, Taken(error), model="chat", replica=0)
    with pytest.raises(type(error)):
        replica.submit(GenerateRequest(id="r1", prompt_ids=[1], max_tokens=1, trace=SAMPLED))
    replica.emitted([TokenEvent(id="r1", token_ids=[1], finish=FinishReason.STOP)])

    assert [span.status.description for span in kept.exporter.get_finished_spans()] == [str(error)]


def test_a_replica_passes_untraced_requests_through() -> None:
    """Requests and cancellations reach the batcher unchanged, without a span."""
    kept, batcher = Kept(), Taken()
    replica = ReplicaTracing(kept.provider, batcher, model="chat", replica=0)
    for id, trace in (("a", None), ("b", NOT_SAMPLED), ("c", "nonsense")):
        replica.submit(GenerateRequest(id=id, prompt_ids=[1], max_tokens=1, trace=trace))
    replica.cancel("a")
    replica.emitted([TokenEvent(id="b", token_ids=[1], finish=FinishReason.STOP)])

    assert [request.id for request in batcher.requests] == ["b", "c"]
    assert kept.spans == {}


@pytest.mark.parametrize(
    ("sampler", "traceparent", "traced"),
    [
        (ParentBased(ALWAYS_ON), None, True),
        (ParentBased(ALWAYS_OFF), None, False),
        (ParentBased(ALWAYS_OFF), SAMPLED, True),
        (ParentBased(ALWAYS_ON), NOT_SAMPLED, False),
        (ALWAYS_ON, NOT_SAMPLED, True),
        (ALWAYS_OFF, SAMPLED, False),
        (ParentBased(ALWAYS_ON), "00-zz-1-01", True),
    ],
)
def test_the_caller_or_the_sampler_decides(sampler: Sampler, traceparent: str | None, traced: bool) -> None:
    """By OTEL_TRACES_SAMPLER; an invalid traceparent is ignored."""
    headers = {} if traceparent is None else {b"traceparent": traceparent.encode()}
    assert (RequestTracing(Kept(sampler).provider).start(headers, "chat") is not None) is traced


@pytest.mark.parametrize(
    ("environ", "traced"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://collector:4318/v1/traces"}, True),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, True),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"}, False),
        ({"OTEL_SDK_DISABLED": "true", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"}, False),
    ],
)
def test_the_environment_enables_traces(environ: dict[str, str], traced: bool) -> None:
    """By the standard variables only."""
    assert is_enabled(environ) is traced


def test_without_enabled_traces_opentelemetry_is_not_imported() -> None:
    """Neither by the gateway nor by a replica: it need not be installed."""
    program = (
        "import sys; from orchestrator.gateway.telemetry.request_spans import RequestTracing; "
        "from workers.serving.spans import open_provider; "
        "assert RequestTracing.from_environment() is None and open_provider('x') is None; "
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(__file__).parents[3],
        env={"PATH": "/usr/bin"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == "[]\n"


class Collector:
    """An OTLP/HTTP collector: what it is sent, one request after the other."""

    def __init__(self) -> None:
        self.received: queue.Queue[tuple[str, dict[str, str], ExportTraceServiceRequest]] = queue.Queue()
        received = self.received

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                received.put((self.path, dict(self.headers.items()), ExportTraceServiceRequest.FromString(body)))
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format: str, *arguments: Any) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def collector() -> Iterator[Collector]:
    server = Collector()
    yield server
    server.close()


def attributes(pairs: Sequence[Any]) -> dict[str, str]:
    return {pair.key: pair.value.string_value for pair in pairs}


def test_a_collector_gets_the_spans_of_both_processes(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over OTLP/HTTP, by the standard variables, each with what its process is."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20t")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
    tracing = RequestTracing.from_environment("1")
    provider = open_provider("corewright-replica", {"service.instance.id": "chat/0"})
    assert tracing is not None
    assert provider is not None
    serve(tracing, ReplicaTracing(provider, Taken(), model="chat", replica=0))
    provider.shutdown()
    tracing.close()

    names: dict[str, set[str]] = {}
    for path, headers, request in itertools.islice(iter(lambda: collector.received.get(timeout=20.0), None), 2):
        assert path == "/v1/traces"
        assert {name.lower(): value for name, value in headers.items()}["authorization"] == "Bearer t"
        for resource in request.resource_spans:
            resource_attributes = attributes(resource.resource.attributes)
            assert resource_attributes["deployment.environment.name"] == "test"
            service = f"{resource_attributes['service.name']} {resource_attributes['service.instance.id']}"
            names.setdefault(service, set()).update(s.name for scope in resource.scope_spans for s in scope.spans)
    assert names == {
        "corewright-gateway gateway/1": {"chat chat", "queue", "replica chat/0"},
        "corewright-replica chat/0": {"llm_request", "prefill", "decode"},
    }


def test_the_name_of_the_service_can_be_set(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    """OTEL_SERVICE_NAME takes precedence over ours."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    monkeypatch.setenv("OTEL_SERVICE_NAME", "chat-fleet")
    tracing = RequestTracing.from_environment()
    assert tracing is not None
    serve(tracing)
    tracing.close()

    _, _, request = collector.received.get(timeout=20.0)
    assert attributes(request.resource_spans[0].resource.attributes)["service.name"] == "chat-fleet"


def test_a_missing_collector_delays_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests are served at once; their spans are lost."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    tracing = RequestTracing.from_environment()
    assert tracing is not None
    began = time.monotonic()
    serve(tracing)
    took = time.monotonic() - began
    tracing.close()

    assert took < 1.0
