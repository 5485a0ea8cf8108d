"""The Ray cluster that `up` starts for one machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from orchestrator.process.home import Home
from placements.facts.topology import Host
from workers.host import host_facts as this_host


@dataclass
class OwnRay:
    """A cluster of the fleet's own, with a Ray node for each emulated host."""

    home: Home
    name: str  # of the fleet
    hosts: tuple[Host, ...]
    dashboard: bool
    further: list[Any] = field(default_factory=list)  # the Ray nodes of the hosts except the first

    @property
    def cpus(self) -> tuple[int, ...]:
        return this_host.usable_cpus()

    def start(self, proceed: Callable[[], None]) -> dict[str, Any]:
        self.home.secure_ray()  # before the import of Ray, which reads its settings
        from orchestrator.on_ray import ray_nodes

        cores, cpus = max((host.cores for host in self.hosts), default=0), len(self.cpus)
        proceed()
        addresses = ray_nodes.start_ray(self.home.ray, self.name, cores=cores, cpus=cpus, dashboard=self.dashboard)
        for index, host in enumerate(self.hosts[1:], start=1):
            proceed()
            self.further.append(ray_nodes.add_node(index, cores=host.cores, cpus=cpus))
        return addresses

    def stop(self) -> None:
        from orchestrator.on_ray import ray_nodes

        ray_nodes.stop_ray(self.further)
