from __future__ import annotations

from dataclasses import replace

import pytest

from placements.facts.core_range import CoreRange
from placements.resources.environ import arithmetic, cpu_mask, threads
from tests.placements.fleets import PLAIN, host

BIG = host()


@pytest.mark.parametrize(("tp", "count"), [(1, 6), (2, 14), (4, 30), (8, 60), (12, 92), (24, 184)])
def test_a_replica_gets_its_share_of_the_cpus(tp: int, count: int) -> None:
    """floor(92 CPU cores x tp / 24), of two CPUs each, on an inf2.48xlarge."""
    assert threads("share", tp, BIG) == count


def test_a_share_under_one_thread_is_one() -> None:
    """Two CPUs for 24 cores still give every replica a thread."""
    assert [threads("share", tp, host(cpus=2, reserve=0)) for tp in (1, 8, 12, 24)] == [1, 1, 1, 2]


def test_a_reserve_of_all_cpus_leaves_one_thread() -> None:
    """Never zero or negative threads."""
    assert threads("share", 8, host(cpus=4, reserve=9)) == 1


def test_lmi_gives_two_threads_per_core() -> None:
    """2 x tp, for any host."""
    assert threads("lmi", 8, host(cpus=2, reserve=0)) == 16


def test_a_number_is_that_number() -> None:
    """A fixed policy is taken as it is."""
    assert threads(48, 8, BIG) == 48


def test_without_cores_tp_degree_counts_cpus_within_the_budget() -> None:
    """A plain CPU host of 8 - 1 CPUs."""
    assert [threads("share", tp, PLAIN) for tp in (1, 4, 24)] == [1, 4, 7]


@pytest.mark.parametrize(
    ("policy", "tp", "on", "text"),
    [
        ("share", 8, BIG, "floor(92 CPU cores x 8 / 24) x 2 = 60"),
        ("share", 8, host("inf2.24xlarge", cpus=96, reserve=4), "floor((96 - 4) x 8 / 12) = 61"),
        ("share", 1, host(cpus=2, reserve=0), "floor((2 - 0) x 1 / 24) = 0, at least 1"),
        ("lmi", 4, BIG, "2 x 4 = 8"),
        (3, 4, BIG, "fixed = 3"),
        ("share", 2, PLAIN, "min(2, (8 - 1)) = 2"),
    ],
)
def test_the_arithmetic_is_printed(policy: object, tp: int, on: object, text: str) -> None:
    """The printed sum is the computed one."""
    assert arithmetic(policy, tp, on) == text  # type: ignore[arg-type]


def test_masks_of_all_cores_divide_the_usable_cpus() -> None:
    """24 single cores divide all CPUs but one physical core of each node, each once."""
    masks = [cpu_mask(BIG, CoreRange(core, core), 6) for core in range(24)]
    assert sorted(cpu for mask in masks for cpu in mask) == list(BIG.usable_cpus)
    assert sorted(set(BIG.cpus) - set(BIG.usable_cpus)) == [0, 24, 48, 72, 96, 120, 144, 168]


def test_the_mask_follows_the_formula() -> None:
    """Cores 8-15 of 24 get physical cores floor(8 x 92 / 24) = 30 to floor(16 x 92 / 24) - 1 = 60 of the order."""
    assert cpu_mask(BIG, CoreRange(8, 15), 60) == tuple(sorted(cpu for c in BIG.physical_cores[30:61] for cpu in c))


def test_an_emulated_host_without_the_cpus_of_its_type_is_divided_by_number() -> None:
    """Cores 8-15 of 24 get a third of 64 CPUs."""
    assert cpu_mask(host(cpus=64, reserve=4, emulated=True), CoreRange(8, 15), 20) == tuple(range(24, 44))


def test_an_emulated_host_on_a_machine_with_the_cpus_of_its_type_has_its_layout() -> None:
    """The layout is that of a real host."""
    emulated = replace(BIG, emulated=True)
    assert cpu_mask(emulated, CoreRange(0, 7), 60) == cpu_mask(BIG, CoreRange(0, 7), 60)


@pytest.mark.parametrize(
    ("on", "cores", "count"),
    [
        (host(cpus=2, reserve=0), CoreRange(0, 7), 1),  # a share of 2/3 CPU
        (BIG, CoreRange(0, 0), 48),  # more threads than its CPUs
        (BIG, None, 7),  # no cores
        (host("inf2.24xlarge", cpus=96, reserve=4), CoreRange(0, 7), 8),  # AWS does not publish its layout
        (host("trn2.3xlarge", cpus=12, reserve=0), CoreRange(0, 3), 1),
        (PLAIN, CoreRange(0, 0), 1),
        (host(cpus=4, reserve=9), CoreRange(0, 23), 1),
    ],
)
def test_there_is_no_mask_if_none_can_be_disjoint(on: object, cores: CoreRange | None, count: int) -> None:
    """Under one CPU, beyond the mask, or without cores a replica is not bound."""
    assert cpu_mask(on, cores, count) == ()  # type: ignore[arg-type]
