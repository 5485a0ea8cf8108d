"""`up` says what it cannot start before anything starts, and `down` says what it leaves behind. No fleet runs here."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from orchestrator.cli import doctor as doctor_command
from orchestrator.cli.main import run
from orchestrator.cluster.settings import SETTINGS
from orchestrator.cluster.up import FleetStart, Up, UpOptions
from orchestrator.gateway.settings import GatewaySettings
from orchestrator.messages.fleet_status import FleetStatus
from orchestrator.process.addresses import free_port
from orchestrator.process.home import FLEET_VARIABLE, FleetRecord, Home
from orchestrator.process.waiting_notice import WaitingNotice
from placements.facts.topology import Machine
from tests.fleet import until
from tests.orchestrator.fakefleet import STATUS, LiveAdmin, replica, status_of
from workers.host import host_facts as this_host
from workers.host.interpreter import Interpreter, probe

SPEC = """\
version: 1
hosts: {emulate: inf2.48xlarge}
models:
  a: {source: MODEL, engine: ENGINE}
"""
TINY = Path(__file__).parents[3] / "placements" / "examples" / "models" / "tiny"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COREWRIGHT_HOME", str(tmp_path / "home"))
    for name in ("COREWRIGHT_URL", "COREWRIGHT_TOKEN", *(setting.env for setting in SETTINGS[:-1])):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "home"


def spec(folder: Path, engine: str, more: str = "") -> str:
    path = folder / "spec.yaml"
    path.write_text(SPEC.replace("MODEL", str(TINY)).replace("ENGINE", engine) + more)
    return str(path)


class NoFleet(Exception):
    """Raised where `up` would start the fleet."""


@pytest.fixture
def no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every interpreter is like this one, without torch; no fleet can be started."""
    here = probe(sys.executable, 30.0)
    packages = {name: version for name, version in here.packages.items() if name != "torch"}

    def without(python: str) -> Interpreter:
        return msgspec.structs.replace(here, python=python, packages=packages)

    def start(*_: Any) -> None:
        raise NoFleet

    monkeypatch.setattr(doctor_command, "probe", without)
    monkeypatch.setattr("orchestrator.cli.up.Up", start)


@pytest.mark.parametrize(
    ("more", "python", "place"),
    [("", sys.executable, "spec.yaml:4:"), ("engines: {cpu: {python: /opt/own/python}}\n", "/opt/own/python", ":5:")],
)
def test_up_rejects_an_engine_that_its_interpreter_does_not_have(
    more: str, python: str, place: str, no_torch: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At once, with the command that installs it; for this interpreter or one of the spec."""
    assert run(["up", spec(tmp_path, "cpu", more)]) == 1
    output = capsys.readouterr().err
    assert f"error: engine-not-installed: {python} has no torch, which the engine cpu needs" in output
    assert f"{python} -m pip install torch" in output
    assert place in output


def test_up_starts_an_engine_that_needs_no_package(no_torch: None, tmp_path: Path) -> None:
    """The check rejects nothing that would work."""
    with pytest.raises(NoFleet):
        run(["up", spec(tmp_path, "echo")])


def test_the_doctor_reports_an_engine_that_is_not_installed(
    no_torch: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the finding of `up`."""
    assert run(["doctor", spec(tmp_path, "cpu")]) == 1
    assert "error: engine-not-installed: " in capsys.readouterr().err


# What `up` says


def test_a_long_wait_is_reported() -> None:
    """With its current state and the seconds since its start."""
    lines: list[str] = []
    state = ["a/0 (loading)"]
    with WaitingNotice(lines.append, silence_s=0.01).waiting(lambda: state[0]):
        until(lambda: lines, 5, "the first line")
        state[0] = "a/0 (compiling)"
        until(lambda: "waiting for a/0 (compiling) (0 s)" in lines, 5, "the second state")
    assert lines[0] == "waiting for a/0 (loading) (0 s)"


def test_a_command_with_its_own_output_has_no_wait_messages() -> None:
    lines: list[str] = []
    beat = WaitingNotice(lines.append, silence_s=60.0)
    with beat.waiting(lambda: "nothing"):
        beat("fetching")
    assert lines == ["fetching"]


class Started(Up):
    """A daemon that starts no process; its controller's status is ``status``."""

    status: FleetStatus
    progress: Path  # a file, since the fleet lives in a child

    @property
    def told(self) -> list[str]:
        return self.progress.read_text().splitlines()

    def _start_ray(self) -> None:
        self._record = self._new_record()
        self.home.write_record(self._record)

    def _own_or_adopt(self) -> None:
        self._follower.ask = self._ask  # type: ignore[method-assign]

    def _wait_down(self) -> None:
        """It is not requested."""

    def _start_gateway(self) -> None:
        until(lambda: "a/0 loading on cores 0-1" in self.told, 10, "the replica's progress")
        until(lambda: self._follower.narration.unready == ["a/0 (loading)", "b (failed)"], 10, "what is waited for")
        self.status = replace(status_of(STATUS), models=[], ready=True)

    def _ask(self, call: Any, within_s: float | None = None) -> Any:
        threading.Event().wait(0.01)
        return None if self._follower.ending else (1, self.status)


@pytest.fixture
def daemon(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Started:
    monkeypatch.setenv(FLEET_VARIABLE, "")  # which the daemon sets for its children
    gateway = GatewaySettings(host="127.0.0.1", port=free_port(), home=str(home))
    progress = tmp_path / "progress"

    def write(line: str) -> None:
        with progress.open("a") as file:
            file.write(line + "\n")

    made = Started(Home(home), UpOptions(gateway=gateway), FleetStart("", "f", "/", "demo", (), Machine((0,))), write)
    made.progress = progress
    waiting = {**STATUS["models"][1], "name": "b", "state": "failed", "wanted": 1, "reason": "no room"}
    first = {**waiting, "name": "a", "replicas": [replica("a/0", "0-1", "loading")]}
    made.status = status_of({**STATUS, "models": [first, waiting], "ready": False})
    return made


def test_up_reports_the_state_of_replicas_while_the_gateway_starts(daemon: Started, home: Path) -> None:
    """They start in parallel; its end leaves nothing and is a success."""
    assert daemon.run(lambda record: daemon._events.put("down")) == 0
    assert daemon.told[-1] == "stopped"
    assert not Home(home).record_file.exists()


@pytest.mark.parametrize("left", ["processes", "the record"])
def test_an_end_with_leftovers_fails_with_a_report(
    left: str, daemon: Started, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record stays for the next `up`."""

    def unremovable(_: Home) -> None:
        raise PermissionError(13, "Permission denied")

    if left == "processes":
        monkeypatch.setattr("orchestrator.cluster.up.end_leftovers", lambda *_: [4711])
    else:
        monkeypatch.setattr(Home, "forget_fleet", unremovable)
    assert daemon.run(lambda record: daemon._events.put("down")) == 1
    assert daemon.told[-1].startswith("stopped, but ")
    assert ("4711" if left == "processes" else "fleet.json") in daemon.told[-1]


# `down`


def record(home: Path, admin_url: str, pid: int, started: float) -> None:
    Home(home).prepare()
    names: dict[str, Any] = dict.fromkeys(("name", "url", "token", "ray_address", "version"), "")
    made = FleetRecord(
        fleet="f", admin_url=admin_url, dashboard_url=None, pid=pid, started=started, **{**names, "token": "secret"}
    )
    Home(home).write_record(made)


@pytest.fixture
def leftover() -> Iterator[subprocess.Popen[bytes]]:
    """A process of the fleet `f`."""
    process = subprocess.Popen(["sleep", "600"], env={**os.environ, FLEET_VARIABLE: "f"})
    yield process
    process.kill()
    process.wait()


def test_down_fails_where_the_fleet_leaves_something(
    leftover: subprocess.Popen[bytes], home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It names the processes and the record."""
    admin = LiveAdmin()
    started = this_host.process_start(os.getpid())
    assert started is not None
    record(home, admin.url, os.getpid(), started)
    monkeypatch.setattr("orchestrator.cli.down.daemon_alive", lambda record: not admin.downs)
    try:
        assert run(["down"]) == 1
    finally:
        admin.close()
    output = capsys.readouterr().err
    assert f"error: down-incomplete: the fleet has ended, but processes remain ({leftover.pid})" in output
    assert str(Home(home).record_file) in output


def test_down_of_a_fleet_whose_daemon_was_killed_lists_the_leftovers(
    leftover: subprocess.Popen[bytes], home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And how to remove them."""
    record(home, "http://127.0.0.1:1", os.getpid(), 1.0)
    assert run(["down"]) == 1
    output = capsys.readouterr().err
    assert "error: down-incomplete" in output
    assert str(leftover.pid) in output
