"""What holds for the CPUs of replicas, whatever the layout of the machine and the CPUs that the process may use."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, combinations

from hypothesis import given
from hypothesis import strategies as st

from placements.facts.core_range import CoreRange
from placements.facts.cpu_layout import LAYOUTS, CpuLayout
from placements.facts.topology import DEGREES, TOPOLOGIES, Host, Machine, alignment
from placements.planner.plan import plan
from placements.planner.spec_hosts import hosts_for
from placements.resources.environ import Policy, cpu_mask, threads
from placements.spec.schema import HostsSpec, ModelSpec, Reserve, Spec
from tests.searches import EXAMPLES, search

BIG = "inf2.48xlarge"
quick = search(100, derandomize=not EXAMPLES)


@st.composite
def layouts(draw: st.DrawFn) -> CpuLayout:
    """One to three siblings on each physical core, next to each other or apart, on one to four nodes."""
    siblings, cores = draw(st.integers(1, 3)), draw(st.integers(1, 48))
    apart = draw(st.booleans())
    own = [tuple(i + n * cores if apart else i * siblings + n for n in range(siblings)) for i in range(cores)]
    nodes = tuple(draw(st.lists(st.integers(0, 3), min_size=cores, max_size=cores)))
    return CpuLayout(tuple(own), nodes, tuple(draw(st.lists(st.sampled_from([None, 0, 1, 2, 3]), max_size=12))))


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    """Machines with Neuron devices or without, of which the process may use any CPUs."""
    layout = draw(layouts())
    cpus = draw(st.sets(st.sampled_from(list(chain(*layout.cores))), min_size=1))
    return Machine(tuple(sorted(cpus)), draw(st.sampled_from([None, BIG])), layout=layout)


@st.composite
def specs(draw: st.DrawFn) -> Spec:
    """Models that leave no place on a host, or only some; on the machine, or on emulated hosts."""
    sizes = draw(st.lists(st.sampled_from(sorted(DEGREES["inf2"])), min_size=1, max_size=24))
    counts: st.SearchStrategy[Policy] = st.sampled_from(["share", "share", "lmi", 2])
    models = [ModelSpec(name=f"m{i}", source="./m", tp_degree=tp, threads=draw(counts)) for i, tp in enumerate(sizes)]
    reserve = Reserve(vcpus=draw(st.sampled_from([None, 0, 1, 3])))
    wish = HostsSpec(emulate=BIG, count=draw(st.integers(1, 3)), reserve=reserve)
    return Spec(models=tuple(models), hosts=draw(st.sampled_from([(), (wish,)])))


def physical(host: Host, cpus: tuple[int, ...]) -> set[int]:
    """The numbers of the physical cores of these CPUs."""
    assert host.cpu_layout is not None
    return {i for i, core in enumerate(host.cpu_layout.cores) if set(core) & set(cpus)}


@quick
@given(specs(), machines())
def test_two_replicas_share_no_physical_core(spec: Spec, machine: Machine) -> None:
    """Unless one has more threads than its share; also if the process may not use some siblings, and on emulated
    hosts."""
    hosts = {host.name: host for host in hosts_for(spec, machine)}
    placed = [p for p in plan(spec, list(hosts.values())).placements if p.cpus and p.cores and p.spec]
    bound = [p for p in placed if p.threads <= threads("share", len(p.cores or ()), hosts[p.host])]
    held = [{(p.host, core) for core in physical(hosts[p.host], p.cpus)} for p in bound]
    assert not [(a, b) for a, b in combinations(held, 2) if a & b]


@quick
@given(specs(), machines())
def test_masks_and_shares_are_within_the_cpus_of_the_process(spec: Spec, machine: Machine) -> None:
    """No CPU is outside, and the threads of shares that are a physical core or more are at most its CPUs."""
    for host in hosts_for(spec, machine):
        own = [placed for placed in plan(spec, [host]).placements if placed.cores is not None]
        assert len(set(host.usable_cpus)) == len(host.usable_cpus)
        assert set(chain(*(placed.cpus for placed in own))) <= set(host.usable_cpus) <= set(machine.cpus)
        shares = [p for p in own if p.spec is not None and p.spec.threads == "share"]
        whole = [p for p in shares if p.cores and len(host.physical_cores) * len(p.cores) >= host.cores]
        assert sum(placed.threads for placed in whole) <= len(host.usable_cpus)
        assert all(placed.cpus for placed in whole if machine.layout)


@quick
@given(st.sampled_from(sorted(LAYOUTS)), st.integers(0, 127))
def test_cpus_are_on_the_nodes_of_the_devices(instance: str, reserve: int) -> None:
    """At least 95 % of those of each legal range, with any reserve, if the range has a physical core."""
    host = Host("h", TOPOLOGIES[instance], tuple(range(TOPOLOGIES[instance].vcpus)), reserve)
    layout, per_device = LAYOUTS[instance], TOPOLOGIES[instance].cores_per_device
    for tp in DEGREES[instance[:4]]:
        for first in range(0, host.cores - tp + 1, alignment(instance[:4], tp).legal):
            cores = CoreRange.of_length(first, tp)
            nodes = {layout.device_nodes[core // per_device] for core in cores}
            bound = physical(host, cpu_mask(host, cores, threads("share", tp, host)))
            assert bound or len(host.physical_cores) * tp < host.cores
            assert sum(layout.nodes[core] in nodes for core in bound) >= 0.95 * len(bound)


@quick
@given(st.sampled_from(sorted(LAYOUTS)), st.integers(0, 127), st.integers(1, 96), st.data())
def test_threads_that_fit_the_nodes_of_the_devices_stay_there(
    instance: str, reserve: int, count: int, data: st.DataObject
) -> None:
    """Any number, of any legal range: at least 95 % of the CPUs are on these nodes."""
    host = Host("h", TOPOLOGIES[instance], tuple(range(TOPOLOGIES[instance].vcpus)), reserve)
    layout, per_device = LAYOUTS[instance], TOPOLOGIES[instance].cores_per_device
    tp = data.draw(st.sampled_from(sorted(tp for tp in DEGREES[instance[:4]] if tp <= host.cores)))
    step = alignment(instance[:4], tp).legal
    cores = CoreRange.of_length(step * data.draw(st.integers(0, (host.cores - tp) // step)), tp)
    nodes = {layout.device_nodes[core // per_device] for core in cores}
    near = sum(layout.nodes[core] in nodes for core in physical(host, host.usable_cpus))
    mask = cpu_mask(host, cores, count)
    if count <= near and nodes != set(layout.nodes) and len(host.physical_cores) * tp >= host.cores:
        bound = physical(host, mask)
        assert len(mask) >= count
        assert sum(layout.nodes[core] in nodes for core in bound) >= 0.95 * len(bound)


@quick
@given(st.integers(0, 191))
def test_the_reserve_is_whole_physical_cores_of_all_nodes(reserve: int) -> None:
    """The reserve is rounded up, and replicas keep one core. No node loses over three more than another."""
    host = Host("h", TOPOLOGIES[BIG], tuple(range(192)), reserve)
    free = physical(host, host.usable_cpus)
    taken = [sum(LAYOUTS[BIG].nodes[i] == node for i in range(96) if i not in free) for node in range(4)]
    assert len(host.usable_cpus) == 2 * len(free) == max(2, 192 - reserve - reserve % 2)
    assert max(taken) - min(taken) <= 3


@quick
@given(machines(), st.sampled_from(sorted(DEGREES["inf2"])))
def test_without_a_layout_a_real_host_has_no_masks(machine: Machine, tp: int) -> None:
    """CPUs by number could be far from the devices."""
    (host,) = hosts_for(Spec(), replace(machine, instance="inf2.24xlarge", layout=None))
    if tp <= host.cores:
        assert cpu_mask(host, CoreRange.of_length(0, tp), 1) == ()
