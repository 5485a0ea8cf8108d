"""The gateway's web server: uvicorn on a thread and an event loop of its own, beside whatever hosts it."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading

import uvicorn
import uvloop

from orchestrator.gateway.app import Controller, Gateway

log = logging.getLogger(__name__)

BACKLOG = 2048
START_DEADLINE_S = 20.0
CHECK_DEADLINE_S = 2.0


def listen(host: str, port: int, *, shared: bool) -> socket.socket:
    """A listening socket; ``shared`` lets a second gateway of the fleet listen on the same port. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


class GatewayServer:
    """Serves one Gateway until ``stop``."""

    def __init__(self, controller: Controller, host: str, port: int) -> None:
        self._controller = controller
        self._listener = listen(host, port, shared=True)
        self._started = threading.Event()
        self._failure: BaseException | None = None
        self._server: uvicorn.Server | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="gateway", daemon=True)

    def start(self) -> None:
        """Returns when requests are answered. Raises RuntimeError when that does not come about."""
        self._thread.start()
        if not self._started.wait(START_DEADLINE_S):
            raise RuntimeError(f"the gateway did not start within {START_DEADLINE_S:.0f} s: {self._failure}")

    def check(self) -> None:
        """Raises RuntimeError when the event loop does not turn."""
        if not self._thread.is_alive() or self._loop is None:
            raise RuntimeError(f"the gateway's thread has ended: {self._failure}")
        turned = threading.Event()
        self._loop.call_soon_threadsafe(turned.set)
        if not turned.wait(CHECK_DEADLINE_S):
            raise RuntimeError(f"the gateway's event loop has not turned for {CHECK_DEADLINE_S:.0f} s")

    def stop(self) -> None:
        """Accept nothing more; the open connections may end their answers."""
        if self._server is not None:
            self._server.should_exit = True
        self._thread.join(timeout=CHECK_DEADLINE_S)

    def _run(self) -> None:
        try:
            self._loop = uvloop.new_event_loop()
            asyncio.set_event_loop(self._loop)
            self._loop.run_until_complete(self._serve())
        except BaseException as error:
            self._failure = error
            log.exception("the gateway has ended")
            raise

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        self.gateway = gateway = Gateway(self._controller)
        config = uvicorn.Config(
            gateway.app,
            http="httptools",
            lifespan="off",
            access_log=False,
            log_config=None,
            server_header=False,
            proxy_headers=False,
            date_header=False,
            backlog=BACKLOG,
            timeout_graceful_shutdown=2,
        )
        self._server = uvicorn.Server(config)
        following = loop.create_task(gateway.follow())
        loop.call_soon(self._started.set)
        try:
            await self._server.serve(sockets=[self._listener])
        finally:
            following.cancel()
