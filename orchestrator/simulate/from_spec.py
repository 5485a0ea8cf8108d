"""Builds the scenario of a simulation from a spec file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from orchestrator.fleet.host_timing import START_S
from orchestrator.process.failure import Failed
from orchestrator.revisions.spec_file import SpecFile
from orchestrator.scaling.schedules import bounds
from orchestrator.simulate.scenario import Scenario
from orchestrator.simulate.simulated_model import SimModel
from placements.facts.checkpoints import Checkpoint
from placements.facts.encoders import traced_batch, traced_lengths
from placements.facts.engines import HOST_ENGINES, SHORTEST_BUCKET, Engine, resolve, takes_cores
from placements.facts.machine import Machine
from placements.facts.topology import Host
from placements.planner.spec_hosts import DEFAULT_EMULATION, hosts_for
from placements.resources.calibration import MeasuredSpeed, calibrated
from placements.resources.estimate import Speed
from placements.spec.problems import Problem, has_errors
from placements.spec.schema import HostsSpec, ModelSpec, Spec
from workers.batching.buckets import default_prefill_buckets, ladder
from workers.batching.encode_queue import SLOTS_PER_ROW
from workers.messages.encoder_protocol import EncoderSpec

TTFT_S = 2.0
"""The objective of models without objectives: the time to the first token."""


class InvalidSpec(Failed):
    """The spec has errors; ``problems`` are reported before this one."""

    def __init__(self, name: str, problems: tuple[Problem, ...]) -> None:
        super().__init__("spec-invalid", f"{name} has errors", f"corewright validate {name} shows them")
        self.problems = problems


@dataclass(frozen=True)
class SpecScenario:
    """A scenario and the speeds of its models, with their sources."""

    name: str  # of the file
    scenario: Scenario
    speeds: Mapping[str, Speed]  # by model


def scenario_of(
    file: SpecFile,
    *,
    hosts: int | None = None,
    host_start_s: float = START_S,
    gateways: int = 1,
    measured: Iterable[MeasuredSpeed] = (),
) -> SpecScenario:
    """Returns the scenario of a spec. ``hosts`` replaces its number of hosts, ``measured`` speeds correct the estimates
    (`calibrated`). Raises Failed."""
    if file.spec is None or has_errors(file.problems):
        raise InvalidSpec(file.name, file.problems)
    spec, fleet_hosts = file.spec, file.hosts
    if hosts is not None:
        spec, fleet_hosts = _with_hosts(spec, hosts, file.name, file.machine)
    models, speeds, every = [], {}, tuple(measured)
    for model in spec.models:
        checkpoint = file.checkpoints.get(model.name)
        engine = resolve(model.engine, fleet_hosts[0], model.kind)
        speeds[model.name] = calibrated(model, checkpoint, engine, fleet_hosts, every)
        has_cores = any(takes_cores(resolve(model.engine, host, model.kind), host) for host in fleet_hosts)
        simulated = replace(
            sim_model(model, speeds[model.name], checkpoint, engine), cores=model.tp_degree if has_cores else 0
        )
        if model.kind != "generate":
            simulated = _encoder(simulated, model, engine)
        models.append(simulated)
    return SpecScenario(
        file.name,
        Scenario(spec, fleet_hosts, tuple(models), gateways, file.checkpoints, host_start_s),
        speeds,
    )


def sim_model(model: ModelSpec, fast: Speed, checkpoint: Checkpoint | None, engine: Engine) -> SimModel:
    """Converts a model of the spec for the simulator; ``engine`` is the resolved engine."""
    objectives, length = model.objectives, model.length(checkpoint)
    buckets = model.buckets.prefill or _default_buckets(engine, length)
    return SimModel(
        name=model.name,
        slots=model.max_batch,
        step_s=fast.step_s,
        prefill_base_s=fast.prefill_base_s,
        prefill_token_s=fast.prefill_token_s,
        prefill_square_s=fast.prefill_square_s,
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
        items_per_second=objectives.items_per_second,
        judged_ttft_s=TTFT_S,
        buckets=buckets,
        prefill_tokens=buckets[-1],
    )


def _default_buckets(engine: Engine, length: int) -> tuple[int, ...]:
    return default_prefill_buckets(length) if engine in HOST_ENGINES else ladder(SHORTEST_BUCKET, length)


def _encoder(simulated: SimModel, model: ModelSpec, engine: Engine) -> SimModel:
    """Returns the model as an encoder: its replicas have more slots than rows, and batches instead of prefills."""
    buckets, compiled_rows = simulated.buckets, 0
    if engine == "torch-neuronx":
        buckets = traced_lengths(model.buckets.prefill, buckets[-1])
        compiled_rows = traced_batch(model.max_batch, model.engine_options)
    simulated = replace(simulated, buckets=buckets)
    spec = EncoderSpec(model.max_batch, buckets, 1, 1, pads_to_longest=engine == "cpu", compiled_rows=compiled_rows)
    return replace(simulated, encoder=spec, slots=SLOTS_PER_ROW * model.max_batch, gather_s=model.max_wait_ms / 1000)


def bounds_at(spec: Spec, begins: float) -> Callable[[SimModel, float], tuple[int, int]] | None:
    """Returns a function for min and max of a model at a virtual time, whose 0 is ``begins`` (seconds since the epoch);
    None if no model has schedules."""
    scheduled = {model.name: model for model in spec.models if model.scaling.schedules}
    if not scheduled:
        return None
    cache: dict[tuple[str, int], tuple[int, int]] = {}

    def at(model: SimModel, now: float) -> tuple[int, int]:
        if model.name not in scheduled:
            return model.min, model.max
        minute = int((begins + now) // 60)
        if (model.name, minute) not in cache:
            own = scheduled[model.name]
            held = bounds(own.replicas, own.scaling.schedules, minute * 60.0)
            cache[model.name, minute] = held.min, held.max
        return cache[model.name, minute]

    return at


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000


def _with_hosts(spec: Spec, count: int, name: str, machine: Machine) -> tuple[Spec, tuple[Host, ...]]:
    if len(spec.hosts) > 1:
        raise Failed("hosts-of-two-types", f"{name} has {len(spec.hosts)} entries of hosts: --hosts needs one", "")
    entry = spec.hosts[0] if spec.hosts else HostsSpec(emulate=DEFAULT_EMULATION)
    changed = spec.model_copy(update={"hosts": (entry.model_copy(update={"count": count, "min": None, "max": None}),)})
    return changed, hosts_for(changed, machine)
