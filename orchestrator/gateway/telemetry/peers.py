"""Connects the gateways that share one port: a scrape reaches one gateway and must report all of them.

Each gateway takes a number and listens on a unix socket of that name. A client of the socket gets the gateway's metric
families, and nothing else. The number outlives its process: a restarted gateway continues the series of the dead one
from zero, which Prometheus handles as a counter reset.

A hung gateway keeps its number, and the kernel keeps giving it connections. So each gateway writes a heartbeat into its
lock file; all of them, the spare included, watch the others, and the first to find a heartbeat overdue kills that
gateway.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from orchestrator.gateway.telemetry.exposition import merge, page
from orchestrator.process.awake_clock import AwakeClock
from workers.host import file_lock, host_facts
from workers.messages.metric_family import MetricFamily

HUNG_S = 3.0  # without a heartbeat: the process is stopped or blocked
BUSY_S = 10.0  # the same for a process that computes, or waits for a processor or a disk
_LAYOUT = struct.Struct("<qdq")
log = logging.getLogger(__name__)
CONTROLLER_AGE = "corewright_controller_age_seconds"
ANSWER_S = 0.5  # deadline for the families of another gateway; after it, the gateway is left out


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


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[MetricFamily])


class Peers:
    """One gateway among those of its fleet."""

    def __init__(
        self,
        folder: Path,
        families: Callable[[], Sequence[MetricFamily]],
        gateways: int,
        seats: Path | None = None,
        clock: AwakeClock | None = None,
    ) -> None:
        """``families`` returns this gateway's own. ``gateways`` is how many the fleet has. ``seats`` is the folder of
        the locks, ``folder`` by default."""
        self._gateways = gateways
        self._folder = folder
        self._seats = seats or folder
        self._clock = clock or AwakeClock()
        self._gateway_watch = GatewayWatch()
        self._beat = GatewayBeat(os.getpid(), host_facts.process_start(os.getpid()) or 0.0, 0)
        self._families = families
        self._lock: int | None = None
        self._server: asyncio.AbstractServer | None = None
        self.name = ""

    async def join(self) -> bool:
        """Takes the lowest free number and listens; returns False when all are taken. A gateway's number is free as
        soon as its process ends, however it ends. Raises OSError when the folder cannot be written."""
        self._seats.mkdir(parents=True, exist_ok=True, mode=0o700)
        number = 0
        while (lock := file_lock.take(self._seats / f"{number}.lock")) is None:
            number += 1
            if number == self._gateways:
                return False
        self._lock, self.name = lock, str(number)
        await self._listen()
        return True

    async def _listen(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = self._folder / self.name
        path.unlink(missing_ok=True)  # left by a dead gateway
        before = self._server
        self._server = await asyncio.start_unix_server(self._answer, str(path))
        if before is not None:
            before.close()

    async def beat(self) -> None:
        """Writes the heartbeat, listens again if the socket's path is gone, and kills hung gateways. To be called
        several times a second, by the spare gateway too. Raises OSError."""
        if self._lock is not None:
            self._beat = self._beat._replace(turn=self._beat.turn + 1)
            os.pwrite(self._lock, self._beat.packed(), 0)
            if not (self._folder / self.name).exists():
                await self._listen()
        self._watch()

    def _watch(self) -> None:
        now = self._clock()
        beats = {path.stem: beat for path in self._seats.glob("*.lock") if (beat := GatewayBeat.read(path)) is not None}
        beats = {seat: beat for seat, beat in beats.items() if beat.pid != self._beat.pid}
        for seat, silent_s in self._gateway_watch.overdue(now, self._clock.resumed_at(), beats).items():
            beat = beats[seat]
            if silent_s > HUNG_S and (silent_s > BUSY_S or not is_busy(beat.pid)):
                with contextlib.suppress(ProcessLookupError):
                    process = os.pidfd_open(beat.pid)  # so that no other process can get the pid meanwhile
                    try:
                        if host_facts.is_alive(beat.pid, beat.started):
                            signal.pidfd_send_signal(process, signal.SIGKILL)
                            log.error("gateway %s (pid %d) hung for %.1f s and was killed", seat, beat.pid, silent_s)
                    finally:
                        os.close(process)

    async def page(self, families: Sequence[MetricFamily], openmetrics: bool) -> tuple[bytes, str]:
        """Returns the `/metrics` page of all gateways and its content type; ``families`` are the controller's.

        In a fleet with several gateways the series have a gateway label. It does not depend on how many are alive: if
        the label went with a gateway's death, all series of the others would end."""
        own = self._families()
        pages = await self.fetch() if self._gateways > 1 else {}

        def make() -> tuple[bytes, str]:
            if self._gateways == 1:
                return page([*own, *families], openmetrics)
            # only the scraped gateway has just asked the controller: the age of the others' copies means nothing
            others = {
                name: [family for family in answer if family.name != CONTROLLER_AGE] for name, answer in pages.items()
            }
            return page([*merge({**others, self.name: own}), *families], openmetrics)

        return await asyncio.to_thread(make)  # it takes milliseconds

    async def fetch(self) -> dict[str, Sequence[MetricFamily]]:
        """Returns the families of the other gateways that answer in time, by name."""
        paths = [path for path in self._folder.glob("[0-9]*") if path.name.isdigit() and path.name != self.name]
        pages = await asyncio.gather(*(_fetch(path) for path in paths))
        return {path.name: families for path, families in zip(paths, pages, strict=True) if families is not None}

    async def leave(self) -> None:
        """Stops listening and frees the number."""
        if self._server is not None:
            self._server.close()
            self._server = None
        if self._lock is not None:
            (self._folder / self.name).unlink(missing_ok=True)
            os.ftruncate(self._lock, 0)  # no heartbeat: this process may take a while to end, and must not be killed
            os.close(self._lock)
            self._lock = None

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            writer.write(_encoder.encode(list(self._families())))
            await asyncio.wait_for(writer.drain(), ANSWER_S)
        except (OSError, asyncio.TimeoutError):
            log.debug("another gateway did not read this one's metrics", exc_info=True)
        finally:
            writer.close()


async def _fetch(path: Path) -> list[MetricFamily] | None:
    writer: asyncio.StreamWriter | None = None
    try:
        reader, writer = await asyncio.wait_for(asyncio.open_unix_connection(str(path)), ANSWER_S)
        return _decoder.decode(await asyncio.wait_for(reader.read(), ANSWER_S))
    except (OSError, asyncio.TimeoutError, msgspec.MsgspecError):
        return None
    finally:
        if writer is not None:
            writer.close()
