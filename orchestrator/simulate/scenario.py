"""The scenario of a simulation: the spec, its hosts and the speeds of its models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from orchestrator.fleet.host_timing import START_S
from orchestrator.simulate.simulated_model import SimModel
from placements.facts.checkpoints import Checkpoint
from placements.facts.topology import Host
from placements.spec.schema import Spec


@dataclass(frozen=True)
class Scenario:
    """A scenario; ``models`` are those of the spec, in its order."""

    spec: Spec
    hosts: tuple[Host, ...]
    models: tuple[SimModel, ...]
    gateways: int = 1
    checkpoints: Mapping[str, Checkpoint] = field(default_factory=dict)
    host_start_s: float = START_S  # from the request of a machine until it joins

    @property
    def cores(self) -> int:
        """The cores of all hosts, without reserved ones."""
        return sum(len(set(range(host.cores)) - set(host.reserved_cores)) for host in self.hosts)
