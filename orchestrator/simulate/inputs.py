"""The inputs and the result of a simulation: a load, and one run of it for each spec."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

from orchestrator.control.decisions.host_demand import START_S
from orchestrator.control.resolve.spec_file import SpecFile
from orchestrator.process.failure import Failed
from orchestrator.simulate.report import span
from orchestrator.simulate.run import Fixed, Joint, Outcome, simulate
from orchestrator.simulate.scenario import BEGINS, Arrival, Scenario, scenario_of
from orchestrator.simulate.speeds import read_speeds
from orchestrator.simulate.trace_file import MOST_TOKENS, by_model, fit_lengths, read_trace
from orchestrator.simulate.workload import Workload

Policy = Literal["auto", "fixed"]
POLICIES: tuple[Policy, ...] = get_args(Policy)


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
class SimulationLoad:
    """A load that is complete."""

    arrivals: Iterable[Arrival]
    description: str
    begins: float = BEGINS  # seconds since the epoch


def run_simulation(inputs: SimulationInputs, report: Callable[[str], None]) -> tuple[str, tuple[Outcome, ...]]:
    """Runs the simulation, and returns the description of the load and the outcome for each spec. First passes to
    ``report`` which requests were dropped or cut. Raises Failed and InvalidTrace."""
    measured = read_speeds(inputs.speeds)
    scenarios = [scenario_of(file, hosts=inputs.hosts, measured=measured) for file in inputs.files]
    if isinstance(inputs.load, Workload):
        load = _synthetic(replace(inputs.load, seed=inputs.seed), scenarios, report)
    else:
        load = _traced(inputs.load, scenarios, report)
    begins = load.begins if inputs.begins is None else inputs.begins

    def run(scenario: Scenario) -> Outcome:
        scenario = replace(scenario, gateways=inputs.gateways, host_start_s=inputs.host_start_s, begins=begins)
        fixed = {model.name: model.spec.replicas.min for model in scenario.models}
        policy = Joint() if inputs.policy == "auto" else Fixed(fixed)
        return simulate(scenario, load.arrivals, policy, seed=inputs.seed, record=True)

    return load.description, tuple(map(run, scenarios))


@contextlib.contextmanager
def reading(path: Path, problem_id: str) -> Iterator[None]:
    """Converts the errors of reading a text file to Failed."""
    try:
        yield
    except (OSError, UnicodeDecodeError) as error:
        fact = f"{path} cannot be read: {getattr(error, 'strerror', None) or error}"
        raise Failed(problem_id, fact, "check the path and its permissions") from None


def _synthetic(synthetic: Workload, scenarios: Sequence[Scenario], report: Callable[[str], None]) -> SimulationLoad:
    """Generates a load for the models that all specs have."""
    names = [{model.name for model in scenario.models} for scenario in scenarios]
    models = tuple(model.name for model in scenarios[0].models if all(model.name in each for each in names))
    if not models:
        raise Failed(
            "no-model-in-common",
            "the two specs have no model in common",
            "the load covers only models that both specs have",
        )
    limits = _limits(models, scenarios)
    load = replace(synthetic, models=models, limits=limits)
    if any(synthetic.lengths.within(limit).capped for limit in limits.values()):
        uncut = replace(load, limits={})
        cut = (item.model for item in uncut if item.prompt_tokens + item.output_tokens > limits[item.model])
        _report_cut(Counter(cut), limits, report)
    description = f"{synthetic.kind}, {synthetic.rate:g} requests/s for {span(synthetic.seconds)}, "
    return SimulationLoad(load, description + f"lengths {synthetic.lengths.name}, seed {synthetic.seed}")


def _traced(path: Path, scenarios: Sequence[Scenario], report: Callable[[str], None]) -> SimulationLoad:
    """Reads a trace for the models, by name or alias, that all specs have."""
    names = [
        {alias: model.name for model in scenario.spec.models for alias in (model.name, *model.aliases)}
        for scenario in scenarios
    ]
    common = {alias: name for alias, name in names[0].items() if all(each.get(alias) == name for each in names)}
    with reading(path, "trace-unreadable"), path.open(encoding="utf-8", newline="") as stream:
        trace = read_trace(stream, str(path), common)
    if trace.unknown:
        whose = "not in the spec" if len(scenarios) == 1 else "not in both specs"
        report(f"{_requests(sum(trace.unknown.values()))} dropped: their models are {whose}: {by_model(trace.unknown)}")
    limits = _limits(trace.models, scenarios)
    _report_cut(fit_lengths(trace, limits), limits, report)
    description = f"{path}: {len(trace)} requests in {span(trace.seconds)}"
    return SimulationLoad(trace, description, BEGINS if trace.begins is None else trace.begins)


def _report_cut(cut: Mapping[str, int], limits: Mapping[str, int], report: Callable[[str], None]) -> None:
    for name, count in sorted(cut.items()):
        report(f"{_requests(count, f' of {name}')} longer than its slots and cut to {limits[name]} tokens")


def _requests(count: int, of: str = "") -> str:
    return f"1 request{of} is" if count == 1 else f"{count} requests{of} are"


def _limits(models: Iterable[str], scenarios: Sequence[Scenario]) -> dict[str, int]:
    """Returns by model the least length of a slot in tokens; an encoder divides longer requests into inputs."""
    lengths = [
        {
            model.name: model.length(scenario.checkpoints.get(model.name)) if model.kind == "generate" else MOST_TOKENS
            for model in scenario.spec.models
        }
        for scenario in scenarios
    ]
    return {name: min(each[name] for each in lengths) for name in models}
