"""Advice on a model's size: each candidate that fits is simulated under the load, and the efficient ones are kept."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import yaml

from orchestrator.control.resolve.checkpoint_reader import CheckpointFacts, read_facts
from orchestrator.control.resolve.spec_file import SpecFile, judge, this_machine
from orchestrator.process.failure import Failed
from orchestrator.simulate.report import Summary
from orchestrator.simulate.run import Fixed, simulate
from orchestrator.simulate.scenario import Arrival, SimModel, scenario_of
from orchestrator.simulate.simulated_queue import Measured
from orchestrator.simulate.workload import Lengths, Workload
from placements.engines.evidence import Evidence, ModelVariant, releases_reported
from placements.engines.registry import Engine, candidates_of, serves
from placements.facts.checkpoints import Checkpoint
from placements.facts.topology import DEGREES, TOPOLOGIES
from placements.planner.plan import Plan, plan
from placements.resources.calibration import MeasuredSpeed
from placements.resources.estimate import Speed
from placements.resources.memory import estimate
from placements.spec.notation import name_from
from placements.spec.parse import parse
from placements.spec.problems import Problem, has_errors

BATCHES = (1, 2, 4, 8, 16, 32, 64)
SHARE = 0.7
"""The load without ``rps``, as a share of what a host can serve."""

WITHIN = 0.99
"""The share of the requests that must be within the objectives."""

ROUNDS = 8  # requests in a row of each slot, to measure what a replica can serve
REQUESTS = 500  # of a simulation under load, at least
TURNOVERS = 20  # how often its slots change their requests, at least
MOST_REQUESTS = 20_000
WARM_UP = 0.1  # the share of the arrivals that is not measured
MOST_HOSTS = 64
CHOSEN = ("tp_degree", "allow_head_padding", "max_batch", "replicas")
SPARE = 1.5  # replicas that are tried, as a multiple of those that have the capacity


@dataclass(frozen=True)
class SizingQuestion:
    """A model and its load. Lengths are in tokens, prices in dollars an hour by instance type."""

    source: str
    engine: Engine = "auto"
    instances: tuple[str, ...] = tuple(TOPOLOGIES)
    prompt_tokens: int = 512
    output_tokens: int = 128
    max_len: int | None = None  # None: ``slot``
    rps: float | None = None  # requests/s; None: a share of what a host can serve
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    prices: Mapping[str, float] = field(default_factory=dict)
    measured: tuple[MeasuredSpeed, ...] = ()
    degrees: tuple[int, ...] = ()  # those to compare; none: all documented ones
    batches: tuple[int, ...] = ()  # the values of ``max_batch`` to compare; none: BATCHES
    as_is: bool = False  # only weights in the checkpoint's own types, and degrees that divide its heads

    @property
    def name(self) -> str:
        """The model's name in the specs."""
        return name_from(self.source)

    @property
    def slot(self) -> int:
        """The tokens of a slot: ``max_len``, or the least power of two that holds a prompt and its output."""
        return self.max_len or 1 << (self.prompt_tokens + self.output_tokens - 1).bit_length()


@dataclass(frozen=True)
class SizingCandidate:
    """A way to serve the model."""

    question: SizingQuestion
    instance: str
    tp_degree: int
    max_batch: int
    quantized: bool  # weights in int8
    padded: bool  # the degree does not divide the heads

    @property
    def shape(self) -> tuple[object, ...]:
        """What decides the speed of a replica: equal on all instance types of a family."""
        return TOPOLOGIES[self.instance].family, self.tp_degree, self.max_batch, self.quantized

    @property
    def weights(self) -> str:
        """The type of the weights."""
        return "int8" if self.quantized else "bf16"

    def fields(self, replicas: int) -> dict[str, Any]:
        """Returns the fields of the model in a spec, with so many replicas."""
        question = self.question
        limits = {"ttft_ms": question.ttft_ms, "tpot_ms": question.tpot_ms}
        objectives = {name: int(limit) if limit == int(limit) else limit for name, limit in limits.items() if limit}
        fields: dict[str, Any] = {
            "source": question.source,
            "engine": None if question.engine == "auto" else question.engine,
            "tp_degree": self.tp_degree,
            "allow_head_padding": True if self.padded else None,
            "max_batch": self.max_batch,
            "max_len": question.slot,
            "quantize": "int8" if self.quantized else None,
            "replicas": replicas,
            "objectives": objectives or None,
        }
        return {name: value for name, value in fields.items() if value is not None}

    def spec(self, replicas: int, hosts: int) -> str:
        """Returns the text of the spec with so many replicas on so many hosts."""
        host = {"instance": self.instance, **({"count": hosts} if hosts > 1 else {})}
        spec = {"version": 1, "hosts": host, "models": {self.question.name: self.fields(replicas)}}
        return yaml.safe_dump(spec, sort_keys=False, width=1000)


def candidates(question: SizingQuestion, checkpoint: Checkpoint) -> Iterator[SizingCandidate]:
    """Yields every combination of instance type, degree, type of weights and batch, small batches first."""
    for instance in question.instances:
        topology = TOPOLOGIES[instance]
        for tp, row in DEGREES[topology.family].items():
            padded = checkpoint.heads % tp != 0
            wanted = tp in question.degrees if question.degrees else row.documented
            if tp > topology.cores or (padded and question.as_is) or not wanted:
                continue
            for quantized in (False,) if question.as_is else (False, True):
                for batch in question.batches or BATCHES:
                    yield SizingCandidate(question, instance, tp, batch, quantized, padded)


@dataclass(frozen=True)
class Line:
    """A candidate under the load. Times are in milliseconds, sizes in GiB."""

    candidate: SizingCandidate
    hosts: int
    replicas: int
    per_host: int  # the most replicas of a host
    spec: str
    hbm_gib: float  # of the fullest core
    host_tokens_per_s: float  # output tokens that a full host can serve
    rps: float  # the load
    ttft_ms: Summary
    tpot_ms: Summary
    latency_ms: Summary
    speed: Speed

    @property
    def cores(self) -> int:
        """The cores of all replicas."""
        return self.replicas * self.candidate.tp_degree

    @property
    def dollars_per_million(self) -> float | None:
        """The price of the hosts for a million output tokens of this load; None without a price."""
        hourly = self.candidate.question.prices.get(self.candidate.instance)
        tokens = self.rps * self.candidate.question.output_tokens * 3600
        return None if hourly is None else self.hosts * hourly / tokens * 1e6

    @property
    def cost(self) -> float:
        """What lines are compared by: dollars or, without prices, cores for each request/s."""
        dollars = self.dollars_per_million
        return self.cores / self.rps if dollars is None else dollars

    @property
    def market(self) -> str:
        """Lines of one market have comparable costs: those with prices, or those of one family."""
        return TOPOLOGIES[self.candidate.instance].family if self.dollars_per_million is None else ""

    def beats(self, other: Line) -> bool:
        """Returns whether this line is nowhere worse than another, the type of the weights included."""
        return (
            self.market == other.market
            and self.candidate.quantized <= other.candidate.quantized
            and self.cost <= other.cost
            and self.latency_ms.p99 <= other.latency_ms.p99
        )


class LeftOut(Exception):
    """A candidate cannot serve the load; ``excess`` orders candidates with the same id by how far they are from it."""

    def __init__(self, id: str, what: str, excess: float = 0.0) -> None:
        super().__init__(what)
        self.id, self.what, self.excess = id, what, excess

    @classmethod
    def by(cls, problems: Iterable[Problem]) -> LeftOut:
        """Returns the first error."""
        problem = next(problem for problem in problems if problem.severity == "error")
        return cls(problem.id, problem.what)

    @classmethod
    def of_plan(cls, placed: Plan) -> LeftOut:
        """Returns the first error of the replicas without a place."""
        return cls.by(problem for missing in placed.unplaced for problem in missing.problems)


@dataclass(frozen=True)
class Advice:
    """The efficient lines, cheapest first, and the candidates that were left out, by the id of the reason."""

    question: SizingQuestion
    model: ModelVariant
    lines: tuple[Line, ...]
    compared: int
    left_out: dict[str, list[tuple[SizingCandidate, LeftOut]]]

    @property
    def evidence(self) -> dict[tuple[str, Engine], tuple[Evidence, ...]]:
        """The reports about the model, by the families of machines that were compared and the engines that serve it
        there."""
        families = dict.fromkeys(TOPOLOGIES[instance].family for instance in self.question.instances)
        engines = candidates_of(self.question.engine)
        return {
            (each, engine): releases_reported(self.model, engine, each)
            for each in families
            for engine in engines
            if serves(engine, self.model.family, each)
        }


def advise(question: SizingQuestion) -> Advice:
    """Returns the efficient ways to serve a model.

    1. A candidate is left out if `check` finds an error in its spec, or `plan` places no replica of it.
    2. What a replica can serve is simulated with requests that never end; a host serves as much with each replica. All
       times are as long as the errors of their estimates allow: 20 ms with an error of 50 % count as 40.
    3. The load is ``rps``, or SHARE of that on one host. It is simulated with as few replicas as have the capacity, and
       with more until WITHIN of the requests are within the objectives; `plan` must place them all.
    4. A line is efficient if no other has lower or equal cost and latency (99th percentile of whole requests), with
       weights of the same type or a wider one.

    Raises Failed if the checkpoint cannot be read, or nothing can serve the load.
    """
    comparison = _Comparison(question)
    lines: list[Line] = []
    left_out: dict[str, list[tuple[SizingCandidate, LeftOut]]] = {}
    count = 0
    for candidate in candidates(question, comparison.checkpoint):
        count += 1
        try:
            lines.append(comparison.line(candidate))
        except LeftOut as reason:
            left_out.setdefault(reason.id, []).append((candidate, reason))
    if not lines:
        reasons = "; ".join(
            f"{len(each)} by {id}, at best: {min(each, key=lambda item: item[1].excess)[1].what}"
            for id, each in left_out.items()
        )
        hint = "raise the limits, shorten the slots, or compare other instance types with --instance"
        raise Failed("nothing-serves-load", f"none of {count} candidates serves the load: {reasons}", hint)
    model = ModelVariant.of(comparison.checkpoint)
    return Advice(question, model, tuple(frontier(lines)), count, left_out)


def frontier(lines: Iterable[Line]) -> list[Line]:
    """Returns the efficient lines, cheapest first. Of equal lines the first stays."""
    kept: list[Line] = []
    for line in lines:
        if not any(other.beats(line) for other in kept):
            kept = [other for other in kept if not line.beats(other)] + [line]
    return sorted(kept, key=lambda line: (line.market, line.cost, line.latency_ms.p99))


@dataclass
class _Comparison:
    question: SizingQuestion
    capacities: dict[tuple[object, ...], float] = field(default_factory=dict)  # requests/s of a replica, by shape
    runs: dict[tuple[object, ...], Measured] = field(default_factory=dict)

    def __post_init__(self) -> None:
        question = self.question
        first = SizingCandidate(question, question.instances[0], 1, 1, quantized=False, padded=False)
        parsed = parse(first.spec(1, 1), question.name, ".")
        if parsed.spec is None or not parsed.ok:
            problem = next(problem for problem in parsed.problems if problem.severity == "error")
            raise Failed.of(problem)
        self.machine = this_machine()
        self.facts: CheckpointFacts = read_facts(parsed.spec)
        if question.name not in self.facts.checkpoints:
            problem = self.facts.problems[0]
            raise Failed(problem.id, problem.what, "pass a folder with config.json, a hub id or s3://BUCKET/PREFIX")
        self.checkpoint = self.facts.checkpoints[question.name]

    def line(self, candidate: SizingCandidate) -> Line:
        """Raises LeftOut."""
        question = self.question
        most = TOPOLOGIES[candidate.instance].cores // candidate.tp_degree
        file = self._file(candidate, most, 1)
        placed = _plan(file)
        per_host = len(placed.placements)
        if not per_host:
            raise LeftOut.of_plan(placed)
        (model,) = scenario_of(file, measured=question.measured).models
        slow = slowed(model)
        self._check_objectives(slow)
        capacity = self._capacity(candidate, slow)
        rps = question.rps or SHARE * per_host * capacity
        replicas, measured = self._loaded(candidate, slow, per_host, capacity, rps)
        hosts = math.ceil(replicas / per_host)
        final = self._file(candidate, replicas, hosts)
        if (placed := _plan(final)).unplaced:
            raise LeftOut.of_plan(placed)
        return Line(
            candidate,
            hosts,
            replicas,
            per_host,
            final.text,
            estimate(model.spec, self.checkpoint).total,
            per_host * capacity * question.output_tokens,
            rps,
            _milliseconds(measured.ttfts),
            _milliseconds(_tpots(measured, question.output_tokens)),
            _milliseconds(measured.latencies),
            model.speed,
        )

    def _file(self, candidate: SizingCandidate, replicas: int, hosts: int) -> SpecFile:
        text = candidate.spec(replicas, hosts)
        file = judge(parse(text, self.question.name, "."), text, self.question.name, ".", self.machine, self.facts)
        if has_errors(file.problems):
            raise LeftOut.by(file.problems)
        return file

    def _check_objectives(self, model: SimModel) -> None:
        """Leaves a candidate out that is too slow without any load."""
        question = self.question
        first, step = model.prefill_s((question.prompt_tokens,)) * 1000, model.speed.step_s * 1000
        if question.ttft_ms is not None and first > question.ttft_ms:
            raise LeftOut("ttft", f"a prompt takes up to {first:.0f} ms without any load", first)
        if question.tpot_ms is not None and step > question.tpot_ms:
            raise LeftOut("tpot", f"a step takes up to {step:.1f} ms", step)

    def _capacity(self, candidate: SizingCandidate, model: SimModel) -> float:
        """Returns the requests/s that one replica serves if its slots are never free."""
        if candidate.shape not in self.capacities:
            question = self.question
            arrival = Arrival(0.0, question.name, question.prompt_tokens, question.output_tokens)
            measured = self._simulate(candidate, 1, 1, [arrival] * (ROUNDS * model.slots))
            self.capacities[candidate.shape] = measured.answered / max(measured.latencies)
        return self.capacities[candidate.shape]

    def _loaded(
        self, candidate: SizingCandidate, model: SimModel, per_host: int, capacity: float, rps: float
    ) -> tuple[int, Measured]:
        """Returns the number of replicas that the load needs, and what was measured with them. Raises LeftOut."""
        if self.question.rps is None:
            return per_host, self._run(candidate, model, per_host, per_host, rps)
        least = math.ceil(rps / capacity)
        for replicas in range(least, math.ceil(least * SPARE) + 2):
            if replicas > MOST_HOSTS * per_host:
                raise LeftOut("hosts", f"the load needs more than {MOST_HOSTS} hosts")
            measured = self._run(candidate, model, per_host, replicas, rps)
            if measured.attainment >= WITHIN:
                return replicas, measured
        within = measured.attainment
        raise LeftOut("load", f"{within:.0%} of the requests are within the limits", -within)

    def _run(self, candidate: SizingCandidate, model: SimModel, per_host: int, replicas: int, rps: float) -> Measured:
        """Simulates the load on so many replicas."""
        question = self.question
        key = (*candidate.shape, replicas, rps)
        if key not in self.runs:
            busy = rps * model.service_s(question.prompt_tokens, question.output_tokens)  # requests in slots
            seconds = min(MOST_REQUESTS, max(REQUESTS, TURNOVERS * busy)) / rps
            lengths = Lengths.parse(f"{question.prompt_tokens}:{question.output_tokens}")
            load = Workload("poisson", (question.name,), rps, seconds, lengths=lengths)
            hosts = math.ceil(replicas / per_host)
            self.runs[key] = self._simulate(candidate, replicas, hosts, load, since=WARM_UP * seconds)
        return self.runs[key]

    def _simulate(
        self, candidate: SizingCandidate, replicas: int, hosts: int, load: Iterable[Arrival], since: float = 0.0
    ) -> Measured:
        name = self.question.name
        scenario = scenario_of(self._file(candidate, replicas, hosts), measured=self.question.measured)
        scenario = replace(scenario, models=tuple(map(slowed, scenario.models)))
        return simulate(scenario, load, Fixed({name: replicas}), since=since).measured[name]


def slowed(model: SimModel) -> SimModel:
    """Returns a model whose times are as long as the errors of their estimates allow."""
    speed = model.speed
    decode, prefill = 1 - speed.decode_error, 1 - speed.prefill_error
    slow = replace(
        speed,
        step_s=speed.step_s / decode,
        prefill_base_s=speed.prefill_base_s / prefill,
        prefill_token_s=speed.prefill_token_s / prefill,
        prefill_square_s=speed.prefill_square_s / prefill,
    )
    return replace(model, speed=slow)


def _plan(file: SpecFile) -> Plan:
    assert file.spec is not None
    return plan(file.spec, file.hosts, file.checkpoints)


def _tpots(measured: Measured, output_tokens: int) -> list[float]:
    """Returns the seconds between tokens of each request; for outputs of one token, 0."""
    pairs = zip(measured.latencies, measured.ttfts, strict=True)
    return [(latency - ttft) / max(1, output_tokens - 1) for latency, ttft in pairs]


def _milliseconds(seconds: Iterable[float]) -> Summary:
    summary = Summary.of([value * 1000 for value in seconds])
    assert summary is not None  # a run answers requests
    return summary


def advised(source: str, instance: str, max_len: int) -> dict[str, Any] | None:
    """Returns the fields ``CHOSEN`` of a spec with which a host serves the most requests, with slots of ``max_len``
    tokens and weights in the checkpoint's own type; None if nothing serves it. Heads are padded only if the model fits
    in no other way. Takes up to 3 s of one core."""
    output = min(SizingQuestion.output_tokens, max(1, max_len // 4))
    prompt = min(SizingQuestion.prompt_tokens, max(1, max_len - output))
    padded = SizingQuestion(source, "auto", (instance,), prompt, output, max_len)
    for question in (replace(padded, as_is=True), padded):
        try:
            lines = advise(question).lines
        except Failed:
            continue
        for line in lines:
            if not line.candidate.quantized:
                fields = line.candidate.fields(line.replicas)
                return {name: fields[name] for name in CHOSEN if name in fields}
    return None
