"""What a gateway on a joined cluster has received from the controller, in files of its machine.

With them a gateway that starts while the controller is away accepts the same keys, and serves as long as replicas
answer. All gateways of the machine share them. They are in a folder of the fleet's id: another fleet's are not used.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from orchestrator.access.keys import encoded
from orchestrator.gateway.controller_client import ControllerAway, ControllerClient
from orchestrator.messages.route_table import RouteTable
from workers.host import file_lock, private_file
from workers.host.task_boundary import task_boundary

log = logging.getLogger(__name__)
POLL_S = 5.0  # longest wait of one poll
RETRY_S = 0.5


class ReceivedFiles:
    """The files of one fleet on this machine. Only this user can read them. All methods block, and
    those that write raise OSError."""

    def __init__(self, folder: Path, fleet: str) -> None:
        """``fleet`` is the fleet's id."""
        self._folder = folder / fleet
        self.keys = self._folder / "keys.json"
        self._routes = self._folder / "routes"

    def write_keys(self, content: bytes) -> None:
        """Replace the key file. The controller of a new head may have none: then an existing file stays."""
        with self._locked():
            if content or not self.keys.exists():
                private_file.replace(self.keys, content or encoded((), None))

    def keep_routes(self, table: RouteTable, *, changed: bool) -> None:
        """Keep the routes that the controller has confirmed now. Those of a fleet that stops are of no use."""
        if table.stopping:
            return
        if not changed:
            with contextlib.suppress(FileNotFoundError):
                os.utime(self._routes)
                return
        with self._locked():
            private_file.replace(self._routes, msgspec.msgpack.encode(table))

    def routes(self) -> tuple[RouteTable, float] | None:
        """Returns the last routes and their age in seconds; None without any, or if they cannot be read."""
        try:
            age_s = time.time() - self._routes.stat().st_mtime
            return msgspec.msgpack.decode(self._routes.read_bytes(), type=RouteTable), max(0.0, age_s)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError) as error:
            log.error("%s cannot be read: %s", self._routes, error)
            return None

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold off the other gateways of this machine."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = file_lock.opened(self._folder / "lock")
        try:
            file_lock.lock(lock)
            yield
        finally:
            os.close(lock)


class ReceivedKeys:
    """The key file of this machine, kept like that of the controller. Used from one event loop."""

    def __init__(self, controller: ControllerClient, files: ReceivedFiles | None) -> None:
        """Without ``files``, the gateway reads the controller's own file, and nothing is received."""
        self._controller = controller
        self._files = files
        self._received = asyncio.Event()

    async def follow(self) -> None:
        """Receives each change, until cancelled. While the controller is away, the last keys stay in use."""
        if self._files is None:
            await asyncio.Event().wait()
            return
        known = ""
        while True:
            try:
                version, content = await self._controller.keys(known, POLL_S)
            except ControllerAway as error:
                log.warning("cannot get keys from the controller: %s", error)
                if self._files.keys.exists():  # of an earlier gateway of this machine
                    self._received.set()
                await asyncio.sleep(RETRY_S)
                continue
            if version != known:
                with task_boundary(log, "the received keys are not written; the previous ones stay in use"):
                    await asyncio.to_thread(self._files.write_keys, content)
                    known = version
                self._received.set()
            if version != known:
                await asyncio.sleep(RETRY_S)

    async def wait(self, within_s: float) -> None:
        """Returns when the first keys have arrived, or after ``within_s``."""
        if self._files is not None:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._received.wait(), within_s)
