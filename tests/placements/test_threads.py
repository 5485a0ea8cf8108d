from __future__ import annotations

import pytest

from placements.facts.core_range import CoreRange
from placements.resources.environ import arithmetic, cpu_mask, threads
from tests.placements.fleets import PLAIN, host

BIG = host()


@pytest.mark.parametrize(("tp", "count"), [(1, 7), (2, 15), (4, 30), (8, 61), (12, 92), (24, 184)])
def test_a_replica_gets_its_share_of_the_cpus(tp: int, count: int) -> None:
    """floor((192 - 8) x tp / 24) on an inf2.48xlarge."""
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
        ("share", 8, BIG, "floor((192 - 8) x 8 / 24) = 61"),
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
    """24 single cores divide CPUs 8 to 191, each once, in order."""
    masks = [cpu_mask(BIG, CoreRange(core, core), 7) for core in range(24)]
    assert [cpu for mask in masks for cpu in mask] == list(range(8, 192))


def test_the_mask_follows_the_formula() -> None:
    """Cores 8-15 of 24 get usable CPUs floor(8 x 184 / 24) = 61 to floor(16 x 184 / 24) - 1 = 121."""
    assert cpu_mask(BIG, CoreRange(8, 15), 61) == tuple(range(8 + 61, 8 + 122))


@pytest.mark.parametrize(
    ("on", "cores", "count"),
    [
        (host(cpus=2, reserve=0), CoreRange(0, 7), 1),  # a share of 2/3 CPU
        (BIG, CoreRange(0, 0), 48),  # more threads than its CPUs
        (BIG, None, 7),  # no cores
        (PLAIN, CoreRange(0, 0), 1),
        (host(cpus=4, reserve=9), CoreRange(0, 23), 1),
    ],
)
def test_there_is_no_mask_if_none_can_be_disjoint(on: object, cores: CoreRange | None, count: int) -> None:
    """Under one CPU, beyond the mask, or without cores a replica is not bound."""
    assert cpu_mask(on, cores, count) == ()  # type: ignore[arg-type]
