"""The metrics of one gateway: vLLM's for each model and replica, and its own.

The calls for every token or request only update numbers and lists; families are made when `/metrics` is scraped.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from orchestrator.scaling.demand_report import FIRST_TOKEN_S, TOKEN_S, ModelLoad
from workers.messages.metric_family import Histogram, MetricFamily, Point, by_label, gauge

QUEUE = "queue"  # the `engine` of requests without a replica; replicas have numbers, as in vLLM
# Further bounds of vLLM v1 (`vllm/v1/metrics/loggers.py`), in seconds and tokens.
REQUEST_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0),
    *(40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
TOKENS = tuple(float(m * 10**e) for e in range(6) for m in (1, 2, 5) if m * 10**e <= 200_000)
OVERHEAD_S = (0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5)
# vLLM's finished_reason by corewright's and OpenAI's; any other is an error.
REASONS = {
    "stop": "stop",
    "length": "length",
    "tool_calls": "stop",
    "function_call": "stop",
    "content_filter": "stop",
    "cancelled": "abort",
    "abort": "abort",
    "error": "error",
}
FINISHED = ("stop", "length", "abort", "error")
LABELS = ("model_name", "engine")
MAX_FIELDS = 64  # unknown fields that are counted by name
OTHER = "other"
_FIELD = re.compile(r"[A-Za-z0-9_.-]{1,64}")
FOLD_AT = 1000  # ended requests that are buffered before they are counted


class ReplicaSnapshot(msgspec.Struct, frozen=True):
    """One replica at the time of a scrape, as this gateway sees it."""

    replica: int
    live: int  # this gateway's requests there
    slots: int
    kv_used_tokens: int  # prompt and answer so far, of those requests
    kv_capacity_tokens: int  # slots times max_len; 0 when unknown, or without a KV cache


class ModelSnapshot(msgspec.Struct, frozen=True):
    """One model at the time of a scrape, as this gateway sees it."""

    model: str
    waiting: int  # in this gateway's queue
    replicas: Sequence[ReplicaSnapshot] = ()
    encodes: bool = False  # it does not generate


class Vitals(msgspec.Struct, frozen=True, kw_only=True):
    """The gateway's other numbers at the time of a scrape. None: not applicable."""

    connections: int = 0  # open
    keys: int = 0  # valid API keys
    keys_in_use: int = 0  # API keys used within the last five minutes
    certificate_expires: float | None = None  # seconds since the epoch
    controller_age_s: float | None = None  # since the last report of the controller's families


class ModelMetrics:
    """The metrics of one model on one replica, or in the queue. Times in seconds."""

    def __init__(self, *, has_replica: bool = True) -> None:
        self._has_replica = has_replica
        self._gap_counts = [0] * (len(TOKEN_S) + 1)
        self._gap_sum = 0.0
        self._generated = 0
        self._prompt_tokens = 0
        self._inputs = 0
        self._first = Histogram(FIRST_TOKEN_S)
        self._queued = Histogram(REQUEST_S)
        self._prefill = Histogram(REQUEST_S)
        self._decode = Histogram(REQUEST_S)
        self._e2e = Histogram(REQUEST_S)
        self._per_output = Histogram(TOKEN_S)
        self._prompt = Histogram(TOKENS)
        self._output = Histogram(TOKENS)
        self._reasons = dict.fromkeys(FINISHED, 0)
        # The arguments of `first_token` and `ended` since the last ``fold``.
        self._firsts: list[tuple[float, float, float]] = []
        self._ends: list[tuple[int, int, float, float]] = []

    def token(self, gap_s: float, count: int = 1) -> None:
        """Counts ``count`` tokens that arrived ``gap_s`` after the previous ones; each gets an equal share of the gap.

        To be called for every step after the first of every request, streamed or not.
        """
        if count != 1:
            if count < 1:
                return
            gap_s /= count
        self._gap_counts[bisect_left(TOKEN_S, gap_s)] += count
        self._gap_sum += gap_s * count
        self._generated += count

    def first_token(self, ttft_s: float, queued_s: float, prefill_s: float) -> None:
        """Counts the first step of a request: ``ttft_s`` after its arrival, of that ``queued_s`` in the queue and
        ``prefill_s`` at the replica."""
        self._firsts.append((ttft_s, queued_s, prefill_s))
        self._generated += 1

    def encoded(self, inputs: int, answer_s: float, queued_s: float, replica_s: float) -> None:
        """Counts the answer to a request of so many ``inputs``: ``answer_s`` after its arrival, of that ``queued_s`` in
        the queue and ``replica_s`` at the replica. To be followed by ``ended``."""
        self._inputs += inputs
        self._firsts.append((answer_s, queued_s, replica_s))

    def ended(self, reason: str, prompt_tokens: int, completion_tokens: int, e2e_s: float, decode_s: float) -> None:
        """Counts the end of a request, once for each. ``decode_s``: from its first token to its last."""
        self._reasons[REASONS.get(reason, "error")] += 1
        self._ends.append((prompt_tokens, completion_tokens, e2e_s, decode_s))
        if len(self._ends) >= FOLD_AT:
            self.fold()

    def fold(self) -> None:
        """Counts the buffered requests; to be called before anything is read."""
        firsts, self._firsts = self._firsts, []
        ends, self._ends = self._ends, []
        for histogram, values in zip(
            (self._first, self._queued, self._prefill), zip(*firsts, strict=True), strict=False
        ):
            histogram.observe_all(values)
        self._e2e.observe_all([e2e_s for _, _, e2e_s, _ in ends])
        if not self._has_replica:
            return  # a request in the queue has no prefill and no tokens
        self._prompt_tokens += sum([prompt for prompt, _, _, _ in ends])
        self._prompt.observe_all([prompt for prompt, _, _, _ in ends])
        self._output.observe_all([output for _, output, _, _ in ends])
        self._decode.observe_all([decode_s for _, output, _, decode_s in ends if output > 0])
        self._per_output.observe_all([decode_s / (output - 1) for _, output, _, decode_s in ends if output > 1])


class GatewayMetrics:
    """All metrics of one gateway. Used from one event loop, without locks."""

    def __init__(self) -> None:
        self._models: dict[tuple[str, str], ModelMetrics] = {}
        self._names: set[str] = set()
        self._refused: Counter[tuple[str, ...]] = Counter()
        self._unknown: Counter[tuple[str, ...]] = Counter()
        self._retries: Counter[tuple[str, ...]] = Counter()
        # The time that this gateway added to a request: all but the waits for a slot and for the replica.
        self.overhead = Histogram(OVERHEAD_S)

    def model(self, name: str, replica: int | None) -> ModelMetrics:
        """Returns the metrics of that model on that replica; None: of requests that ended in the queue."""
        key = name, QUEUE if replica is None else str(replica)
        metrics = self._models.get(key)
        if metrics is None:
            self._names.add(name)
            metrics = self._models[key] = ModelMetrics(has_replica=replica is not None)
        return metrics

    def refused(self, model: str | None, status: int, code: str) -> None:
        """Counts a request that was answered with an error. Only served models become a label: clients may send any
        name."""
        self._refused[(model if model in self._names and model is not None else "", str(status), code)] += 1

    def unknown(self, fields: Iterable[str]) -> None:
        """Counts the unknown fields of a request, by their paths without places in lists. Since clients may send any
        name, only the first ``MAX_FIELDS`` names are counted by name. Others, and long ones, are `other`."""
        for field in fields:
            known = (field,) in self._unknown or (len(self._unknown) < MAX_FIELDS and _FIELD.fullmatch(field))
            self._unknown[(field if known else OTHER,)] += 1

    def retried(self, model: str, kind: str) -> None:
        """Counts a request that moves to another replica; ``kind`` is the cause: `lost` or `draining`."""
        self._retries[(model, kind)] += 1

    def loads(self) -> list[ModelLoad]:
        """Returns what has been counted for each model, with its adapters, since the start of this gateway."""
        counted: dict[str, list[ModelMetrics]] = {}
        for (name, _), metrics in self._models.items():
            metrics.fold()
            counted.setdefault(name.partition(":")[0], []).append(metrics)
        return [
            ModelLoad(
                model=name,
                tokens=sum(each._generated for each in group),
                first=[sum(counts) for counts in zip(*(each._first.counts for each in group), strict=True)],
                gaps=[sum(counts) for counts in zip(*(each._gap_counts for each in group), strict=True)],
            )
            for name, group in counted.items()
        ]

    def families(self, snapshot: Sequence[ModelSnapshot], vitals: Vitals | None = None) -> list[MetricFamily]:
        """Returns the families of this gateway alone."""
        for model in snapshot:  # every served model has its series from the start, at zero
            self._names.add(model.model)
            for replica in model.replicas:
                self.model(model.model, replica.replica)
        return [*_gauges(snapshot), *self._vllm(), *self._own(snapshot, vitals or Vitals())]

    def _vllm(self) -> Iterable[MetricFamily]:
        items = self._models.items()
        for model in self._models.values():
            model.fold()
        prompt = {key: model._prompt_tokens for key, model in items}
        yield by_label("vllm:prompt_tokens", "counter", "Number of prefill tokens processed.", LABELS, prompt)
        generated = {key: model._generated for key, model in items}
        help = "Number of generation tokens processed."
        yield by_label("vllm:generation_tokens", "counter", help, LABELS, generated)
        success = {(*key, reason): count for key, model in items for reason, count in model._reasons.items()}
        help = "Number of finished requests."
        yield by_label("vllm:request_success", "counter", help, (*LABELS, "finished_reason"), success)
        gaps = [(key, Point(key, model._gap_sum, tuple(model._gap_counts))) for key, model in items]
        for name, help in (
            ("vllm:inter_token_latency_seconds", "Time between two tokens of an answer."),
            ("vllm:time_per_output_token_seconds", "The former vLLM name of vllm:inter_token_latency_seconds."),
        ):
            yield _family(name, help, TOKEN_S, [point for key, point in gaps if key[1] != QUEUE])
        for name, help, bounds, attribute in _HISTOGRAMS:
            everywhere = attribute == "_e2e"
            points = [getattr(model, attribute).point(*key) for key, model in items if everywhere or key[1] != QUEUE]
            yield _family(name, help, bounds, points)

    def _own(self, snapshot: Sequence[ModelSnapshot], vitals: Vitals) -> Iterable[MetricFamily]:
        slots = {(model.model, str(replica.replica)): replica.slots for model in snapshot for replica in model.replicas}
        help = "Slots of the replica: requests that it can run at once."
        yield by_label("corewright_routed_slots", "gauge", help, ("model", "replica"), slots)
        queue = {(model.model,): model.waiting for model in snapshot}
        yield by_label("corewright_queue_length", "gauge", "Requests waiting for a slot.", ("model",), queue)
        encoders = {model.model for model in snapshot if model.encodes}
        inputs = {key: model._inputs for key, model in self._models.items() if key[0] in encoders and key[1] != QUEUE}
        help = "Inputs encoded: texts and pairs of texts."
        yield by_label("corewright_encoded_inputs", "counter", help, ("model", "replica"), inputs)
        help = "Requests answered with an error, by status and code."
        yield by_label("corewright_requests_refused", "counter", help, ("model", "status", "code"), self._refused)
        help = "Unknown fields of requests, which are ignored, by path."
        yield by_label("corewright_unknown_fields", "counter", help, ("field",), self._unknown)
        help = "Requests moved to another replica, by cause."
        yield by_label("corewright_request_retries", "counter", help, ("model", "kind"), self._retries)
        help = "Time the gateway adds to a request, without the waits for a slot and for the replica."
        yield _family("corewright_gateway_overhead_seconds", help, OVERHEAD_S, [self.overhead.point()], ())
        yield gauge("corewright_connections", "Open client connections.", vitals.connections)
        yield gauge("corewright_keys", "Valid API keys.", vitals.keys)
        help = "API keys used within the last five minutes."
        yield gauge("corewright_keys_in_use", help, vitals.keys_in_use)
        if vitals.certificate_expires is not None:
            help = "Expiry of the served TLS certificate, in seconds since the epoch."
            yield gauge("corewright_certificate_expiry_timestamp_seconds", help, vitals.certificate_expires)
        if vitals.controller_age_s is not None:
            help = "Seconds since the controller last reported its metrics."
            yield gauge("corewright_controller_age_seconds", help, vitals.controller_age_s)


# Name, help, bounds and the attribute that counts it.
_HISTOGRAMS = (
    (
        "vllm:time_to_first_token_seconds",
        "Time from the arrival of a request to its first token.",
        FIRST_TOKEN_S,
        "_first",
    ),
    ("vllm:e2e_request_latency_seconds", "Time from the arrival of a request to its end.", REQUEST_S, "_e2e"),
    ("vllm:request_queue_time_seconds", "Time in the gateway's queue.", REQUEST_S, "_queued"),
    ("vllm:request_prefill_time_seconds", "Time from the slot to the first token.", REQUEST_S, "_prefill"),
    ("vllm:request_decode_time_seconds", "Time from the first token to the last.", REQUEST_S, "_decode"),
    (
        "vllm:request_time_per_output_token_seconds",
        "Mean time between two tokens of a request, observed once per request.",
        TOKEN_S,
        "_per_output",
    ),
    ("vllm:request_prompt_tokens", "Tokens of the prompt.", TOKENS, "_prompt"),
    ("vllm:request_generation_tokens", "Tokens of the answer.", TOKENS, "_output"),
    (
        "vllm:request_max_num_generation_tokens",
        "Tokens of the longest answer of a request; each choice counts as a request.",
        TOKENS,
        "_output",
    ),
)


def _family(
    name: str, help: str, bounds: tuple[float, ...], points: Iterable[Point], labels: tuple[str, ...] = LABELS
) -> MetricFamily:
    return MetricFamily(name=name, kind="histogram", help=help, labels=labels, points=tuple(points), buckets=bounds)


def _gauges(snapshot: Sequence[ModelSnapshot]) -> Iterable[MetricFamily]:
    """Yields vLLM's gauges. The queue is the gateway's: replicas have no waiting requests of their own."""
    replicas = {(model.model, str(replica.replica)): replica for model in snapshot for replica in model.replicas}
    running = {key: replica.live for key, replica in replicas.items()}
    yield by_label("vllm:num_requests_running", "gauge", "Requests in a slot.", LABELS, running)
    waiting = {(model.model, QUEUE): model.waiting for model in snapshot}
    yield by_label("vllm:num_requests_waiting", "gauge", "Requests waiting for a slot.", LABELS, waiting)
    used = {
        key: replica.kv_used_tokens / replica.kv_capacity_tokens
        for key, replica in replicas.items()
        if replica.kv_capacity_tokens
    }
    for name, help in (
        ("vllm:kv_cache_usage_perc", "Used share of the KV cache, 0 to 1."),
        ("vllm:gpu_cache_usage_perc", "The former vLLM name of vllm:kv_cache_usage_perc."),
    ):
        yield by_label(name, "gauge", help, LABELS, used)
