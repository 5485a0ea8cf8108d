"""The planner, in the benchmark's words: a fleet becomes its arguments, and its plan a layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.placement_parts.fleet import Fleet, Layout, Replica
from placements.facts.core_range import CoreRange
from placements.facts.topology import TOPOLOGIES, Host
from placements.planner.plan import Plan, Running, plan
from placements.spec.notation import CorePin
from placements.spec.schema import ModelSpec, Replicas, Spec, Spread

RESERVED_VCPUS = 8


@dataclass(frozen=True)
class Arguments:
    """What `plan` is given."""

    spec: Spec
    hosts: Sequence[Host]
    running: Sequence[Running]
    wanted: Mapping[str, int]
    blocked: Mapping[str, frozenset[int]]

    def plan(self, moves: int | None = None) -> Plan:
        """The plan, with at most so many moves."""
        return plan(self.spec, self.hosts, {}, self.running, self.wanted, self.blocked, moves=moves)


def arguments(fleet: Fleet) -> Arguments:
    """The same fleet as the planner's values."""
    hosts = []
    for machine in fleet.machines:
        topology = TOPOLOGIES[machine.instance]
        reserved = frozenset(machine.reserved)
        cpus = tuple(range(topology.vcpus))
        memory = float(topology.memory_gib)
        hosts.append(Host(machine.name, topology, cpus, RESERVED_VCPUS, reserved, memory_gib=memory))
    models = []
    for model in fleet.models:
        pins = tuple(CorePin(CoreRange.of_length(pin.first, model.tp), pin.host) for pin in model.pins)
        fields: dict[str, Any] = {"host_memory_gib": model.memory_gib and float(model.memory_gib)}
        if model.spread is not None:
            fields["spread"] = Spread(host=model.spread)
        replicas = Replicas(min=model.min, max=max(1, model.wanted))
        models.append(
            ModelSpec(
                name=model.name,
                source="./m",
                tp_degree=model.tp,
                replicas=replicas,
                priority=model.priority,
                cores=pins,
                **fields,
            )
        )
    return Arguments(
        spec=Spec(models=tuple(models)),
        hosts=tuple(hosts),
        running=tuple(_running(replica) for replica in fleet.running),
        wanted={model.name: model.wanted for model in fleet.models},
        blocked={machine.name: frozenset(machine.quarantined) for machine in fleet.machines if machine.quarantined},
    )


def layout(drawn: Plan) -> Layout:
    """What the plan says, for the checker."""
    moves = getattr(drawn, "moves", ())
    return Layout(
        placed=tuple(_replica(placement) for placement in drawn.placements),
        refused=tuple((unplaced.model, unplaced.replica) for unplaced in drawn.unplaced),
        moves=tuple((_replica(move.before), _replica(move.after)) for move in moves),
    )


def _running(replica: Replica) -> Running:
    return Running(replica.model, replica.index, replica.host, CoreRange(replica.first, replica.last))


def _replica(placed: Any) -> Replica:
    return Replica(placed.model, placed.replica, placed.host, placed.cores.first, placed.cores.last)
