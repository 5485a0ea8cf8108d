"""Runs the gateway's listener and event loop on a separate thread."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import resource
import ssl
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import uvloop

from orchestrator.access.tls import CertificateFiles
from orchestrator.gateway.app import Gateway
from orchestrator.gateway.controller_client import ControllerClient
from orchestrator.gateway.http.connection import HttpConnection
from orchestrator.gateway.http.http_server import bind
from orchestrator.gateway.openapi import GatewayRoute
from orchestrator.gateway.routes import CONTAINER_ROUTES, OWN_ROUTES
from orchestrator.gateway.settings import DRAIN_S, GatewaySettings

log = logging.getLogger(__name__)

BACKLOG = 4096
START_DEADLINE_S = 20.0
CHECK_DEADLINE_S = 2.0
STOP_GRACE_S = 2.0  # for running answers of a fleet that ends
IDLE_S = 2.0  # for the next requests on its idle connections
SWEEP_S = 0.25
HANDSHAKE_S = 10.0
SPARE_FILES = 64  # descriptors besides client connections: refused ones, links to replicas, logs, keys
SEAT_POLL_S = 0.05  # time for a spare gateway to replace a dead one
TAKEOVER_S = 4 * SEAT_POLL_S  # time for another gateway to listen before one stops
KEEP_EACH = 5  # a spare gateway checks the others at every fifth poll
FIRST_ROUTES_S = 5.0


class GatewayServer:
    """Serves one Gateway until ``stop``."""

    def __init__(
        self,
        controller: ControllerClient,
        settings: GatewaySettings,
        routes: Sequence[GatewayRoute] | None = None,
    ) -> None:
        """Raises OSError when the port cannot be bound, Failed when certificates or keys cannot be read."""
        self._settings = settings
        self._certificates = _certificates(settings)
        own = CONTAINER_ROUTES if settings.sagemaker else OWN_ROUTES
        self.gateway = Gateway(controller, settings, own if routes is None else routes)
        self._http = self.gateway.server
        self._listener = bind(settings.host, settings.port, shared=True)
        self._started = threading.Event()
        self._stopping: asyncio.Event | None = None
        self._failure: BaseException | None = None
        self._server: asyncio.AbstractServer | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="gateway", daemon=True)

    def start(self) -> None:
        """Returns when requests are answered. Raises RuntimeError when that takes too long."""
        self._thread.start()
        if not self._started.wait(START_DEADLINE_S):
            raise RuntimeError(f"the gateway did not start within {START_DEADLINE_S:.0f} s: {self._failure}")

    def check(self) -> None:
        """Raises RuntimeError when the event loop is blocked or has ended."""
        if not self._thread.is_alive() or self._loop is None:
            raise RuntimeError(f"the gateway's thread has ended: {self._failure}")
        turned = threading.Event()
        self._loop.call_soon_threadsafe(turned.set)
        if not turned.wait(CHECK_DEADLINE_S):
            raise RuntimeError(f"the gateway's event loop has been blocked for {CHECK_DEADLINE_S:.0f} s")

    def stop(self) -> None:
        """Stops accepting connections, and gives running answers ``DRAIN_S``, or ``STOP_GRACE_S`` if the fleet ends."""
        if self._loop is not None and self._stopping is not None:
            with contextlib.suppress(RuntimeError):  # it has ended by itself
                self._loop.call_soon_threadsafe(self._stopping.set)
        if self._thread.ident is not None:
            self._thread.join(timeout=DRAIN_S + STOP_GRACE_S + CHECK_DEADLINE_S)

    def _run(self) -> None:
        try:
            self._loop = uvloop.new_event_loop()
            asyncio.set_event_loop(self._loop)
            self._loop.run_until_complete(self._serve())
        except BaseException as error:
            self._failure = error
            log.exception("the gateway failed")
            raise
        finally:
            self._listener.close()
            if self._loop is not None:
                self._loop.close()

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        self._http.max_connections = _affordable(self._settings.max_connections)
        self._stopping = asyncio.Event()
        works = (
            self.gateway.served.follow(),
            self.gateway.keys.follow(),
            self.gateway.report(),
            self._listen_and_sweep(),
        )
        tasks = [loop.create_task(work) for work in works]
        stopping = loop.create_task(self._stopping.wait())
        try:
            await asyncio.wait([*tasks, stopping], return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()  # raises its error
            await self._hand_over(tasks[-1])
            await self._end()
        finally:
            stopping.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, stopping, return_exceptions=True)

    async def _listen_and_sweep(self) -> None:
        """Accepts connections, and a few times a second checks deadlines, keys and certificates.

        Waits for the first routes, for up to ``FIRST_ROUTES_S``: another gateway may have the same port, and can answer
        what this one would have to reject."""
        await asyncio.gather(
            self.gateway.served.wait_for_routes(FIRST_ROUTES_S), self.gateway.keys.wait(FIRST_ROUTES_S)
        )
        for turn in itertools.count():
            if await self.gateway.join():
                break
            self._started.set()  # the spare: ready, but it does not listen yet
            if turn % KEEP_EACH == 0:
                await self.gateway.beat()
            await asyncio.sleep(SEAT_POLL_S)
        self.gateway.gate.refresh()
        if self._certificates is not None:
            self._certificates.renewed()
        self._server = await self._accept(None if self._certificates is None else self._certificates.context)
        self._started.set()
        try:
            while True:
                await asyncio.sleep(SWEEP_S)
                await self.gateway.beat()
                if self.gateway.settled:
                    self._http.sweep(time.monotonic())
                self.gateway.gate.refresh()
                renewed = None if self._certificates is None else self._certificates.renewed()
                if renewed is not None:  # both listen for a moment, so that no connection is lost
                    before, self._server = self._server, await self._accept(renewed)
                    before.close()
        finally:
            self._server.close()

    async def _accept(self, context: ssl.SSLContext | None) -> asyncio.AbstractServer:
        """Accepts connections on a copy of the listener, since closing a server closes its socket."""
        if self._certificates is not None:
            self.gateway.certificate_expires = self._certificates.expires
        self.gateway.listens = True
        return await asyncio.get_running_loop().create_server(
            lambda: HttpConnection(self._http),
            sock=self._listener.dup(),
            backlog=BACKLOG,
            ssl=context,
            ssl_handshake_timeout=None if context is None else HANDSHAKE_S,
        )

    async def _hand_over(self, listening: asyncio.Task[None]) -> None:
        """Frees the place of this gateway, and then its port, so that its successor listens first. A spare gateway has
        none, and must not take one."""
        is_replaced = self._server is not None and not self.gateway.served.is_stopping
        if not is_replaced:
            listening.cancel()
        await self.gateway.leave()
        if is_replaced:
            await asyncio.sleep(TAKEOVER_S)
        listening.cancel()
        if self._server is not None:
            self._server.close()
        self._listener.close()
        self.gateway.listens = False

    async def _end(self) -> None:
        if not self.gateway.served.is_stopping:
            await self._retire()
        self._http.close()
        deadline = time.monotonic() + STOP_GRACE_S
        while self._http.connections and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        self._http.abort()
        await self.gateway.stop()

    async def _retire(self) -> None:
        """Waits until no client has sent a request for ``IDLE_S``, for up to ``DRAIN_S``."""
        self._http.retire()
        busy_at, deadline = time.monotonic(), time.monotonic() + DRAIN_S
        while self._http.connections and time.monotonic() < min(busy_at + IDLE_S, deadline):
            await asyncio.sleep(0.02)
            if not self._http.is_idle:
                busy_at = time.monotonic()


def _certificates(settings: GatewaySettings) -> CertificateFiles | None:
    if settings.tls_cert is None or settings.tls_key is None:
        return None
    return CertificateFiles(settings.tls_cert, settings.tls_key, settings.tls_client_ca)


def _affordable(connections: int) -> int:
    """Raises the limit of open files, and returns how many of ``connections`` it allows.

    Each connection is a file descriptor, and many systems start with a limit of 1024. Without free descriptors the
    gateway could not reconnect to a replica or read a changed key file, so surplus clients are rejected before that.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and (hard == resource.RLIM_INFINITY or soft < hard):
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return connections
    available = max(1, limit - sum(1 for _ in Path("/proc/self/fd").iterdir()) - SPARE_FILES)
    if available < connections:
        log.warning("open files are limited to %d (ulimit -Hn): at most %d connections are accepted", limit, available)
    return min(connections, available)
