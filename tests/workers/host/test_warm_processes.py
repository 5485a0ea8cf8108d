"""Starts of replicas as forks of a warm process: the same as fresh processes, or fresh ones."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.fleet import until
from workers.host import fork_client, fork_server
from workers.host.fork_client import FORKED
from workers.host.host_facts import NODE_VARIABLE, is_orphan
from workers.host.warm_processes import WarmProcesses

DEADLINE_S = 60.0
SERVER = """\
from workers.host import fork_server
fork_server.imports_of = lambda engine: ("json",)
fork_server.IMPORTS_OF_FORKS = ()
{before}
fork_server.main("cpu", {descriptor})
"""
SCRIPT = """\
import json, os, sys, time
from pathlib import Path
from workers.host import fork_server
print(json.dumps({
    "arguments": sys.argv, "environment": dict(os.environ), "folder": os.getcwd(), "pid": os.getpid(),
    "group": os.getpgid(0), "path": sys.path[0], "is_fork": bool(fork_server.imported), "name": __name__,
    "descriptors": [os.readlink(each) for each in map("/proc/self/fd/".__add__, os.listdir("/proc/self/fd"))
                    if os.path.lexists(each)],
}), flush=True)
if "wait" in sys.argv:
    time.sleep(600)
"""


class Server:
    """A warm process that has imported little, with the socket of its clients."""

    def __init__(self, folder: Path, before: str = "", environment: Mapping[str, str] | None = None) -> None:
        self.path = folder / "s"
        self.script = folder / "script.py"
        self.script.write_text(SCRIPT)
        self.environment = {**os.environ, **(environment or {}), "SECRET": "of the host"}
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(self.path))
            listener.listen()
            self.process = subprocess.Popen(
                [sys.executable, "-c", SERVER.format(before=before, descriptor=listener.fileno())],
                stdin=subprocess.PIPE,
                pass_fds=[listener.fileno()],
                env={**self.environment, **fork_server.ENVIRONMENT},
            )

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        """Starts a client, whose output is that of its process."""
        return subprocess.Popen(
            [sys.executable, "-I", "-S", fork_client.__file__, str(self.path), str(self.script), *arguments],
            env={**self.environment, **environment},
            cwd=self.script.parent,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments: str, **environment: str) -> dict[str, Any]:
        """Returns what the process of a client reports."""
        with self.start(*arguments, **environment) as client:
            assert client.stdout is not None
            report: dict[str, Any] = json.loads(client.stdout.readline())
        return report

    def connect(self) -> socket.socket:
        client = socket.socket(socket.AF_UNIX)
        client.settimeout(DEADLINE_S)
        client.connect(str(self.path))
        return client

    def forks(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children()

    def end(self) -> None:
        with contextlib.suppress(psutil.Error):
            for fork in self.forks():
                fork.kill()
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path)
    yield server
    server.end()


def test_a_fork_has_the_arguments_environment_folder_and_output_of_its_client(server: Server) -> None:
    """As a fresh process of the same command."""
    report = server.run("a", "b c", COREWRIGHT_MODEL="large", RAY_JOB_ID="7")

    fresh = subprocess.run(
        [sys.executable, str(server.script), "a", "b c"],
        env={**server.environment, "COREWRIGHT_MODEL": "large", "RAY_JOB_ID": "7"},
        cwd=server.script.parent,
        capture_output=True,
        text=True,
        check=True,
    )
    expected = json.loads(fresh.stdout)
    same = ("arguments", "environment", "folder", "path", "name")
    assert report["is_fork"]
    assert {key: report[key] for key in same} == {key: expected[key] for key in same}


def test_a_fork_has_no_other_descriptors(server: Server) -> None:
    """Neither the socket of the server nor anything of another fork."""
    with server.start("wait") as other:
        report = server.run()
        other.terminate()
        for fork in server.forks():
            fork.kill()

    assert [each.partition(":")[0] for each in report["descriptors"]] == ["/dev/null", "pipe", "pipe"]


def test_nothing_of_a_fork_reaches_the_next(server: Server) -> None:
    """Such as the credentials of its model."""
    server.run(COREWRIGHT_MODEL="a", NEURON_RT_VISIBLE_CORES="0-7", COREWRIGHT_KEY="x")
    environment = server.run()["environment"]

    assert not environment.keys() & {"COREWRIGHT_MODEL", "NEURON_RT_VISIBLE_CORES", "COREWRIGHT_KEY"}


def test_a_fork_leads_a_process_group(server: Server) -> None:
    """Ray kills the group of a worker that ends: the server's group would include all other replicas."""
    report = server.run()

    assert report["group"] == report["pid"]


def test_an_ended_fork_leaves_nothing(server: Server) -> None:
    """No zombie either: a process that waits for its pid would wait for ever."""
    pid = server.run()["pid"]

    until(lambda: not psutil.pid_exists(pid), DEADLINE_S, "the end of the fork")


@pytest.mark.parametrize("name", ["HF_HOME", "LD_LIBRARY_PATH", "OMP_WAIT_POLICY", "PYTHONPATH", "TMPDIR"])
def test_another_environment_of_the_imports_starts_a_fresh_process(server: Server, name: str) -> None:
    """The packages have read it, or may have."""
    with server.start(**{name: "/tmp"}) as client:
        assert client.stdout is not None
        assert client.stderr is not None
        report = json.loads(client.stdout.readline())
        reason = client.stderr.read()

    assert not report["is_fork"]
    assert reason == f"A fresh process is started: the warm process has imported its packages with another {name}.\n"


def test_variables_that_are_read_later_do_not_matter() -> None:
    """Those of the cores, of the threads, of Ray and its debugger; and those that only the server has."""
    own = {"PATH": "/bin", "PYTHONBREAKPOINT": "ray.util.rpdb.set_trace", **fork_server.ENVIRONMENT}
    requested = {"PATH": "/bin", "NEURON_RT_VISIBLE_CORES": "0-3", "OMP_NUM_THREADS": "8", "RAY_JOB_ID": "1"}
    requested["PYTHONBREAKPOINT"] = "ray.util.rpdb._driver_set_trace"  # where a driver has started Ray

    assert fork_server.refusal(requested, own) is None


def test_a_replica_that_sets_a_variable_of_the_imports_starts_as_a_fresh_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray has started the fork by then; others are set in it."""
    monkeypatch.setattr("workers.host.warm_processes.PROGRAM", "import time; time.sleep(600)")
    warm = WarmProcesses(tmp_path)
    commands = [warm.command("cpu", None, {name: "0-3"}) for name in ("HF_HOME", "NEURON_RT_VISIBLE_CORES")]
    warm.keep({})

    assert [command is not None for command in commands] == [False, True]


def test_no_environment_is_handed_to_another_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user may have bound the path of the socket."""
    client, server = socket.socketpair()
    monkeypatch.setattr("os.getuid", lambda: 12345)
    with client, server, pytest.raises(PermissionError, match="belongs to user"):
        fork_client.check_peer(client)


def test_an_interpreter_that_does_not_exist_is_no_error_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its replicas report it; the processes of other engines are kept."""
    monkeypatch.setattr("workers.host.warm_processes.PROGRAM", "import time; time.sleep(600)")
    warm = WarmProcesses(tmp_path)
    monkeypatch.setattr("workers.host.warm_processes.QUIET_S", 0.0)
    warm.keep({"nxd-inference": "/nonexistent/python", "cpu": None})
    quiet = warm.quiet()
    warm.keep({})

    assert [shlex.split(command)[0] for command in quiet] == [sys.executable]


def test_no_spare_worker_competes_with_a_start_in_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a small machine it would take a second longer."""
    monkeypatch.setattr("workers.host.warm_processes.PROGRAM", "import time; time.sleep(600)")
    warm, counts = WarmProcesses(tmp_path), []
    warm.keep({"cpu": None})
    for quiet_s in (0.0, 600.0):
        monkeypatch.setattr("workers.host.warm_processes.QUIET_S", quiet_s)
        warm.command("cpu", None, {})
        counts.append(len(warm.quiet()))
    warm.keep({})

    assert counts == [1, 0]


STARTER = """\
import sys
from pathlib import Path
from workers.host import warm_processes
warm_processes.PROGRAM = "import time; time.sleep(600)"
warm = warm_processes.WarmProcesses(Path(sys.argv[1]))
print(warm.command("cpu", None, {}), warm.handed_over(), sep="\\n", flush=True)
sys.stdin.read()
"""
Handed = tuple[str, psutil.Process, WarmProcesses]


@pytest.fixture
def handed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Handed]:
    """The command of a warm process, the process, which another one has started, and the object that took it over."""
    monkeypatch.setattr("workers.host.warm_processes.PROGRAM", "import time; time.sleep(600)")
    monkeypatch.setattr("workers.host.warm_processes.RETRY_S", 0.0)
    command = [sys.executable, "-c", STARTER, str(tmp_path / "starter")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        fork_command, processes = (starter.stdout.readline().rstrip() for _ in range(2))
        adopter = WarmProcesses(tmp_path / "adopter")
        adopter.adopt(processes)
        (process,) = psutil.Process(starter.pid).children()
        yield fork_command, process, adopter
        adopter.keep({})


def test_a_process_that_was_handed_over_is_used(handed_over: Handed) -> None:
    """`up` starts it before Ray."""
    command, _, adopter = handed_over
    assert adopter.command("cpu", None, {}) == command


def test_another_process_with_the_pid_of_one_that_was_handed_over_is_not_taken_for_it(tmp_path: Path) -> None:
    """A restarted host actor reads of it again, and would kill it in the end."""
    socket_path = tmp_path / "s"
    socket_path.touch()
    warm = WarmProcesses(tmp_path)
    with subprocess.Popen(["sleep", "600"]) as other:
        warm.adopt(json.dumps([["cpu", sys.executable, str(socket_path), other.pid, 0.0]]))
        warm.keep({})
        ended = other.poll()
        other.terminate()  # by its own signal
    assert (ended, other.returncode) == (None, -signal.SIGTERM)


def test_one_that_was_handed_over_is_replaced_when_it_has_ended(handed_over: Handed) -> None:
    """Its parent is another process."""
    command, process, adopter = handed_over
    process.kill()
    until(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE, DEADLINE_S, "its end")
    assert adopter.command("cpu", None, {}) not in (command, None)


def test_no_process_is_left_of_one_that_was_handed_over(handed_over: Handed) -> None:
    """No zombie either: its parent waits for it."""
    _, process, adopter = handed_over
    parent = process.parent()
    adopter.keep({})
    assert parent is not None
    until(lambda: not process.is_running(), DEADLINE_S, "its end")
    assert (parent.is_running(), parent.children()) == (True, [])


@pytest.mark.parametrize("stage", ["listening", "accepted", "requested", "half a reply"])
def test_a_server_that_ends_in_a_takeover_gives_one_fresh_process(tmp_path: Path, stage: str) -> None:
    """The client becomes it, whatever the server has done until its end, except a reply."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        command = [sys.executable, "-I", "-S", fork_client.__file__, str(tmp_path / "s"), str(script)]
        client = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        if stage != "listening":
            connection, _ = listener.accept()
            if stage in ("requested", "half a reply"):
                connection.recv(1 << 16)
            connection.close()
    output, _ = client.communicate(timeout=DEADLINE_S)

    reports = [json.loads(line) for line in output.splitlines()]
    assert [(report["is_fork"], report["pid"]) for report in reports] == [(False, client.pid)]


def test_without_a_server_a_fresh_process_starts(server: Server) -> None:
    """Its socket remains if it was killed."""
    server.process.kill()
    server.process.wait()

    assert not server.run()["is_fork"]


def test_a_client_that_gives_up_while_the_server_imports_is_no_second_process(tmp_path: Path) -> None:
    """The fork that the server makes in the end finds its client gone."""
    server = Server(tmp_path, before="import sys; sys.stdin.read(1)")
    try:
        client = server.start("wait")
        until(lambda: psutil.Process(client.pid).net_connections("unix"), DEADLINE_S, "a connection")
        client.kill()
        client.wait()  # its output remains open, in its request
        assert server.process.stdin is not None
        server.process.stdin.write(b"\n")
        server.process.stdin.flush()
        assert server.run()["is_fork"]
        until(lambda: not server.forks(), DEADLINE_S, "the end of the fork")
        client.communicate()
    finally:
        server.end()


@pytest.mark.parametrize("last", ["nothing", "half a request", "no permission"])
def test_a_client_that_ends_in_a_takeover_leaves_no_process(server: Server, last: str) -> None:
    """And the server goes on."""
    with server.connect() as client:
        request = {"environment": server.environment, "arguments": [str(server.script), "wait"]}
        if last == "half a request":
            socket.send_fds(client, [(1000).to_bytes(4, "big")], [0, 1, 2])
            client.sendall(b"{")
        elif last == "no permission":
            fork_client.send(client, {**request, "folder": "/"}, (0, 1, 2))
            assert client.recv(1) == FORKED
            assert len(server.forks()) == 1

    until(lambda: not server.forks(), DEADLINE_S, "the end of the fork")
    assert server.run()["is_fork"]


def test_forks_outlive_the_server(server: Server) -> None:
    """It ends with its host actor, replicas do not."""
    with server.start("wait") as client:
        assert client.stdout is not None
        assert server.process.stdin is not None
        pid = json.loads(client.stdout.readline())["pid"]
        server.process.stdin.close()
        assert server.process.wait(DEADLINE_S) == 0
        is_running = psutil.pid_exists(pid)
        os.kill(pid, signal.SIGKILL)

    assert is_running


def test_a_server_ends_where_memory_is_short(tmp_path: Path) -> None:
    """By itself, when it checks the next time."""
    server = Server(tmp_path, before="fork_server.available_memory = lambda: fork_server.LEAST_BYTES - 1")
    try:
        with server.connect():
            assert server.process.wait(DEADLINE_S) == 0
    finally:
        server.end()


def test_a_worker_that_waits_has_imported_what_its_replica_needs(tmp_path: Path) -> None:
    """Before it runs Ray's script."""
    server = Server(tmp_path, before='fork_server.IMPORTS_OF_FORKS = ("workers.host.fork_server", "wave")')
    server.script.write_text("import sys; print('\"wave\"' if 'wave' in sys.modules else 0, flush=True)")
    try:
        assert server.run() == "wave"
    finally:
        server.end()


def test_a_fork_is_ended_before_the_fleets_own_processes_where_memory_is_short(server: Server) -> None:
    """Like Ray's other workers, to the kernel."""
    server.script.write_text("print(open('/proc/self/oom_score_adj').read(), flush=True)")
    assert server.run() == 1000


def test_imports_that_start_threads_are_not_forked(tmp_path: Path) -> None:
    """A fork would lose them, with what they hold."""
    server = Server(
        tmp_path, before="import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()"
    )
    try:
        assert server.process.wait(DEADLINE_S) == 1
        assert not server.run()["is_fork"]
    finally:
        server.end()


def test_a_warm_process_that_ends_by_itself_is_not_started_again_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Meanwhile replicas start as fresh processes."""
    monkeypatch.setattr("workers.host.warm_processes.PROGRAM", "raise SystemExit(1)")
    warm = WarmProcesses(tmp_path)
    first = warm.command("cpu", None, {})
    assert first is not None
    until(lambda: warm.command("cpu", None, {}) is None, DEADLINE_S, "the end of the process")

    assert shlex.split(first)[:3] == [sys.executable, "-I", "-S"]


def test_a_warm_process_ends_once_no_engine_is_to_have_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And its socket with it."""
    program = "import time; time.sleep(600)"
    monkeypatch.setattr("workers.host.warm_processes.PROGRAM", program)
    warm = WarmProcesses(tmp_path)
    warm.keep({"cpu": None})

    def shown() -> list[psutil.Process]:  # Linux shows the command of a new process only after a while
        return [process for process in psutil.Process().children() if program in process.cmdline()]

    ran = until(shown, DEADLINE_S, "the process")
    sockets = [*tmp_path.iterdir()]
    warm.keep({})

    assert (len(ran), len(sockets)) == (1, 1)
    assert not ran[0].is_running()
    assert not [*tmp_path.iterdir()]


def test_a_warm_process_whose_socket_was_removed_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a cleaner of temporary folders."""
    monkeypatch.setattr("workers.host.warm_processes.PROGRAM", "import time; time.sleep(600)")
    monkeypatch.setattr("workers.host.warm_processes.RETRY_S", 0.0)
    warm = WarmProcesses(tmp_path / "sockets")
    first = warm.command("cpu", None, {})
    shutil.rmtree(tmp_path / "sockets")
    second = warm.command("cpu", None, {})
    (socket_path,) = (tmp_path / "sockets").iterdir()
    warm.keep({})

    assert first is not None
    assert second is not None
    assert second != first
    assert str(socket_path) in second


def test_other_processes_see_the_mark_of_the_ray_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel shows the variables of the warm process for its forks: a later node of the machine ends those, too."""
    monkeypatch.setattr("workers.host.warm_processes.PROGRAM", "import time; time.sleep(600)")
    before = {*psutil.Process().children()}
    warm = WarmProcesses(tmp_path, {NODE_VARIABLE: "fleet|machine|former"})
    warm.keep({"cpu": None})
    (process,) = {*psutil.Process().children()} - before
    mark = process.environ()[NODE_VARIABLE]
    warm.keep({})

    assert is_orphan(mark, "fleet|machine|current")


def test_without_memory_no_warm_process_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.host.warm_processes.available_memory", lambda: fork_server.LEAST_BYTES - 1)

    assert WarmProcesses(tmp_path).command("cpu", None, {}) is None


COMPUTES = """\
import ctypes, json, os, sys, threading
from workers.host import fork_server
import numpy, torch
threads = []
openmp = next(line.split()[-1] for line in open("/proc/self/maps") if "libgomp" in line)
def compute():
    fork_server.use_threads()
    threads.extend([torch.get_num_threads(), ctypes.CDLL(openmp).omp_get_max_threads()])
thread = threading.Thread(target=compute)
thread.start()
thread.join()
print(json.dumps({"threads": threads, "is_fork": "torch" in fork_server.imported, "random": float(torch.rand(1)),
                  "numpy": float(numpy.random.rand())}), flush=True)
"""


@pytest.fixture(scope="module")
def cpu_reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What two forks and a fresh process report, each with two threads for torch."""
    folder = tmp_path_factory.mktemp("cpu")
    script = folder / "script.py"
    script.write_text(COMPUTES)
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "PASSIVE"}

    def report(command: str) -> dict[str, Any]:
        run = [*shlex.split(command), str(script)]
        with subprocess.Popen(run, env=environment, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            line: dict[str, Any] = json.loads(process.stdout.readline())
            return line

    warm = WarmProcesses(folder)
    command = warm.command("cpu", None, {})
    assert command is not None
    # On a busy machine the imports may take longer than a client waits.
    until(lambda: report(command)["is_fork"], DEADLINE_S, "the warm process has imported the engine")
    reports = [report(start) for start in (command, command, shlex.quote(sys.executable))]
    warm.keep({})
    return reports


def test_a_fork_of_the_cpu_engine_has_imported_torch(cpu_reports: list[dict[str, Any]]) -> None:
    """The fresh process has not."""
    assert [report["is_fork"] for report in cpu_reports] == [True, True, False]


def test_torch_has_the_threads_of_a_fresh_process_in_each_thread_of_a_fork(cpu_reports: list[dict[str, Any]]) -> None:
    """Also OpenMP, which has read OMP_NUM_THREADS in the warm process."""
    assert [report["threads"] for report in cpu_reports] == [[2, 2]] * 3


def test_forks_draw_different_random_numbers(cpu_reports: list[dict[str, Any]]) -> None:
    """From the default generators of torch and numpy."""
    assert len({report["random"] for report in cpu_reports} | {report["numpy"] for report in cpu_reports}) == 6


def attached(server: Server, *arguments: str) -> subprocess.Popen[str]:
    """A client that waits for its fork."""
    command = [sys.executable, "-I", "-S", fork_client.__file__, str(server.path), fork_client.ATTACHED]
    return subprocess.Popen(
        [*command, str(server.script), *arguments], env=server.environment, stdout=subprocess.PIPE, text=True
    )


def test_an_attached_client_ends_with_its_fork(server: Server) -> None:
    """So that whoever waits for the client has waited for the fork."""
    with attached(server, "wait") as client:
        assert client.stdout is not None
        report = json.loads(client.stdout.readline())
        assert (report["is_fork"], report["arguments"], client.poll()) == (True, [str(server.script), "wait"], None)
        os.kill(report["pid"], signal.SIGKILL)
        client.wait(DEADLINE_S)


def test_a_fork_ends_with_its_attached_client(server: Server) -> None:
    with attached(server, "wait") as client:
        assert client.stdout is not None
        report = json.loads(client.stdout.readline())
        client.kill()
        until(lambda: not psutil.pid_exists(report["pid"]), DEADLINE_S, "the fork has ended")
