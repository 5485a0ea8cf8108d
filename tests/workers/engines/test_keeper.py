"""A server's processes end with it, with its keeper and with the replica that started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.fleet import until
from workers.engines.server.server_process import Address, ServerProcess, server_folder
from workers.host.host_facts import confirm_death
from workers.host.lifetime import process_start
from workers.messages.engine_protocol import EngineLoadError

DEADLINE_S = 20.0
GRACE_S = 0.3
# A first process, a child in a session of its own, and a grandchild that ignores SIGTERM and hides its environment by
# starting without one, as vLLM's do with their titles. Each writes its pid.
TREE = """
import os, signal, subprocess, sys, time
role = sys.argv[1]
open(role, "w").write(str(os.getpid()))
if role == "first":
    subprocess.Popen([sys.executable, "-c", open("tree.py").read(), "child"], start_new_session=True, env={})
elif role == "child":
    subprocess.Popen([sys.executable, "-c", open("tree.py").read(), "stubborn"], env={})
else:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    open("up", "w").close()
time.sleep(600)
"""
ROOT = """
import sys, time
from pathlib import Path
from tests.workers.engines.test_keeper import GRACE_S, start
process, folder = start(Path(sys.argv[1]))
print(folder, process._keeper.pid, flush=True)
time.sleep(600)
"""


def start(parent: Path) -> tuple[ServerProcess, Path]:
    folder = server_folder(parent, GRACE_S)
    (folder / "tree.py").write_text(TREE)
    return ServerProcess([sys.executable, "tree.py", "first"], {}, folder, grace_s=GRACE_S), folder


def tree(folder: Path) -> list[psutil.Process]:
    """The server's processes, once the last of them has started."""
    until((folder / "up").exists, DEADLINE_S, "the whole tree runs")
    return [psutil.Process(int((folder / role).read_text())) for role in ("first", "child", "stubborn")]


def all_gone(processes: list[psutil.Process]) -> bool:
    return not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes)


def test_stop_ends_every_process(tmp_path: Path) -> None:
    """Also one that has left the group and one that ignores SIGTERM; the folder is gone afterwards."""
    server, folder = start(tmp_path)
    processes = tree(folder)

    server.stop()

    assert all_gone(processes)
    assert not folder.exists()


def test_the_death_of_the_first_process_ends_the_others(tmp_path: Path) -> None:
    """Nothing can reach them any more, so they get no grace."""
    server, folder = start(tmp_path)
    processes = tree(folder)

    processes[0].kill()

    assert server.wait() == 128 + signal.SIGKILL
    assert all_gone(processes)


@pytest.mark.parametrize("ending", ["by itself", "stopped"])
def test_a_stopped_keeper_goes_on_and_notices_the_end_of_its_server(tmp_path: Path, ending: str) -> None:
    """While the server runs, its clients notice nothing."""
    server, folder = start(tmp_path)
    processes = tree(folder)
    os.kill(server._keeper.pid, signal.SIGSTOP)

    if ending == "by itself":
        processes[0].kill()
        assert server.wait() == 128 + signal.SIGKILL
    else:
        server.stop()
    assert all_gone(processes)


@pytest.mark.parametrize("victims", ["replica", "keeper", "both"])
def test_no_process_outlives_a_killed_replica(tmp_path: Path, victims: str) -> None:
    """The keeper ends them when the replica is killed; `confirm_death` does where the keeper is gone, too."""
    replica = subprocess.Popen([sys.executable, "-c", ROOT, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    started = process_start(replica.pid)
    assert replica.stdout is not None
    assert started is not None
    folder, keeper = replica.stdout.readline().split()
    processes = tree(Path(folder))

    if victims in ("keeper", "both"):
        os.kill(int(keeper), signal.SIGKILL)
    if victims in ("replica", "both"):
        replica.kill()
    if victims == "keeper":
        assert not all_gone(processes)  # only the controller's reaction to the failed replica ends them

    assert confirm_death(replica.pid, started, DEADLINE_S)
    assert all_gone(processes)
    replica.wait()


def test_held_descriptors_stay_open_until_the_last_process_is_gone(tmp_path: Path) -> None:
    """A lock that the replica passes on is free only when the keeper has ended."""
    read, write = os.pipe()
    folder = server_folder(tmp_path, GRACE_S)
    (folder / "tree.py").write_text(TREE)
    server = ServerProcess([sys.executable, "tree.py", "first"], {}, folder, grace_s=GRACE_S, held=[write])
    os.close(write)
    processes = tree(folder)
    os.set_blocking(read, False)
    with pytest.raises(BlockingIOError):
        os.read(read, 1)

    server.stop()

    assert os.read(read, 1) == b""
    assert all_gone(processes)
    os.close(read)


def test_a_server_that_ends_while_it_loads_is_an_error(tmp_path: Path) -> None:
    folder = server_folder(tmp_path, GRACE_S)
    server = ServerProcess([sys.executable, "-c", "raise SystemExit(3)"], {}, folder, grace_s=GRACE_S)

    with pytest.raises(EngineLoadError, match="exit code 3") as raised:
        server.wait_ready(Address(path=str(folder / "s")), "/health")

    assert raised.value.id == "server-failed"


def test_a_command_that_cannot_be_started_leaves_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Its cause is in the replica's log, and the exit code is the shells'."""
    folder = server_folder(tmp_path, GRACE_S)

    assert ServerProcess(["/missing/server"], {}, folder, grace_s=GRACE_S).wait() == 127

    assert capfd.readouterr().err == "/missing/server cannot be started: No such file or directory\n"
    assert not folder.exists()


def test_the_server_gets_only_named_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Secrets of the replica's environment are not passed on."""
    monkeypatch.setenv("COREWRIGHT_SECRET", "x")
    folder = server_folder(tmp_path, GRACE_S)
    output = tmp_path / "environ"
    code = f"import os; open({str(output)!r}, 'w').write(repr(dict(os.environ)))"
    server = ServerProcess([sys.executable, "-c", code], {"OMP_NUM_THREADS": "3"}, folder, grace_s=GRACE_S)
    server.wait()

    environ = output.read_text()

    assert "COREWRIGHT_SECRET" not in environ
    assert "'OMP_NUM_THREADS': '3'" in environ
    assert "'PATH'" in environ
