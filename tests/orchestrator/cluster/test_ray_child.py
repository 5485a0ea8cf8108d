"""The process of `up` that owns Ray may end without a word: its parent has its signals, its marks and its end."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import psutil
import pytest

from orchestrator.access.audit_log import Audit
from orchestrator.cluster import up as up_module
from orchestrator.cluster.own_ray import HEALTH_CHECKS
from orchestrator.cluster.up import GONE, READY, REPORTED, FleetStart, Up, UpOptions
from orchestrator.gateway.settings import GatewaySettings
from orchestrator.process.addresses import free_port
from orchestrator.process.child_process import Ended
from orchestrator.process.failure import Failed
from orchestrator.process.home import Home
from placements.facts.topology import Machine

SCRIPT = """
import os, signal, sys, time
from orchestrator.process.child_process import apart
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
got = []
for number in SIGNALS:
    signal.signal(number, lambda number, _: got.append(number))

def work(mark):
    mark(b"a")
    print("child", os.getpid(), flush=True)
    {work}

print(apart(work, SIGNALS), os.getpid(), flush=True)
"""
WAIT = "deadline = time.monotonic() + 20\n    while not got and time.monotonic() < deadline: time.sleep(0.01)\n    "


def started(work: str) -> tuple[subprocess.Popen[str], int]:
    """The parent's process, and the child's pid."""
    command = [sys.executable, "-c", SCRIPT.replace("{work}", work)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True
    )
    assert process.stdout is not None
    return process, int(process.stdout.readline().split()[1])


@pytest.mark.parametrize(
    ("work", "ended"),
    [
        ("mark(b'b'); return 3", "Ended(marks=b'ab', code=3)"),
        ("os._exit(1)", "Ended(marks=b'a', code=1)"),
        ("raise ValueError", "Ended(marks=b'a', code=1)"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "Ended(marks=b'a', code=-9)"),
        # its output cannot be written any more, as with `up | head`
        ("sys.stdout = open('/dev/full', 'w'); sys.stdout.write('x'); return 4", "Ended(marks=b'a', code=4)"),
        # somebody that the child has started lives on, and holds what it has inherited
        ("os.fork() or time.sleep(1); return 0", "Ended(marks=b'a', code=0)"),
    ],
)
def test_the_parent_gets_the_exit_status_of_the_child(work: str, ended: str) -> None:
    """For every way in which a process can end."""
    process, child = started(work)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line == f"{ended} {process.pid}\n"
    assert child != process.pid
    process.wait(10)
    process.stdout.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize("group", [False, True])
def test_a_signal_reaches_the_child_once(number: signal.Signals, group: bool) -> None:
    """Sent to the process alone or, as with Ctrl-C, to its process group."""
    process, _ = started(f"{WAIT}time.sleep(0.2); return 10 * len(got) + (got[0] == {int(number)})")
    if group:
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    out, _ = process.communicate(timeout=30)
    assert out.startswith("Ended(marks=b'a', code=11)")


def test_the_child_does_not_outlive_the_parent() -> None:
    """A SIGKILL of the parent ends it, and Ray with it."""
    process, child = started(f"{WAIT}return 0")
    living = psutil.Process(child)
    process.kill()
    process.communicate()
    assert living.wait(10) is None or not living.is_running()


# What `up` makes of it


@pytest.fixture
def daemon(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Up:
    home = Home(tmp_path / "home")
    home.prepare()
    settings = GatewaySettings(host="127.0.0.1", port=free_port(), home=str(home.path))
    said: list[str] = []
    made = Up(
        home, UpOptions(gateway=settings), FleetStart("version: 1", "f.yaml", "/", "f", (), Machine((0,))), said.append
    )
    made.said = said  # type: ignore[attr-defined]
    return made


def ends(daemon: Up, monkeypatch: pytest.MonkeyPatch, ended: Ended) -> int:
    """Have its child leave a record of the fleet, and end like that."""

    def child(work: Any, signals: Any) -> Ended:
        daemon.home.write_record(daemon._new_record())
        return ended

    monkeypatch.setattr(up_module, "apart", child)
    return daemon.run(lambda record: None)


@pytest.mark.parametrize("ready", [False, True])
@pytest.mark.parametrize(("code", "how"), [(1, "exit code 1"), (-9, "SIGKILL"), (0, "exit code 0")])
def test_an_unexpected_end_is_reported_and_leaves_nothing(
    daemon: Up, monkeypatch: pytest.MonkeyPatch, ready: bool, code: int, how: str
) -> None:
    """On the terminal, in the audit log, and with an exit code that makes systemd restart it."""
    assert ends(daemon, monkeypatch, Ended(READY if ready else b"", code)) == 1
    assert any("error: up-died: " in line and how in line for line in daemon.said)  # type: ignore[attr-defined]
    last = Audit(daemon.home.audit).entries(10)[-1]
    reason = last.arguments.get("reason") if ready else last.status
    assert (last.action, reason) == ("end" if ready else "up", "up-died")
    assert not daemon.home.record_file.exists()


@pytest.mark.parametrize(("code", "given"), [(0, 0), (1, 1), (-9, 1)])
def test_an_end_that_the_child_has_reported_is_not_reported_again(
    daemon: Up, monkeypatch: pytest.MonkeyPatch, code: int, given: int
) -> None:
    """Ray may kill it while Ray shuts down; leftovers are removed then, too."""
    marks = READY + REPORTED + (GONE if code >= 0 else b"")
    assert ends(daemon, monkeypatch, Ended(marks, code)) == given
    assert daemon.said == []  # type: ignore[attr-defined]
    assert [entry.action for entry in Audit(daemon.home.audit).entries(10)] == ["up"]
    assert daemon.home.record_file.exists() is (code >= 0)  # which a child that left nothing has removed


def test_a_failure_is_reported_and_audited_before_ray_shuts_down(daemon: Up, monkeypatch: pytest.MonkeyPatch) -> None:
    """Because Ray may end the process during the shutdown."""

    class Swallowed(BaseException):
        pass

    def fails() -> None:
        raise Failed("controller-failed", "the controller does not come back", "see controller.log")

    def shut_down() -> None:
        raise Swallowed

    daemon._line = Audit(daemon.home.audit).begin("up", "up", {}, by="me")
    monkeypatch.setattr(daemon, "_start_ray", lambda: None)
    monkeypatch.setattr(daemon, "_start", fails)
    monkeypatch.setattr(daemon, "_take_down", shut_down)
    monkeypatch.setattr("orchestrator.cluster.up._end_everything", lambda *_: None)
    marks: list[bytes] = []
    with pytest.raises(Swallowed):
        daemon._live(lambda record: None, marks.append)
    assert "error: controller-failed: the controller does not come back" in daemon.said[0]  # type: ignore[attr-defined]
    assert Audit(daemon.home.audit).entries(1)[0].status == "controller-failed"
    assert marks[0] == REPORTED


def test_a_raylet_may_stall_for_half_a_minute() -> None:
    """All nodes are on one machine, where a stall is not a lost host. The minimum is that of the timeouts."""
    checks, timeout_ms = HEALTH_CHECKS["health_check_failure_threshold"], HEALTH_CHECKS["health_check_timeout_ms"]
    least_ms = checks * timeout_ms + (checks - 1) * HEALTH_CHECKS["health_check_period_ms"]
    assert least_ms >= 30_000
    assert HEALTH_CHECKS["health_check_period_ms"] * checks <= 5_000  # a dead one refuses at once


FULL_DISK = """
import os, sys
sys.stdout = open("/dev/full", "w")
from orchestrator.process.child_process import apart

def work(mark):
    print("lost")
    raise ValueError

print("lost too")
caller = os.getpid()
ended = apart(work, ())
os._exit(10 + ended.code if os.getpid() == caller else 1)
"""


def test_a_full_disk_makes_no_second_copy_of_the_caller() -> None:
    """The child ends if its output cannot be written, and the parent gets its exit code."""
    process = subprocess.run([sys.executable, "-c", FULL_DISK], check=False, capture_output=True)
    assert process.returncode == 11


@pytest.mark.parametrize(("listens", "code", "status"), [(False, 1, "failed"), (True, 0, "ready")])
def test_a_signal_ends_a_start_well_only_if_the_gateway_listens(
    daemon: Up, monkeypatch: pytest.MonkeyPatch, listens: bool, code: int, status: str
) -> None:
    """While Serve has not reported it; all replicas are ready."""

    def started() -> None:
        daemon._record = daemon._new_record()
        daemon._serve_up = True
        daemon._follower.ready.set()
        daemon._events.put("SIGTERM")

    monkeypatch.setattr(daemon, "_start_ray", started)
    monkeypatch.setattr(daemon, "_in_background", lambda work: None)
    monkeypatch.setattr(daemon, "_end_ray", lambda: None)
    daemon._line = daemon._audit.begin("up", "up", {}, by="me")
    with contextlib.ExitStack() as resources:
        if listens:
            resources.enter_context(socket.create_server(("127.0.0.1", daemon._options.gateway.port)))
        assert daemon._live(lambda record: None, lambda mark: None) == code
    assert next(entry.status for entry in Audit(daemon.home.audit).entries(10) if entry.action == "up") == status


def test_a_fleet_that_ends_while_it_becomes_ready_is_not_reported_as_ready(
    daemon: Up, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end may begin after the last look at it."""
    monkeypatch.setattr(daemon, "_start", daemon._new_record)
    monkeypatch.setattr(up_module, "wait_for_gateway", lambda url, between: None)
    monkeypatch.setattr(daemon, "_in_background", lambda work: shown.append("a thread"))
    daemon._follower.ready.set()
    daemon._line = daemon._audit.begin("up", "up", {}, by="me")
    shown: list[str] = []
    go_on = daemon._go_on

    def ends_after_it() -> None:
        go_on()
        daemon._follower.ending = True

    monkeypatch.setattr(daemon, "_go_on", ends_after_it)
    with pytest.raises(up_module._Interrupted):
        daemon._work(lambda record: shown.append("the addresses"))
    assert shown == []
    assert Audit(daemon.home.audit).entries(10)[-1].status != "ready"


def test_unwritable_progress_output_does_not_end_the_fleet() -> None:
    """The output of `up` may be a file on a full disk."""
    settings = GatewaySettings(host="127.0.0.1", port=free_port(), home="/h")
    with Path("/dev/full").open("w", buffering=1) as output:
        daemon = Up(
            Home(Path("/h")),
            UpOptions(gateway=settings),
            FleetStart("", "", "", "n", (), Machine((0,))),
            _line_to(output),
        )
        daemon._report("m/0 ready")
        with contextlib.suppress(OSError):
            output.close()


def _line_to(output: TextIO) -> Callable[[str], None]:
    def tell(line: str) -> None:
        output.write(line + "\n")

    return tell
