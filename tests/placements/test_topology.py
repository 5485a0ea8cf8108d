from __future__ import annotations

import pytest

from placements.topology import DEGREES, TOPOLOGIES, alignment, degree


@pytest.mark.parametrize(
    ("instance", "cores", "vcpus", "memory"),
    [
        ("inf2.xlarge", 2, 4, 16),
        ("inf2.8xlarge", 2, 32, 128),
        ("inf2.24xlarge", 12, 96, 384),
        ("inf2.48xlarge", 24, 192, 768),
    ],
)
def test_inf2_types_have_the_documented_sizes(instance: str, cores: int, vcpus: int, memory: int) -> None:
    """Cores, vCPUs and memory are those of AWS's pages; a core has 16 GiB."""
    topology = TOPOLOGIES[instance]
    assert (topology.cores, topology.vcpus, topology.memory_gib, topology.hbm_per_core_gib) == (
        cores,
        vcpus,
        memory,
        16,
    )


def test_a_preferred_block_is_always_legal() -> None:
    """Every preferred alignment is a multiple of the legal one."""
    rows = [row for table in DEGREES.values() for row in table.values()]
    assert [row for row in rows if row.preferred % row.legal] == []


def test_every_fact_has_a_source() -> None:
    """No row of the tables is without its source."""
    rows = [*TOPOLOGIES.values(), *(row for table in DEGREES.values() for row in table.values())]
    assert [row for row in rows if not row.source] == []


def test_inf2_degrees_and_their_legal_alignment() -> None:
    """1 anywhere; 2, 4 and 8 on whole devices; 12 at 0 and 12; 24 at 0; only 12 is undocumented."""
    table = {tp: (row.legal, row.preferred, row.documented) for tp, row in DEGREES["inf2"].items()}
    assert table == {
        1: (1, 1, True),
        2: (2, 2, True),
        4: (2, 4, True),
        8: (2, 8, True),
        12: (12, 12, False),
        24: (24, 24, True),
    }


def test_a_degree_outside_the_table_takes_whole_devices() -> None:
    """An overridden degree of 6 begins at an even core, preferably at a multiple of 6."""
    row = alignment("inf2", 6)
    assert (degree("inf2", 6), row.legal, row.preferred) == (None, 2, 6)
