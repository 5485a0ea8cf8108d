"""Compilers end with the replica that started them: real processes, killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.doubles import Neuron, neuron  # noqa: F401 - the fixture
from tests.fleet import until
from tests.workers import nxdi_traffic, tnx_runs
from workers.compiled.host_sets import compiling
from workers.host import host_facts, process_tree
from workers.host.lifetime import process_start
from workers.messages.json_form import encoded
from workers.messages.replica_config import ReplicaConfig

Checkpoints = Callable[[str], Path]
PROJECT = Path(__file__).parents[3]
DEADLINE_S = 60.0
ROOT = """
import subprocess, sys
from workers.compiled.host_sets import compiling
with compiling("a model", "its log is here"):
    subprocess.run([sys.executable, "-c", sys.argv[1], sys.argv[2]], check=True)
"""
# A compiler that forks; below it there is one that leaves the group and the session.
COMPILER = """
import os, subprocess, sys, time
pids = open(sys.argv[1], "a")
if os.fork() == 0:
    os.setsid()
print(os.getpid(), file=pids, flush=True)
time.sleep(3600)
"""
ALIVE = "import ctypes, threading, time; threading.Thread(target=time.sleep, args=(3600,)).start()\n"
LEADER_ENDS = "ctypes.CDLL(None).pthread_exit(None)"
REPLICA = """
import sys, msgspec
from workers.compiled.host_sets import compiling
from workers.messages.json_form import decoded
from workers.messages.replica_config import ReplicaConfig
from workers.engines.open_engine import open_engine
open_engine(decoded(sys.argv[1], ReplicaConfig)).load()
"""


@pytest.fixture
def started() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts Python with a program and its arguments; the test ends it, and processes with its mark."""
    roots: list[tuple[subprocess.Popen[bytes], float | None]] = []

    def start(*arguments: str, **env: str) -> subprocess.Popen[bytes]:
        path = os.pathsep.join([str(PROJECT), *([env.pop("PYTHONPATH")] if "PYTHONPATH" in env else [])])
        process = subprocess.Popen([sys.executable, "-c", *arguments], env={**os.environ, **env, "PYTHONPATH": path})
        roots.append((process, process_start(process.pid)))
        return process

    yield start
    for process, began in roots:
        process.kill()
        process.wait()
        process_tree.end_marked(process.pid, began, 5.0)  # type: ignore[arg-type]


def listed(file: Path, count: int) -> list[psutil.Process]:
    """Returns the processes whose pids are in ``file``, once there are ``count``."""
    until(lambda: file.exists() and len(file.read_text().split()) >= count, DEADLINE_S, "compilers were started")
    return [psutil.Process(int(pid)) for pid in file.read_text().split()]


def survivors(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Returns the processes that have not ended by the deadline."""
    deadline = time.monotonic() + DEADLINE_S
    while running := [process for process in processes if process_start(process.pid) is not None]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    return running


def test_compilers_end_with_a_killed_root(started: Callable[..., subprocess.Popen[bytes]], tmp_path: Path) -> None:
    """Also those in a session of their own."""
    root = started(ROOT, COMPILER, str(tmp_path / "pids"))
    compilers = listed(tmp_path / "pids", 2)

    root.send_signal(signal.SIGKILL)
    root.wait()

    assert survivors(compilers) == []


def test_a_confirmed_death_has_ended_the_compilers(
    started: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    """Also without the watcher, and if the root is already dead, as after `ray.kill`."""
    root = started(ROOT, COMPILER, str(tmp_path / "pids"))
    compilers = listed(tmp_path / "pids", 2)
    began = process_start(root.pid)
    assert began is not None
    children = psutil.Process(root.pid).children()
    (watcher,) = [child for child in children if "workers.host.process_tree" in child.cmdline()]
    watcher.kill()
    root.kill()
    root.wait()
    assert all(compiler.is_running() for compiler in compilers)

    assert host_facts.confirm_death(root.pid, began, DEADLINE_S)

    assert [compiler for compiler in compilers if process_start(compiler.pid) is not None] == []


def test_a_running_root_is_killed_with_its_children(
    started: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    """Also children without the mark, as at the deadline of a start."""
    root = started(
        "import subprocess, sys; subprocess.run([sys.executable, *sys.argv[1:]])",
        "-c",
        COMPILER,
        str(tmp_path / "pids"),
    )
    children = listed(tmp_path / "pids", 2)

    assert host_facts.confirm_death(root.pid, process_start(root.pid), DEADLINE_S)  # type: ignore[arg-type]

    assert survivors(children) == []
    assert root.wait(DEADLINE_S) == -signal.SIGKILL


def test_the_compilers_of_other_roots_are_not_marked(
    started: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    """The mark has the pid and the start time of the root."""
    root = started(ROOT, COMPILER, str(tmp_path / "pids"))
    listed(tmp_path / "pids", 2)
    began = process_start(root.pid)
    assert began is not None

    assert len(process_tree.marked(root.pid, began)) == 2
    assert process_tree.marked(root.pid, began - 100) == []
    assert process_tree.marked(1, began) == []


@pytest.mark.parametrize("program", [ALIVE, ALIVE + LEADER_ENDS], ids=["whole", "without-its-first-thread"])
def test_a_process_whose_mark_has_vanished_still_counts(
    started: Callable[..., subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    """A dying process loses its environment and its working directory before its files, with which it holds cores."""
    process = psutil.Process(started(program).pid)
    if program != ALIVE:
        until(lambda: process.status() == psutil.STATUS_ZOMBIE, DEADLINE_S, "its first thread has ended")
    searches = iter([[(process, 60.0)]])
    monkeypatch.setattr(process_tree, "marked", lambda *_: next(searches, []))

    assert not process_tree.end_marked(1, 0.0, 0.1)

    process.kill()
    searches = iter([[(process, 60.0)]])
    assert process_tree.end_marked(1, 0.0, DEADLINE_S)


def test_a_failed_compilation_leaves_no_compiler() -> None:
    """A descendant of the failed child would continue to write into the folder."""
    with contextlib.suppress(ChildProcessError), process_tree.watched():
        below = subprocess.Popen(["sleep", "3600"], start_new_session=True)
        raise ChildProcessError

    assert below.wait(DEADLINE_S) == -signal.SIGKILL
    assert process_tree.MARK not in os.environ


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["nxd-inference", "transformers-neuronx"])
def test_the_compilers_of_a_killed_replica_end(
    engine: str,
    neuron: Neuron,  # noqa: F811
    checkpoint: Checkpoints,
    started: Callable[..., subprocess.Popen[bytes]],
    tmp_path: Path,
) -> None:
    """NxD Inference compiles in a process of its own, transformers-neuronx in the replica."""
    neuron.plan({"at": "compile", "hangs": True})
    compiled = str(tmp_path / "compiled")
    config: ReplicaConfig = (
        nxdi_traffic.replica_config(checkpoint("llama"), tmp_path / "compiled")
        if engine == "nxd-inference"
        else tnx_runs.config(checkpoint("llama"), compiled=compiled, **tnx_runs.BUCKETS)
    )
    replica = started(REPLICA, encoded(config).decode(), **neuron.env, NEURON_RT_VISIBLE_CORES="0-1")
    compilers = listed(neuron.state / "compilers", 2)
    below = psutil.Process(replica.pid).children(recursive=True)

    replica.send_signal(signal.SIGKILL)
    replica.wait()

    assert survivors([*compilers, *below]) == []


def test_the_start_and_the_end_of_a_compilation_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    """With the place of its output, its duration, and its failure."""
    caplog.set_level("INFO", "workers.compiled.host_sets")
    with compiling("a with an engine", "the compilers write to a.log"):
        assert caplog.messages == ["compiling a with an engine; the compilers write to a.log"]
    assert caplog.messages[1:] == ["compiled a with an engine in 0 s"]

    with pytest.raises(OSError, match="full"), compiling("b", "its log"):
        raise OSError("full")
    assert caplog.messages[-1] == "compiling b failed after 0 s: OSError"
