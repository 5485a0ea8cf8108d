"""Places for a model beside those that it has: more hosts, and ranges near a pin."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace

from placements.explain.explanation import Question, Trial
from placements.facts.core_range import CoreRange
from placements.facts.topology import TOPOLOGIES, Host, Topology, alignment
from placements.planner.spec_hosts import host_for
from placements.spec.notation import CorePin
from placements.spec.schema import HostsSpec

MOST_HOSTS = 8
"""Hosts whose cordons and cores are tried one by one."""


def near_pins(question: Question, pin: CorePin, others: Iterable[CorePin], *, itself: bool = False) -> list[CorePin]:
    """Returns legal ranges without other models, the nearest first; with ``itself``, only the pin's own range."""
    tp = question.model.tp_degree
    others = list(others)
    distances: dict[CorePin, int] = {}
    for host in question.own_hosts[:MOST_HOSTS] if pin.host is None else question.own_hosts:
        if pin.host not in (None, host.name) or host.topology is None or tp > host.cores:
            continue
        held = {
            core
            for placement in question.drawn.placements
            if placement.host == host.name and placement.model != question.model.name
            for core in placement.cores or ()
        }
        held |= {core for other in others if other.host in (None, host.name) for core in other.cores}
        step = alignment(host.topology.family, tp).legal
        for first in range(0, host.cores - tp + 1, step):
            cores = CoreRange.of_length(first, tp)
            if not (set(cores) & question.unusable(host) or set(cores) & held) and (not itself or cores == pin.cores):
                distances.setdefault(CorePin(cores, pin.host), abs(first - pin.cores.first))
    return sorted(distances, key=distances.__getitem__)


def with_hosts(trial: Trial, template: Host, number: int) -> Trial:
    """Returns the trial with more hosts like the template."""
    topology = template.topology
    assert topology is not None
    instance = topology.instance
    same = {host.name for host in trial.hosts if host.topology is not None and host.topology.instance == instance}
    unused = (name for i in itertools.count() if (name := f"{instance}/{i}") not in same)
    new = tuple(replace(template, name=name) for name in itertools.islice(unused, number))
    key = "emulate" if template.emulated else "instance"
    wishes = [*trial.spec.hosts]
    at = next(
        (
            i
            for i, wish in enumerate(wishes)
            if getattr(wish, key) == instance and TOPOLOGIES[instance].at_lnc(wish.lnc) == topology
        ),
        None,
    )
    lnc, reached = topology.lnc if topology != TOPOLOGIES[instance] else None, ""
    if at is None:
        wishes.append(HostsSpec.model_validate({key: instance, "count": number, "lnc": lnc}))
    else:
        reached = " (max reached)" if wishes[at].max is not None and len(same) + number > wishes[at].most else ""
        key = "count" if wishes[at].max is None else "max"
        wishes[at] = wishes[at].model_copy(update={key: wishes[at].most + number})
    with_lnc = "" if lnc is None else f" (lnc {lnc})"
    article = "an" if instance[0] in "aeio" else "a"
    count = f"{'one' if number == 1 else number} more" if same else article if number == 1 else str(number)
    spec = trial.spec.model_copy(update={"hosts": tuple(wishes)})
    hosts = (*trial.hosts, *new)
    return replace(trial, id="host", change=f"{count} {instance}{with_lnc}{reached}", spec=spec, hosts=hosts)


def new_host(topology: Topology, like: Host, real: bool) -> Host:
    """Returns an empty host of a type, emulated like the others unless they are real."""
    name = f"{topology.instance}/0"
    if real:
        return host_for(name, HostsSpec(instance=topology.instance), tuple(range(topology.vcpus)))
    return replace(like, name=name, topology=topology, reserved_cores=frozenset(), emulated=True)
