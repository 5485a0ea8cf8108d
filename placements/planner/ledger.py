"""Computes the resources that a plan uses: threads and memory of each host, HBM of each core."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from placements.engines.registry import Engine, resolve
from placements.facts.checkpoints import Checkpoint
from placements.facts.core_range import ranges
from placements.facts.topology import Host, Topology
from placements.planner.plan import Plan
from placements.planner.replica_demand import suits
from placements.resources.environ import arithmetic, threads
from placements.resources.host_memory import HostMemory, host_memory
from placements.resources.memory import MemoryEstimate, estimate, measured_surplus, usable_hbm
from placements.spec.schema import ModelSpec, Spec


@dataclass(frozen=True)
class ThreadLine:
    """The replicas of one model on one host."""

    model: str
    replicas: int
    each: int  # threads
    arithmetic: str  # the sum behind ``each``

    @property
    def together(self) -> int:
        return self.replicas * self.each

    def as_dict(self) -> dict[str, Any]:
        """Returns the JSON of `plan -o json`."""
        return {**asdict(self), "together": self.together}


@dataclass(frozen=True)
class HostLedger:
    """One host, and the resources that its replicas use."""

    host: Host
    threads: tuple[ThreadLine, ...]
    load_gib: float  # host memory if all replicas load at once, without replicas whose checkpoint is unknown
    cordoned: frozenset[int] = frozenset()
    quarantined: frozenset[int] = frozenset()

    def as_dict(self) -> dict[str, Any]:
        """Returns the JSON of `plan -o json`."""
        host = self.host
        return {
            "name": host.name,
            "instance": None if host.topology is None else host.topology.instance,
            "emulated": host.emulated,
            "lnc": None if host.topology is None else host.topology.lnc,
            "cores": host.cores,
            "reserved": ranges(host.reserved_cores),
            "cordoned": ranges(self.cordoned),
            "quarantined": ranges(self.quarantined),
            "cpus": len(host.cpus),
            "reserve_vcpus": len(host.cpus) - len(host.usable_cpus),
            "threads": sum(line.together for line in self.threads),
            "thread_ledger": [line.as_dict() for line in self.threads],
            "memory_gib": host.memory_gib,
            "load_gib": round(self.load_gib, 3),
        }


@dataclass(frozen=True)
class ModelMemory:
    """The memory that one replica of a model needs on one type of host."""

    model: str
    engine: Engine
    topology: Topology
    core: MemoryEstimate
    host: HostMemory

    def as_dict(self) -> dict[str, Any]:
        """Returns the JSON of `plan -o json`."""
        return {
            "model": self.model,
            "instance": self.topology.instance,
            "lnc": self.topology.lnc,
            "engine": self.engine,
            "classes": [{"class": name, "gib": round(size, 3)} for name, size in self.core.classes()],
            "total_gib": round(self.core.total, 3),
            "others_gib": round(self.core.others, 3),
            "usable_gib": round(usable_hbm(self.topology, self.core), 3),
            "hbm_gib": self.topology.hbm_per_core_gib,
            "host": {
                "load_gib": round(self.host.load, 3),
                "serving_gib": round(self.host.serving, 3),
                "compile_gib": round(self.host.compile, 3),
            },
            "measured": {
                "hbm_gib": measured_surplus(self.topology, self.core),
                "host_gib": self.topology.measured.host_gib,
            },
        }


@dataclass(frozen=True)
class Ledger:
    """The resources that a plan uses."""

    hosts: tuple[HostLedger, ...]
    memory: tuple[ModelMemory, ...]  # models whose config.json is known, on the types of host that suit them

    def as_dict(self) -> dict[str, Any]:
        """Returns two keys of `plan -o json`."""
        return {"hosts": [host.as_dict() for host in self.hosts], "memory": [need.as_dict() for need in self.memory]}


def ledger(
    spec: Spec,
    hosts: Sequence[Host],
    plan: Plan,
    checkpoints: Mapping[str, Checkpoint] | None = None,
    drafts: Mapping[str, Checkpoint] | None = None,
    quarantined: Mapping[str, frozenset[int]] | None = None,
    cordoned: Mapping[str, frozenset[int]] | None = None,
) -> Ledger:
    """Returns the resources that ``plan`` uses on ``hosts``. The other arguments are those of `plan` and `core_map`."""
    models = {model.name: model for model in spec.models}
    counts: dict[str, dict[str, list[int]]] = {host.name: {} for host in hosts}
    for placement in plan.placements:
        counts.setdefault(placement.host, {}).setdefault(placement.model, []).append(placement.threads)
    needs = _needs(spec, hosts, checkpoints or {}, drafts or {})
    host_ledgers = []
    for host in hosts:
        lines, load = [], 0.0
        for name, each in counts[host.name].items():
            model = models.get(name)
            if model is not None:
                lines.append(ThreadLine(name, len(each), each[0], _sum(model, host, each[0])))
            need = needs.get((name, host.topology))
            load += 0.0 if need is None else len(each) * need.host.load
        blocked = ((quarantined or {}).get(host.name, frozenset()), (cordoned or {}).get(host.name, frozenset()))
        host_ledgers.append(HostLedger(host, tuple(lines), load, cordoned=blocked[1], quarantined=blocked[0]))
    return Ledger(tuple(host_ledgers), tuple(needs.values()))


def _sum(model: ModelSpec, host: Host, count: int) -> str:
    """Returns the arithmetic, or only the count for a replica that was started under another spec."""
    same = threads(model.threads, model.tp_degree, host) == count
    return arithmetic(model.threads, model.tp_degree, host) if same else str(count)


def _needs(
    spec: Spec, hosts: Sequence[Host], checkpoints: Mapping[str, Checkpoint], drafts: Mapping[str, Checkpoint]
) -> dict[tuple[str, Topology | None], ModelMemory]:
    """Returns the needs by model and type of host, in the order of the spec."""
    kinds: dict[Topology, Host] = {}
    for host in hosts:
        if host.topology is not None:
            kinds.setdefault(host.topology, host)
    needs: dict[tuple[str, Topology | None], ModelMemory] = {}
    for model in spec.models:
        checkpoint, draft = checkpoints.get(model.name), drafts.get(model.name)
        for topology, host in kinds.items():
            if checkpoint is None or not suits(model, host, checkpoint):
                continue
            engine = resolve(model.engine, host, model.kind)
            need = estimate(model, checkpoint, engine, draft)
            memory = host_memory(model, checkpoint, engine, draft, spec.vllm_release_on(host), host.measured.host_gib)
            needs[model.name, topology] = ModelMemory(model.name, engine, topology, need, memory)
    return needs
