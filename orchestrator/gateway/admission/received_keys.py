"""Receives the API keys from the controller, for a gateway that does not share the controller's home."""

from __future__ import annotations

import asyncio
import contextlib
import logging

from orchestrator.gateway.controller_client import ControllerAway, ControllerClient
from orchestrator.gateway.received_files import ReceivedFiles
from workers.host.task_boundary import task_boundary

log = logging.getLogger(__name__)

POLL_S = 5.0  # longest wait of one poll
RETRY_S = 0.5


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
