"""Explains with numbers why a replica has no place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from placements.facts.core_range import CoreRange, contiguous
from placements.facts.plural import counted
from placements.facts.topology import alignment
from placements.planner.board import NEVER, Tenant
from placements.planner.grid import windows
from placements.planner.host_pool import HostPool
from placements.planner.pins import bits
from placements.resources.environ import threads
from placements.spec.notation import CorePin
from placements.spec.schema import Spec


class PlacementRefusal(NamedTuple):
    """The parts of a problem that all replicas of a model share."""

    id: str
    what: str  # continues "MODEL/REPLICA ..."
    hint: str


class Refusals:
    """Finds the reasons for missing replicas, after all others are placed."""

    def __init__(self, spec: Spec, ground: HostPool, tenants: Sequence[Tenant]) -> None:
        self._spec = spec
        self._ground = ground
        self._tenants = [tenant for tenant in tenants if tenant.host >= 0]
        self._known: dict[int, PlacementRefusal] = {}  # by model
        self._opens: dict[tuple[int, frozenset[int]], list[int]] = {}
        self._runs: dict[int, tuple[int, int]] = {}
        hosts, kinds = ground.hosts, ground.kinds.of
        self._free = list(ground.allowed)
        self._memory = [NEVER if host.memory_gib is None else host.memory_gib for host in hosts]
        self._cpus = [NEVER if host.emulated else len(host.usable_cpus) for host in hosts]
        for tenant in self._tenants:
            host, model = tenant.host, spec.models[tenant.model]
            self._free[host] &= ~tenant.mask
            if tenant.demand.memory:
                self._memory[host] -= tenant.demand.memory[kinds[host]]
            self._cpus[host] -= threads(model.threads, model.tp_degree, hosts[host])

    def pin_taken(self, pin: CorePin) -> PlacementRefusal:
        """Returns the refusal of a replica whose pinned cores are held by others or cannot be used."""
        numbers = self._ground.numbers
        names = [pin.host] if pin.host is not None else list(numbers)
        reasons = [self._why_taken(numbers[name], pin.cores) for name in names if name in numbers]
        on = f" of {pin.host}" if pin.host else ""
        why = "; ".join(reasons[:3]) or "no host has that name"
        fact = f"is pinned to cores {pin.cores}{on}, but {why}"
        hint = "`corewright status` shows the holders; free the cores, or change the pin"
        return PlacementRefusal("pin-taken", fact, hint)

    def _why_taken(self, number: int, cores: CoreRange) -> str:
        host = self._ground.hosts[number]
        if cores.last >= host.cores:
            return f"{host.name} has {counted(host.cores, 'core')}"
        holders = []
        for tenant in sorted(self._tenants, key=lambda tenant: (tenant.model, tenant.replica)):
            if tenant.host == number and tenant.mask & bits(cores):
                held = CoreRange.of_length(tenant.first, tenant.size).overlap(cores)
                holders.append(f"{self._spec.models[tenant.model].name}/{tenant.replica} holds {held}")
        blocked = self._ground.blocked.get(host.name, ())
        for label, unusable in (("withheld", blocked), ("reserved", host.reserved_cores)):
            shared = sorted(core for core in cores if core in unusable)
            if shared:
                holders.append(f"{', '.join(map(str, shared))} {'is' if len(shared) == 1 else 'are'} {label}")
        return f"on {host.name} {' and '.join(holders) or 'memory, CPUs or spread exclude it'}"

    def no_room(self, tenant: Tenant) -> PlacementRefusal:
        """Returns the refusal of a replica without a pin: the first constraint that no host meets."""
        refusal = self._known.get(tenant.model)
        if refusal is None:
            refusal = self._known[tenant.model] = self._no_room(tenant)
        return refusal

    def _no_room(self, tenant: Tenant) -> PlacementRefusal:
        ground, tp = self._ground, tenant.size
        needs = f"needs {tp} contiguous cores" if tp > 1 else "needs 1 core"
        hint = "use fewer replicas, a smaller tp_degree, or more hosts"
        hosts = [i for i, cores in enumerate(ground.cores) if cores]
        if not hosts:
            return PlacementRefusal("no-room", f"needs {counted(tp, 'core')}, but no host has NeuronCores", hint)
        hosts = [i for i in hosts if ground.kinds.of[i] in tenant.demand.kinds]
        if not hosts:
            names = sorted({host.topology.instance for host in ground.kinds.hosts if host.topology})
            fact = f"has no suitable host: tp_degree {tp}, the engine or memory excludes {', '.join(names)}"
            hint = "`corewright explain` shows which; use another tp_degree or instance type"
            return PlacementRefusal("no-suitable-host", fact, hint)
        open_hosts = self._open(tp, tenant.demand.kinds, hosts)
        if open_hosts:
            return self._why_closed(tenant, open_hosts)
        run_of = {i: self._longest(i) for i in hosts}
        best = max(hosts, key=lambda i: run_of[i][1])
        name, (first, length) = ground.hosts[best].name, run_of[best]
        comparison = f", the longest of {counted(len(hosts), 'host')}" if len(hosts) > 1 else ""
        if length == 0:
            where = name if len(hosts) == 1 else f"any of {counted(len(hosts), 'host')}"
            return PlacementRefusal("no-room", f"{needs}, but none is free on {where}", hint)
        run = f"{length} ({CoreRange.of_length(first, length)}){comparison}"
        step = alignment(ground.family(best), tp).legal
        aligned = f" that begin at a multiple of {step}" if length >= tp else ""
        return PlacementRefusal("no-room", f"{needs}{aligned}, the longest free run on {name} is {run}", hint)

    def _open(self, tp: int, kinds: frozenset[int], hosts: Sequence[int]) -> list[int]:
        """Returns those of the hosts, which are of these kinds, with a free legal range of the degree."""
        open_hosts = self._opens.get((tp, kinds))
        if open_hosts is None:
            open_hosts = [i for i in hosts if self._ground.grid(i).legal(tp) & windows(self._free[i], tp)]
            self._opens[tp, kinds] = open_hosts
        return open_hosts

    def _longest(self, host: int) -> tuple[int, int]:
        """Returns (first, length) of the first longest free run."""
        run = self._runs.get(host)
        if run is None:
            run = self._runs[host] = _longest(self._free[host], self._ground.cores[host])
        return run

    def _why_closed(self, tenant: Tenant, hosts: Sequence[int]) -> PlacementRefusal:
        """Returns the constraint other than cores that excludes these hosts."""
        demand, kinds = tenant.demand, self._ground.kinds.of
        on = Counter(other.host for other in self._tenants if other.model == tenant.model)
        apart = [i for i in hosts if not demand.most or on[i] < demand.most]
        if not apart:
            where = f"the {counted(len(hosts), 'host')} with {counted(tenant.size, 'free core')}"
            have = "has" if len(hosts) == 1 else "have"
            fact = f"is limited by spread: at most {demand.most} on a host, and {where} {have} that many"
            return PlacementRefusal("spread-blocks", fact, "add a host, or raise spread")
        memory_hint = "set host_memory_gib if you measured that it needs less, or add a host"
        for id, need_of, supply, unit, hint in (
            ("host-memory-short", demand.memory, self._memory, "GiB of host memory", memory_hint),
            (
                "vcpus-short",
                demand.cpus if demand.insists else (),
                self._cpus,
                "CPUs for its threads",
                "lower threads, or add a host",
            ),
        ):
            if need_of and all(supply[i] < need_of[kinds[i]] for i in apart):
                best = max(apart, key=lambda i: supply[i])
                need = need_of[kinds[best]]
                fact = f"needs {need:.4g} {unit}; {self._ground.hosts[best].name} has {max(0.0, supply[best]):.4g} left"
                comparison = f", the most of {counted(len(apart), 'host')} with free cores" if len(apart) > 1 else ""
                return PlacementRefusal(id, f"{fact}{comparison}", hint)
        return PlacementRefusal("no-room", "needs cores, memory and CPUs that no host has free together", "add a host")


def _longest(free: int, cores: int) -> tuple[int, int]:
    """Returns (first, length) of the first longest run."""
    runs = contiguous(core for core in range(cores) if free >> core & 1)
    longest = max(runs, key=len, default=None)
    return (0, 0) if longest is None else (longest.first, len(longest))
