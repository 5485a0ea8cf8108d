"""What the simulator is asked, and what it answers: a load, and a run of it for each spec."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_args

from orchestrator.bench.lengths import Lengths
from orchestrator.process.failure import Failed
from orchestrator.revisions.spec_file import SpecFile
from orchestrator.simulate.from_spec import Read, bounds_at, scenario_of
from orchestrator.simulate.report import run_data, span
from orchestrator.simulate.run import Outcome, simulate
from orchestrator.simulate.scaling_policy import Fixed, Joint
from orchestrator.simulate.simulated_request import Arrival
from orchestrator.simulate.speeds import parse_speeds
from orchestrator.simulate.trace_file import by_model, fitted, read_trace
from orchestrator.simulate.workload import Kind, Workload

Policy = Literal["auto", "fixed"]
POLICIES: tuple[Policy, ...] = get_args(Policy)
BEGINS = 1_767_571_200.0  # Monday, 2026-01-05, in UTC


@dataclass(frozen=True)
class MadeUp:
    """A load of a seed: ``rate`` requests a second, of all models together."""

    kind: Kind
    rate: float
    seconds: float
    lengths: Lengths
    cv: float | None = None
    shares: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))  # by model, against 1.0


@dataclass(frozen=True)
class SimulationInputs:
    """How would ``files`` fare under ``load``, a trace's file or one that is made up?"""

    files: tuple[SpecFile, ...]
    load: MadeUp | Path
    hosts: int | None = None  # in place of the specs' own numbers
    gateways: int = 1
    policy: Policy = "auto"
    speeds: Path | None = None  # a file of measured ones
    begins: float | None = None  # seconds since the epoch; None: when the trace does, or BEGINS
    seed: int = 0


@dataclass(frozen=True)
class SimulationResult:
    """A run for each spec, as data and as it came out."""

    load: str  # in words
    runs: tuple[dict[str, Any], ...]
    outcomes: tuple[Outcome, ...]


@dataclass(frozen=True)
class _Load:
    arrivals: Iterable[Arrival]
    told: str
    begins: float | None = None


def answer(question: SimulationInputs, tell: Callable[[str], None]) -> SimulationResult:
    """Run it; ``tell`` hears first what of the load was left out or changed. Raises Failed and TraceWrong."""
    reads = [_read(question, file) for file in question.files]
    load = _made(question, question.load, reads, tell) if isinstance(question.load, MadeUp) else None
    if load is None:
        assert isinstance(question.load, Path)
        load = _traced(question.load, reads, tell)
    begins = next(at for at in (question.begins, load.begins, BEGINS) if at is not None)
    outcomes = tuple(_run(question, read, load.arrivals, begins) for read in reads)
    return SimulationResult(load.told, tuple(map(run_data, reads, outcomes)), outcomes)


def _read(question: SimulationInputs, file: SpecFile) -> Read:
    told = None
    if question.speeds is not None and file.spec is not None:
        text = _text(question.speeds)
        told = parse_speeds(text, str(question.speeds), (model.name for model in file.spec.models))
    return scenario_of(file, hosts=question.hosts, gateways=question.gateways, told=told)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        what = f"{path} cannot be read: {getattr(error, 'strerror', None) or error}"
        raise Failed("speeds-wrong", what, "is the path right?") from None


def _made(question: SimulationInputs, wanted: MadeUp, reads: list[Read], tell: Callable[[str], None]) -> _Load:
    """Of the models that all specs have."""
    names = [{model.name for model in read.scenario.models} for read in reads]
    models = tuple(model.name for model in reads[0].scenario.models if all(model.name in each for each in names))
    if not models:
        raise Failed("no-model-in-common", "the two specs have no model in common", "the load is for those in both")
    limits = {name: min(_length(read, name) for read in reads) for name in models}
    fit = {name: wanted.lengths.within(limit) for name, limit in limits.items()}

    def load(lengths: Mapping[str, Lengths]) -> Workload:
        return Workload(
            wanted.kind, models, wanted.rate, wanted.seconds, question.seed, wanted.cv, lengths, wanted.shares
        )

    if any(lengths.capped for lengths in fit.values()):
        whole = load(dict.fromkeys(models, wanted.lengths))
        _tell_cut(Counter(one.model for one in whole if _tokens(one) > limits[one.model]), limits, tell)
    told = f"{wanted.kind}, {wanted.rate:g} requests/s for {span(wanted.seconds)}, "
    return _Load(load(fit), told + f"lengths {wanted.lengths.name}, seed {question.seed}")


def _traced(path: Path, reads: list[Read], tell: Callable[[str], None]) -> _Load:
    """Of the models, or their aliases, that all specs have."""
    called = [
        {alias: model.name for model in read.scenario.spec.models for alias in (model.name, *model.aliases)}
        for read in reads
    ]
    common = {alias: name for alias, name in called[0].items() if all(alias in each for each in called)}
    try:
        with path.open(encoding="utf-8", newline="") as stream:
            found = read_trace(stream, str(path), common)
    except (OSError, UnicodeDecodeError) as error:
        what = f"{path} cannot be read: {getattr(error, 'strerror', None) or error}"
        raise Failed("trace-unreadable", what, "is the path right?") from None
    if found.unknown:
        whose = "the spec does not have" if len(reads) == 1 else "not both specs have"
        tell(f"{_requests(sum(found.unknown.values()))} left out, of models that {whose}: {by_model(found.unknown)}")
    limits = {name: min(_length(read, name) for read in reads) for name in found.models}
    fit, cut = fitted(found, limits)
    _tell_cut(cut, limits, tell)
    return _Load(fit, f"{path}: {len(found)} requests in {span(found.seconds)}", found.begins)


def _tell_cut(cut: Mapping[str, int], limits: Mapping[str, int], tell: Callable[[str], None]) -> None:
    for name, count in sorted(cut.items()):
        tell(f"{_requests(count, f' of {name}')} longer than its slots, and cut to {limits[name]} tokens")


def _requests(count: int, of: str = "") -> str:
    return f"1 request{of} is" if count == 1 else f"{count} requests{of} are"


def _tokens(one: Arrival) -> int:
    return one.prompt_tokens + one.output_tokens


def _length(read: Read, name: str) -> int:
    """Tokens of a slot."""
    model = read.scenario.spec.model(name)
    assert model is not None
    return model.length(read.scenario.checkpoints.get(name))


def _run(question: SimulationInputs, read: Read, arrivals: Iterable[Arrival], begins: float) -> Outcome:
    scenario = read.scenario
    policy = Joint() if question.policy == "auto" else Fixed({model.name: model.min for model in scenario.models})
    bounds = bounds_at(scenario.spec, begins)
    return simulate(scenario, arrivals, policy, seed=question.seed, bounds=bounds, record=True)
