"""Refusals: why a replica has no place, with the numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from placements.facts.core_range import CoreRange
from placements.facts.topology import alignment
from placements.planner.free_cores import FreeCores, bits, runs
from placements.planner.grid import windows
from placements.planner.host_pool import HostPool
from placements.planner.tenants import NEVER, Tenant
from placements.resources.threads import threads
from placements.spec.schema import Pin, Spec


class Refusal(NamedTuple):
    """The parts of a Problem that are the same for all replicas of a model."""

    id: str
    what: str  # continues "MODEL/REPLICA ..."
    hint: str


class Refusals:
    """What keeps replicas out, once all that can be placed is."""

    def __init__(self, spec: Spec, ground: HostPool, tenants: Sequence[Tenant]) -> None:
        self._spec = spec
        self._ground = ground
        self._tenants = [tenant for tenant in tenants if tenant.host >= 0]
        self._known: dict[int, Refusal] = {}  # by model
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

    def pin_taken(self, pin: Pin) -> Refusal:
        """Of a replica whose pin's cores are held by others."""
        numbers = self._ground.numbers
        names = [pin.host] if pin.host is not None else list(numbers)
        reasons = [self._why_taken(numbers[name], pin.cores) for name in names if name in numbers]
        on = f" of {pin.host}" if pin.host else ""
        why = "; ".join(reasons[:3]) or "no host of that name is there"
        what = f"is pinned to cores {pin.cores}{on}, but {why}"
        hint = "`corewright status` says who holds or withholds them: free them, or change the pin"
        return Refusal("pin-taken", what, hint)

    def _why_taken(self, number: int, cores: CoreRange) -> str:
        host = self._ground.hosts[number]
        if cores.last >= host.cores:
            return f"{host.name} has {_count(host.cores, 'core')}"
        holders = []
        for tenant in sorted(self._tenants, key=lambda tenant: (tenant.model, tenant.replica)):
            if tenant.host == number and tenant.mask & bits(cores):
                held = CoreRange.of_length(tenant.first, tenant.size).overlap(cores)
                holders.append(f"{self._spec.models[tenant.model].name}/{tenant.replica} holds {held}")
        blocked = self._ground.blocked.get(host.name, ())
        for label, found in (("withheld", blocked), ("reserved", host.reserved_cores)):
            both = sorted(core for core in cores if core in found)
            holders.extend([f"{', '.join(map(str, both))} {'is' if len(both) == 1 else 'are'} {label}"] if both else [])
        return f"on {host.name} {' and '.join(holders) or 'memory, CPUs or spread keep it out'}"

    def no_room(self, tenant: Tenant) -> Refusal:
        """Of a replica without a pin: the first constraint that leaves no host."""
        found = self._known.get(tenant.model)
        if found is None:
            found = self._known[tenant.model] = self._no_room(tenant)
        return found

    def _no_room(self, tenant: Tenant) -> Refusal:
        ground, tp = self._ground, tenant.size
        needs = f"needs {tp} contiguous cores" if tp > 1 else "needs 1 core"
        hint = "fewer replicas, a smaller tp_degree, or another host would make it fit"
        hosts = [i for i, cores in enumerate(ground.cores) if cores]
        if not hosts:
            return Refusal("no-room", f"needs {_count(tp, 'core')}, and no host has NeuronCores", hint)
        hosts = [i for i in hosts if ground.kinds.of[i] in tenant.demand.kinds]
        if not hosts:
            names = sorted({host.topology.instance for host in ground.kinds.hosts if host.topology})
            what = f"finds no suitable host: tp_degree {tp}, its engine or its memory rules out {', '.join(names)}"
            return Refusal(
                "no-suitable-host", what, "`corewright explain` says which; take another tp_degree or host type"
            )
        open_hosts = self._open(tp, tenant.demand.kinds, hosts)
        if open_hosts:
            return self._why_closed(tenant, open_hosts)
        run_of = {i: self._longest(i) for i in hosts}
        best = max(hosts, key=lambda i: run_of[i][1])
        name, (first, length) = ground.hosts[best].name, run_of[best]
        others = f" and none of {_count(len(hosts), 'host')} has a longer one" if len(hosts) > 1 else ""
        if length == 0:
            where = name if len(hosts) == 1 else f"any of {_count(len(hosts), 'host')}"
            return Refusal("no-room", f"{needs}, none is free on {where}", hint)
        run = f"{length} ({CoreRange.of_length(first, length)}){others}"
        step = alignment(ground.family(best), tp).legal
        aligned = f" from a multiple of {step} on" if length >= tp else ""
        return Refusal("no-room", f"{needs}{aligned}, the longest free run on {name} is {run}", hint)

    def _open(self, tp: int, kinds: frozenset[int], hosts: Sequence[int]) -> list[int]:
        """Those of the hosts, which are of these kinds, where a legal range of the degree is free."""
        found = self._opens.get((tp, kinds))
        if found is None:
            found = [i for i in hosts if self._ground.grid(i).legal(tp) & windows(self._free[i], tp)]
            self._opens[tp, kinds] = found
        return found

    def _longest(self, host: int) -> tuple[int, int]:
        """(first, length) of the longest free run, the first of several."""
        found = self._runs.get(host)
        if found is None:
            found = self._runs[host] = _longest(self._free[host], self._ground.cores[host])
        return found

    def _why_closed(self, tenant: Tenant, hosts: Sequence[int]) -> Refusal:
        """Cores are free on these, and something else is missing."""
        demand, kinds = tenant.demand, self._ground.kinds.of
        on = Counter(one.host for one in self._tenants if one.model == tenant.model)
        apart = [i for i in hosts if not demand.most or on[i] < demand.most]
        if not apart:
            where = f"the {_count(len(hosts), 'host')} with {_count(tenant.size, 'free core')}"
            have = "has" if len(hosts) == 1 else "have"
            what = f"has spread: at most {demand.most} on a host, and {where} {have} that"
            return Refusal("spread-blocks", what, "another host, or a larger spread")
        memory_hint = "host_memory_gib, if you measured that it needs less; or another host"
        for id, wanted, left, unit, hint in (
            ("host-memory-short", demand.memory, self._memory, "GiB of host memory", memory_hint),
            (
                "vcpus-short",
                demand.cpus if demand.insists else (),
                self._cpus,
                "CPUs for its threads",
                "fewer threads, or another host",
            ),
        ):
            if wanted and all(left[i] < wanted[kinds[i]] for i in apart):
                best = max(apart, key=lambda i: left[i])
                need = wanted[kinds[best]]
                what = (
                    f"needs {need:.4g} {unit}, {max(0.0, left[best]):.4g} are left on {self._ground.hosts[best].name}"
                )
                others = (
                    f", where most are of the {_count(len(apart), 'host')} with free cores" if len(apart) > 1 else ""
                )
                return Refusal(id, f"{what}{others}", hint)
        return Refusal("no-room", "finds no host with cores, memory and CPUs for it together", "another host")


def _longest(free: int, cores: int) -> tuple[int, int]:
    """(first, length) of the longest run, the first of several."""
    best = (0, 0)
    for run in runs(FreeCores("", cores, free)):
        if len(run) > best[1]:
            best = (run.first, len(run))
    return best


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
