"""Detects hung gateways among those that share a port, from the heartbeats in their lock files."""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

HUNG_S = 3.0  # without a heartbeat: the process is stopped or blocked
BUSY_S = 10.0  # the same for a process that computes, or waits for a processor or a disk
_LAYOUT = struct.Struct("<qdq")


class GatewayBeat(NamedTuple):
    """The heartbeat that a gateway writes several times a second."""

    pid: int
    started: float  # start of its process, by `host_facts.process_start`
    turn: int

    def packed(self) -> bytes:
        return _LAYOUT.pack(*self)

    @classmethod
    def read(cls, seat: Path) -> GatewayBeat | None:
        """Returns the last heartbeat in the lock file ``seat``; None when there is none."""
        try:
            return cls(*_LAYOUT.unpack(seat.read_bytes()))
        except (OSError, struct.error):
            return None


class GatewayWatch:
    """Tracks the heartbeats of the other gateways. Pure: the times are arguments."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[GatewayBeat, float]] = {}  # by seat: the last heartbeat, and when it was first seen

    def overdue(self, now: float, resumed: float, beats: Mapping[str, GatewayBeat]) -> Mapping[str, float]:
        """Returns the seconds without a heartbeat, by seat. ``now`` is the watcher's clock without pauses, ``resumed``
        the end of its last pause: gateways that were paused with the watcher get the full time from then on."""
        self._seen = {
            seat: last
            if (last := self._seen.get(seat)) is not None and last[0] == beat and last[1] >= resumed
            else (beat, now)
            for seat, beat in beats.items()
        }
        return {seat: now - since for seat, (_, since) in self._seen.items()}


def is_busy(pid: int) -> bool:
    """Returns whether a thread of the process runs, or waits for a processor or a disk."""
    try:
        stats = [Path(task.path, "stat").read_text() for task in os.scandir(f"/proc/{pid}/task")]
    except OSError:  # a thread has just ended; the next check decides
        return True
    return any(stat.rpartition(")")[2].split()[0] in "RD" for stat in stats)
