"""Compilers end with whom they work for: real processes, really killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from tests.doubles import Neuron, neuron  # noqa: F401 - the fixture
from tests.fleet import until
from tests.workers import nxdi_traffic, tnx_runs
from workers.host import host_facts, process_tree
from workers.host.lifetime import process_start
from workers.messages.replica_config import ReplicaConfig
from workers.neff_cache.compiled_artifacts import compiling

Checkpoints = Callable[[str], Path]
PROJECT = Path(__file__).parents[2]
DEADLINE_S = 60.0
ROOT = """
import subprocess, sys
from workers.neff_cache.compiled_artifacts import compiling
with compiling("a model", "its log is here"):
    subprocess.run([sys.executable, "-c", sys.argv[1], sys.argv[2]], check=True)
"""
# A compiler that forks; below it there is one that leaves the group and the session.
COMPILER = """
import os, subprocess, sys, time
told = open(sys.argv[1], "a")
if os.fork() == 0:
    os.setsid()
print(os.getpid(), file=told, flush=True)
time.sleep(3600)
"""
REPLICA = """
import sys, msgspec
from workers.neff_cache.compiled_artifacts import compiling
from workers.messages.replica_config import ReplicaConfig
from workers.engines.open_engine import open_engine
open_engine(msgspec.json.decode(sys.argv[1], type=ReplicaConfig)).load()
"""


@pytest.fixture
def started() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts Python with a program and its arguments; ended with the test, and whoever bears their mark."""
    found: list[tuple[subprocess.Popen[bytes], float | None]] = []

    def start(*arguments: str, **env: str) -> subprocess.Popen[bytes]:
        path = os.pathsep.join([str(PROJECT), *([env.pop("PYTHONPATH")] if "PYTHONPATH" in env else [])])
        process = subprocess.Popen([sys.executable, "-c", *arguments], env={**os.environ, **env, "PYTHONPATH": path})
        found.append((process, process_start(process.pid)))
        return process

    yield start
    for process, began in found:
        process.kill()
        process.wait()
        process_tree.end_marked(process.pid, began, 5.0)  # type: ignore[arg-type]


def told(file: Path, count: int) -> list[psutil.Process]:
    """The processes whose pids stand in ``file``, once there are ``count``."""
    until(lambda: file.exists() and len(file.read_text().split()) >= count, DEADLINE_S, "compilers were started")
    return [psutil.Process(int(pid)) for pid in file.read_text().split()]


def left(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those that have not ended by the deadline."""
    deadline = time.monotonic() + DEADLINE_S
    while found := [one for one in processes if process_start(one.pid) is not None]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    return found


def test_compilers_end_with_a_root_that_is_killed(
    started: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    """By SIGKILL, which the root cannot answer; those too that are in a session of their own."""
    root = started(ROOT, COMPILER, str(tmp_path / "pids"))
    compilers = told(tmp_path / "pids", 2)

    root.send_signal(signal.SIGKILL)
    root.wait()

    assert left(compilers) == []


def test_whoever_confirms_a_death_has_ended_the_compilers(
    started: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    """Without the process that watches, and when the root is dead already, as after `ray.kill`."""
    root = started(ROOT, COMPILER, str(tmp_path / "pids"))
    compilers = told(tmp_path / "pids", 2)
    began = process_start(root.pid)
    assert began is not None
    watchers = [one for one in psutil.Process(root.pid).children() if "workers.host.process_tree" in one.cmdline()]
    assert len(watchers) == 1
    watchers[0].kill()
    root.kill()
    root.wait()
    assert all(one.is_running() for one in compilers)

    assert host_facts.confirm_death(root.pid, began, DEADLINE_S)

    assert [one for one in compilers if process_start(one.pid) is not None] == []


def test_a_living_root_is_ended_with_its_children(
    started: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    """At the deadline of a start: what it has started without a mark ends as well."""
    root = started(
        "import subprocess, sys; subprocess.run([sys.executable, *sys.argv[1:]])",
        "-c",
        COMPILER,
        str(tmp_path / "pids"),
    )
    children = told(tmp_path / "pids", 2)

    assert host_facts.confirm_death(root.pid, process_start(root.pid), DEADLINE_S)  # type: ignore[arg-type]

    assert left(children) == []
    assert root.wait(DEADLINE_S) == -signal.SIGKILL


def test_the_compilers_of_others_are_left_alone(
    started: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    """The mark names one root: by its pid, and by when it began."""
    root = started(ROOT, COMPILER, str(tmp_path / "pids"))
    told(tmp_path / "pids", 2)
    began = process_start(root.pid)
    assert began is not None

    assert len(process_tree.marked(root.pid, began)) == 2
    assert process_tree.marked(root.pid, began - 100) == []
    assert process_tree.marked(root.pid + 1, began) == []


def test_a_compile_that_fails_leaves_no_compiler_behind() -> None:
    """Its child died alone; what that had started would go on writing into the folder."""
    with contextlib.suppress(ChildProcessError), process_tree.watched():
        below = subprocess.Popen(["sleep", "3600"], start_new_session=True)
        raise ChildProcessError

    assert below.wait(DEADLINE_S) == -signal.SIGKILL
    assert process_tree.MARK not in os.environ


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["nxd-inference", "transformers-neuronx"])
def test_a_replica_that_is_killed_takes_its_compilers_with_it(
    engine: str,
    neuron: Neuron,  # noqa: F811
    checkpoint: Checkpoints,
    started: Callable[..., subprocess.Popen[bytes]],
    tmp_path: Path,
) -> None:
    """NxD Inference compiles in a process of its own, transformers-neuronx in the replica; below both are compilers."""
    neuron.plan({"at": "compile", "hangs": True})
    compiled = str(tmp_path / "compiled")
    config: ReplicaConfig = (
        nxdi_traffic.replica_config(checkpoint("llama"), tmp_path / "compiled")
        if engine == "nxd-inference"
        else tnx_runs.config(checkpoint("llama"), compiled=compiled, **tnx_runs.BUCKETS)
    )
    replica = started(REPLICA, msgspec.json.encode(config).decode(), **neuron.env, NEURON_RT_VISIBLE_CORES="0-1")
    compilers = told(neuron.state / "compilers", 2)
    below = psutil.Process(replica.pid).children(recursive=True)

    replica.send_signal(signal.SIGKILL)
    replica.wait()

    assert left([*compilers, *below]) == []


def test_a_compile_is_told_when_it_begins_and_when_it_ends(caplog: pytest.LogCaptureFixture) -> None:
    """What, and where its output goes; how long it took, or that it failed."""
    caplog.set_level("INFO", "workers.neff_cache.compiled_artifacts")
    with compiling("a with an engine", "the compilers write to a.log"):
        assert caplog.messages == ["compiling a with an engine; the compilers write to a.log"]
    assert caplog.messages[1:] == ["compiled a with an engine in 0 s"]

    with pytest.raises(OSError, match="full"), compiling("b", "its log"):
        raise OSError("full")
    assert caplog.messages[-1] == "compiling b failed after 0 s: OSError"
