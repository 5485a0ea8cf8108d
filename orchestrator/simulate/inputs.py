"""The inputs and the result of a simulation: a load, and one run of it for each spec."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from orchestrator.fleet.host_timing import START_S
from orchestrator.process.failure import Failed
from orchestrator.revisions.spec_file import SpecFile
from orchestrator.simulate.from_spec import SpecScenario, bounds_at, scenario_of
from orchestrator.simulate.report import run_data, span
from orchestrator.simulate.run import Outcome, simulate
from orchestrator.simulate.scaling_policy import Fixed, Joint
from orchestrator.simulate.simulated_request import Arrival
from orchestrator.simulate.speeds import read_speeds
from orchestrator.simulate.trace_file import MOST_TOKENS, by_model, fit_lengths, read_trace
from orchestrator.simulate.workload import Workload

Policy = Literal["auto", "fixed"]
POLICIES: tuple[Policy, ...] = get_args(Policy)
BEGINS = 1_767_571_200.0  # Monday, 2026-01-05, in UTC


@dataclass(frozen=True)
class SimulationInputs:
    """The specs in ``files``, and the ``load`` that they are simulated with: a trace file, or a synthetic load whose
    models, limits and seed are not set yet."""

    files: tuple[SpecFile, ...]
    load: Workload | Path
    hosts: int | None = None  # replaces the number of the specs
    host_start_s: float = START_S  # of a machine that comes and goes
    gateways: int = 1
    policy: Policy = "auto"
    speeds: Path | None = None  # a file of measured speeds
    begins: float | None = None  # seconds since the epoch; None: the start of the trace, or BEGINS
    seed: int = 0


@dataclass(frozen=True)
class SimulationResult:
    """One run for each spec, as data and as an outcome."""

    load: str  # description
    runs: tuple[dict[str, Any], ...]
    outcomes: tuple[Outcome, ...]


@dataclass(frozen=True)
class _Load:
    arrivals: Iterable[Arrival]
    description: str
    begins: float | None = None


def run_simulation(inputs: SimulationInputs, report: Callable[[str], None]) -> SimulationResult:
    """Runs the simulation. First passes to ``report`` which requests were dropped or cut. Raises Failed and
    InvalidTrace."""
    reads = [_read(inputs, file) for file in inputs.files]
    if isinstance(inputs.load, Workload):
        load = _synthetic(inputs, inputs.load, reads, report)
    else:
        load = _traced(inputs.load, reads, report)
    begins = next(at for at in (inputs.begins, load.begins, BEGINS) if at is not None)
    outcomes = tuple(_run(inputs, read, load.arrivals, begins) for read in reads)
    return SimulationResult(load.description, tuple(map(run_data, reads, outcomes)), outcomes)


def _read(inputs: SimulationInputs, file: SpecFile) -> SpecScenario:
    measured = read_speeds(inputs.speeds)
    return scenario_of(
        file, hosts=inputs.hosts, host_start_s=inputs.host_start_s, gateways=inputs.gateways, measured=measured
    )


@contextlib.contextmanager
def _reading(path: Path, problem_id: str) -> Iterator[None]:
    """Converts the errors of reading a text file to Failed."""
    try:
        yield
    except (OSError, UnicodeDecodeError) as error:
        what = f"{path} cannot be read: {getattr(error, 'strerror', None) or error}"
        raise Failed(problem_id, what, "check the path and its permissions") from None


def _synthetic(
    inputs: SimulationInputs, synthetic: Workload, reads: list[SpecScenario], report: Callable[[str], None]
) -> _Load:
    """Generates a load for the models that all specs have."""
    names = [{model.name for model in read.scenario.models} for read in reads]
    models = tuple(model.name for model in reads[0].scenario.models if all(model.name in each for each in names))
    if not models:
        raise Failed(
            "no-model-in-common",
            "the two specs have no model in common",
            "the load covers only models that both specs have",
        )
    limits = {name: min(_length(read, name) for read in reads) for name in models}
    load = replace(synthetic, models=models, seed=inputs.seed, limits=limits)
    if any(synthetic.lengths.within(limit).capped for limit in limits.values()):
        uncut = replace(load, limits={})
        cut = (item.model for item in uncut if item.prompt_tokens + item.output_tokens > limits[item.model])
        _report_cut(Counter(cut), limits, report)
    description = f"{synthetic.kind}, {synthetic.rate:g} requests/s for {span(synthetic.seconds)}, "
    return _Load(load, description + f"lengths {synthetic.lengths.name}, seed {inputs.seed}")


def _traced(path: Path, reads: list[SpecScenario], report: Callable[[str], None]) -> _Load:
    """Reads a trace for the models, by name or alias, that all specs have."""
    names = [
        {alias: model.name for model in read.scenario.spec.models for alias in (model.name, *model.aliases)}
        for read in reads
    ]
    common = {alias: name for alias, name in names[0].items() if all(alias in each for each in names)}
    with _reading(path, "trace-unreadable"), path.open(encoding="utf-8", newline="") as stream:
        trace = read_trace(stream, str(path), common)
    if trace.unknown:
        whose = "not in the spec" if len(reads) == 1 else "not in both specs"
        report(f"{_requests(sum(trace.unknown.values()))} dropped: their models are {whose}: {by_model(trace.unknown)}")
    limits = {name: min(_length(read, name) for read in reads) for name in trace.models}
    fit, cut = fit_lengths(trace, limits)
    _report_cut(cut, limits, report)
    return _Load(fit, f"{path}: {len(trace)} requests in {span(trace.seconds)}", trace.begins)


def _report_cut(cut: Mapping[str, int], limits: Mapping[str, int], report: Callable[[str], None]) -> None:
    for name, count in sorted(cut.items()):
        report(f"{_requests(count, f' of {name}')} longer than its slots and cut to {limits[name]} tokens")


def _requests(count: int, of: str = "") -> str:
    return f"1 request{of} is" if count == 1 else f"{count} requests{of} are"


def _length(read: SpecScenario, name: str) -> int:
    """Returns the length of a slot in tokens; an encoder divides longer requests into inputs."""
    model = read.scenario.spec.model(name)
    assert model is not None
    if model.kind != "generate":
        return MOST_TOKENS
    return model.length(read.scenario.checkpoints.get(name))


def _run(inputs: SimulationInputs, read: SpecScenario, arrivals: Iterable[Arrival], begins: float) -> Outcome:
    scenario = read.scenario
    policy = Joint() if inputs.policy == "auto" else Fixed({model.name: model.min for model in scenario.models})
    bounds = bounds_at(scenario.spec, begins)
    return simulate(scenario, arrivals, policy, seed=inputs.seed, bounds=bounds, record=True)
