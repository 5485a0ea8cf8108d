"""The scenario of a simulation: the spec, its hosts and the speeds of its models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from orchestrator.simulate.simulated_model import SimModel
from placements.facts.checkpoints import Checkpoint
from placements.facts.topology import Host
from placements.planner.spec_hosts import Machine, hosts_for
from placements.spec.schema import HostsSpec, ModelSpec, Replicas, Spec

_MACHINE = Machine(tuple(range(8)))


@dataclass(frozen=True)
class Scenario:
    """A scenario; ``models`` are those of the spec, in its order."""

    spec: Spec
    hosts: tuple[Host, ...]
    models: tuple[SimModel, ...]
    gateways: int = 1
    checkpoints: Mapping[str, Checkpoint] = field(default_factory=lambda: MappingProxyType({}))

    @classmethod
    def of(
        cls, models: Sequence[SimModel], *, hosts: int, instance: str = "inf2.48xlarge", gateways: int = 1
    ) -> Scenario:
        """Returns a scenario for models without a spec, on ``hosts`` hosts of one type."""
        specs = tuple(_spec_of(model) for model in models)
        spec = Spec(hosts=(HostsSpec(emulate=instance, count=hosts),), models=specs)
        return cls(spec, hosts_for(spec, _MACHINE), tuple(models), gateways)

    @property
    def cores(self) -> int:
        """The cores of all hosts, without reserved ones."""
        return sum(usable_cores(host) for host in self.hosts)

    def model(self, name: str) -> SimModel:
        """Returns the model of that name. Raises KeyError."""
        for model in self.models:
            if model.name == name:
                return model
        raise KeyError(name)


def usable_cores(host: Host) -> int:
    """Returns the number of cores that replicas can use."""
    return host.cores - len([core for core in host.reserved_cores if 0 <= core < host.cores])


def _spec_of(model: SimModel) -> ModelSpec:
    return ModelSpec(
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
