"""A gateway that hangs is killed by the others within seconds, and a healthy one never is, whatever pauses come."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.gateway.telemetry import peers as peers_of
from orchestrator.gateway.telemetry.peers import HUNG_S, GatewayBeat, GatewayWatch, Peers, is_busy
from orchestrator.process.awake_clock import BEAT_S, LATE_S, AwakeClock

GATEWAY = """
import asyncio, sys, time
from pathlib import Path
from orchestrator.gateway.telemetry.peers import Peers

async def live():
    peers = Peers(Path(sys.argv[1]), list, 1)
    assert await peers.join()
    print("joined", flush=True)
    while True:
        await peers.beat()
        await asyncio.sleep(0.02)
        if Path(sys.argv[1], "spin").exists():
            deadline = time.monotonic() + 1.5
            while time.monotonic() < deadline:
                pass
            Path(sys.argv[1], "spin").unlink()

asyncio.run(live())
"""


class Raw:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@given(
    story=st.lists(st.tuples(st.integers(1, 30), st.floats(LATE_S + 0.01, 1e5), st.booleans()), max_size=5),
    hangs=st.booleans(),
)
def test_only_a_hanging_gateway_is_overdue(story: list[tuple[int, float, bool]], hangs: bool) -> None:
    """Between pauses of all, or of the watcher alone, one keeps beating. Another one has stopped: it is detected in
    time.
    """
    raw = Raw()
    clock, vigil, turn, longest = AwakeClock(raw), GatewayWatch(), 0, 0.0
    hung = GatewayBeat(2, 0.0, 7)
    for turns, paused, alone in [*story, (40, 0.0, False)]:
        silent: Mapping[str, float] = {}
        for _ in range(turns):
            raw.now += BEAT_S
            turn += 1
            beats = {"0": GatewayBeat(1, 0.0, turn)} | ({"1": hung} if hangs else {})
            silent = vigil.overdue(clock(), clock.resumed_at(), beats)
            longest = max(longest, silent["0"])
        raw.now += paused
        turn += alone  # the watched one goes on meanwhile
        if turns * BEAT_S > HUNG_S + 2 * BEAT_S and hangs:
            assert silent["1"] > HUNG_S
    assert longest <= BEAT_S


def test_a_watched_gateway_is_not_overdue_in_the_first_seconds_after_a_pause_of_all() -> None:
    """It may be scheduled later than the watcher."""
    vigil, beat = GatewayWatch(), {"0": GatewayBeat(1, 0.0, 1)}
    assert vigil.overdue(100.0, float("-inf"), beat)["0"] == 0.0
    assert vigil.overdue(102.9, float("-inf"), beat)["0"] == pytest.approx(2.9)
    assert vigil.overdue(103.1, 103.0, beat)["0"] == 0.0
    assert vigil.overdue(106.0, 103.0, beat)["0"] == pytest.approx(2.9)


@pytest.fixture
def other(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([sys.executable, "-c", GATEWAY, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "joined\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


async def watch(spare: Peers, process: subprocess.Popen[str], seconds: float) -> float | None:
    """Until the process has ended: after how many seconds. None: it lives."""
    began = time.monotonic()
    while (passed := time.monotonic() - began) < seconds:
        await spare.beat()
        if process.poll() is not None:
            return passed
        await asyncio.sleep(0.02)
    return None


async def test_a_stopped_gateway_is_killed_and_replaced_by_the_spare(
    tmp_path: Path, other: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGSTOP: the kernel would keep accepting connections for it."""
    monkeypatch.setattr(peers_of, "HUNG_S", 0.3)
    spare = Peers(tmp_path, list, 1)
    assert not await spare.join()
    assert await watch(spare, other, 0.6) is None  # it beats

    other.send_signal(signal.SIGSTOP)
    assert await watch(spare, other, 10.0) is not None
    assert other.wait() == -signal.SIGKILL
    assert await spare.join()
    await spare.leave()


async def test_a_gateway_that_computes_for_a_while_is_not_killed(
    tmp_path: Path, other: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its loop is blocked, but its process is not: a long prompt, or a busy machine."""
    monkeypatch.setattr(peers_of, "HUNG_S", 0.2)
    spare = Peers(tmp_path, list, 1)
    (tmp_path / "spin").touch()
    busy = False
    while (tmp_path / "spin").exists():
        await spare.beat()
        busy = busy or is_busy(other.pid)
        await asyncio.sleep(0.02)
    assert busy
    assert await watch(spare, other, 0.3) is None


async def test_the_gateways_find_each_other_after_their_sockets_were_removed(tmp_path: Path) -> None:
    """Their locks are elsewhere, so no second one takes a seat in use."""
    sockets, seats = tmp_path / "s", tmp_path / "seats"
    first, second = Peers(sockets, list, 1, seats), Peers(sockets, list, 1, seats)
    assert await first.join()
    for path in sockets.iterdir():
        path.unlink()
    sockets.rmdir()
    assert not await second.join()
    assert await second.fetch() == {}
    await first.beat()
    assert await second.fetch() == {"0": []}
    await first.leave()


async def test_a_gateway_that_has_left_is_not_watched(tmp_path: Path) -> None:
    """It may still flush its traces for longer than a gateway hangs."""
    peers = Peers(tmp_path, list, 1)
    assert await peers.join()
    await peers.beat()
    assert GatewayBeat.read(tmp_path / "0.lock") is not None
    await peers.leave()
    assert GatewayBeat.read(tmp_path / "0.lock") is None
