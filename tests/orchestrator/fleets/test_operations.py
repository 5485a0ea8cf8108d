"""What an operator does to a running fleet, and what the world does to it: one fleet of echo replicas on three hosts.

The tests share the fleet and leave it as they found it, but for the last, which loses a host.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from orchestrator.process.home import Home
from tests.fleet import LiveFleet, until
from tests.orchestrator.clients import Admin, Load, Streamed, complete, echo_questions, echo_text
from workers.host.core_claims import CoreClaim, CoresTaken, held_cores
from workers.messages.wire import FrameReader, Hello, Refused, encode

pytestmark = [pytest.mark.live, pytest.mark.timeout(180)]

HOSTS = tuple(f"inf2.48xlarge/{i}" for i in range(3))
SPEC = """\
version: 1
name: operations
hosts: {emulate: inf2.48xlarge, count: 3}
defaults:
  engine: echo
  tp_degree: 8
  max_batch: 16
  max_len: 4096
  engine_options: {step_ms: 5}
  deadlines: {drain_s: 60}
  scaling: {auto: false}  # what is asked of it here must not change the numbers
models:
  alpha: {replicas: {min: 2, max: 3}}
  high: {priority: 10}
  low: {priority: -10}
"""
MODELS = ("alpha", "high", "low")
SETTLE_S = 60.0


@pytest.fixture(scope="module")
def fleet() -> Iterator[LiveFleet]:
    with LiveFleet(SPEC, arguments=("--no-dashboard", "--watch")) as live:
        yield live.wait_ready()


@pytest.fixture(scope="module")
def admin(fleet: LiveFleet) -> Admin:
    return Admin(fleet.home)


@pytest.fixture(autouse=True)
def settled(request: pytest.FixtureRequest, fleet: LiveFleet, admin: Admin) -> None:
    """Each test begins with the fleet's own spec, and everything ready."""
    status, answer = admin.apply(SPEC, str(fleet.home))
    assert status == 200, answer
    settle(fleet, admin)


def settle(fleet: LiveFleet, admin: Admin, deadline_s: float = SETTLE_S) -> Any:
    """Wait until the rollout is complete, and every replica that is wanted is ready and no other one there."""

    def now() -> Any:
        status = admin.status()
        calm = status["rollout"]["state"] == "complete" and all(
            len(model["replicas"]) == model["wanted"] and all(r["state"] == "ready" for r in model["replicas"])
            for model in status["models"]
        )
        return status if calm else None

    try:
        return until(now, deadline_s, "the fleet is settled")
    except AssertionError as error:
        shown = fleet.corewright("status").stdout
        raise AssertionError(f"{error}\n{shown}\n{log_end(fleet)}\n{fleet.output()[-1500:]}") from None


def log_end(fleet: LiveFleet, lines: int = 30) -> str:
    return "\n".join((fleet.home / "logs" / "controller.log").read_text().splitlines()[-lines:])


def ready(admin: Admin, id: str) -> Any:
    replica = admin.replica(id)
    return replica if replica is not None and replica["state"] == "ready" else None


def only(admin: Admin, model: str) -> Any:
    """The replica of a model with one, whatever its number is by now."""
    (replica,) = next(entry for entry in admin.status()["models"] if entry["name"] == model)["replicas"]
    return replica


def serving(admin: Admin, model: str, hosts: tuple[str, ...]) -> Any:
    """A ready replica of the model on one of these hosts."""
    candidates = [r for r in replicas(admin.status()) if r["id"].startswith(f"{model}/") and r["state"] == "ready"]
    return next((replica for replica in candidates if replica["host"] in hosts), None)


def host_of(admin: Admin, name: str) -> Any:
    return next(host for host in admin.status()["hosts"] if host["name"] == name)


def replicas(status: Any) -> list[Any]:
    return [replica for model in status["models"] for replica in model["replicas"]]


def pids(status: Any) -> dict[str, int]:
    return {replica["id"]: replica["pid"] for replica in replicas(status)}


def write(folder: Path, text: str) -> str:
    file = folder / "spec.yaml"
    file.write_text(text)
    return str(file)


def test_an_apply_by_surge_under_load_fails_no_request(fleet: LiveFleet, admin: Admin, tmp_path: Path) -> None:
    """Every replica is replaced by a new process while 8 clients send requests and 6 long streams run; all answers
    are exact.
    """
    before = admin.status()
    streams = [Streamed(fleet, MODELS[i % 3], f"long {i}", 900) for i in range(6)]
    assert all(stream.begun.wait(20) for stream in streams)

    with Load(fleet, echo_questions(MODELS, 1)) as load:
        load.wait_answered(20)
        result = fleet.corewright("apply", "--wait", "--timeout", "50", write(tmp_path, SPEC.replace("4096", "4000")))
        load.wait_answered(20)

    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("surge") >= 3, result.stdout
    assert (load.wrong, load.failed) == ([], {})
    assert load.answered > 60
    assert all(stream.done.wait(30) for stream in streams)
    assert [stream.text for stream in streams] == [echo_text(f"long {i}", 900) for i in range(6)]
    after = admin.status()
    assert after["revision"] == before["revision"] + 1
    assert set(pids(after).values()).isdisjoint(pids(before).values())


def test_a_frozen_replica_is_noticed_and_replaced(fleet: LiveFleet, admin: Admin) -> None:
    """SIGSTOP: its begun stream ends with an error, a request of which nothing was sent is answered by its successor,
    and the stopped process is gone."""
    before = only(admin, "high")
    stream = Streamed(fleet, "high", "frozen", 3000)
    assert stream.begun.wait(20)
    answers: list[Any] = []
    asking = threading.Thread(
        target=lambda: answers.append(complete(fleet, "high", "thawed", max_tokens=5)), daemon=True
    )

    os.kill(before["pid"], signal.SIGSTOP)
    asking.start()

    assert stream.done.wait(60)
    assert stream.error is not None
    assert stream.error["code"] == "replica_lost"
    after = until(
        lambda: (now := ready(admin, before["id"])) and now["pid"] != before["pid"] and now, 30, "a successor is ready"
    )
    assert (after["cores"], after["epoch"]) == (before["cores"], before["epoch"] + 1)
    asking.join(30)
    assert [answer.json()["choices"][0]["text"] for answer in answers] == [echo_text("thawed", 5)]
    assert before["pid"] not in fleet.replica_pids()


def test_a_core_taken_by_a_foreign_process_is_quarantined_and_the_replica_moves(fleet: LiveFleet, admin: Admin) -> None:
    """This process takes a core of a replica that has just died. `status` shows it, and the replica starts on other
    cores; once the core is free again, it counts as free.
    """
    before = only(admin, "low")
    host = HOSTS.index(before["host"])
    core = int(before["cores"].partition("-")[0])

    def take() -> CoreClaim | None:
        try:
            return CoreClaim(Home(fleet.home).claims(host), [core])
        except CoresTaken:
            return None

    os.kill(before["pid"], signal.SIGKILL)
    claim = until(take, 10, "the dead replica's core is free")
    try:
        elsewhere = until(
            lambda: (now := ready(admin, before["id"])) and now["pid"] != before["pid"] and now, 45, "low is back"
        )
        assert (elsewhere["host"], elsewhere["cores"]) != (before["host"], before["cores"])
        host_entry = host_of(admin, before["host"])
        assert [(entry["core"], entry["pid"]) for entry in host_entry["quarantine"]] == [(core, os.getpid())]
        assert "pytest" in host_entry["quarantine"][0]["command"]
        assert (host_entry["quarantined"], host_entry["balanced"]) == (1, True)
    finally:
        claim.release()

    until(lambda: host_of(admin, before["host"])["quarantined"] == 0, 15, "the core is free again")
    assert complete(fleet, "low", max_tokens=3).json()["choices"][0]["text"] == echo_text("hello", 3)


def test_on_a_full_disk_nothing_is_applied_but_repairs_continue(fleet: LiveFleet, admin: Admin) -> None:
    """An apply is rejected, a killed replica restarts; with space again everything is in the journal."""
    before, revision = (
        next(r for r in replicas(admin.status()) if r["id"].startswith("alpha/")),
        admin.status()["revision"],
    )
    controller = psutil.Process(fleet.controller_pid())
    limits = controller.rlimit(psutil.RLIMIT_FSIZE)
    events = admin.get("/events", limit=1000)["next"]
    controller.rlimit(psutil.RLIMIT_FSIZE, (Home(fleet.home).journal.stat().st_size, limits[1]))
    try:
        status, answer = admin.apply(SPEC.replace("4096", "3000"), str(fleet.home))
        assert (status, answer["error"]["code"]) == (507, "journal-unwritable")
        assert admin.status()["revision"] == revision
        os.kill(before["pid"], signal.SIGKILL)
        after = until(
            lambda: (now := ready(admin, before["id"])) and now["pid"] != before["pid"] and now, 30, "it is back"
        )
        assert after["epoch"] == before["epoch"] + 1
        condition = next(
            condition for condition in admin.status()["conditions"] if condition["type"] == "JournalWritable"
        )
        assert (condition["status"], condition["reason"]) == (False, "DiskFull")
    finally:
        controller.rlimit(psutil.RLIMIT_FSIZE, limits)

    def journaled() -> bool:
        new = admin.get("/events", after=events, limit=1000)["events"]
        return [e["reason"] for e in new if e["replica"] == before["id"]] == ["Failed", "Starting", "Ready"]

    until(journaled, 10, f"the repair is told: {admin.get('/events', after=events, limit=1000)}")
    condition = next(condition for condition in admin.status()["conditions"] if condition["type"] == "JournalWritable")
    assert condition["status"] is True
    starts = [
        json.loads(line[line.index(b"{") :])
        for line in Home(fleet.home).journal.read_bytes().splitlines()
        if b'"decision"' in line and b'"start"' in line
    ]
    assert any(start["model"] == "alpha" and start["epoch"] == after["epoch"] for start in starts)
    status, answer = admin.apply(SPEC.replace("4096", "3000"), str(fleet.home))
    assert status == 200, answer


def test_a_rollout_continues_after_the_death_of_the_controller(fleet: LiveFleet, admin: Admin) -> None:
    """kill -9 after the first new replica: open streams are complete, no request fails, the rollout completes."""
    streams = [Streamed(fleet, MODELS[i % 3], f"open {i}", 1200) for i in range(6)]
    assert all(stream.begun.wait(20) for stream in streams)
    old = fleet.controller_pid()

    with Load(fleet, echo_questions(MODELS, 2)) as load:
        status, answer = admin.apply(SPEC.replace("4096", "3500"), str(fleet.home))
        assert status == 200, answer
        until(
            lambda: any(m["ready"] > 0 and m["old"] for m in admin.get("/rollout")["models"]), 30, "a new one is ready"
        )
        os.kill(old, signal.SIGKILL)
        done = settle(fleet, admin)
        load.wait_answered(10)

    assert fleet.controller_pid() != old
    assert done["revision"] == answer["revision"]
    assert (load.wrong, load.failed) == ([], {})
    assert all(stream.done.wait(30) for stream in streams)
    assert [stream.text for stream in streams] == [echo_text(f"open {i}", 1200) for i in range(6)]


def test_lost_revisions_are_held_until_an_operator_applies_a_spec(fleet: LiveFleet, admin: Admin) -> None:
    """One bit in the record of each flips, and Ray starts the controller again: no replica goes or comes."""
    newest = SPEC.replace("4096", "3600")
    status, answer = admin.apply(newest, str(fleet.home))
    assert status == 200, answer
    settle(fleet, admin)
    before, journal, old = pids(admin.status()), Home(fleet.home).journal, fleet.controller_pid()
    with journal.open("r+b") as file:
        data = file.read()
        for match in re.finditer(b'"kind":"revision"', data):
            file.seek(match.start())
            file.write(bytes([data[match.start()] ^ 1]))

    with Load(fleet, echo_questions(MODELS, 2)) as load:
        os.kill(old, signal.SIGKILL)
        until(lambda: "journal-damaged: " in fleet.corewright("status").stdout, 45, "the fleet is held")
        until(lambda: "error: journal-damaged: " in fleet.output(), 15, "`up` says so")
        load.wait_answered(10)
        reasons = [event["reason"] for event in admin.get("/events", limit=1000)["events"] if event["level"] == "error"]
        assert reasons[-2:] == ["JournalDamaged", "ActionsHeld"]
        assert pids(admin.status()) == before
        assert fleet.http.get("/readyz").status_code == 200
        status, answer = admin.apply(newest, str(fleet.home))
        assert (status, answer["changed"]) == (200, True)
        settle(fleet, admin)
        assert pids(admin.status()) == before

    assert (load.wrong, load.failed) == ([], {})


def test_a_frozen_replica_of_a_dead_controller_is_ended_by_the_next(fleet: LiveFleet, admin: Admin) -> None:
    """It does not respond, so it is not adopted: its process ends, its cores are not lost, and the next epoch
    serves. A request for the old epoch is rejected by the new process.
    """
    before = only(admin, "low")
    os.kill(before["pid"], signal.SIGSTOP)
    os.kill(fleet.controller_pid(), signal.SIGKILL)

    try:
        after = until(
            lambda: (now := ready(admin, before["id"])) and now["pid"] != before["pid"] and now, 45, "low is back"
        )
        until(lambda: before["pid"] not in fleet.replica_pids(), 15, "the old process is gone")
    except AssertionError as error:
        shown = json.dumps(admin.status()["hosts"], indent=1)
        raise AssertionError(f"{error}; old pid {before['pid']}\n{shown}\n{log_end(fleet)}") from None
    assert after["epoch"] > before["epoch"]
    until(lambda: all(host["quarantined"] == 0 for host in admin.status()["hosts"]), 15, "no core is lost")
    path = socket_of(fleet, after["pid"])
    assert refusal(fleet, path, before["epoch"]) == f"this is epoch {after['epoch']}, not {before['epoch']}"


def socket_of(fleet: LiveFleet, pid: int) -> Path:
    """Where that replica's process listens."""
    listening = {connection.laddr for connection in psutil.Process(pid).net_connections(kind="unix")}
    (path,) = (path for path in Home(fleet.home).sockets.iterdir() if str(path) in listening)
    return path


def refusal(fleet: LiveFleet, path: Path, epoch: int) -> str:
    """What a replica says to a gateway that means another epoch."""
    record = Home(fleet.home).read_record()
    assert record is not None
    with socket.socket(socket.AF_UNIX) as caller:
        caller.settimeout(10)
        caller.connect(str(path))
        caller.sendall(encode(Hello("test", record.token, epoch)))
        reader = FrameReader()
        messages: list[Any] = []
        while not messages:
            data = caller.recv(65536)
            assert data, "the replica hung up without a word"
            messages = reader.feed(data)
    assert isinstance(messages[0], Refused)
    return messages[0].reason


def test_maintenance_of_all_hosts_loses_none_of_eighty_streams(fleet: LiveFleet, admin: Admin) -> None:
    """The replicas of each host start elsewhere, then it is empty; every stream is complete."""
    hosts = sorted(admin.status()["hosts"], key=lambda host: -host["leased"])
    for host in hosts:
        name = host["name"]
        streams = [Streamed(fleet, MODELS[i % 3], f"drained {i}", 400) for i in range(80 // len(hosts))]
        assert all(stream.begun.wait(30) for stream in streams)
        result = fleet.corewright("drain", name, "--wait", "--timeout", "60")
        assert (result.returncode, result.stdout) == (0, f"{name}: empty\n"), result.stderr
        assert all(stream.done.wait(60) for stream in streams)
        assert [stream.error or stream.broken for stream in streams] == [None] * len(streams)
        assert [stream.text for stream in streams] == [echo_text(f"drained {i}", 400) for i in range(len(streams))]
        entry = host_of(admin, name)
        assert (entry["draining"], entry["cordoned"], entry["free_cordoned"], entry["busy"]) == (True, "all", 24, 0)
        for command in (["uncordon", name], ["hosts", "wait", name, "--timeout", "60"]):
            assert fleet.corewright(*command).returncode == 0
    status = settle(fleet, admin)
    assert [host["cordoned"] for host in status["hosts"]] == [[]] * len(hosts)


def test_a_canary_gets_its_share_and_is_promoted(fleet: LiveFleet, admin: Admin, tmp_path: Path) -> None:
    """A new version that is slow on purpose answers about 30 % of the requests; promoted, it answers all."""
    slow = SPEC.replace("alpha: {replicas: {min: 2, max: 3}}", "alpha: {replicas: 2, engine_options: {step_ms: 150}}")
    file = write(tmp_path, slow)
    result = fleet.corewright("apply", "--canary", "0.3", "--wait", "--timeout", "50", file)
    assert result.returncode == 0, result.stdout + result.stderr
    assert admin.get("/rollout")["state"] == "canary"
    took: list[float] = []

    def ask(client: int) -> None:
        for number in range(20):
            began = time.monotonic()
            response = complete(fleet, "alpha", f"canary {client} {number}", max_tokens=4)
            took.append(time.monotonic() - began)
            assert response.status_code == 200

    clients = [threading.Thread(target=ask, args=(i,)) for i in range(6)]
    for client in clients:
        client.start()
    for client in clients:
        client.join(60)

    assert len(took) == 120
    share = sum(seconds >= 0.6 for seconds in took) / len(took)  # four steps of 150 ms, against four of 5 ms
    assert 0.15 <= share <= 0.5, sorted(took)
    assert fleet.corewright("rollout", "promote").returncode == 0
    settle(fleet, admin)
    began = time.monotonic()
    assert complete(fleet, "alpha", max_tokens=4).status_code == 200
    assert time.monotonic() - began >= 0.6


def test_up_watch_rejects_a_bad_file_and_applies_a_good_one(fleet: LiveFleet, admin: Admin) -> None:
    """The bad one is reported with its problem and changes nothing; the next good one becomes a revision."""
    before = admin.status()
    written = fleet.spec.read_text()
    try:
        fleet.spec.write_text(SPEC.replace("tp_degree: 8", "tp_degree: 7"))
        until(lambda: "was rejected: the fleet is unchanged" in fleet.output(), 15, "the bad file is told")
        assert "illegal-degree" in fleet.output()
        now = admin.status()
        assert (now["revision"], pids(now)) == (before["revision"], pids(before))

        fleet.spec.write_text(SPEC.replace("priority: 10", "priority: 11"))
        until(lambda: admin.status()["revision"] == before["revision"] + 1, 15, "the good file is applied")
        until(lambda: "has changed: revision" in fleet.output(), 5, "that is told")
        assert pids(settle(fleet, admin)) == pids(before)  # a priority needs no new process
    finally:
        fleet.spec.write_text(written)
        until(lambda: admin.get("/spec")["text"] == written, 15, "the old file is applied again")


def test_a_blocked_step_is_detected_by_the_watchdog(fleet: LiveFleet, admin: Admin) -> None:
    """A replica whose step takes longer than `deadlines.step_s` is restarted; its request ends with an error or an
    answer.
    """
    slow = "  blocked: {tp_degree: 1, engine_options: {step_ms: 7000}, deadlines: {step_s: 1}}\n"
    status, answer = admin.apply(SPEC + slow, str(fleet.home))
    assert status == 200, answer
    first = until(lambda: ready(admin, "blocked/0"), 60, "it is ready: a load may take as long as `start_s`")

    def sent() -> Streamed | None:
        stream = Streamed(fleet, "blocked", "stuck", 100)
        until(lambda: stream.status == 200 or stream.done.is_set(), 15, "the stream begins or is refused")
        return None if (stream.error or {}).get("code") == "model_loading" else stream

    stream = until(sent, 30, "the gateway knows that it is ready")

    def failed() -> Any:
        events = admin.get("/events", model="blocked", limit=1000)["events"]
        return [event for event in events if event["reason"] == "Failed" and "step-stuck" in event["message"]]

    (event, *_) = until(failed, 30, "the watchdog has seen it")
    assert "the deadline is 1 s" in event["message"]
    until(lambda: first["pid"] not in fleet.replica_pids(), 15, "its process is ended")
    assert complete(fleet, "high", max_tokens=3).status_code == 200
    status, answer = admin.apply(SPEC, str(fleet.home))  # nobody waits for it any longer
    assert status == 200, answer
    assert stream.done.wait(60)
    assert (stream.error or {}).get("code") in ("replica_lost", "model_unavailable", "model_loading"), stream.error


def test_a_load_that_hangs_is_rolled_back(fleet: LiveFleet, admin: Admin, tmp_path: Path) -> None:
    """A new version that is never ready fails at `start_s`, and the fleet goes back while the old one serves."""
    before = admin.status()
    stuck = SPEC.replace(
        "high: {priority: 10}",
        "high: {priority: 10, engine_options: {step_ms: 3600000}, deadlines: {start_s: 5}, update: {max_failures: 1}}",
    )
    with Load(fleet, echo_questions(MODELS, 3), clients=4) as load:
        result = fleet.corewright("apply", "--wait", "--timeout", "50", write(tmp_path, stuck))
        settle(fleet, admin)

    assert result.returncode == 1, result.stdout + result.stderr
    after = admin.status()
    assert pids(after) == pids(before)
    assert admin.get("/spec")["text"] == SPEC
    history = admin.get("/revisions")["revisions"]
    assert (history[0]["cause"], history[1]["state"]) == ("rollback", "rolled_back"), history[:3]
    assert (load.wrong, load.failed) == ([], {})


def test_a_lost_host_leaves_the_remaining_room_to_the_highest_priority(fleet: LiveFleet, admin: Admin) -> None:
    """The last test: host 2 loses its raylet while only 8 cores elsewhere are open. `high` starts there, `low`
    waits for a place with a reason; with room again it serves.
    """
    for host in HOSTS[:2]:
        assert admin.post("/cordon", host=host, cores="0-23")[0] == 200
    for view in (only(admin, "low"), only(admin, "high")):  # both go to host 2
        if view["host"] != HOSTS[2]:
            assert admin.post("/drain", target=view["id"])[0] == 200
    until(lambda: all(serving(admin, name, HOSTS[2:]) for name in ("high", "low")), 45, "both are on host 2")
    status = settle(fleet, admin)
    old = {replica["pid"] for replica in replicas(status) if replica["host"] == HOSTS[2]}
    assert [only(admin, name)["host"] for name in ("high", "low")] == [HOSTS[2]] * 2
    room = roomy(status)
    assert admin.post("/uncordon", host=room[0], cores=room[1])[0] == 200

    os.kill(fleet.raylet_pid(2), signal.SIGKILL)

    until(lambda: host_of(admin, HOSTS[2])["lost"], 20, "the status tells that the host is lost")
    high = until(lambda: serving(admin, "high", HOSTS[:2]), 60, "high is elsewhere")
    assert (high["host"], high["cores"]) == room
    model = next(model for model in admin.status()["models"] if model["name"] == "low")
    reasons = {condition["type"]: condition for condition in model["conditions"]}
    assert reasons["Placed"]["status"] is False, model
    assert "needs 8 contiguous cores" in reasons["Placed"]["message"]
    assert complete(fleet, "low", max_tokens=2).status_code == 503
    assert old.isdisjoint(fleet.replica_pids())
    for host in HOSTS[:2]:
        assert admin.post("/uncordon", host=host)[0] == 200
    until(lambda: serving(admin, "low", HOSTS[:2]), 45, "low is back")
    settle(fleet, admin)
    for model_name in MODELS:
        answer = complete(fleet, model_name, max_tokens=3)
        assert answer.json()["choices"][0]["text"] == echo_text("hello", 3)
    held = held_cores(Home(fleet.home).claims(2))
    assert held == {}


def roomy(status: Any) -> tuple[str, str]:
    """A host but the last with eight free cores that a replica may take, and these."""
    for host in status["hosts"][:2]:
        taken = {
            core
            for lease in host["leases"]
            for core in range(int(lease["cores"].split("-")[0]), int(lease["cores"].split("-")[-1]) + 1)
        }
        for first in (0, 8, 16):
            if not taken & set(range(first, first + 8)):
                return host["name"], f"{first}-{first + 7}"
    raise AssertionError(f"no room: {status['hosts']}")
