"""Metric families of the controller for `/metrics`: its counters, and the state of the fleet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from orchestrator.control.decisions.replica_view import ReplicaView
from orchestrator.messages.fleet_status import FleetStatus, HostInFleet, ModelInFleet
from orchestrator.messages.replica_states import STARTING, State
from workers.messages.metric_family import Histogram, MetricFamily, Point, by_label, gauge
from workers.messages.status import ReplicaStatus
from workers.serving.replica_metrics import METRICS

LOAD_S = (0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 300.0, 600.0, 1200.0, 2400.0, 3600.0, 7200.0)
ROUND_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
DECISIONS = ("place", "retry", "drain", "stop", "fail", "release", "forget")
ROLLOUT_STATES = ("progressing", "paused", "canary", "complete", "failed", "rolled_back")
ENDED = ("complete", "failed", "rolled_back")
OF_A_REPLICA = ("model", "replica")
COUNTERS: Mapping[str, tuple[str, tuple[str, ...]]] = {  # by name: help and labels
    "decisions": ("Actions of the controller.", ("action",)),
    "replica_restarts": ("Starts of a replica after an earlier process of it had ended.", ("model",)),
    "replica_failures": ("Failed replicas, by the id of the problem.", ("model", "problem", "phase")),
    "fetched_bytes": ("Bytes fetched over the network; bytes that the host already had are not counted.", ("model",)),
    "failed_fetches": ("Fetches that failed.", ("model",)),
    "rollouts": ("Finished rollouts.", ("state",)),
    "quarantines": ("Cores put into quarantine, by cause.", ("host", "cause")),
    "controller_failed_rounds": ("Rounds that ended with an exception.", ()),
}
ZEROS: Mapping[str, Iterable[tuple[str, ...]]] = {  # the series of counters that start at zero
    "decisions": [(action,) for action in DECISIONS],
    "rollouts": [(state,) for state in ENDED],
    "controller_failed_rounds": [()],
}
HISTOGRAMS: Mapping[str, tuple[str, tuple[str, ...], tuple[float, ...]]] = {
    # by name: help, labels and buckets
    "load_seconds": (
        "Time from the start of a replica to its first generation, without fetching and compiling ahead.",
        ("model",),
        LOAD_S,
    ),
    "load_phase_seconds": (
        "The phases of the start of a replica, which add up to corewright_load_seconds.",
        ("model", "phase"),
        LOAD_S,
    ),
    "fetch_seconds": ("Time to fetch a replica's remote artifacts to its host.", ("model",), LOAD_S),
    "controller_round_seconds": ("One round of the controller: observe, decide, act.", (), ROUND_S),
}


MODEL_GAUGES: tuple[tuple[str, Callable[[ModelInFleet], float], str], ...] = (  # name, value and help
    ("replicas_wanted", lambda model: model.wanted, "Replicas that the model should have."),
    (
        "target_replicas",
        lambda model: model.scaling.target,
        "Replicas that the autoscaler targets, regardless of manual scaling.",
    ),
    ("replicas_min", lambda model: model.scaling.min, "Lower limit of replicas that applies now."),
    ("replicas_max", lambda model: model.scaling.max, "Upper limit of replicas that applies now."),
    (
        "model_available",
        lambda model: model.holds("Available"),
        "Whether the model has its min replicas, or as many as are desired.",
    ),
    (
        "model_placed",
        lambda model: model.holds("Placed"),
        "Whether every desired replica is placed.",
    ),
    (
        "model_reachable",
        lambda model: model.holds("Reachable"),
        "Whether every gateway is connected to every ready replica of the model.",
    ),
)


class ControllerCounters:
    """Counters of one controller. Used from one event loop, so there are no locks.

    A restarted controller begins at zero, which Prometheus recognizes as a reset.
    """

    def __init__(self) -> None:
        self._counts: dict[str, Counter[tuple[str, ...]]] = {
            name: Counter(dict.fromkeys(ZEROS.get(name, ()), 0)) for name in COUNTERS
        }
        self._histograms: dict[str, dict[tuple[str, ...], Histogram]] = {name: {} for name in HISTOGRAMS}
        self._histograms["controller_round_seconds"][()] = Histogram(ROUND_S)
        self._rollout: tuple[int, str] | None = None  # the last one counted

    def _count(self, name: str, *labels: str, by: int = 1) -> None:
        self._counts[name][labels] += by

    def _observe(self, name: str, seconds: float, *labels: str) -> None:
        self._histograms[name].setdefault(labels, Histogram(HISTOGRAMS[name][2])).observe(seconds)

    def round(self, seconds: float) -> None:
        """Count a round of the controller."""
        self._observe("controller_round_seconds", seconds)

    def failed_round(self, error: Exception) -> None:
        """Count a round that has ended with ``error``."""
        self._count("controller_failed_rounds")

    def decided(self, action: str) -> None:
        """Count an executed action, one of DECISIONS."""
        self._count("decisions", action)

    def started(self, view: ReplicaView, *, again: bool) -> None:
        """Count a start of a replica; ``again``: after an earlier process of it."""
        self.decided("retry" if again else "place")
        self._count("replica_restarts", view.model, by=again)

    def loaded(self, view: ReplicaView) -> None:
        """Count a replica that is ready, ``view.load_s`` seconds after its start."""
        self._observe("load_seconds", view.load_s or 0.0, view.model)
        for phase, seconds in view.load_phases.items():
            self._observe("load_phase_seconds", seconds, view.model, phase)

    def fetched(self, model: str, moved: int, seconds: float) -> None:
        """Count a completed fetch; ``moved`` is the number of bytes that came over the network."""
        self._observe("fetch_seconds", seconds, model)
        self._count("fetched_bytes", model, by=moved)

    def not_fetched(self, model: str) -> None:
        """Count a failed fetch."""
        self._count("failed_fetches", model)

    def failed(self, view: ReplicaView, problem: str) -> None:
        """Count a failed replica; ``problem`` is the id of the failure."""
        phase = "serving" if view.state in (State.READY, State.DRAINING) else "loading"
        self._count("replica_failures", view.model, problem, phase)

    def quarantined(self, host: str, cause: str) -> None:
        """Count a quarantined core: ``held`` by a foreign process, or ``suspect`` after a failure."""
        self._count("quarantines", host, cause)

    def rollout(self, revision: int, state: str) -> None:
        """Note the state of the current rollout each round; its end is counted once."""
        if (revision, state) != self._rollout and state in ENDED:
            self._count("rollouts", state)
        self._rollout = (revision, state)

    def families(self) -> Iterable[MetricFamily]:
        """Returns all counters and histograms."""
        for name, (help, labels) in COUNTERS.items():
            yield by_label(f"corewright_{name}", "counter", help, labels, self._counts[name])
        for name, (help, labels, buckets) in HISTOGRAMS.items():
            yield MetricFamily(
                name=f"corewright_{name}",
                kind="histogram",
                help=help,
                labels=labels,
                points=tuple(histogram.point(*key) for key, histogram in self._histograms[name].items()),
                buckets=buckets,
            )


def fleet_families(status: FleetStatus, views: Mapping[str, ReplicaView], now: float) -> Iterable[MetricFamily]:
    """Returns gauges of the fleet's ``status`` and of its replicas; ``now`` is on the clock of their times."""
    yield gauge("corewright_ready", "Whether every model has reached its min replicas.", status.ready)
    yield gauge("corewright_journal_revision", "The number of the current revision of the spec.", status.revision)
    yield from _hosts(status.hosts)
    yield from _models(status.models)
    yield from _replicas(views, now)
    rollout = status.rollout
    states = {(condition,): float(condition == rollout.state) for condition in ROLLOUT_STATES}
    yield by_label("corewright_rollout_state", "gauge", "1 for the state of the current rollout.", ("state",), states)
    since = "When the current rollout entered its state, in seconds since the epoch."
    yield gauge("corewright_rollout_since_timestamp_seconds", since, rollout.since)
    conditions = {(condition.type,): float(condition.status) for condition in status.conditions}
    holds = "Whether a condition of the fleet holds."
    yield by_label("corewright_condition", "gauge", holds, ("type",), conditions)


def _hosts(hosts: Sequence[HostInFleet]) -> Iterable[MetricFamily]:
    starting = {(host.name,): float(host.starting is not None) for host in hosts}
    requested = "Whether the host's machine is requested and has not joined."
    yield by_label("corewright_host_starting", "gauge", requested, ("host",), starting)
    hosts = [host for host in hosts if host.starting is None]
    cores = {(host.name, state): count for host in hosts for state, count in host.cores_by_state.items()}
    labels = ("host", "state")
    yield by_label("corewright_cores", "gauge", "NeuronCores by state; together all of the host.", labels, cores)
    total = {(host.name,): host.cores for host in hosts}
    yield by_label("corewright_host_cores", "gauge", "NeuronCores of the host.", ("host",), total)
    up = {(host.name,): float(not host.lost) for host in hosts}
    yield by_label("corewright_host_up", "gauge", "Whether the host's Ray node is alive.", ("host",), up)


def _models(models: Sequence[ModelInFleet]) -> Iterable[MetricFamily]:
    """Yields the replicas of each model, the bounds and targets of the autoscaler, and the demand at all gateways."""
    for name, value_of, help in MODEL_GAUGES:
        points = {(model.name,): float(value_of(model)) for model in models}
        yield by_label(f"corewright_{name}", "gauge", help, ("model",), points)
    counted = {
        (model.name, state.value): sum(replica.state is state for replica in model.replicas)
        for model in models
        for state in State
    }
    yield by_label("corewright_replicas", "gauge", "Replicas by state.", ("model", "state"), counted)
    demand = {model.name: row for model in models if (row := model.scaling.demand) is not None}
    text = "Requests for inference that arrive each second at all gateways, averaged over half a minute."
    rates = {(name,): row.arrivals_per_s for name, row in demand.items()}
    yield by_label("corewright_demand_arrivals_per_second", "gauge", text, ("model",), rates)
    text = "Requests at all gateways now: waiting for a slot, or live in one."
    requests = {(name, "waiting"): row.waiting for name, row in demand.items()}
    requests |= {(name, "live"): row.live for name, row in demand.items()}
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
        values = ((key, metric.of(status)) for key, status in heard.items())
        points = tuple(Point(key, float(value)) for key, value in values if value is not None)
        yield MetricFamily(
            name=metric.name.removesuffix("_total"),
            kind="counter" if metric.is_counter else "gauge",
            help=metric.description,
            labels=OF_A_REPLICA,
            points=points,
        )
