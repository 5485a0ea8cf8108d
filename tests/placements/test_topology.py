from __future__ import annotations

import pytest

from placements.facts.topology import DEGREES, TOPOLOGIES, alignment, degree, doubt


@pytest.mark.parametrize(
    ("instance", "family", "devices", "cores", "hbm", "vcpus", "memory", "link"),
    [
        ("inf2.xlarge", "inf2", 1, 2, 32, 4, 16, "none"),
        ("inf2.8xlarge", "inf2", 1, 2, 32, 32, 128, "none"),
        ("inf2.24xlarge", "inf2", 6, 12, 192, 96, 384, "line"),
        ("inf2.48xlarge", "inf2", 12, 24, 384, 192, 768, "ring"),
        ("trn1.2xlarge", "trn1", 1, 2, 32, 8, 32, "none"),
        ("trn1.32xlarge", "trn1", 16, 32, 512, 128, 512, "torus"),
        ("trn1n.32xlarge", "trn1", 16, 32, 512, 128, 512, "torus"),
        ("trn2.3xlarge", "trn2", 1, 4, 96, 12, 128, "none"),
        ("trn2.48xlarge", "trn2", 16, 64, 1536, 192, 2048, "torus"),
        ("trn2u.48xlarge", "trn2", 16, 64, 1536, 192, 2048, "torus"),
        # four servers: 9216 GiB of HBM, 768 vCPUs, 8192 GiB; 36 servers: 20736 GiB, 2304 vCPUs, 27648 GiB
        ("trn3.48xlarge", "trn3", 16, 64, 9216 // 4, 768 // 4, 8192 // 4, "switch"),
        ("trn3e.24xlarge", "trn3", 4, 16, 20736 // 36, 2304 // 36, 27648 // 36, "switch"),
    ],
)
def test_each_type_has_the_documented_sizes(
    instance: str, family: str, devices: int, cores: int, hbm: int, vcpus: int, memory: int, link: str
) -> None:
    """Devices, cores, HBM, vCPUs, memory and how the devices are joined are those of AWS's pages."""
    topology = TOPOLOGIES[instance]
    assert (topology.family, topology.devices, topology.cores, topology.cores * topology.hbm_per_core_gib) == (
        family,
        devices,
        cores,
        hbm,
    )
    assert (topology.vcpus, topology.memory_gib, topology.link) == (vcpus, memory, link)


def test_there_are_exactly_twelve_types() -> None:
    """Those whose names AWS has not published are marked."""
    assert len(TOPOLOGIES) == 12
    noted = [topology.instance for topology in TOPOLOGIES.values() if topology.note]
    assert noted == ["trn3.48xlarge", "trn3e.24xlarge"]


@pytest.mark.parametrize(
    ("instance", "lnc", "cores", "hbm"),
    [
        ("trn2.48xlarge", None, 64, 24),
        ("trn2.48xlarge", 2, 64, 24),
        ("trn2.48xlarge", 1, 128, 12),
        ("trn2u.48xlarge", 1, 128, 12),
        ("trn2.3xlarge", 1, 8, 12),
        ("trn3e.24xlarge", 1, 32, 18),
    ],
)
def test_logical_cores_are_two_physical_ones_or_one(instance: str, lnc: int | None, cores: int, hbm: int) -> None:
    """At LNC 1 there are twice as many, each with half of the HBM; the devices do not change."""
    topology = TOPOLOGIES[instance].at_lnc(lnc)
    assert (topology.cores, topology.hbm_per_core_gib, topology.lnc) == (cores, hbm, lnc or 2)
    assert topology.devices == TOPOLOGIES[instance].devices
    assert topology.at_lnc(2) == TOPOLOGIES[instance]


@pytest.mark.parametrize(("instance", "lnc"), [("inf2.xlarge", 1), ("trn1.32xlarge", 2), ("trn2.48xlarge", 4)])
def test_no_other_choice_of_logical_cores_is_accepted(instance: str, lnc: int) -> None:
    """inf2 and trn1 have none, trn2 has two."""
    with pytest.raises(ValueError, match=rf"{instance} does not support LNC {lnc}"):
        TOPOLOGIES[instance].at_lnc(lnc)


def test_a_preferred_block_is_always_legal() -> None:
    """Every preferred alignment is a multiple of the legal one."""
    rows = [row for table in DEGREES.values() for row in table.values()]
    assert [row for row in rows if row.preferred % row.legal] == []


@pytest.mark.parametrize(
    ("family", "rows"),
    [
        # 1 anywhere; 2, 4 and 8 on whole devices; 12 and 16 too, but named on one page only; 24 at 0
        (
            "inf2",
            {
                1: (1, 1, True),
                2: (2, 2, True),
                4: (2, 4, True),
                8: (2, 8, True),
                12: (2, 12, False),
                16: (2, 8, False),
                24: (24, 24, True),
            },
        ),
        # the device sets of the scheduler: one device, 0-3, 4-7, 8-11, 12-15; 0-7, 8-15; all sixteen
        (
            "trn1",
            {1: (1, 1, True), 2: (2, 2, True), 8: (8, 8, True), 16: (16, 16, True), 32: (32, 32, True)},
        ),
        # shown at multiples of the degree only
        ("trn2", {tp: (tp, tp, True) for tp in (1, 2, 4, 8, 16, 32, 64)}),
        ("trn3", {tp: (tp, tp, True) for tp in (1, 2, 4, 8, 16, 32, 64)}),
    ],
)
def test_degrees_have_their_legal_and_preferred_alignment(family: str, rows: dict[int, tuple[int, int, bool]]) -> None:
    """Each family's, as its documents define where a range may start."""
    table = DEGREES[family]
    assert {tp: (row.legal, row.preferred, row.documented) for tp, row in table.items()} == rows
    assert all(row.tp == tp for tp, row in table.items())


def test_degrees_are_in_doubt_where_their_documents_end() -> None:
    """Those of logical cores are documented for LNC 2 only; there a user saw 2 of the four of a device rejected."""
    big = TOPOLOGIES["trn2.48xlarge"]
    by_lnc = {(lnc, tp): bool(doubt(big.at_lnc(lnc), DEGREES["trn2"][tp])) for lnc in (1, 2) for tp in (1, 2, 8)}
    assert by_lnc == {(1, 1): False, (1, 2): True, (1, 8): True, (2, 1): False, (2, 2): True, (2, 8): False}
    assert [tp for tp, row in DEGREES["inf2"].items() if doubt(TOPOLOGIES["inf2.48xlarge"], row)] == [12, 16]


@pytest.mark.parametrize(("family", "tp", "legal"), [("inf2", 6, 2), ("trn1", 4, 2), ("trn2", 6, 6)])
def test_a_degree_outside_the_table_uses_whole_devices(family: str, tp: int, legal: int) -> None:
    """An allowed degree starts at an even core, preferably at a multiple of itself; on trn2 always."""
    row = alignment(family, tp)
    assert (degree(family, tp), row.legal, row.preferred) == (None, legal, tp)
