"""Joining a Ray cluster: what it is refused for, and which machine each host gets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.daemon.ray_connection import JoinedRay, survey
from orchestrator.fleet.host_binding import Member, bind_hosts
from orchestrator.fleet.machine_claims import MachineClaims, claims, release_machines
from orchestrator.on_ray import ray_nodes
from orchestrator.process.addresses import free_port
from orchestrator.process.failure import Failed
from placements.planner.spec_hosts import Machine, hosts_for
from placements.spec.parse import parse

TYPE = "inf2.48xlarge"
HOSTS = hosts_for(
    parse(f"hosts: {{emulate: {TYPE}, count: 2}}\nmodels: {{a: {{engine: echo}}}}", "s", "/").spec,  # type: ignore[arg-type]
    Machine((0, 1), joined=True),
)


def member(label: str, *, alive: bool = True, cores: int = 24, instance: str | None = TYPE) -> Member:
    return Member(label=label, instance=instance, alive=alive, cores=cores, cpus=8)


def joined(address: str) -> JoinedRay:
    return JoinedRay(address, HOSTS, "id", "name", lambda line: None)


def refusal(work: Any) -> str:
    with pytest.raises(Failed) as raised:
        work()
    return raised.value.problem.id


def test_each_emulated_host_of_a_joined_cluster_has_the_cpus_of_a_machine() -> None:
    assert [host.cpus for host in HOSTS] == [(0, 1), (0, 1)]


def test_an_address_where_nothing_listens_is_refused() -> None:
    assert refusal(lambda: joined(f"127.0.0.1:{free_port()}").start(lambda: None)) == "ray-unreachable"


@pytest.mark.parametrize(
    ("error", "id"),
    [
        ("Version mismatch: The cluster was started with", "ray-version-differs"),
        ("Failed to connect to Ray cluster at 10.0.0.1:6379", "ray-not-joined"),
    ],
)
def test_what_ray_says_becomes_a_problem(error: str, id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(address: str, name: str) -> Any:
        raise RuntimeError(error)

    monkeypatch.setattr(ray_nodes, "join_ray", fail)
    assert refusal(lambda: joined("auto").start(lambda: None)) == id


def test_a_machine_that_is_not_the_head_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_nodes, "join_ray", lambda address, name: {})
    monkeypatch.setattr(ray_nodes, "ray_nodes", list)
    monkeypatch.setattr(ray_nodes, "on_head", lambda: False)
    assert refusal(lambda: joined("auto").start(lambda: None)) == "not-on-the-head"


def test_the_cluster_of_another_fleet_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [member("a"), member("b")]
    other = ray_nodes.ClusterOwner("other", "chat", "head", 0.0)
    monkeypatch.setattr(ray_nodes, "join_ray", lambda address, name: {})
    monkeypatch.setattr(ray_nodes, "ray_nodes", lambda: nodes)
    monkeypatch.setattr(ray_nodes, "on_head", lambda: True)
    monkeypatch.setattr(ray_nodes, "claim_name", lambda owner, previous: other)
    assert refusal(lambda: joined("auto").start(lambda: None)) == "fleet-already-running"


@pytest.mark.parametrize(
    ("members", "id"),
    [
        ([], "no-hosts-on-cluster"),
        ([member("a", instance=None)], "no-hosts-on-cluster"),
        ([member("a", alive=False)], "no-hosts-on-cluster"),
        ([member("a", cores=12)], "core-resources-missing"),
    ],
)
def test_machines_that_cannot_be_hosts_are_refused(members: list[Member], id: str) -> None:
    assert refusal(lambda: list(survey(HOSTS, members))) == id


def test_a_host_without_a_machine_is_reported() -> None:
    (line,) = survey(HOSTS, [member("a")])
    assert line.startswith(f"{TYPE}/1: no machine")


INSTANCES = st.sampled_from([TYPE, "x"])
LABELS = st.sampled_from("abcdef")
MEMBERS = st.lists(
    st.builds(
        member, LABELS, alive=st.booleans(), cores=st.sampled_from([0, 24]), instance=st.sampled_from([TYPE, "x"])
    ),
    unique_by=lambda member: member.label,
)
NAMES = [f"{TYPE}/0", f"{TYPE}/1", "x/0"]


@given(MEMBERS, MEMBERS)
def test_hosts_keep_living_machines_and_share_none(before: list[Member], after: list[Member]) -> None:
    """Each free living machine is used before a host is lost, and is of the host's type when it is bound."""
    first = bind_hosts(NAMES, {}, before)
    then = bind_hosts(NAMES, first, after)
    living = {member.label: member for member in after if member.alive and member.cores}
    for name, label in first.items():
        assert then[name] == label or label not in living
    assert len(set(then.values())) == len(then)
    for name, label in then.items():
        assert first.get(name) == label or living[label].instance == name.partition("/")[0]
    unused = {member.instance for label, member in living.items() if label not in then.values()}
    assert not [name for name in NAMES if then.get(name) not in living and name.partition("/")[0] in unused]


class Shared:
    """Ray's KV, as ``KeyValues`` describes it."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, str], bytes] = {}

    def get(self, namespace: str, keys: Sequence[str]) -> dict[str, bytes]:
        return {key: self.values[namespace, key] for key in keys if (namespace, key) in self.values}

    def put(self, namespace: str, key: str, value: bytes, *, overwrite: bool = True) -> bool:
        new = (namespace, key) not in self.values
        if new or overwrite:
            self.values[namespace, key] = value
        return new

    def delete(self, namespace: str, key: str) -> None:
        self.values.pop((namespace, key), None)

    def keys(self, namespace: str, prefix: str) -> list[str]:
        return [key for space, key in self.values if space == namespace and key.startswith(prefix)]


FLEETS = ("red", "blue", "green")
ROUNDS = st.lists(
    st.tuples(st.sampled_from(FLEETS), st.sets(st.sampled_from(NAMES)), MEMBERS, st.booleans()), max_size=12
)


@given(ROUNDS)
def test_no_machine_has_two_fleets(rounds: list[tuple[str, set[str], list[Member], bool]]) -> None:
    """However fleets bind, shrink, and restart their controllers; and a free machine that suits a host is used."""
    kv = Shared()
    fleets = {fleet: MachineClaims(kv, fleet) for fleet in FLEETS}
    for fleet, wanted, members, restarts in rounds:
        if restarts:
            before, fleets[fleet] = fleets[fleet].labels, MachineClaims(kv, fleet)
            assert fleets[fleet].labels == before
        labels = fleets[fleet].bind(sorted(wanted), members)
        claimed = claims(kv)
        assert {claim.host: label for label, claim in claimed.items() if claim.fleet == fleet} == labels
        assert len(claimed) == sum(len(other.labels) for other in fleets.values())
        living = {member.label: member for member in members if member.alive and member.cores}
        free = {member.instance for label, member in living.items() if label not in claimed}
        assert not [name for name in wanted if labels.get(name) not in living and name.partition("/")[0] in free]


def test_the_machines_of_a_removed_fleet_are_free() -> None:
    kv = Shared()
    MachineClaims(kv, "red").bind(NAMES, [member("a")])
    MachineClaims(kv, "blue").bind(NAMES, [member("b")])
    release_machines(kv, "red")
    assert claims(kv).keys() == {"b"}
