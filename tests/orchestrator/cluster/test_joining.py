"""Joining a Ray cluster: what it is refused for, and which machine each host gets."""

from __future__ import annotations

import getpass
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec.structs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.access.audit_log import Audit
from orchestrator.cli.main import run
from orchestrator.cluster import nodes, ownership, reach, survey
from orchestrator.cluster import up as up_module
from orchestrator.cluster.host_greeting import HostGreeting, unfit
from orchestrator.cluster.machine_claims import MachineClaims, Member, bind_hosts, claims, lost_hosts, release_machines
from orchestrator.cluster.ownership import ClusterOwner, only_fleet
from orchestrator.cluster.reach import Sides, join, refuse_versions, refused
from orchestrator.cluster.up import FleetStart, Up, UpOptions, audit_fields, refuse_version
from orchestrator.gateway.settings import GatewaySettings
from orchestrator.messages.controller_replies import SpecReply
from orchestrator.process.addresses import free_port
from orchestrator.process.failure import Failed
from orchestrator.process.home import FleetRecord, Home, daemon_alive
from orchestrator.process.version import corewright_version
from placements.facts.topology import Machine
from placements.planner.spec_hosts import hosts_for
from placements.spec.parse import parse
from placements.spec.problems import Problem

TYPE = "inf2.48xlarge"
HOSTS = hosts_for(
    parse(f"hosts: {{emulate: {TYPE}, count: 2}}\nmodels: {{a: {{engine: echo}}}}", "s", "/").spec,  # type: ignore[arg-type]
    Machine((0, 1), joined=True),
)


def member(label: str, *, alive: bool = True, cores: int = 24, instance: str | None = TYPE) -> Member:
    return Member(label=label, instance=instance, alive=alive, cores=cores, cpus=8)


def refusal(work: Any) -> str:
    with pytest.raises(Failed) as raised:
        work()
    return raised.value.problem.id


def test_each_emulated_host_of_a_joined_cluster_has_the_cpus_of_a_machine() -> None:
    assert [host.cpus for host in HOSTS] == [(0, 1), (0, 1)]


# Reach


def test_an_address_where_nothing_listens_is_refused() -> None:
    assert refusal(lambda: reach.reach(f"127.0.0.1:{free_port()}")) == "ray-unreachable"
    assert refusal(lambda: reach.reach("head")) == "ray-unreachable"


AGREE = Sides(token=True, sends_token=True, uses_tls=False, cluster_tls=False)


@pytest.mark.parametrize(
    ("kind", "sides", "id"),
    [
        ("token", replace(AGREE, token=False), "ray-token-missing"),
        ("token", replace(AGREE, sends_token=False), "ray-token-missing"),
        ("token", AGREE, "ray-token-refused"),
        ("broken", replace(AGREE, cluster_tls=True), "ray-tls-differs"),
        ("silent", replace(AGREE, uses_tls=True), "ray-tls-differs"),
        ("broken", replace(AGREE, uses_tls=True, cluster_tls=True), "ray-tls-differs"),
        ("silent", replace(AGREE, uses_tls=True, cluster_tls=True), "ray-silent"),
        ("silent", AGREE, "ray-silent"),
    ],
)
def test_a_cluster_that_does_not_answer_is_a_problem_with_its_cause(kind: str, sides: Sides, id: str) -> None:
    assert refused("head:6379", kind, "text", sides).problem.id == id


def test_other_versions_are_refused_down_to_the_patch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless Ray itself is told to compare less."""
    versions = ("2.60.0", "3.11.4")
    refuse_versions("head:6379", versions, versions)
    for other in (("2.59.0", "3.11.4"), ("2.60.0", "3.11.5")):
        assert refusal(lambda other=other: refuse_versions("head:6379", other, versions)) == "ray-version-differs"
    monkeypatch.setenv("RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL", "minor")
    refuse_versions("head:6379", ("2.60.0", "3.11.5"), versions)


def test_a_machine_without_a_node_of_the_cluster_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray would look for a raylet here, and time out."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        facts = reach.ClusterFacts(reach.own_versions(), frozenset({"10.1.2.3"}))
        monkeypatch.setattr(reach, "look", lambda address: facts)
        assert refusal(lambda: reach.reach(f"127.0.0.1:{server.getsockname()[1]}")) == "not-on-a-node"


def test_a_silent_port_is_reported_within_its_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """3 s each for the call and for the look at its TLS; Ray itself would try for 22 s."""
    monkeypatch.setattr(reach, "LOOK_S", 0.2)
    monkeypatch.setattr("orchestrator.cluster.reach.REACH_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        began = time.monotonic()
        assert refusal(lambda: reach.reach(f"127.0.0.1:{server.getsockname()[1]}")) == "ray-silent"
        assert time.monotonic() - began < 10


def test_an_error_of_ray_itself_is_reported_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: object) -> Any:
        raise RuntimeError("Failed to connect\nand pages of text")

    monkeypatch.setattr("ray.init", fail)
    with pytest.raises(Failed, match=r"ray-not-joined: .*: Failed to connect$"):
        join("head:6379", "chat")


# Survey

OWN = HostGreeting("1.0", "/opt/corewright", devices=False, protocol=3)


def surveyed(members: list[Member], greetings: dict[str, HostGreeting | str] | None = None, **more: Any) -> list[str]:
    reports = {member.label: OWN for member in members} if greetings is None else greetings
    return list(survey.survey(HOSTS, members, reports, OWN, **more))


@pytest.mark.parametrize(
    ("members", "id"),
    [
        ([], "no-hosts-on-cluster"),
        ([member("a", instance=None)], "no-hosts-on-cluster"),
        ([member("a", alive=False)], "no-hosts-on-cluster"),
        ([member("a", cores=0)], "no-hosts-on-cluster"),
        ([member("a", cores=12)], "core-resources-missing"),
    ],
)
def test_machines_that_cannot_be_hosts_are_refused(members: list[Member], id: str) -> None:
    assert refusal(lambda: surveyed(members)) == id


def test_a_host_without_a_machine_is_reported() -> None:
    """Also if another fleet has claimed the machine."""
    for lines in (surveyed([member("a")]), surveyed([member("a"), member("b")], taken={"b"})):
        assert lines[-1].startswith(f"{TYPE}/1: no machine")


@pytest.mark.parametrize(
    ("greeting", "reason"),
    [
        (
            HostGreeting("0.8", OWN.folder, devices=False, protocol=OWN.protocol - 1),
            "it has corewright 0.8, and the fleet 1.0",
        ),
        (msgspec.structs.replace(OWN, devices=True), "it has Neuron devices, and the spec emulates them"),
        ("corewright does not run there: ModuleNotFoundError", "corewright does not run there"),
    ],
)
def test_a_machine_that_differs_is_left_out(greeting: HostGreeting | str, reason: str) -> None:
    lines = surveyed([member("a"), member("b")], {"a": OWN, "b": greeting})
    assert lines[0].startswith(f"b is left out: {reason}")
    assert lines[1].startswith(f"{TYPE}: 1 machine, emulated")


def test_a_machine_with_another_version_of_the_same_protocol_can_be_a_host() -> None:
    other = HostGreeting("other", "/elsewhere", devices=False, protocol=OWN.protocol)
    assert unfit(other, OWN, emulated=True) is None


def test_a_machine_without_devices_is_no_host_of_a_real_instance_type() -> None:
    assert unfit(OWN, OWN, emulated=False) == "it has no Neuron devices"


def test_a_machine_without_core_resources_is_reported_with_the_way_to_them() -> None:
    lines = surveyed([member("a"), member("b", cores=0)])
    assert lines[0].startswith("b is left out: it has no core resources")
    assert "corewright node-resources" in lines[0]


# Adopting, and the end


@pytest.fixture
def up(tmp_path: Path) -> Up:
    return made(tmp_path, "auto")


def made(home: Path, ray_address: str | None) -> Up:
    options = UpOptions(gateway=GatewaySettings(home=str(home)), config=({"name": "port", "value": 1},))
    start = FleetStart(
        "models: {}", "fleet.yaml", "/", "chat", HOSTS, Machine((0,)), ray_address, detach=ray_address is not None
    )
    return Up(Home(home), options, start, lambda line: None)


def test_a_running_fleet_that_rejects_the_spec_keeps_its_own(up: Up, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem("plan-does-not-fit", "error", "fleet.yaml", "too large", "less")
    monkeypatch.setattr(up._follower, "ask", lambda call: SpecReply(error=problem))
    assert refusal(up._apply) == "adopt-rejected"


def test_up_waits_for_the_tokenizers_of_the_gateway_that_it_reports(up: Up, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the replicas are ready, as with a Ray of its own."""
    awaited: list[str] = []
    monkeypatch.setattr(up, "_start", lambda: None)
    monkeypatch.setattr(up_module, "_stored_record", lambda *_: SimpleNamespace(url="http://head:8080"))
    monkeypatch.setattr(up_module, "wait_for_gateway", lambda url, between: awaited.append(url))
    up._follower.ready.set()
    up._line = up._audit.begin("up", "up", {}, by="me")
    up._work(lambda record: awaited.append("ready"))
    assert awaited == ["http://head:8080", "ready"]


@pytest.mark.parametrize(
    ("event", "status"), [(Failed("controller-failed", "it is gone", "see"), "controller-failed"), ("SIGINT", "SIGINT")]
)
def test_the_audit_log_has_the_end_of_an_up_whose_fleet_was_ready(up: Up, event: Failed | str, status: str) -> None:
    """The fleet itself lives on, or ends by `down`, which has lines of its own."""
    up.home.prepare()
    up._line = up._audit.begin("up", "up", audit_fields(up._spec, up._options), by="me")
    up._note_ready()
    up._report_end(event)
    assert "tls" not in audit_fields(up._spec, up._options)
    assert Audit(up.home.audit).entries(10)[-1].status == status


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What `up` does on the cluster, where another `up` of this user and home has just claimed the name."""
    user, calls = f"{getpass.getuser()}@here", list[str]()
    owner = ClusterOwner("other", "chat", user, "", time.time())
    monkeypatch.setattr(ownership, "remove_fleet", calls.append)
    return SimpleNamespace(owner=owner, removed=calls)


def test_up_adopts_the_fleet_that_another_up_is_starting(
    up: Up, cluster: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its controller is registered later than its name."""
    controllers = iter([None, None, "controller"])
    owner = msgspec.structs.replace(cluster.owner, home=str(up.home.path))
    monkeypatch.setattr(ownership, "owner_of", lambda name: owner)
    monkeypatch.setattr(ownership, "find_controller", lambda name: next(controllers))
    monkeypatch.setattr(ownership, "record_of", lambda name: None)
    monkeypatch.setattr(up, "_apply", lambda: 1)
    up._own_or_adopt()
    assert (up._follower.controller, cluster.removed) == ("controller", [])


def test_up_waits_for_no_controller_of_an_up_that_has_died(
    up: Up, cluster: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here one that was killed after it had claimed the name. Its fleet is removed at once."""
    code = (
        "import sys, msgspec; from orchestrator.cluster.ownership import ClusterOwner;"
        "print(msgspec.json.encode(ClusterOwner.here('other', 'chat', *sys.argv[1:])).decode())"
    )
    command = [sys.executable, "-c", code, cluster.owner.user, str(up.home.path)]
    ended = subprocess.run(command, capture_output=True, check=True)
    owner = msgspec.json.decode(ended.stdout, type=ClusterOwner)
    monkeypatch.setattr(ownership, "owner_of", lambda name: owner)
    monkeypatch.setattr(ownership, "find_controller", lambda name: None)
    monkeypatch.setattr(ownership, "claim_name", lambda owner: True)
    monkeypatch.setattr(up, "_start_controller", lambda *given: None)
    up._own_or_adopt()
    assert cluster.removed == ["chat"]


def test_an_owner_is_dead_only_where_its_pid_can_be_seen() -> None:
    """On another machine, or in another container, the pid means another process."""
    owner = ClusterOwner.here("f", "chat", "me", "/home")
    assert not owner.has_died
    gone = msgspec.structs.replace(owner, started=owner.started + 100)
    assert gone.has_died
    assert not msgspec.structs.replace(gone, pid_space="another").has_died
    assert not ClusterOwner("f", "chat", "me", "/home", time.time()).has_died  # of an earlier version


def test_a_failed_up_leaves_the_fleet_of_another_up(
    up: Up, cluster: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which has claimed the name while this one was slow."""
    owners = iter([None, cluster.owner])
    monkeypatch.setattr(ownership, "owner_of", lambda name: next(owners))
    monkeypatch.setattr(ownership, "find_controller", lambda name: None)
    monkeypatch.setattr(ownership, "claim_name", lambda owner: True)
    monkeypatch.setattr(up, "_start_controller", lambda *given: (_ for _ in ()).throw(ValueError("the name is taken")))
    with pytest.raises(ValueError, match="taken"):
        up._own_or_adopt()
    assert cluster.removed == []


def test_a_home_with_a_fleet_of_another_name_on_a_cluster_is_refused(up: Up, tmp_path: Path) -> None:
    """By `up` on a cluster, and by one with a Ray of its own."""
    texts: dict[str, Any] = dict.fromkeys(("fleet", "url", "admin_url", "token", "ray_address", "version"), "")
    record = FleetRecord(name="other", dashboard_url=None, pid=0, started=0.0, on_cluster=True, **texts)
    Home(tmp_path).prepare()
    Home(tmp_path).write_record(record)
    assert daemon_alive(record)  # no process of this machine is asked
    for address in ("auto", None):
        assert refusal(lambda address=address: made(tmp_path, address).run(lambda record: None)) == (
            "fleet-already-running"
        )


def test_down_without_a_name_takes_the_only_fleet() -> None:
    assert only_fleet(["chat"], "head:6379") == "chat"
    assert refusal(lambda: only_fleet([], "head:6379")) == "no-fleet"
    assert refusal(lambda: only_fleet(["a", "b"], "head:6379")) == "fleet-not-named"


@pytest.mark.parametrize(
    ("arguments", "id"),
    [
        (["--detach"], "detach-needs-cluster"),
        (["--detach", "--watch", "--ray-address", "auto"], "watch-needs-viewer"),
    ],
)
def test_an_option_is_refused_where_it_has_no_meaning(
    arguments: list[str], id: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["up", "fleet.yaml", *arguments]) == 1
    assert f"error: {id}: " in capsys.readouterr().err


# Binding

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


@given(MEMBERS, MEMBERS)
def test_no_host_moves_or_is_lost_while_nodes_register_again(before: list[Member], after: list[Member]) -> None:
    """One that has no machine yet gets a free one, or is lost at once."""
    first = bind_hosts(NAMES, {}, before)
    then = bind_hosts(NAMES, first, after, keep=True)
    living = {member.label for member in after if member.alive and member.cores}
    assert first.items() <= then.items()
    assert lost_hosts(NAMES, then, living, settling=True) == {name for name in NAMES if name not in then}
    assert lost_hosts(NAMES, then, living, settling=False) == {name for name in NAMES if then.get(name) not in living}


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
    st.tuples(st.sampled_from(FLEETS), st.sets(st.sampled_from(NAMES)), MEMBERS, st.booleans()), max_size=6
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


# Versions


def fleet_record(version: str) -> FleetRecord:
    texts: dict[str, Any] = dict.fromkeys(("fleet", "url", "admin_url", "token", "ray_address"), "")
    return FleetRecord(name="chat", dashboard_url=None, pid=0, started=0.0, version=version, on_cluster=True, **texts)


def test_a_head_that_cannot_run_the_controller_is_refused(up: Up, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray would wait for ever for an interpreter that is not there."""
    monkeypatch.setattr(nodes, "ray_nodes", list)
    monkeypatch.setattr(survey, "greet", lambda nodes: {survey.THE_HEAD: "it has no /opt/new/bin/python"})
    assert refusal(up._survey) == "head-unfit"


def test_a_fleet_of_another_version_is_not_changed_by_a_plain_up() -> None:
    refuse_version(fleet_record(corewright_version()))
    assert refusal(lambda: refuse_version(fleet_record("0.0.1"))) == "fleet-version-differs"
