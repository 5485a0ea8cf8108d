"""Computes what the replicas of each model need of a host, by kind of host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from placements.engines.registry import may_run, needs_neuron, resolve, takes_cores
from placements.facts.checkpoints import Checkpoint
from placements.facts.topology import Host, Topology, degree
from placements.planner.board import Demand
from placements.resources.environ import threads
from placements.resources.host_memory import host_memory
from placements.resources.memory import estimate, fits
from placements.spec.schema import ModelSpec, Spec


@dataclass(frozen=True)
class Kinds:
    """Kinds of hosts: hosts of one kind differ only in what is free on them."""

    hosts: tuple[Host, ...]  # one of each kind
    of: tuple[int, ...]  # the kind of each host


def kinds_of(hosts: Sequence[Host], prices: Sequence[float] = ()) -> Kinds:
    """Returns the kinds in the order of their first hosts. ``prices``: of each host; (): equal."""
    numbers: dict[tuple[object, ...], int] = {}
    first: list[Host] = []
    of: list[int] = []
    for host, price in zip(hosts, prices or (0.0,) * len(hosts), strict=True):
        topology = host.topology
        name = None if topology is None else (topology.instance, topology.lnc)
        cpus = (len(host.physical_cores), len(host.usable_cpus))
        key = (name, host.emulated, cpus, host.memory_gib is None, price)
        number = numbers.get(key)
        if number is None:
            number = numbers[key] = len(first)
            first.append(host)
        of.append(number)
    return Kinds(tuple(first), tuple(of))


def demands(spec: Spec, kinds: Sequence[Host], checkpoints: Mapping[str, Checkpoint]) -> tuple[Demand, ...]:
    """Returns one demand for each model, in the order of the spec.

    Memory counts on hosts with a limit; CPUs count only if some model has a fixed number of threads.
    """
    counts_cpus = any(isinstance(model.threads, int) for model in spec.models)
    return tuple(
        _demand(order, model, kinds, checkpoints.get(model.name), counts_cpus, spec)
        for order, model in enumerate(spec.models)
    )


def coreless_kinds(model: ModelSpec, kinds: Sequence[Host]) -> list[int]:
    """Returns the kinds of host where the model runs without cores. If there are any, it uses cores nowhere."""
    return [
        kind
        for kind, host in enumerate(kinds)
        if not takes_cores(model.engine, host) and (host.topology or not needs_neuron(model.engine))
    ]


def has_degree(model: ModelSpec, topology: Topology) -> bool:
    """Returns whether hosts of the type support the degree, by table or ``allow_degrees``, and have the cores."""
    supported = model.tp_degree in model.allow_degrees or degree(topology.family, model.tp_degree) is not None
    return supported and model.tp_degree <= topology.cores


def suits(model: ModelSpec, host: Host, checkpoint: Checkpoint | None, draft: Checkpoint | None = None) -> bool:
    """Returns whether the model can be placed on such a host: it uses cores there, the family supports the degree,
    the engine runs there and serves the model, and the HBM suffices."""
    if host.topology is None or not takes_cores(model.engine, host) or not has_degree(model, host.topology):
        return False
    if not may_run(resolve(model.engine, host, model.kind), host, checkpoint.model_type if checkpoint else None):
        return False
    if checkpoint is None:
        return True
    return fits(estimate(model, checkpoint, resolve(model.engine, host, model.kind), draft), host.topology)


def _demand(
    order: int, model: ModelSpec, kinds: Sequence[Host], checkpoint: Checkpoint | None, counts_cpus: bool, spec: Spec
) -> Demand:
    suitable = frozenset(kind for kind, host in enumerate(kinds) if suits(model, host, checkpoint))
    memory = tuple(_host_memory(spec, model, host, checkpoint) for host in kinds)
    cpus = tuple(threads(model.threads, model.tp_degree, host) for host in kinds) if counts_cpus else ()
    most = 0 if model.spread is None else model.spread.host
    insists = isinstance(model.threads, int)
    return Demand(order, model.tp_degree, suitable, memory if any(memory) else (), cpus, insists, most)


def _host_memory(spec: Spec, model: ModelSpec, host: Host, checkpoint: Checkpoint | None) -> float:
    if host.memory_gib is None:
        return 0.0
    if model.host_memory_gib is not None:
        return model.host_memory_gib
    if checkpoint is None:
        return 0.0
    engine, release = resolve(model.engine, host, model.kind), spec.vllm_release_on(host)
    return host_memory(model, checkpoint, engine, release=release, surplus_gib=host.measured.host_gib).load
