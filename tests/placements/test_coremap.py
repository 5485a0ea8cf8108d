"""The picture of a plan: what every host's devices hold, and how they are joined."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from placements.explain.core_map import WIDTH, core_map
from placements.facts.core_range import CoreRange
from placements.facts.topology import TOPOLOGIES, Host
from placements.planner.plan import Placement, Plan, plan
from placements.spec.schema import Spec
from tests.placements.fleets import PLAIN, host, model


def placed(host: Host, *ranges: str, name: str = "a") -> list[Placement]:
    """Replicas of one model on those cores of a host."""
    return [Placement(name, i, host.name, CoreRange.parse(cores), 4) for i, cores in enumerate(ranges)]


def map_of(hosts: Sequence[Host], *placements: Placement) -> str:
    return core_map(Plan(tuple(placements)), hosts)


def on(instance: str, lnc: int | None = None) -> Host:
    topology = TOPOLOGIES[instance].at_lnc(lnc)
    return Host(f"{instance}/0", topology, tuple(range(topology.vcpus)), 8)


def test_a_ring_is_drawn_closed_with_replicas_and_unusable_cores() -> None:
    """Two columns a core: the model's letter and the replica's number, or a sign."""
    machine = dataclasses.replace(host(), reserved_cores=frozenset({23}))
    placements = [*placed(machine, "0-7", name="chat"), *placed(machine, "8", "9", name="tiny")]
    cordoned = {machine.name: frozenset({0, 11, 12})}
    text = core_map(Plan(tuple(placements)), [machine], {machine.name: frozenset({10})}, cordoned)
    assert text == (
        "inf2.48xlarge/0: 10 of 24 cores in use, 12 devices in a ring\n"
        "  core   0    2    4    6    8    10   12   14   16   18   20   22\n"
        "       ,-A0A0-A0A0-A0A0-A0A0-B0B1-!!//-//..-....-....-....-....-..##-.\n"
        "       '-------------------------------------------------------------'\n"
        "  A chat/0  cores 0-7, 4 threads\n"
        "  B tiny  0 on 8, 1 on 9; 4 threads each\n"
        "  .. free   ## reserved   // cordoned   !! quarantined   cordoned in use: 0\n"
    )


def test_a_line_of_devices_is_not_closed() -> None:
    """inf2.24xlarge."""
    machine = host("inf2.24xlarge")
    assert map_of([machine], *placed(machine, "0-3", "4-7")) == (
        "inf2.24xlarge/0: 8 of 12 cores in use, 6 devices in a line\n"
        "  core   0    2    4    6    8    10\n"
        "         A0A0-A0A0-A1A1-A1A1-....-....\n"
        "  A a  0 on 0-3, 1 on 4-7; 4 threads each\n"
        "  .. free\n"
    )


def test_a_torus_is_a_grid_with_connected_edges() -> None:
    """trn1.32xlarge."""
    machine = on("trn1.32xlarge")
    assert map_of([machine], *placed(machine, "0-15", "16")) == (
        "trn1.32xlarge/0: 17 of 32 cores in use, 16 devices in a 4 x 4 torus\n"
        "  core      |0     |2     |4     |6\n"
        "         ---A0A0---A0A0---A0A0---A0A0---\n"
        "            |8     |10    |12    |14\n"
        "         ---A0A0---A0A0---A0A0---A0A0---\n"
        "            |16    |18    |20    |22\n"
        "         ---A1..---....---....---....---\n"
        "            |24    |26    |28    |30\n"
        "         ---....---....---....---....---\n"
        "            |      |      |      |\n"
        "         (a link at an edge continues at the opposite edge)\n"
        "  A a  0 on 0-15, 1 on 16; 4 threads each\n"
        "  .. free\n"
    )


def test_the_cores_of_trn2_are_logical_ones() -> None:
    """Four of a device with LNC 2, eight with LNC 1; the header shows which."""
    for lnc, first_row, cores in ((2, "A0A0A0A0--........", 64), (1, "A0A0A0A0........-", 128)):
        machine = on("trn2.48xlarge", lnc)
        text = map_of([machine], *placed(machine, "0-3"))
        assert first_row in text
        assert f"4 of {cores} cores in use, 16 devices in a 4 x 4 torus, LNC {lnc}" in text


def test_no_line_is_longer_than_80_columns() -> None:
    """On every instance type, full of replicas with the longest possible names."""
    for instance in TOPOLOGIES:
        for lnc in (1, 2) if TOPOLOGIES[instance].lnc else (None,):
            machine = on(instance, lnc)
            cores = [str(core) for core in range(machine.cores)]
            assert max(map(len, map_of([machine], *placed(machine, *cores, name="m" * 63)).splitlines())) <= WIDTH


def test_each_of_a_few_hosts_has_its_block() -> None:
    """Blocks are separated by an empty line; an emulated host is marked."""
    hosts = [host("inf2.xlarge", 0, emulated=True), host("inf2.xlarge", 1, emulated=True)]
    assert map_of(hosts, *placed(hosts[0], "0-1")) == (
        "inf2.xlarge/0: 2 of 2 cores in use, emulated\n  core   0\n         A0A0\n  A a/0  cores 0-1, 4 threads\n"
        "\ninf2.xlarge/1: 0 of 2 cores in use, emulated\n  core   0\n         ....\n  .. free\n"
    )


def test_many_hosts_share_maps() -> None:
    """Identical ones are drawn once, with replicas counted on each; empty ones share a line."""
    hosts = [host("inf2.xlarge", i) for i in range(1000)]
    placements = [Placement("a", i, hosts[i].name, CoreRange(0, 1), 4) for i in range(500)]
    text = map_of(hosts, *placements, Placement("b", 0, hosts[700].name, CoreRange(0, 0), 1))
    assert text == (
        "500 hosts, inf2.xlarge/0-499: 2 of 2 cores in use on each\n  core   0\n         A0A0\n"
        "  A a  1 replica of 2 cores, 4 threads\n"
        "\ninf2.xlarge/700: 1 of 2 cores in use\n  core   0\n         B0..\n  B b/0  core 0, 1 thread\n  .. free\n"
        "\n499 hosts, inf2.xlarge/500-699,701-999: no replicas, 2 cores\n"
    )


def test_a_thousand_different_hosts_are_not_a_thousand_maps() -> None:
    """Twelve are drawn, and the use of the others is summarized."""
    hosts = [host(i=i) for i in range(1000)]
    placements = [Placement(f"m{i}", 0, hosts[i].name, CoreRange(0, 7), 4) for i in range(1000)]
    text = map_of(hosts, *placements)
    assert text.count("devices in a ring") == 12
    assert text.endswith("\n988 more hosts: 7904 of 23712 cores in use; `-o json` has every replica\n")
    assert max(map(len, text.splitlines())) <= WIDTH


def test_replicas_without_cores_are_listed() -> None:
    """A plain CPU host has no cores to draw."""
    text = core_map(plan(Spec(models=(model("a", 2),)), [PLAIN]), [PLAIN])
    assert text == "plain: 8 CPUs, no NeuronCores\n  A a/0  no cores, 2 threads\n"


def test_the_requested_window_is_marked() -> None:
    """Where it is free."""
    machine = host("inf2.24xlarge")
    text = core_map(Plan(), [machine], window=(machine.name, CoreRange(4, 7)))
    assert "....-....-[][]-[][]-....-....\n  [] the window   .. free\n" in text


def test_more_models_than_letters_share_a_star() -> None:
    """The map stays readable, if less telling."""
    hosts = [host(i=i) for i in range(3)]
    placements = [Placement(f"m{i}", 0, hosts[i // 24].name, CoreRange(i % 24, i % 24), 1) for i in range(60)]
    assert "* m59/0" in map_of(hosts, *placements)


def test_letters_are_those_of_the_spec() -> None:
    """Also if a model before has no replica; models that the spec no longer has follow."""
    machine, spec = host("inf2.xlarge"), Spec(models=(model("resting"), model("a")))
    placements = [*placed(machine, "0", name="removed"), *placed(machine, "1")]
    assert "         C0B0\n" in core_map(Plan(tuple(placements)), [machine], spec=spec)


def test_each_model_has_its_own_colour() -> None:
    """For all its replicas; without its codes the coloured map is the plain one."""
    machine = host()
    placements = [*placed(machine, "0-7", "8-15"), *placed(machine, "16-17", name="b")]
    colored = core_map(Plan(tuple(placements)), [machine], color=True)
    assert re.sub(r"\x1b\[[0-9;]*m", "", colored) == map_of([machine], *placements)
    codes = {cell: code for code, cell in re.findall(r"\x1b\[([0-9;]+)m([AB]\d)", colored)}
    assert codes["A0"] == codes["A1"] != codes["B0"]
