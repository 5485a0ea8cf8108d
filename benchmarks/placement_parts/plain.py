"""A plain first fit of the planner's own arguments: what its time is measured against."""

from __future__ import annotations

from benchmarks.placement_parts.planner import Arguments
from benchmarks.placement_parts.rules import starts
from placements.facts.core_range import CoreRange
from placements.facts.topology import Host
from placements.planner.plan import Placement
from placements.resources.environ import threads


def first_fit(problem: Arguments) -> list[Placement]:
    """Keep what runs and is valid, then give each missing replica the first free range: hosts in order, no search.

    The same checks of what runs, the same indices and the same list as the planner's, in the order of the spec: known
    model and host, inside the host, as long as tp, off reserved cores, no core and no index twice. Each degree
    remembers the first host that may still have room for it, since nothing is given back. What does not fit is left.
    """
    hosts = {host.name: host for host in problem.hosts}
    models = {model.name: model for model in problem.spec.models}
    free = {}
    for name, host in hosts.items():
        mask = (1 << host.cores) - 1
        for core in host.reserved_cores:
            mask &= ~(1 << core)
        free[name] = mask
    counts = {name: max(0, min(problem.wanted.get(name, m.replicas.min), m.replicas.max)) for name, m in models.items()}
    kept: dict[str, dict[int, Placement]] = {name: {} for name in models}
    omp: dict[tuple[str, str], int] = {}

    def placed(name: str, index: int, at: Host, cores: CoreRange) -> Placement:
        key = (name, at.topology.instance if at.topology else "")
        if key not in omp:
            omp[key] = threads(models[name].threads, models[name].tp_degree, at)
        return Placement(name, index, at.name, cores, omp[key], at)

    for replica in problem.running:
        model, at, cores = models.get(replica.model), hosts.get(replica.host), replica.cores
        if model is None or at is None or cores is None or replica.replica < 0:
            continue
        own = kept[model.name]
        if cores.last >= at.cores or len(cores) != model.tp_degree or replica.replica in own:
            continue
        wanted = ((1 << model.tp_degree) - 1) << cores.first
        if len(own) < counts[model.name] and free[at.name] & wanted == wanted:
            free[at.name] &= ~wanted
            own[replica.replica] = placed(model.name, replica.replica, at, cores)
    for name, cores_out in problem.blocked.items():
        for core in cores_out:
            free[name] &= ~(1 << core)
    order = list(hosts)
    first_host: dict[int, int] = {}
    for model in problem.spec.models:
        own, tp = kept[model.name], model.tp_degree
        index = 0
        while len(own) < counts[model.name]:
            spot = None
            for i in range(first_host.get(tp, 0), len(order)):
                topology = hosts[order[i]].topology
                room = free[order[i]]
                for first in starts(topology.instance, tp) if topology else ():
                    wanted = ((1 << tp) - 1) << first
                    if room & wanted == wanted:
                        spot = order[i], first
                        break
                if spot:
                    break
            first_host[tp] = i
            if spot is None:
                break
            while index in own:
                index += 1
            free[spot[0]] &= ~wanted
            own[index] = placed(model.name, index, hosts[spot[0]], CoreRange.of_length(spot[1], tp))
    return [kept[model.name][index] for model in problem.spec.models for index in sorted(kept[model.name])]
