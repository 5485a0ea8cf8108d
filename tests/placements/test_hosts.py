from __future__ import annotations

from dataclasses import replace

import pytest

from placements.facts.cpu_layout import CpuLayout
from placements.facts.topology import TOPOLOGIES, Host, Machine
from placements.planner.spec_hosts import default_reserve, hosts_for
from placements.spec.parse import parse
from placements.spec.schema import HostsSpec, Spec
from tests.placements.fleets import LAPTOP

BIG = TOPOLOGIES["inf2.48xlarge"]


def wish(**hosts: object) -> Spec:
    return Spec(hosts=(HostsSpec.model_validate(hosts),))


def test_an_instance_is_planned_from_its_topology_only() -> None:
    """On any machine, the hosts are those of the instance type."""
    assert hosts_for(wish(instance="inf2.48xlarge", count=2), LAPTOP) == (
        Host("inf2.48xlarge/0", BIG, tuple(range(192)), 8, memory_gib=766.0),
        Host("inf2.48xlarge/1", BIG, tuple(range(192)), 8, memory_gib=766.0),
    )


def test_an_emulated_host_has_the_machine_s_cpus_and_reserves_none() -> None:
    """Only the accelerator is emulated."""
    assert hosts_for(wish(emulate="inf2.48xlarge"), LAPTOP) == (
        Host("inf2.48xlarge/0", BIG, (0, 1), 0, frozenset(), emulated=True),
    )


def test_emulated_hosts_divide_the_machine_s_cpus() -> None:
    """Each CPU belongs to one of them, so thread budgets add up."""
    hosts = hosts_for(wish(emulate="inf2.xlarge", count=3), Machine(cpus=(3, 4, 5, 6, 7)))
    assert [host.cpus for host in hosts] == [(3,), (4, 5), (6, 7)]


def test_emulated_hosts_divide_the_machine_by_physical_core() -> None:
    """Siblings stay on one host."""
    machine = Machine((0, 1, 2, 3, 4, 5), layout=CpuLayout(((0, 3), (1, 4), (2, 5)), (0, 0, 0)))
    hosts = hosts_for(wish(emulate="inf2.xlarge", count=3), machine)
    assert [(host.cpus, host.physical_cores) for host in hosts] == [((i, i + 3), ((i, i + 3),)) for i in range(3)]


def test_a_machine_of_the_type_is_planned_with_the_cpus_of_this_process() -> None:
    """A container has four of them. Without a known layout they are used as on any machine."""
    seen = CpuLayout(tuple((i, i + 16) for i in range(16)), (0,) * 16)
    machine = Machine((2, 3, 18, 19), "inf2.8xlarge", layout=seen)
    (host,) = hosts_for(wish(instance="inf2.8xlarge"), machine)
    assert (host.cpus, host.physical_cores) == (machine.cpus, ((3, 19),))
    (host,) = hosts_for(wish(instance="inf2.8xlarge"), replace(machine, layout=None))
    assert host.cpus == tuple(range(32))


def test_more_emulated_hosts_than_cpus_share_them() -> None:
    """No host is left without a CPU."""
    assert all(host.cpus for host in hosts_for(wish(emulate="inf2.xlarge", count=5), LAPTOP))


def test_without_hosts_the_machine_s_own_type_is_used() -> None:
    """A real inf2.8xlarge, with its real CPUs and the default reserve."""
    cpus = tuple(range(32))
    assert hosts_for(Spec(), Machine(cpus, "inf2.8xlarge")) == (
        Host("inf2.8xlarge/0", TOPOLOGIES["inf2.8xlarge"], cpus, 2, memory_gib=126.0),
    )


@pytest.mark.parametrize("instance", [None, "inf1.24xlarge", "m5.large"])
def test_without_hosts_and_without_neuron_one_inf2_48xlarge_is_emulated(instance: str | None) -> None:
    """As on a laptop."""
    (host,) = hosts_for(Spec(), Machine((0, 1), instance))
    assert (host.name, host.emulated) == ("inf2.48xlarge/0", True)


def test_reserves_of_the_spec_are_applied() -> None:
    """vCPUs and cores of `reserve`, on real and emulated hosts."""
    reserve = {"vcpus": 4, "cores": [23, "20-21"]}
    real = hosts_for(wish(instance="inf2.48xlarge", reserve=reserve), LAPTOP)[0]
    emulated = hosts_for(wish(emulate="inf2.48xlarge", reserve={"vcpus": 1}), LAPTOP)[0]
    assert (real.reserve_vcpus, real.reserved_cores, emulated.usable_cpus) == (4, {20, 21, 23}, (1,))


@pytest.mark.parametrize(("vcpus", "reserve"), [(4, 1), (32, 2), (96, 4), (192, 8)])
def test_the_default_reserve_is_four_percent(vcpus: int, reserve: int) -> None:
    """Rounded up, at least 1."""
    assert default_reserve(vcpus) == reserve


def test_hosts_of_several_types_are_counted_by_type() -> None:
    """In the order of the list; repeated types continue the count."""
    wishes = [("inf2.48xlarge", 1), ("trn1.32xlarge", 2), ("inf2.48xlarge", 1)]
    spec = Spec(hosts=tuple(HostsSpec(instance=instance, count=count) for instance, count in wishes))
    names = ["inf2.48xlarge/0", "trn1.32xlarge/0", "trn1.32xlarge/1", "inf2.48xlarge/1"]
    assert [host.name for host in hosts_for(spec, LAPTOP)] == names


def test_emulated_hosts_of_several_types_divide_the_machine_s_cpus() -> None:
    """All of them together, not each type for itself."""
    spec = Spec(hosts=(HostsSpec(emulate="inf2.xlarge", count=2), HostsSpec(emulate="trn1.2xlarge")))
    hosts = hosts_for(spec, Machine(cpus=(3, 4, 5, 6, 7)))
    assert [(host.name, host.cpus) for host in hosts] == [
        ("inf2.xlarge/0", (3,)),
        ("inf2.xlarge/1", (4, 5)),
        ("trn1.2xlarge/0", (6, 7)),
    ]


@pytest.mark.parametrize(("lnc", "cores"), [(None, 64), (2, 64), (1, 128)])
def test_trn2_has_as_many_cores_as_its_lnc_gives(lnc: int | None, cores: int) -> None:
    """Real or emulated; names stay those of the type."""
    for kind in ("instance", "emulate"):
        (host,) = hosts_for(wish(**{kind: "trn2.48xlarge", "lnc": lnc}), LAPTOP)
        assert (host.name, host.cores) == ("trn2.48xlarge/0", cores)


def test_memory_is_that_of_the_type_minus_the_reserve_and_unlimited_if_emulated() -> None:
    """An emulated host has an unknown part of this machine's memory."""
    real = hosts_for(wish(instance="trn1.2xlarge", reserve={"memory_gib": 4.5}), LAPTOP)[0]
    emulated = hosts_for(wish(emulate="trn1.2xlarge", reserve={"memory_gib": 4.5}), LAPTOP)[0]
    assert (real.memory_gib, emulated.memory_gib) == (27.5, None)


def test_unreadable_hosts_are_not_replaced() -> None:
    """A misspelt instance type does not turn into an emulated host."""
    spec = parse("hosts: {instance: inf2.4xlarge}\nmodels: {a: {source: ./a}}").spec
    assert spec is not None
    assert hosts_for(spec, LAPTOP) == ()


def test_a_container_with_some_devices_uses_their_cores() -> None:
    """By their ids on the instance type. The cores of the other devices are reserved."""
    (host,) = hosts_for(Spec(), Machine(tuple(range(192)), "inf2.48xlarge", devices=(2, 3)))
    assert host.reserved_cores == frozenset(range(24)) - {4, 5, 6, 7}


@pytest.mark.parametrize("devices", [None, (), tuple(range(12))])
def test_a_machine_with_all_devices_reserves_no_core(devices: tuple[int, ...] | None) -> None:
    (host,) = hosts_for(Spec(), Machine(tuple(range(192)), "inf2.48xlarge", devices=devices))
    assert host.reserved_cores == frozenset()


def test_hosts_that_a_spec_names_do_not_depend_on_the_devices_of_this_machine() -> None:
    (host,) = hosts_for(wish(instance="inf2.48xlarge"), Machine((0, 1), "inf2.48xlarge", devices=(0,)))
    assert host.reserved_cores == frozenset()
