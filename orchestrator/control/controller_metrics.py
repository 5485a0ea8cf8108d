"""Metric families of the controller for `/metrics`: its counters, and the state of the fleet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from orchestrator.fleet.replica_states import STARTING, State
from orchestrator.fleet.snapshot import ReplicaView
from workers.messages.metric_family import Histogram, MetricFamily, Point, by_label, gauge
from workers.messages.status import ReplicaStatus
from workers.serving.replica_metrics import METRICS, Kind

LOAD_S = (0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 300.0, 600.0, 1200.0, 2400.0, 3600.0, 7200.0)
ROUND_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
CORE_STATES = {  # each with the key of the status that counts it
    "leased": "leased",
    "free": "free",
    "cordoned": "free_cordoned",
    "quarantined": "quarantined",
    "reserved": "reserved",
}
DECISIONS = ("place", "retry", "drain", "stop", "fail", "release", "forget")
ROLLOUT_STATES = ("progressing", "paused", "canary", "complete", "failed", "rolled_back")
ENDED = ("complete", "failed", "rolled_back")
OF_A_REPLICA = ("model", "replica")


class ControllerCounters:
    """Counters of one controller. Used from one event loop, so there are no locks.

    A restarted controller begins at zero, which Prometheus recognizes as a reset.
    """

    def __init__(self) -> None:
        self.rounds = Histogram(ROUND_S)
        self.failed_rounds = 0
        self._decisions: Counter[tuple[str, ...]] = Counter()
        self._loads: dict[str, Histogram] = {}
        self._failures: Counter[tuple[str, ...]] = Counter()
        self._restarts: Counter[tuple[str, ...]] = Counter()
        self._fetches: dict[str, Histogram] = {}
        self._fetched_bytes: Counter[tuple[str, ...]] = Counter()
        self._failed_fetches: Counter[tuple[str, ...]] = Counter()
        self._rollouts: Counter[tuple[str, ...]] = Counter()
        self._quarantines: Counter[tuple[str, ...]] = Counter()
        self._rollout: tuple[int, str] | None = None  # the last one counted

    def decided(self, action: str) -> None:
        """Count an executed action, one of DECISIONS."""
        self._decisions[(action,)] += 1

    def started(self, view: ReplicaView, *, again: bool) -> None:
        """Count a start of a replica; ``again``: after an earlier process of it."""
        self.decided("retry" if again else "place")
        self._restarts[(view.model,)] += again

    def loaded(self, view: ReplicaView) -> None:
        """Count a replica that is ready, ``view.load_s`` seconds after its start."""
        self._loads.setdefault(view.model, Histogram(LOAD_S)).observe(view.load_s or 0.0)

    def fetched(self, model: str, moved: int, seconds: float) -> None:
        """Count a completed fetch; ``moved`` is the number of bytes that came over the network."""
        self._fetches.setdefault(model, Histogram(LOAD_S)).observe(seconds)
        self._fetched_bytes[(model,)] += moved

    def not_fetched(self, model: str) -> None:
        """Count a failed fetch."""
        self._failed_fetches[(model,)] += 1

    def failed(self, view: ReplicaView, problem: str) -> None:
        """Count a failed replica; ``problem`` is the id of the failure."""
        phase = "serving" if view.state in (State.READY, State.DRAINING) else "loading"
        self._failures[(view.model, problem, phase)] += 1

    def quarantined(self, host: str, cause: str) -> None:
        """Count a quarantined core: ``held`` by a foreign process, or ``suspect`` after a failure."""
        self._quarantines[(host, cause)] += 1

    def rollout(self, revision: int, state: str) -> None:
        """Note the state of the current rollout each round; its end is counted once."""
        if (revision, state) != self._rollout and state in ENDED:
            self._rollouts[(state,)] += 1
        self._rollout = (revision, state)

    def families(self) -> Iterable[MetricFamily]:
        """Returns all counters. Those whose labels have few values start at zero."""
        decisions = {(key,): 0 for key in DECISIONS} | self._decisions
        yield by_label("corewright_decisions", "counter", "Actions of the controller.", ("action",), decisions)
        restarts = "Starts of a replica after an earlier process of it had ended."
        yield by_label("corewright_replica_restarts", "counter", restarts, ("model",), self._restarts)
        failures = "Failed replicas, by the id of the problem."
        of_failures = ("model", "problem", "phase")
        yield by_label("corewright_replica_failures", "counter", failures, of_failures, self._failures)
        yield MetricFamily(
            name="corewright_load_seconds",
            kind="histogram",
            help="Time from the start of a replica to its first generation, without fetching and compiling ahead.",
            labels=("model",),
            points=tuple(histogram.point(model) for model, histogram in self._loads.items()),
            buckets=LOAD_S,
        )
        yield MetricFamily(
            name="corewright_fetch_seconds",
            kind="histogram",
            help="Time to fetch a replica's remote artifacts to its host.",
            labels=("model",),
            points=tuple(histogram.point(model) for model, histogram in self._fetches.items()),
            buckets=LOAD_S,
        )
        moved = "Bytes fetched over the network; bytes that the host already had are not counted."
        yield by_label("corewright_fetched_bytes", "counter", moved, ("model",), self._fetched_bytes)
        failed = "Fetches that failed."
        yield by_label("corewright_failed_fetches", "counter", failed, ("model",), self._failed_fetches)
        rollouts = {(key,): 0 for key in ENDED} | self._rollouts
        yield by_label("corewright_rollouts", "counter", "Finished rollouts.", ("state",), rollouts)
        quarantines = "Cores put into quarantine, by cause."
        yield by_label("corewright_quarantines", "counter", quarantines, ("host", "cause"), self._quarantines)
        yield MetricFamily(
            name="corewright_controller_round_seconds",
            kind="histogram",
            help="One round of the controller: observe, decide, act.",
            points=(self.rounds.point(),),
            buckets=ROUND_S,
        )
        failed = "Rounds that ended with an exception."
        yield by_label("corewright_controller_failed_rounds", "counter", failed, (), {(): self.failed_rounds})


def fleet_families(status: Mapping[str, Any], views: Mapping[str, ReplicaView], now: float) -> Iterable[MetricFamily]:
    """Returns gauges of the fleet's ``status`` and of its replicas; ``now`` is on the clock of their times."""
    yield gauge("corewright_ready", "Whether every model has reached its min replicas.", status["ready"])
    yield gauge("corewright_journal_revision", "The number of the current revision of the spec.", status["revision"])
    yield from _hosts(status["hosts"])
    yield from _models(status["models"])
    yield from _replicas(views, now)
    rollout = status["rollout"]
    states = {(condition,): float(condition == rollout["state"]) for condition in ROLLOUT_STATES}
    yield by_label("corewright_rollout_state", "gauge", "1 for the state of the current rollout.", ("state",), states)
    since = "When the current rollout entered its state, in seconds since the epoch."
    yield gauge("corewright_rollout_since_timestamp_seconds", since, rollout["since"])
    conditions = {(condition["type"],): float(condition["status"]) for condition in status["conditions"]}
    holds = "Whether a condition of the fleet holds."
    yield by_label("corewright_condition", "gauge", holds, ("type",), conditions)


def _hosts(hosts: Iterable[Mapping[str, Any]]) -> Iterable[MetricFamily]:
    hosts = list(hosts)
    cores = {(host["name"], state): host[key] for host in hosts for state, key in CORE_STATES.items()}
    labels = ("host", "state")
    yield by_label("corewright_cores", "gauge", "NeuronCores by state; together all of the host.", labels, cores)
    yield by_label(
        "corewright_host_cores",
        "gauge",
        "NeuronCores of the host.",
        ("host",),
        {(h["name"],): h["cores"] for h in hosts},
    )
    up = {(host["name"],): float(not host["lost"]) for host in hosts}
    yield by_label("corewright_host_up", "gauge", "Whether the host's Ray node is alive.", ("host",), up)


def _models(models: Iterable[Mapping[str, Any]]) -> Iterable[MetricFamily]:
    models = list(models)
    desired = {(model["name"],): model["wanted"] for model in models}
    yield by_label("corewright_replicas_wanted", "gauge", "Replicas that the model should have.", ("model",), desired)
    yield from _scaling(models)
    counted = {
        (model["name"], state.value): sum(replica["state"] == state.value for replica in model["replicas"])
        for model in models
        for state in State
    }
    yield by_label("corewright_replicas", "gauge", "Replicas by state.", ("model", "state"), counted)
    for kind, text in (
        ("Available", "Whether the model has its min replicas, or as many as are desired."),
        ("Placed", "Whether every desired replica is placed."),
        ("Reachable", "Whether every gateway is connected to every ready replica of the model."),
    ):
        holds = {
            (model["name"],): float(condition["status"])
            for model in models
            for condition in model["conditions"]
            if condition["type"] == kind
        }
        yield by_label(f"corewright_model_{kind.lower()}", "gauge", text, ("model",), holds)


def _scaling(models: Iterable[Mapping[str, Any]]) -> Iterable[MetricFamily]:
    """Yields the autoscaler's targets and bounds, and the demand that all gateways report."""
    scaling = {(model["name"],): model["scaling"] for model in models}
    text = "Replicas that the autoscaler targets, regardless of manual scaling."
    targets = {name: row["target"] for name, row in scaling.items()}
    yield by_label("corewright_target_replicas", "gauge", text, ("model",), targets)
    for key, limit in (("min", "Lower"), ("max", "Upper")):
        text = f"{limit} limit of replicas that applies now."
        bound = {name: row[key] for name, row in scaling.items()}
        yield by_label(f"corewright_replicas_{key}", "gauge", text, ("model",), bound)
    demand = {name: row["demand"] for name, row in scaling.items() if row["demand"] is not None}
    text = "Requests for inference that arrive each second at all gateways, averaged over half a minute."
    rates = {name: row["arrivals_per_s"] for name, row in demand.items()}
    yield by_label("corewright_demand_arrivals_per_second", "gauge", text, ("model",), rates)
    text = "Requests at all gateways now: waiting for a slot, or live in one."
    requests = {(*name, state): row[state] for name, row in demand.items() for state in ("waiting", "live")}
    yield by_label("corewright_demand_requests", "gauge", text, ("model", "state"), requests)


def scaling_changes(counts: Mapping[tuple[str, ...], int]) -> MetricFamily:
    """Returns how often the number of replicas was changed by demand or schedule, or held back; by model and event."""
    text = "Decisions about the number of replicas, by the event that reports them."
    return by_label("corewright_scaling_decisions", "counter", text, ("model", "kind"), counts)


def _replicas(views: Mapping[str, ReplicaView], now: float) -> Iterable[MetricFamily]:
    living = [view for view in views.values() if not view.gone]
    starting = {
        (view.model, str(view.replica)): max(0.0, now - view.begun - view.aside(now))
        for view in living
        if view.state in STARTING
    }
    text = "How long a replica that is not ready has been starting, without fetching and compiling ahead."
    yield by_label("corewright_replica_starting_seconds", "gauge", text, OF_A_REPLICA, starting)
    compiling = {(view.model, str(view.replica)): view.compile_s for view in living}
    text = "How long the replica's process has compiled, or waited for a process that compiles the same."
    yield by_label("corewright_replica_compile_seconds", "gauge", text, OF_A_REPLICA, compiling)
    stopped = {(view.model, str(view.replica)): float(view.stopped or view.breaker_open) for view in views.values()}
    text = "Whether the replica is retried rarely or never, after repeated or permanent failures."
    yield by_label("corewright_replica_given_up", "gauge", text, OF_A_REPLICA, stopped)


def engine_families(heard: Mapping[tuple[str, str], ReplicaStatus]) -> Iterable[MetricFamily]:
    """Returns the counters of each replica, by model and number, from its last report: at most some seconds old."""
    for metric in METRICS:
        counter = metric.kind is Kind.COUNTER
        points = tuple(Point(key, float(metric.of(status))) for key, status in heard.items())
        yield MetricFamily(
            name=metric.name.removesuffix("_total") if counter else metric.name,
            kind="counter" if counter else "gauge",
            help=metric.description,
            labels=OF_A_REPLICA,
            points=points,
        )
