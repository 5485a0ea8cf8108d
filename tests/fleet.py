"""A real fleet for tests: `corewright up` as a process of its own, in a home of its own, on a free port."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import psutil

from orchestrator.cli.app import DEMO
from orchestrator.process.addresses import free_port

if TYPE_CHECKING:
    from typing_extensions import Self

    from tests.installed_wheel import InstalledWheel

READY_DEADLINE_S = 120.0
COREWRIGHT = Path(sys.executable).with_name("corewright")


def until(condition: Callable[[], Any], deadline_s: float, what: str) -> Any:
    """Read the world again until ``condition`` gives something true; fail after the deadline."""
    deadline = time.monotonic() + deadline_s
    pause = 0.001
    while True:
        result = condition()
        if result:
            return result
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {deadline_s:.0f} s: {what}")
        time.sleep(pause)
        pause = min(pause * 2, 0.2)


async def until_async(condition: Callable[[], Any], deadline_s: float, what: str) -> Any:
    """``until``, while the event loop goes on."""
    deadline = time.monotonic() + deadline_s
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {deadline_s:.0f} s: {what}")
        await asyncio.sleep(0.002)
    return value


class Fleet:
    """An `up` that runs, as its operators and clients see it."""

    process: subprocess.Popen[bytes]

    def __init__(self, url: str) -> None:
        self.url = url
        self.http = httpx.Client(base_url=url, timeout=60.0)

    def wait_ready(self, deadline_s: float = READY_DEADLINE_S) -> Self:
        def ready() -> bool:
            assert not self.process.poll(), f"up has failed: {self.output()}"
            try:
                return self.http.get("/readyz").status_code == 200
            except httpx.TransportError:
                return False

        try:
            until(ready, deadline_s, "the fleet is ready")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.output()}") from None
        return self

    def entrance(self) -> str:
        """The URL of the gateway for a client's next request."""
        return self.url

    def output(self) -> str:
        """What `up` has printed."""
        raise NotImplementedError

    def status(self) -> Any:
        raise NotImplementedError

    def replica(self, id: str) -> Any:
        """That replica's entry in the status, or one without a process if it is not planned now."""
        replicas = (replica for model in self.status()["models"] for replica in model["replicas"])
        return next((replica for replica in replicas if replica["id"] == id), {"state": "none", "epoch": 0})


class LiveFleet(Fleet):
    """One `up`. Nothing of it is left after its `with` block."""

    def __init__(
        self,
        spec: str | Path | None,
        *,
        home: Path | None = None,
        arguments: tuple[str, ...] = (),
        secure: bool = False,
        spare: bool = False,
        verb: tuple[str, ...] = (),
        wheel: InstalledWheel | None = None,
    ) -> None:
        """``spec`` None: that of `corewright demo`. ``secure``: Ray demands its token, as it does for a user.
        ``spare``: with the gateway that stands by, which takes a second of CPU time to start. ``verb``: another command
        that starts a fleet, with its arguments. ``wheel``: from it, in its empty folder."""
        self.home = home or Path(tempfile.mkdtemp(prefix="cwt-", dir="/tmp"))
        if isinstance(spec, Path) or spec is None:
            self.spec = spec or DEMO
        else:
            self.spec = self.home / "spec.yaml"
            self.home.mkdir(exist_ok=True)
            self.spec.write_text(spec)
        self.port = free_port()
        super().__init__(f"http://127.0.0.1:{self.port}")
        self.log = self.home / "up.log"
        self.env = {
            **(os.environ if wheel is None else wheel.environment),
            "COREWRIGHT_HOME": str(self.home),
            "NO_COLOR": "1",
            "COREWRIGHT_GATEWAY_SPARE": str(int(spare)),
        }
        self.env.pop("RAY_AUTH_MODE", None)
        if not secure:
            self.env["RAY_AUTH_MODE"] = "disabled"
        self.command = COREWRIGHT if wheel is None else wheel.command
        self.cwd = None if wheel is None else wheel.empty
        started = verb or (("demo",) if spec is None else ("up", str(self.spec)))
        rest = () if verb else arguments or ("--no-dashboard",)
        up = [str(self.command), *started, "--port", str(self.port), *rest]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                up, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=self.env, cwd=self.cwd, start_new_session=True
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.clean()

    def output(self) -> str:
        return self.log.read_text()

    def corewright(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run another command in this home."""
        return subprocess.run(
            [str(self.command), *arguments],
            env=self.env,
            cwd=self.cwd,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def status(self) -> Any:
        result = self.corewright("status", "-o", "json")
        assert result.returncode == 0, result.stderr
        return json.loads(result.stdout)

    def processes(self) -> list[int]:
        """Every living process of this home's fleets but the daemon, from the outside: by what they write to."""
        from orchestrator.process.home import Home, fleet_processes

        record = Home(self.home).read_record()
        fleet = record.fleet if record is not None else "none"
        return [process.pid for process in fleet_processes(Home(self.home), fleet)]

    def named_pids(self, part: str) -> list[int]:
        """The fleet's processes that have this in their command line or title."""
        pids = []
        for pid in self.processes():
            with contextlib.suppress(psutil.Error):
                if part in " ".join(psutil.Process(pid).cmdline()):
                    pids.append(pid)
        return pids

    def controller_pid(self) -> int:
        """The controller actor's process; waits for Ray to start it again."""
        pids: list[int] = until(lambda: self.named_pids("ControllerActor"), 30.0, "the controller has a process")
        return pids[0]

    def replica_pids(self) -> set[int]:
        """Every process of a replica, of whatever epoch, stopped ones too."""
        return set(self.named_pids("Replica["))

    def raylet_pid(self, host_index: int) -> int:
        """The raylet of that emulated host: kill it, and the host is lost."""
        label = f'"corewright-host": "emu-{host_index}"'
        pids = [
            pid
            for pid in self.processes()
            if psutil.Process(pid).name() == "raylet"
            and any(word.startswith("--labels=") and label in word for word in psutil.Process(pid).cmdline())
        ]
        assert len(pids) == 1, pids
        return pids[0]

    def stop(self, signal_number: int = signal.SIGTERM, deadline_s: float = 40.0) -> int:
        """End it as its user would; gives the exit code."""
        self.http.close()
        if self.process.poll() is None:
            self.process.send_signal(signal_number)
        try:
            return self.process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"up did not end within {deadline_s:.0f} s\n{self.output()}") from None

    def clean(self) -> None:
        """Whatever happened: nothing of it is left."""
        from orchestrator.process.home import Home, end_leftovers

        record = Home(self.home).read_record()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        end_leftovers(Home(self.home), record.fleet if record is not None else "none", 10.0)
        shutil.rmtree(Home(self.home).sockets, ignore_errors=True)
        shutil.rmtree(self.home, ignore_errors=True)
