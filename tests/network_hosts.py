"""Several hosts on one Linux machine, joined by a bridge: each with network, processes, mounts and name of its own.

    with network_hosts(3) as network:             # 10.77.0.1, 10.77.0.2, 10.77.0.3
        network.hosts[0].start_ray()              # the head
        network.hosts[1].start_ray(cores=24)
        network.hosts[1].cut()                    # the bridge drops its frames: no reset, the link stays up
        network.hosts[1].power_off()              # its processes and its disk are gone at once, and send nothing

The bridge is in a network namespace, too, so no packet leaves them. The test's thread, and those that it starts, are at
the bridge, 10.77.0.254. The kernel ends all of it with the test's process. It needs root, which ``needs_network_hosts``
checks.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.fleet import until

T = TypeVar("T")
BIN = Path(sys.executable).parent
SETPRIV = ("setpriv", "--pdeathsig", "KILL")  # the kernel ends it with the thread that started it
UNSHARE = ("unshare", "--net", "--mount", "--pid", "--uts", "--ipc", "--fork", "--kill-child", "--mount-proc")
NEW_NET = 0x40000000  # CLONE_NEWNET
GCS_PORT = 6379
DASHBOARD_PORT = 8265
RAY_PORTS = {  # fixed: an agent that does not report its port within 15 s ends its raylet
    "node-manager-port": 6400,
    "object-manager-port": 6401,
    "dashboard-agent-listen-port": 52365,
    "dashboard-agent-grpc-port": 52366,
    "runtime-env-agent-port": 52367,
    "metrics-export-port": 20080,
}
HEALTH_CHECKS = {  # a host that is cut off is dead after 18 s; less would lose hosts of a busy machine
    "health_check_initial_delay_ms": 5000,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 2000,
    "health_check_failure_threshold": 6,
}
RAY_START_S = 300.0
RAY_RESTARTS = 5  # of a machine with too many processes for its cores


@functools.cache
def _missing() -> str | None:
    """Returns why this machine cannot have such hosts."""
    if os.getuid() != 0:
        return "only root can make network namespaces"
    missing = [tool for tool in ("ip", "bridge", "unshare", "nsenter", "setpriv") if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} not installed (apt-get install iproute2 util-linux)"
    probe = subprocess.run([*UNSHARE, "ip", "link", "add", "br0", "type", "bridge"], capture_output=True, text=True)
    return f"namespaces are refused: {probe.stderr.strip()}" if probe.returncode else None


needs_network_hosts = pytest.mark.skipif(_missing() is not None, reason=f"no network hosts: {_missing()}")


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True, timeout=30)


def _ended_with_us(*words: str, **options: Any) -> subprocess.Popen[str]:
    assert threading.current_thread() is threading.main_thread(), "its hosts would end with this thread"
    return subprocess.Popen([*SETPRIV, *words], text=True, stdin=subprocess.DEVNULL, start_new_session=True, **options)


class NetworkHost:
    """One host. Its disk is ``folder``, at the same path on each host; other files are those of this machine."""

    ray: subprocess.Popen[bytes]  # the `ray start` that was started last
    ray_began: float  # when it was, as of time.monotonic

    def __init__(self, name: str, address: str, switch: int, folder: Path) -> None:
        self.name, self.address, self.folder = name, address, folder
        self.variables: dict[str, str] = {}  # of every command
        self._switch = ("nsenter", "-t", str(switch), "-n")
        self._link = f"to-{name}"
        self._entered: list[subprocess.Popen[bytes]] = []  # each waits for a process in the host
        self.boot()

    def boot(self) -> None:
        """Start it, with an empty disk."""
        script = f"""
            exec 2>&1 # unshare's own complaints about a killed child are not shown
            set -e
            hostname {self.name}
            mount -t tmpfs none {self.folder}
            mkdir -m 700 -p {self.folder}/short {self.folder}/home /tmp/cw-{os.getuid()}
            mount --bind {self.folder}/short /tmp/cw-{os.getuid()}
            printf '127.0.0.1 localhost\\n{self.address} {self.name}\\n' >{self.folder}/hosts
            : >{self.folder}/resolv.conf
            mount --bind {self.folder}/hosts /etc/hosts
            mount --bind {self.folder}/resolv.conf /etc/resolv.conf
            echo booted
            while :; do sleep 1000 & wait $!; done # bash reaps orphans, as process 1 must
        """
        self._holder = _ended_with_us(*UNSHARE, "bash", "-c", script, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert self._holder.stdout is not None
        assert (first := self._holder.stdout.readline()) == "booted\n", first
        children = Path(f"/proc/{self._holder.pid}/task/{self._holder.pid}/children")
        self.pid = int(children.read_text().split()[0])  # of its process 1, on this machine
        peer = ("peer", "name", "eth0", "netns", str(self.pid))
        _run(*self._switch, "ip", "link", "add", self._link, "type", "veth", *peer)
        _run(*self._switch, "ip", "link", "set", self._link, "master", "br0", "up")
        for words in (
            "link set lo up",
            f"addr add {self.address}/24 dev eth0",
            "link set eth0 up",
            "route add default via 10.77.0.254",
        ):
            _run("nsenter", "-t", str(self.pid), "-n", "ip", *words.split())

    # Commands

    def spawn(self, *words: str, log: str, **variables: str) -> subprocess.Popen[bytes]:
        """Start a command in the host, which writes to the file ``log`` of its disk."""
        environment = {
            "PATH": f"{BIN}:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": str(self.folder),
            "LANG": "C.UTF-8",
            "NO_COLOR": "1",
            "RAY_AUTH_MODE": "disabled",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_TMPDIR": str(self.folder),
            "RAY_memory_monitor_refresh_ms": "0",
            "RAY_worker_niceness": "0",
            "COREWRIGHT_HOME": str(self.folder / "home"),
            **self.variables,
            **variables,
        }
        assigned = [f"{name}={value}" for name, value in environment.items()]
        enter = ["nsenter", "-t", str(self.pid), "-a", "env", "-i", "-C", str(self.folder)]
        with self.path(log).open("ab") as file:
            process = subprocess.Popen(
                [*enter, *assigned, *words],
                stdout=file,
                stderr=file,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._entered.append(process)
        return process

    def run(self, *words: str, deadline_s: float = 120.0, **variables: str) -> str:
        """Run a command in the host. Returns what it has printed; raises AssertionError if it fails."""
        log = f"run-{words[-1].strip('/').replace('/', '-')[:40]}-{threading.get_ident()}.log"
        self.path(log).unlink(missing_ok=True)
        code = self.spawn(*words, log=log, **variables).wait(deadline_s)
        output = self.read(log)
        assert code == 0, f"{self.name}$ {' '.join(words)}: {code}\n{output}"
        return output

    def inside(self, call: Callable[[], T]) -> T:
        """Returns what the call returns in the machine's network, where it reaches its loopback."""

        def enter() -> None:
            with Path(f"/proc/{self.pid}/ns/net").open() as network:
                _enter_network(network.fileno())

        with ThreadPoolExecutor(1, initializer=enter) as thread:
            return thread.submit(call).result()

    def path(self, name: str) -> Path:
        """Returns the path of one of its disk's files for this process."""
        return Path(f"/proc/{self.pid}/root") / str(self.folder / name).lstrip("/")

    def read(self, name: str) -> str:
        path = self.path(name)
        return path.read_text(errors="replace") if path.exists() else ""

    def processes(self, *parts: str) -> dict[int, str]:
        """Returns the pids on this machine of its processes, with the command lines, that have all the ``parts``."""
        found = {}
        namespace = Path(f"/proc/{self.pid}/ns/pid").readlink()
        for folder in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                pid = int(folder.name)
                if pid == self.pid or (folder / "ns/pid").readlink() != namespace:
                    continue
                line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                if line and not line.startswith("sleep 1000") and all(part in line for part in parts):
                    found[pid] = line
        return found

    def kill(self, *parts: str) -> None:
        """Kill its processes whose command lines have all the ``parts``; all of them without parts."""
        self._signal(signal.SIGKILL, *parts)

    def _signal(self, number: int, *parts: str) -> None:
        for pid in self.processes(*parts):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    # Faults

    def cut(self) -> None:
        """Drop all of its frames."""
        _run(*self._switch, "bridge", "link", "set", "dev", self._link, "state", "0")

    def heal(self) -> None:
        _run(*self._switch, "bridge", "link", "set", "dev", self._link, "state", "3")

    def freeze(self) -> None:
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._continue()
        self._signal(signal.SIGCONT)

    def _continue(self) -> None:
        for process in self._entered:  # nsenter stops itself when its child is stopped
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)

    def power_off(self) -> None:
        """All of it is gone, without a last frame. ``boot`` starts a new machine at the same address."""
        self.cut()
        self.end()
        with contextlib.suppress(subprocess.CalledProcessError):  # it has gone with the other end
            _run(*self._switch, "ip", "link", "del", self._link)

    def end(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self._continue()  # a stopped nsenter reaps no child, for which process 1 waits
        self._holder.wait(30)
        for process in self._entered:
            process.wait(30)
        self._entered.clear()
        if self._holder.stdout is not None:
            self._holder.stdout.close()

    # Ray

    def stop_ray(self) -> None:
        """End Ray on a worker as `systemctl stop` does: its `ray start` ends it on SIGTERM, and the rest is killed."""
        self._signal(signal.SIGTERM, "ray start --block")
        self.ray.wait(30)
        self.kill_rest()

    def kill_rest(self) -> None:
        """Kill what is left of Ray after the end of `ray start`, as a service does."""
        self.kill()
        until(lambda: not self.processes(), 30, f"nothing runs on {self.name}")

    @property
    def ray_runs(self) -> bool:
        """True if `ray start` has registered the machine and has not ended."""
        return self.ray.poll() is None and "Ray runtime started" in self.read("ray.log")

    def start_ray(
        self,
        head: str | None = None,
        *,
        cores: int = 0,
        dashboard: bool = False,
        labels: Mapping[str, str] | None = None,
        settings: Mapping[str, str] | None = None,
    ) -> Callable[[], None]:
        """Start a Ray node, in the foreground of `ray start --block` as a service of the host would; the cluster's head
        without the address of one. Returns the function that waits until it is registered.

        ``dashboard``: the head accepts jobs. ``settings`` are variables of its processes, such as RAY_REDIS_ADDRESS.
        """
        place = ["--head", f"--port={GCS_PORT}"] if head is None else [f"--address={head}:{GCS_PORT}"]
        if head is None:
            place += [f"--include-dashboard={str(dashboard).lower()}", f"--dashboard-port={DASHBOARD_PORT}"]
            place += ["--dashboard-host=0.0.0.0", f"--system-config={json.dumps(HEALTH_CHECKS)}"]
        if cores:
            labels = {"corewright-instance": "inf2.48xlarge", **(labels or {})}
            place.append(f"--resources={json.dumps({f'nc{core}': 1 for core in range(cores)})}")
        if labels:
            place.append(f"--labels={','.join(f'{name}={value}' for name, value in labels.items())}")
        ports = [f"--{option}={port}" for option, port in RAY_PORTS.items()]
        common = [f"--node-ip-address={self.address}", "--num-cpus=2", "--object-store-memory=80000000"]
        words = ("ray", "start", "--block", "--include-log-monitor=false", *place, *ports, *common)
        restarts = itertools.count()

        def start() -> None:
            self.path("ray.log").unlink(missing_ok=True)
            self.ray_began = time.monotonic()
            self.ray = self.spawn(*words, log="ray.log", **(settings or {}))

        start()

        def wait() -> None:
            def started() -> bool:
                if self.ray.poll() is not None:  # a raylet whose agents do not start within 15 s
                    assert next(restarts) < RAY_RESTARTS, f"Ray on {self.name} has ended\n{self.read('ray.log')}"
                    self.kill("/ray/")
                    self.kill("ray::")
                    start()
                return self.ray_runs

            until(started, RAY_START_S, f"Ray runs on {self.name}")

        return wait


class Network:
    """The hosts and the switch between them."""

    def __init__(self, count: int, folder: Path) -> None:
        script = "echo made; exec sleep infinity"
        self._holder = _ended_with_us("unshare", "--net", "sh", "-c", script, stdout=subprocess.PIPE)
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == "made\n"
        self.pid = self._holder.pid
        for words in (
            "link add br0 address 02:00:0a:4d:00:fe type bridge",  # its own: by default that of a port, which may go
            "addr add 10.77.0.254/24 dev br0",
            "link set br0 up",
            "link set lo up",
        ):
            _run("nsenter", "-t", str(self.pid), "-n", "ip", *words.split())
        self._folder = folder
        self._machines: list[NetworkHost] = []
        self.hosts = [self.add(f"h{index}", index) for index in range(1, count + 1)]

    def add(self, name: str, number: int) -> NetworkHost:
        """Add a machine at 10.77.0.``number``, which is not one of the ``hosts``."""
        self._machines.append(NetworkHost(name, f"10.77.0.{number}", self.pid, self._folder))
        return self._machines[-1]

    def save_logs(self, folder: Path) -> None:
        """Copy the logs of all machines, of Ray and of the fleet, each to a folder of its own."""
        for machine in self._machines:
            for pattern in ("*.log", "home/logs/*", "**/session_*/logs/**/*", "home/journal*"):
                root = machine.path("")
                for file in root.glob(pattern):
                    if file.is_file() and not file.is_symlink():
                        copy = folder / machine.name / file.relative_to(root)
                        copy.parent.mkdir(parents=True, exist_ok=True)
                        shutil.copyfile(file, copy)

    def end(self) -> None:
        for machine in self._machines:
            machine.end()
        self._holder.kill()
        self._holder.wait()
        if self._holder.stdout is not None:
            self._holder.stdout.close()


@contextlib.contextmanager
def network_hosts(count: int, logs: Path | None = None) -> Iterator[Network]:
    """Yields ``count`` hosts, with this thread at their switch; ends all of their processes. After a failure, ``logs``
    is a folder with their logs."""
    with (
        tempfile.TemporaryDirectory(prefix="cwn-", dir="/tmp") as folder,
        Path("/proc/thread-self/ns/net").open() as own,
    ):
        network = Network(count, Path(folder))
        try:
            with Path(f"/proc/{network.pid}/ns/net").open() as switch:
                _enter_network(switch.fileno())
            yield network
        except BaseException:
            if logs is not None:
                network.save_logs(logs)
                print(f"the logs of all hosts are in {logs}")  # noqa: T201
            raise
        finally:
            _enter_network(own.fileno())
            network.end()


def _enter_network(namespace: int) -> None:
    """Move this thread to a network. Threads and processes that it starts begin there."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, NEW_NET):
        raise OSError(ctypes.get_errno(), "setns")
