"""From a spec file to a scenario."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from orchestrator.process.failure import Failed
from orchestrator.revisions.spec_file import SpecFile
from orchestrator.scaling.schedules import bounds
from orchestrator.simulate.scenario import Scenario
from orchestrator.simulate.simulated_model import SimModel
from orchestrator.simulate.speeds import with_speeds
from placements.facts.checkpoints import Checkpoint
from placements.facts.engines import resolve, takes_cores
from placements.facts.topology import Host
from placements.planner.spec_hosts import DEFAULT_EMULATION, Machine, hosts_for
from placements.resources.estimate import Speed, speed
from placements.spec.problems import Problem, has_errors
from placements.spec.schema import HostsSpec, ModelSpec, Spec
from workers.batching.buckets import default_prefill_buckets

TTFT_S = 2.0
"""By which requests of a model without objectives are judged: the time to the first token."""


class SpecWrong(Failed):
    """Its problems are told before it."""

    def __init__(self, name: str, problems: tuple[Problem, ...]) -> None:
        super().__init__("spec-invalid", f"{name} has errors", f"corewright validate {name}")
        self.problems = problems


@dataclass(frozen=True)
class Read:
    """A scenario, and where the speeds of its models come from."""

    name: str  # of the file
    scenario: Scenario
    speeds: Mapping[str, Speed]  # by model, as estimated
    told: Mapping[str, Mapping[str, float]]  # what was given in their place

    def source(self, model: str) -> str:
        """Of a model's speeds, in a few words."""
        estimated = self.speeds[model]
        if not self.told.get(model):
            return estimated.source
        return "measured" if len(self.told[model]) >= 4 else f"measured, the rest {estimated.source}"


def scenario_of(
    file: SpecFile,
    *,
    hosts: int | None = None,
    gateways: int = 1,
    told: Mapping[str, Mapping[str, float]] | None = None,
) -> Read:
    """What a run of the spec is about: ``hosts`` of its type in place of its own number, ``told`` speeds in place of
    estimates. Raises Failed."""
    if file.spec is None or has_errors(file.problems):
        raise SpecWrong(file.name, file.problems)
    spec, there = file.spec, file.hosts
    if hosts is not None:
        spec, there = _with_hosts(spec, hosts, file.name, file.machine)
    told = told or {}
    models, speeds = [], {}
    for model in spec.models:
        checkpoint = file.checkpoints.get(model.name)
        speeds[model.name] = speed(model, checkpoint, resolve(model.engine, there[0]), there[0].topology)
        has_cores = any(takes_cores(resolve(model.engine, host), host) for host in there)
        made = replace(sim_model(model, speeds[model.name], checkpoint), cores=model.tp_degree if has_cores else 0)
        models.append(with_speeds(made, told.get(model.name, {})))
    return Read(file.name, Scenario(spec, there, tuple(models), gateways, file.checkpoints), speeds, told)


def sim_model(model: ModelSpec, fast: Speed, checkpoint: Checkpoint | None) -> SimModel:
    """A model of the spec as the simulator wants it."""
    objectives, length = model.objectives, model.length(checkpoint)
    buckets = model.buckets.prefill or default_prefill_buckets(length)
    return SimModel(
        name=model.name,
        slots=model.max_batch,
        step_s=fast.step_s,
        prefill_base_s=fast.prefill_base_s,
        prefill_token_s=fast.prefill_token_s,
        cores=model.tp_degree,
        load_s=fast.load_s,
        min=model.replicas.min,
        max=model.replicas.max,
        priority=model.priority,
        max_queue=model.max_queue,
        max_queue_bytes=model.max_queue_bytes,
        max_wait_s=model.max_wait_s,
        queue_order=model.queue_order,
        hold_s=model.scaling.hold_s,
        idle_s=model.scaling.idle_s,
        worth_per_1000=model.scaling.worth_per_1000,
        auto=model.scaling.auto,
        ttft_s=_seconds(objectives.ttft_ms),
        tpot_s=_seconds(objectives.tpot_ms),
        queue_s=_seconds(objectives.queue_ms),
        judged_ttft_s=TTFT_S,
        buckets=buckets,
        prefill_tokens=buckets[-1],
    )


def bounds_at(spec: Spec, begins: float) -> Callable[[SimModel, float], tuple[int, int]] | None:
    """Min and max of a model at a time of the virtual clock, whose 0 is ``begins`` (seconds since the epoch); None
    where no model has schedules."""
    scheduled = {model.name: model for model in spec.models if model.scaling.schedules}
    if not scheduled:
        return None
    known: dict[tuple[str, int], tuple[int, int]] = {}

    def at(model: SimModel, now: float) -> tuple[int, int]:
        if model.name not in scheduled:
            return model.min, model.max
        minute = int((begins + now) // 60)
        if (model.name, minute) not in known:
            own = scheduled[model.name]
            held = bounds(own.replicas, own.scaling.schedules, minute * 60.0)
            known[model.name, minute] = held.min, held.max
        return known[model.name, minute]

    return at


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000


def _with_hosts(spec: Spec, count: int, name: str, machine: Machine) -> tuple[Spec, tuple[Host, ...]]:
    if len(spec.hosts) > 1:
        raise Failed("hosts-of-two-types", f"{name} has hosts of {len(spec.hosts)} entries: --hosts is for one", "")
    one = spec.hosts[0] if spec.hosts else HostsSpec(emulate=DEFAULT_EMULATION)
    changed = spec.model_copy(update={"hosts": (one.model_copy(update={"count": count}),)})
    return changed, hosts_for(changed, machine)
