"""Which of the gateways that share a port hang, from the beats that each of them writes into its seat."""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

HUNG_S = 3.0  # without a beat: its process is stopped, or waits for something that never comes
BUSY_S = 10.0  # the same while it computes, or waits for a processor or a disk
_LAYOUT = struct.Struct("<qdq")


class GatewayBeat(NamedTuple):
    """What a gateway writes several times a second."""

    pid: int
    started: float  # of its process, by `lifetime.process_start`
    turn: int

    def packed(self) -> bytes:
        return _LAYOUT.pack(*self)

    @classmethod
    def read(cls, seat: Path) -> GatewayBeat | None:
        """The last beat in that file; None when there is none."""
        try:
            return cls(*_LAYOUT.unpack(seat.read_bytes()))
        except (OSError, struct.error):
            return None


class GatewayWatch:
    """One watcher of the seats. Pure: the times are arguments."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[GatewayBeat, float]] = {}  # by seat, the last beat, and when it was seen first

    def overdue(self, now: float, resumed: float, beats: Mapping[str, GatewayBeat]) -> Mapping[str, float]:
        """By seat, the seconds without a beat. ``now`` is the watcher's own clock without pauses, and ``resumed`` when
        its last pause ended: what was stopped with the watcher has from then on the time to beat again."""
        self._seen = {
            seat: known
            if (known := self._seen.get(seat)) is not None and known[0] == beat and known[1] >= resumed
            else (beat, now)
            for seat, beat in beats.items()
        }
        return {seat: now - since for seat, (_, since) in self._seen.items()}


def is_busy(pid: int) -> bool:
    """Whether a thread of the process runs, or waits for a processor or a disk."""
    try:
        stats = [Path(task.path, "stat").read_text() for task in os.scandir(f"/proc/{pid}/task")]
    except OSError:  # a thread has just ended: then another one will be looked at the next time
        return True
    return any(stat.rpartition(")")[2].split()[0] in "RD" for stat in stats)
