from __future__ import annotations

import re

from placements.explain import core_map
from placements.hosts import hosts_for
from placements.plan import plan
from placements.spec import Spec
from placements.topology import Host
from tests.placements.fleets import LAPTOP, PLAIN, host, model, planned, spec


def test_the_core_map_shows_devices_replicas_and_what_is_not_free() -> None:
    """Two columns a core, devices apart, a letter for each replica."""
    wish = spec(model("chat", 8, "0-7"), model("tiny", replicas=2), cores=[23])
    drawn = planned(wish, blocked={"inf2.48xlarge/0": frozenset({10})})
    text = core_map(drawn, hosts_for(wish, LAPTOP), {"inf2.48xlarge/0": frozenset({10})})
    assert text == (
        "inf2.48xlarge/0: 10 of 24 cores in use\n"
        "  core   0    2    4    6    8    10   12   14   16   18   20   22\n"
        "         AAAA AAAA AAAA AAAA BBCC !!.. .... .... .... .... .... ..--\n"
        "  A chat/0  cores 0-7, 61 threads\n"
        "  B tiny/0  core 8, 7 threads\n"
        "  C tiny/1  core 9, 7 threads\n"
        "  . free   - reserved   ! quarantined\n"
    )


def test_no_line_of_a_full_host_is_longer_than_80_columns() -> None:
    """24 replicas with names of 40 letters."""
    wish = spec(model("m" * 40, replicas=24))
    text = core_map(planned(wish), hosts_for(wish, LAPTOP))
    assert max(map(len, text.splitlines())) <= 80


def test_each_host_has_its_block() -> None:
    """Blocks are separated by an empty line; an emulated host says so."""
    hosts = [host("inf2.xlarge", 0, emulated=True), host("inf2.xlarge", 1, emulated=True)]
    text = core_map(plan(Spec(models=(model("a", 2),)), hosts), hosts)
    assert text == (
        "inf2.xlarge/0: 2 of 2 cores in use, emulated\n  core   0\n         AAAA\n  A a/0  cores 0-1, 192 threads\n"
        "\ninf2.xlarge/1: 0 of 2 cores in use, emulated\n  core   0\n         ....\n  . free\n"
    ).replace("192", "184")


def test_replicas_without_cores_are_listed() -> None:
    """A plain CPU host has no cores to draw."""
    text = core_map(plan(Spec(models=(model("a", 2),)), [PLAIN]), [PLAIN])
    assert text == "plain: 8 CPUs, no NeuronCores\n  A a/0  no cores, 2 threads\n"


def test_more_replicas_than_letters_share_a_star() -> None:
    """The map stays readable, if less telling."""
    hosts = [host(i=i) for i in range(3)]
    text = core_map(plan(Spec(models=(model("a", replicas=60),)), hosts), hosts)
    assert "* a/52" in text


def test_color_changes_nothing_but_escape_codes() -> None:
    """Without its codes the coloured map is the plain one."""
    hosts: list[Host] = [host()]
    drawn = plan(Spec(models=(model("a", 8), model("b", 2))), hosts)
    colored = core_map(drawn, hosts, color=True)
    assert (colored != core_map(drawn, hosts), re.sub(r"\x1b\[[0-9;]*m", "", colored)) == (True, core_map(drawn, hosts))
