"""The gateways that share one port, as they find each other: a scrape reaches one of them and must tell of all.

Each takes a number and listens on a unix socket of that name. Whoever connects gets the gateway's families, and that
is all that is ever said there. The number outlives the process that has it: a gateway that is started again takes up
the series of the one that died, from zero, which Prometheus takes for the reset that it is.

A gateway that hangs keeps its number, and the kernel goes on giving it connections. So each writes a beat into the file
that it has locked, all of them, the spare one too, watch the others' beats, and the first to miss one kills it.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from orchestrator.gateway.telemetry.gateway_watch import BUSY_S, HUNG_S, GatewayBeat, GatewayWatch, is_busy
from orchestrator.process.awake_clock import AwakeClock
from workers.host import host_facts
from workers.messages.metric_family import MetricFamily

log = logging.getLogger(__name__)

ANSWER_S = 0.5  # for another gateway to tell; one that is hung or dying is left out
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[MetricFamily])


class Peers:
    """One gateway among those of its fleet."""

    def __init__(
        self,
        folder: Path,
        families: Callable[[], Sequence[MetricFamily]],
        gateways: int | None = None,
        seats: Path | None = None,
        clock: AwakeClock | None = None,
    ) -> None:
        """``families`` are this gateway's own, asked for whenever another gateway is scraped; ``gateways`` is how many
        the fleet has. Without it: as many as have ever taken a number in this folder. ``seats`` is the folder of the
        locks, where it is another one than that of the sockets."""
        self._gateways = gateways
        self._folder = folder
        self._seats = seats or folder
        self._clock = clock or AwakeClock()
        self._vigil = GatewayWatch()
        self._beat = GatewayBeat(os.getpid(), host_facts.process_start(os.getpid()) or 0.0, 0)
        self._families = families
        self._lock: int | None = None
        self._server: asyncio.AbstractServer | None = None
        self.name = ""

    async def join(self) -> bool:
        """Take the lowest free number and listen; False when the fleet's gateways have them all. One that dies, in
        whatever way, gives its number back at once. Raises OSError when the folder cannot be written."""
        self._seats.mkdir(parents=True, exist_ok=True, mode=0o700)
        number = 0
        while (lock := _locked(self._seats / f"{number}.lock")) is None:
            number += 1
            if number == self._gateways:
                return False
        self._lock, self.name = lock, str(number)
        await self._listen()
        return True

    async def _listen(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = self._folder / self.name
        path.unlink(missing_ok=True)  # of the one that died
        before = self._server
        self._server = await asyncio.start_unix_server(self._answer, str(path))
        if before is not None:
            before.close()

    async def keep(self) -> None:
        """To be called several times a second, by a spare gateway too: beats, listens again where the socket's path is
        gone, and kills what hangs. Raises OSError."""
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
        for seat, silent_s in self._vigil.overdue(now, self._clock.resumed_at(), beats).items():
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

    @property
    def shared(self) -> bool:
        """Whether the fleet has several gateways, so that series must say which of them they are of. Not whether they
        live: a label that goes with a gateway's death would end all series of the others."""
        return (self._gateways or len(list(self._seats.glob("*.lock")))) > 1

    async def ask(self) -> dict[str, Sequence[MetricFamily]]:
        """The families of all others that answer in time, by their names."""
        others = [path for path in self._folder.glob("[0-9]*") if path.name.isdigit() and path.name != self.name]
        told = await asyncio.gather(*(_ask(path) for path in others))
        return {path.name: families for path, families in zip(others, told, strict=True) if families is not None}

    async def leave(self) -> None:
        """Stop listening and give the number back."""
        if self._server is not None:
            self._server.close()
            self._server = None
        if self._lock is not None:
            (self._folder / self.name).unlink(missing_ok=True)
            os.ftruncate(self._lock, 0)  # without a beat: this process may take its time to end
            os.close(self._lock)
            self._lock = None

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            writer.write(_encoder.encode(list(self._families())))
            await asyncio.wait_for(writer.drain(), ANSWER_S)
        except (OSError, asyncio.TimeoutError):
            log.debug("another gateway did not take what this one counts", exc_info=True)
        finally:
            writer.close()


async def _ask(path: Path) -> list[MetricFamily] | None:
    writer: asyncio.StreamWriter | None = None
    try:
        reader, writer = await asyncio.wait_for(asyncio.open_unix_connection(str(path)), ANSWER_S)
        return _decoder.decode(await asyncio.wait_for(reader.read(), ANSWER_S))
    except (OSError, asyncio.TimeoutError, msgspec.MsgspecError):
        return None
    finally:
        if writer is not None:
            writer.close()


def _locked(path: Path) -> int | None:
    """The descriptor of a lock that ends with this process; None when another holds it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            return None
        raise
    return descriptor
