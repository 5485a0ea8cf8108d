"""Processes are identified by pid and start time, also when the wall clock is set."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import psutil
import pytest

from tests.fleet import until
from workers.host import host_facts, lifetime
from workers.host.lifetime import Process, end_process, is_alive, is_stopped, pid_space, process_start

DAY_S = 86400.0


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


@pytest.fixture(params=[-DAY_S, DAY_S])
def set_clock(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Sets the wall clock, and with it the kernel's boot time."""
    boot_time, wall, by = psutil.boot_time(), time.time, float(request.param)

    def jump() -> None:
        monkeypatch.setattr("psutil._pslinux.boot_time", lambda: boot_time + by)
        monkeypatch.setattr(time, "time", lambda: wall() + by)

    return jump


def test_a_process_keeps_its_identity_when_the_clock_is_set(
    sleeper: subprocess.Popen[bytes], set_clock: Callable[[], None]
) -> None:
    started = lifetime.process_start(sleeper.pid)
    assert started is not None
    set_clock()
    assert lifetime.is_alive(sleeper.pid, started)


def test_a_death_is_confirmed_after_the_clock_was_set(
    sleeper: subprocess.Popen[bytes], set_clock: Callable[[], None]
) -> None:
    """Only then do its cores get another process."""
    started = lifetime.process_start(sleeper.pid)
    assert started is not None
    set_clock()
    assert host_facts.confirm_death(sleeper.pid, started, 10.0)
    assert sleeper.wait(0) != 0


def test_a_zombie_has_ended() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert lifetime.process_start(process.pid) is None
    process.wait()


def test_the_start_of_this_process_is_between_boot_and_now() -> None:
    started = lifetime.process_start(os.getpid())
    assert started is not None
    assert 0 < started <= lifetime.since_boot()


def test_a_stopped_process_is_recognized_and_ended() -> None:
    """But not another process with its pid, nor one of another machine."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    started = process_start(process.pid)
    assert started is not None
    os.kill(process.pid, signal.SIGSTOP)
    until(lambda: is_stopped(process.pid), 10, "it is stopped")

    end_process(Process(process.pid, started - 60.0, pid_space()))
    end_process(Process(process.pid, started, "another machine"))
    assert is_alive(process.pid, started)
    end_process(Process(process.pid, started, pid_space()))
    assert process.wait(10) == -signal.SIGKILL
    assert not is_stopped(process.pid)
