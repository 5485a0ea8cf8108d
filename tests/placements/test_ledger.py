"""What a plan takes of its machines adds up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from placements.facts.topology import MeasuredConstants
from placements.planner.ledger import Ledger, ledger
from placements.planner.plan import plan
from placements.planner.spec_hosts import hosts_for
from placements.resources.calibration import speed_rows
from placements.resources.host_memory import host_memory
from placements.resources.memory import estimate
from placements.spec.schema import HostsSpec, Spec
from tests.placements.fleets import LAPTOP, LLAMA_2_7B, model, spec


def booked(wish: Spec) -> Ledger:
    hosts = hosts_for(wish, LAPTOP)
    checkpoints = {"a": LLAMA_2_7B}
    return ledger(wish, hosts, plan(wish, hosts, checkpoints), checkpoints)


def test_the_threads_of_a_host_are_those_of_its_replicas() -> None:
    """Each model with the arithmetic of its share."""
    (host,) = booked(spec(model("a", 8, replicas=2), model("b", 2))).hosts
    rows = {line.model: (line.replicas, line.each, line.arithmetic, line.together) for line in host.threads}
    assert rows == {
        "a": (2, 60, "floor(92 CPU cores x 8 / 24) x 2 = 60", 120),
        "b": (1, 14, "floor(92 CPU cores x 2 / 24) x 2 = 14", 14),
    }
    assert host.as_dict()["threads"] == 134


def test_the_memory_of_a_model_is_its_estimate() -> None:
    """By class, with the limit; a model without a checkpoint has no row."""
    wish = spec(model("a", 8), model("b", 2))
    (need,) = booked(wish).memory
    rows = need.as_dict()
    expected = estimate(wish.models[0], LLAMA_2_7B)
    assert rows["total_gib"] == pytest.approx(expected.total, abs=1e-3)
    assert sum(size["gib"] for size in rows["classes"]) == pytest.approx(expected.total, abs=1e-2)
    assert (rows["usable_gib"], rows["hbm_gib"]) == (15.2, 16)


def test_replicas_load_side_by_side() -> None:
    """Two of them need the host's memory twice."""
    wish = spec(model("a", 8, replicas=2))
    (host,) = booked(wish).hosts
    assert host.load_gib == pytest.approx(2 * host_memory(wish.models[0], LLAMA_2_7B).load)


def test_what_was_measured_on_such_machines_is_in_the_plan() -> None:
    """The memory beyond the estimates, and the slow disk; on emulated ones it is another machine's."""
    constants = MeasuredConstants(hbm_gib=0.5, host_gib=2.0, read_bytes_s=2e8)
    for kind, surplus in (("inf2.48xlarge", 1), ("emulated inf2.48xlarge", 0)):
        wish = spec(model("a", 8))
        hosts = hosts_for(wish, replace(LAPTOP, measured={kind: constants}))
        book = ledger(wish, hosts, plan(wish, hosts, {"a": LLAMA_2_7B}), {"a": LLAMA_2_7B})
        (rows,) = book.as_dict()["memory"]
        assert rows["measured"] == {"hbm_gib": 0.5 * surplus, "host_gib": 2.0 * surplus}
        assert rows["usable_gib"] == pytest.approx(15.2 - 0.5 * surplus)
        load_gib = host_memory(wish.models[0], LLAMA_2_7B).load + 2.0 * surplus
        assert (rows["host"]["load_gib"], book.hosts[0].load_gib) == pytest.approx((load_gib, load_gib), abs=1e-3)
        own = wish.models[0].model_copy(update={"host_memory_gib": 5.0})  # instead of the estimate and what is beyond
        assert host_memory(own, LLAMA_2_7B, surplus_gib=2.0) == host_memory(own, LLAMA_2_7B)
        (speed,) = speed_rows(wish, hosts, {"a": LLAMA_2_7B})
        weights_gb = LLAMA_2_7B.parameters * 2 / 1e9
        assert speed["load_s"] == pytest.approx(30 + weights_gb * (5 if surplus else 1), abs=1e-2)
        assert ("load at 0.20 GB/s, measured" in speed["source"]) == bool(surplus)


def test_each_type_of_host_has_a_separate_row() -> None:
    """The limits differ; a type that is too small for the degree has none."""
    types = ("inf2.xlarge", "inf2.48xlarge", "trn2.48xlarge")
    wish = Spec(hosts=tuple(HostsSpec(instance=name) for name in types), models=(model("a", 8),))
    rows = [(need.as_dict()["instance"], need.as_dict()["usable_gib"]) for need in booked(wish).memory]
    assert rows == [("inf2.48xlarge", 15.2), ("trn2.48xlarge", 22.8)]


def test_blocked_cores_are_listed_separately() -> None:
    """As ranges."""
    wish = spec(model("a"), cores=[23])
    hosts = hosts_for(wish, LAPTOP)
    name = hosts[0].name
    book = ledger(
        wish, hosts, plan(wish, hosts), quarantined={name: frozenset({3})}, cordoned={name: frozenset({8, 9, 12})}
    )
    rows = book.as_dict()["hosts"][0]
    assert (rows["reserved"], rows["cordoned"], rows["quarantined"]) == (["23"], ["8-9", "12"], ["3"])


def test_a_row_is_for_suitable_hosts() -> None:
    """With their number of physical cores in a logical one; half of the HBM may be too little."""
    types = (HostsSpec(instance="trn2.48xlarge", lnc=1), HostsSpec(instance="trn2.48xlarge"))
    wish = Spec(hosts=types, models=(model("a", 1, max_batch=1, max_len=256),))
    rows = [(need.as_dict()["lnc"], need.as_dict()["usable_gib"]) for need in booked(wish).memory]
    assert rows == [(2, 22.8)]
