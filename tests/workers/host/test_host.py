"""Processes, logs, CPUs and memory of a host."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from workers.host import host_facts
from workers.host.facts.reading import Places


def test_confirm_death_kills_the_process() -> None:
    """Once it returns True, the process is gone."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    started = host_facts.process_start(process.pid)
    assert started is not None

    assert host_facts.confirm_death(process.pid, started, 10.0)

    assert not host_facts.is_alive(process.pid, started)


def test_a_later_process_with_the_same_pid_is_not_killed() -> None:
    """A process is identified by its pid and its start time."""
    assert not host_facts.is_alive(os.getpid(), time.time() - 10**6)
    assert host_facts.confirm_death(os.getpid(), time.time() - 10**6, 1.0)


def ending(code: str, folder: Path, *, attended: bool = True) -> str | None:
    """Returns how a process that ran ``code`` ended, according to its host."""
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


@pytest.mark.skipif(KERNEL < (6, 15), reason="the kernel reports exit statuses to parents only")
@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import os; os.kill(os.getpid(), 9)", "was killed by SIGKILL"),
        ("import os; os.kill(os.getpid(), 1)", "was killed by SIGHUP"),
        ("import os; os.kill(os.getpid(), 40)", "was killed by signal 40"),
        ("import os; os._exit(3)", "exited with code 3"),
        ("", "exited with code 0"),
    ],
)
def test_a_host_reports_how_a_process_ended(code: str, expected: str, tmp_path: Path) -> None:
    """Also if its parent has already read the exit status."""
    assert ending(code, tmp_path) == expected


def test_a_process_that_exits_on_sigterm_is_recognized_by_its_log(tmp_path: Path) -> None:
    """Workers of Ray exit like this."""
    code = (
        "import os, signal, sys; from workers.host import host_facts as host; "
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(1)); "
        "host.log_sigterm(); os.kill(os.getpid(), signal.SIGTERM); signal.pause()"
    )
    assert ending(code, tmp_path) == "was killed by SIGTERM"


@pytest.mark.parametrize(
    ("text", "expected"), [("*** SIGSEGV received at time=1 on cpu 1 ***", "was killed by SIGSEGV"), ("Ready.", None)]
)
def test_the_end_of_a_process_that_was_not_tracked_is_read_from_its_log(
    text: str, expected: str | None, tmp_path: Path
) -> None:
    """Used on older kernels, and after a restart of the host actor."""
    assert ending(f"import sys; sys.stderr.write({text!r})", tmp_path, attended=False) == expected


def test_log_tail_returns_the_last_lines_of_a_large_log(tmp_path: Path) -> None:
    """A missing log has none."""
    log = tmp_path / "model-0.log"
    log.write_text("".join(f"line {i}\n" for i in range(100_000)))

    assert host_facts.log_tail(log, 2) == ["line 99998", "line 99999"]
    assert host_facts.log_tail(tmp_path / "none.log", 2) == []


def test_a_machine_without_neuron_devices_has_no_instance_type(tmp_path: Path) -> None:
    """Without /dev/neuron* its cores can only be emulated."""
    product = tmp_path / "product_name"
    product.write_text("inf2.48xlarge\n")

    assert host_facts.instance_type(tmp_path, product) is None
    (tmp_path / "neuron0").touch()
    assert host_facts.instance_type(tmp_path, product) == "inf2.48xlarge"


def test_usable_cpus_are_those_of_the_affinity_mask() -> None:
    """The machine may have more."""
    assert set(host_facts.usable_cpus()) <= os.sched_getaffinity(0)
    assert host_facts.usable_cpus()


@pytest.mark.parametrize(("quota", "cpus"), [(None, 8), (2, 2), (0, 1), (99, 8)])
def test_the_cpus_of_a_quota_are_spread_over_the_mask(
    quota: int | None, cpus: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At least one; siblings that are half of the CPUs apart stay together."""
    monkeypatch.setattr(host_facts, "_cgroup_cpu_quota", lambda: quota)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert host_facts.usable_cpus() == tuple(range(0, 8, 8 // cpus))


def test_planned_cpus_that_do_not_exist_are_ignored() -> None:
    """Without any of the planned CPUs, the process keeps its mask."""
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


def test_log_part_continues_at_an_offset_with_complete_lines(tmp_path: Path) -> None:
    """Ray's marks are hidden, an incomplete line waits, and a rotated log is read from its start."""
    log = tmp_path / "replica.log"
    log.write_text("one\n:job_id:1\ntwo\nthree\nincompl")
    assert host_facts.log_part(log, None, 1000, 2) == ("two\nthree\n", 24)
    assert host_facts.log_part(log, 24, 1000, 2) == ("", 24)
    with log.open("a") as more:
        more.write("ete\n")
    assert host_facts.log_part(log, 24, 1000, 2) == ("incomplete\n", 35)
    log.write_text("anew\n")
    assert host_facts.log_part(log, 35, 1000, 2) == ("anew\n", 5)
    assert host_facts.log_part(tmp_path / "none.log", 7, 1000, 2) == ("", 0)


def test_a_mounted_host_is_read_below_its_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container, COREWRIGHT_HOST_ROOT has its devices, firmware and tools."""
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/neuron0").touch()
    (tmp_path / "sys/devices/virtual/dmi/id").mkdir(parents=True)
    (tmp_path / "sys/devices/virtual/dmi/id/product_name").write_text("trn1.32xlarge\n")
    monkeypatch.setenv("COREWRIGHT_HOST_ROOT", str(tmp_path))
    assert host_facts.instance_type() == "trn1.32xlarge"
    assert Places.of_this_host() == Places(tmp_path / "sys", tmp_path / "dev", str(tmp_path / "opt/aws/neuron/bin"))

    monkeypatch.delenv("COREWRIGHT_HOST_ROOT")
    assert Places.of_this_host() == Places()


def test_the_available_memory_of_a_container_is_limited(tmp_path: Path) -> None:
    """Inactive page cache counts as free. Without a limit, the machine's memory counts."""
    machine = host_facts.available_memory(tmp_path / "none")
    (tmp_path / "memory.max").write_text("3000000\n")
    (tmp_path / "memory.current").write_text("2500000\n")
    (tmp_path / "memory.stat").write_text("anon 1000000\ninactive_file 500000\n")
    assert host_facts.available_memory(tmp_path) == 1_000_000
    (tmp_path / "memory.current").write_text("9500000\n")
    assert host_facts.available_memory(tmp_path) == 0
    (tmp_path / "memory.max").write_text("max\n")
    assert host_facts.available_memory(tmp_path) > machine // 2


def test_a_large_log_is_rotated_under_its_writers(tmp_path: Path) -> None:
    """Its last content is kept in one other file."""
    log = tmp_path / "m-0.log"
    with log.open("a") as writer:
        for part in ("old", "new"):
            writer.write(part * 100)
            writer.flush()
            host_facts.cut_log(log, most=200)
        writer.write("continues")

    assert log.read_text() == "continues"
    assert (tmp_path / "m-0.log.1").read_text() == "new" * 100
    host_facts.cut_log(log, most=200)
    assert log.read_text() == "continues"


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


def test_a_replica_limits_the_size_of_its_own_log(tmp_path: Path) -> None:
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


def test_a_full_disk_does_not_break_the_log_marks_of_a_process() -> None:
    assert subprocess.run([sys.executable, "-c", NO_ROOM], check=False).returncode == 7
