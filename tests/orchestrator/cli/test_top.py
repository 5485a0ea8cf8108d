"""`corewright top`: the live state of a fleet, on terminals of any size."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from msgspec import convert
from msgspec.structs import replace

from orchestrator.cli.top import cells, host_line, letters, screen
from orchestrator.messages.fleet_status import EventRow, HostInFleet
from tests.orchestrator.fakefleet import EVENTS, STATUS, TOKEN, LiveAdmin, status_of

HOST = convert(STATUS["hosts"][0], HostInFleet)
READY = {"chat/0"}
DEADLINE_S = 30.0


def test_a_core_shows_its_model_or_why_it_has_none() -> None:
    """Capitals are ready replicas; a lease hides every other sign."""
    drawn = "".join(cells(replace(HOST, reserved_cores=["16-17"]), READY, letters(["chat", "small"])))

    assert drawn == "AAAAAAAA" + "aaaaaaaa" + "##" + ".." + "///" + "!"


def test_a_host_without_devices_has_no_cells() -> None:
    """Also while it is cordoned."""
    assert cells(replace(HOST, cores=0, leases=[], quarantine=[], cordoned="all"), {}, {}) == []


@pytest.mark.parametrize(("width", "groups"), [(80, 12), (35, 1)])
def test_devices_are_apart_where_there_is_room(width: int, groups: int) -> None:
    line = host_line(HOST, cells(HOST, READY, {"chat": "A"}), width, color=False)

    assert len(line.split()) == groups


@pytest.mark.parametrize("hosts", [1, 100])
@pytest.mark.parametrize("height", [20, 24, 50])
def test_the_screen_fits_the_terminal(hosts: int, height: int) -> None:
    """Hosts that do not fit are counted."""
    machines = [replace(HOST, name=f"inf2.48xlarge/{i}") for i in range(hosts)]
    status = replace(status_of(STATUS), hosts=machines)
    events = convert(EVENTS, list[EventRow])
    lines = screen(status, {}, events, 80, height, color=False).splitlines()

    drawn = sum(line.startswith("inf2.48xlarge/") for line in lines)
    assert len(lines) <= height
    others = [int(match[1]) for line in lines if (match := re.match(r"and (\d+) more hosts", line))]
    assert drawn + sum(others) == hosts


def test_a_terminal_shows_the_fleet_until_ctrl_c(admin: LiveAdmin, tmp_path: Path) -> None:
    """On the alternate screen, which ends with it; a change is shown without a key."""
    screen_end, terminal = pty.openpty()
    environment = {**os.environ, "COREWRIGHT_URL": admin.url, "COREWRIGHT_TOKEN": TOKEN, "TERM": "xterm-256color"}
    environment |= {"COREWRIGHT_HOME": str(tmp_path), "COLUMNS": "100", "LINES": "30"}
    command = [sys.executable, "-m", "orchestrator.cli.main", "top", "--interval", "0.2"]
    process = subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal, env=environment)
    os.close(terminal)
    try:
        first = read_until(screen_end, "AA")
        admin.fleet.told_status["models"][0]["state"] = "failed"
        read_until(screen_end, "\x1b[31mfailed")
        process.send_signal(signal.SIGINT)
        rest = read_until(screen_end, "\x1b[?1049l")
        assert process.wait(DEADLINE_S) == 0
    finally:
        process.kill()
        process.wait()
        os.close(screen_end)
    assert "\x1b[?1049h" in first
    assert "Traceback" not in rest


def read_until(screen_end: int, text: str) -> str:
    """Returns what the terminal has received up to ``text``."""
    received, deadline = "", time.monotonic() + DEADLINE_S
    readable = select.poll()  # unlike select.select, also of descriptors above 1023
    readable.register(screen_end, select.POLLIN)
    while text not in received:
        left_s = deadline - time.monotonic()
        assert left_s > 0, f"no {text!r} in {received[-500:]!r}"
        if readable.poll(left_s * 1000):
            received += os.read(screen_end, 65536).decode(errors="replace")
    return received
