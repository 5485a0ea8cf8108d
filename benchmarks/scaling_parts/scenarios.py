"""Scenarios for the simulator without a spec file."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.simulate.scenario import Scenario
from orchestrator.simulate.simulated_model import SimModel
from placements.facts.machine import Machine
from placements.planner.spec_hosts import hosts_for
from placements.spec.schema import HostsSpec, ModelSpec, Replicas, Spec

_MACHINE = Machine(tuple(range(8)))


def scenario_of(
    models: Sequence[SimModel], *, hosts: int, least: int | None = None, price: float = 0.0, host_start_s: float = 60.0
) -> Scenario:
    """Returns the scenario of these models on ``hosts`` emulated inf2.48xlarge; with ``least``, on so many up to
    ``hosts``."""
    specs = tuple(
        ModelSpec(
            name=model.name,
            source="./model",
            engine="echo",
            tp_degree=model.cores,
            max_batch=model.slots,
            replicas=Replicas(min=model.min, max=model.max),
            priority=model.priority,
            max_queue=model.max_queue,
            allow_degrees=(model.cores,),
        )
        for model in models
    )
    wanted = HostsSpec(emulate="inf2.48xlarge", count=hosts, price_per_core_hour=price)
    if least is not None:
        wanted = wanted.model_copy(update={"count": None, "min": least, "max": hosts})
    spec = Spec(hosts=(wanted,), models=specs)
    return Scenario(spec, hosts_for(spec, _MACHINE), tuple(models), host_start_s=host_start_s)
