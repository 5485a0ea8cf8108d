"""What is asked of a host."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from workers.host import host_facts
from workers.host.facts.reading import Places


def test_confirm_death_kills_that_process_and_sees_it_gone() -> None:
    """When it says that a process is dead, the process is dead."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    started = host_facts.process_start(process.pid)
    assert started is not None

    assert host_facts.confirm_death(process.pid, started, 10.0)

    assert not host_facts.is_alive(process.pid, started)


def test_a_pid_that_was_used_again_is_another_process() -> None:
    """A process is named by its pid and its start: a later process with the same pid is left alone."""
    assert not host_facts.is_alive(os.getpid(), time.time() - 10**6)
    assert host_facts.confirm_death(os.getpid(), time.time() - 10**6, 1.0)


def ended(code: str, folder: Path, *, attended: bool = True) -> str | None:
    """How a process ended that ran ``code``, in the words of its host."""
    log = folder / "model-0.log"
    with log.open("w") as stream:
        process = subprocess.Popen([sys.executable, "-c", f"input(); {code}"], stdin=subprocess.PIPE, stderr=stream)
    started = host_facts.process_start(process.pid)
    assert started is not None
    endings = host_facts.Endings()
    if attended:
        endings.attend(process.pid, started)
    process.communicate(b"\n")
    try:
        return endings.of(process.pid, started, log)
    finally:
        endings.forget(process.pid, started)


KERNEL = tuple(int(part) for part in os.uname().release.split(".")[:2])


@pytest.mark.skipif(KERNEL < (6, 15), reason="the kernel tells only the parent how a process ended")
@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("import os; os.kill(os.getpid(), 9)", "was killed by SIGKILL"),
        ("import os; os.kill(os.getpid(), 1)", "was killed by SIGHUP"),
        ("import os; os.kill(os.getpid(), 40)", "was killed by signal 40"),
        ("import os; os._exit(3)", "exited with code 3"),
        ("", "exited with code 0"),
    ],
)
def test_a_host_says_how_a_process_ended(code: str, says: str, tmp_path: Path) -> None:
    """Also of one whose exit status somebody else has taken."""
    assert ended(code, tmp_path) == says


def test_a_process_that_exits_at_sigterm_is_known_by_its_log(tmp_path: Path) -> None:
    """As Ray's workers do."""
    code = (
        "import os, signal, sys; from workers.host import host_facts as host; "
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(1)); "
        "host.log_sigterm(); os.kill(os.getpid(), signal.SIGTERM); signal.pause()"
    )
    assert ended(code, tmp_path) == "was killed by SIGTERM"


@pytest.mark.parametrize(
    ("text", "says"), [("*** SIGSEGV received at time=1 on cpu 1 ***", "was killed by SIGSEGV"), ("Ready.", None)]
)
def test_a_process_that_nobody_attended_says_in_its_log_how_it_ended(
    text: str, says: str | None, tmp_path: Path
) -> None:
    """On older kernels, and after the host actor's own death."""
    assert ended(f"import sys; sys.stderr.write({text!r})", tmp_path, attended=False) == says


def test_log_tail_gives_the_last_lines_of_a_large_log(tmp_path: Path) -> None:
    """The end of a log is read without the rest of it."""
    log = tmp_path / "model-0.log"
    log.write_text("".join(f"line {i}\n" for i in range(100_000)))

    assert host_facts.log_tail(log, 2) == ["line 99998", "line 99999"]
    assert host_facts.log_tail(tmp_path / "none.log", 2) == []


def test_a_machine_without_neuron_devices_has_no_instance_type(tmp_path: Path) -> None:
    """The instance type counts only where /dev/neuron* exists; without devices the host is emulated."""
    product = tmp_path / "product_name"
    product.write_text("inf2.48xlarge\n")

    assert host_facts.instance_type(tmp_path, product) is None
    (tmp_path / "neuron0").touch()
    assert host_facts.instance_type(tmp_path, product) == "inf2.48xlarge"


def test_usable_cpus_are_those_of_the_affinity_mask() -> None:
    """The budget is what this process may use, not what the machine has."""
    assert set(host_facts.usable_cpus()) <= os.sched_getaffinity(0)
    assert host_facts.usable_cpus()


def test_cpus_that_are_not_there_are_left_out() -> None:
    """A plan for an instance type is for all of its CPUs; with none of them the process keeps what it has."""
    before = os.sched_getaffinity(0)
    try:
        host_facts.pin_to(None)
        host_facts.pin_to("9000-9007")
        host_facts.pin_to("no list")
        assert os.sched_getaffinity(0) == before
        host_facts.pin_to(f"{min(before)},9000-9007")
        assert os.sched_getaffinity(0) == {min(before)}
    finally:
        for task in Path("/proc/self/task").iterdir():
            os.sched_setaffinity(int(task.name), before)


def test_log_part_goes_on_where_it_ended_and_gives_whole_lines(tmp_path: Path) -> None:
    """Ray's marks are left out, a line under way waits, and a log begun anew is read from its start."""
    log = tmp_path / "replica.log"
    log.write_text("one\n:job_id:1\ntwo\nthree\nunder w")
    assert host_facts.log_part(log, None, 1000, 2) == ("two\nthree\n", 24)
    assert host_facts.log_part(log, 24, 1000, 2) == ("", 24)
    with log.open("a") as more:
        more.write("ay\n")
    assert host_facts.log_part(log, 24, 1000, 2) == ("under way\n", 34)
    log.write_text("anew\n")
    assert host_facts.log_part(log, 34, 1000, 2) == ("anew\n", 5)
    assert host_facts.log_part(tmp_path / "none.log", 7, 1000, 2) == ("", 0)


def test_a_host_that_is_mounted_elsewhere_is_read_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """COREWRIGHT_HOST_ROOT, as in a container: devices, firmware and tools are below it."""
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/neuron0").touch()
    (tmp_path / "sys/devices/virtual/dmi/id").mkdir(parents=True)
    (tmp_path / "sys/devices/virtual/dmi/id/product_name").write_text("trn1.32xlarge\n")
    monkeypatch.setenv("COREWRIGHT_HOST_ROOT", str(tmp_path))
    assert host_facts.instance_type() == "trn1.32xlarge"
    assert Places.of_this_host() == Places(tmp_path / "sys", tmp_path / "dev", str(tmp_path / "opt/aws/neuron/bin"))

    monkeypatch.delenv("COREWRIGHT_HOST_ROOT")
    assert Places.of_this_host() == Places()


def test_a_container_has_the_memory_that_its_limit_leaves(tmp_path: Path) -> None:
    """Pages of files that can be dropped count as free; without a limit the machine's memory does."""
    machine = host_facts.available_memory(tmp_path / "none")
    (tmp_path / "memory.max").write_text("3000000\n")
    (tmp_path / "memory.current").write_text("2500000\n")
    (tmp_path / "memory.stat").write_text("anon 1000000\ninactive_file 500000\n")
    assert host_facts.available_memory(tmp_path) == 1_000_000
    (tmp_path / "memory.current").write_text("9500000\n")
    assert host_facts.available_memory(tmp_path) == 0
    (tmp_path / "memory.max").write_text("max\n")
    assert host_facts.available_memory(tmp_path) > machine // 2


def test_a_log_that_grew_large_is_begun_anew(tmp_path: Path) -> None:
    """While processes go on appending to it; what it held is beside it, and no more than that."""
    log = tmp_path / "m-0.log"
    with log.open("a") as writer:
        for part in ("old", "new"):
            writer.write(part * 100)
            writer.flush()
            host_facts.cut_log(log, most=200)
        writer.write("goes on")

    assert log.read_text() == "goes on"
    assert (tmp_path / "m-0.log.1").read_text() == "new" * 100
    host_facts.cut_log(log, most=200)
    assert log.read_text() == "goes on"


OWN_LOG = """
import os, sys, time
from pathlib import Path
from workers.host import host_facts as host
from workers.serving import replica
cut = host.cut_log
host.cut_log = lambda path: cut(path, 1000)
replica.LOG_CHECK_S = 0.01
log = Path(sys.argv[1])
replica._redirect_output(log)
deadline = time.monotonic() + 20
while not log.with_name("m-0.log.1").exists() and time.monotonic() < deadline:
    os.write(2, b"x" * 100)
    time.sleep(0.005)
"""


def test_a_replica_bounds_its_own_log_while_it_runs(tmp_path: Path) -> None:
    log = tmp_path / "m-0.log"
    subprocess.run([sys.executable, "-c", OWN_LOG, str(log)], check=True, timeout=60)
    assert (tmp_path / "m-0.log.1").exists()
    assert log.stat().st_size < 1000


NO_ROOM = """
import os, signal, sys, threading
from workers.host import host_facts as host
os.dup2(os.open("/dev/full", os.O_WRONLY), 2)
host.mark_log(2)
signal.signal(signal.SIGTERM, lambda number, frame: os._exit(7))
host.log_sigterm()
signal.raise_signal(signal.SIGTERM)
"""


def test_a_log_on_a_full_disk_keeps_no_process_from_its_start_and_its_end() -> None:
    assert subprocess.run([sys.executable, "-c", NO_ROOM], check=False).returncode == 7
