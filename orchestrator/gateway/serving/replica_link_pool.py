"""Keeps a link open to each replica of one model, and reopens lost links."""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeVar
from urllib.parse import urlsplit

import msgspec.structs

from orchestrator.gateway.openai.request_builder import RequestLimits
from orchestrator.gateway.serving.replica_link import Arrived, LinkOwner, ReplicaLink
from orchestrator.messages.route_table import ModelRoutes, Route
from workers.messages.credentials import REPLICA, Credentials, client_context
from workers.messages.wire import GATEWAY_S, Hello, watch_link
from workers.serving.dataplane import HANDSHAKE_S, TLS_SCHEME

P = TypeVar("P", bound=asyncio.Protocol)
log = logging.getLogger(__name__)
CONNECT_DEADLINE_S = 5.0
RECONNECT_S = 0.1  # before the first retry; it doubles
MAX_RECONNECT_S = 2.0
UNREACHABLE_S = 3.0  # without a link for longer than a start, a stop or a retry takes


async def open_link(
    loop: asyncio.AbstractEventLoop, factory: Callable[[], P], address: str, credentials: Credentials | None
) -> tuple[asyncio.Transport, P]:
    """Connects ``factory()`` to the replica at ``address``: the path of a unix socket, or `tls://host:port`.

    Raises OSError when nothing listens there, and when the peer is not a replica of the fleet of ``credentials``.
    """
    if not address.startswith(f"{TLS_SCHEME}://"):
        transport, protocol = await loop.create_unix_connection(factory, address)
        return transport, protocol
    if credentials is None:
        raise ConnectionError(f"{address} requires credentials, but this gateway has none")
    parts = urlsplit(address)
    assert parts.hostname is not None
    assert parts.port is not None
    try:
        transport, protocol = await loop.create_connection(
            factory,
            parts.hostname,
            parts.port,
            ssl=client_context(credentials),
            server_hostname=REPLICA,
            ssl_handshake_timeout=HANDSHAKE_S,
        )
    except ssl.CertificateError as error:
        raise ConnectionError(f"{address} is not a replica of this fleet: {error.verify_message}") from None
    except ssl.SSLError as error:
        raise ConnectionError(f"the TLS handshake with {address} failed: {error.reason or error}") from None
    watch_link(transport.get_extra_info("socket"), GATEWAY_S)
    return transport, protocol


@dataclass(frozen=True)
class LinkSettings:
    """What a gateway needs to connect to replicas."""

    gateway: str  # its id
    token: str  # of the fleet
    machine: str = ""  # that of the gateway, by its address
    credentials: Credentials | None = None  # for replicas on other machines


class LinksOwner(LinkOwner, Protocol):
    """The queue whose requests all replicas of a model serve."""

    def unreachable(self) -> None:
        """Called again and again while no replica can be reached."""
        ...

    def unusable(self) -> None:
        """Called when a replica refuses this gateway and no other replica serves it."""
        ...


class ReplicaLinks:
    """The open links, in the order in which they were opened, those to replicas of this machine first: of equally good
    ones the first is chosen. Owned by the gateway's event loop."""

    def __init__(self, routes: ModelRoutes, settings: LinkSettings, owner: LinksOwner) -> None:
        self._routes = routes
        self._settings = settings
        self._owner = owner
        self._links: dict[Route, ReplicaLink] = {}
        self._keeping: dict[Route, asyncio.Task[None]] = {}
        self._refused: set[Route] = set()  # replicas that refused this gateway, or have another version
        self._last: dict[Route, float] = {}  # when the route's last link ended, or the route was added (monotonic)
        self.recount()

    def __iter__(self) -> Iterator[ReplicaLink]:
        return iter(self._links.values())

    @property
    def live(self) -> int:
        return sum(link.live for link in self)

    @property
    def reachable(self) -> bool:
        """Returns whether the routes have replicas that are connected, or may be in a moment."""
        return len(self._routes.replicas) > len(self.unreachable(time.monotonic()))

    @property
    def usable(self) -> bool:
        """True when some replica has not refused this gateway."""
        return len(self._routes.replicas) > len(self._refused)

    def unreachable(self, now: float) -> list[Route]:
        """Returns the replicas in the routes without a link for ``UNREACHABLE_S``."""
        return [
            route
            for route, since in self._last.items()
            if now - since >= UNREACHABLE_S and ((link := self._links.get(route)) is None or link.welcome is None)
        ]

    def cut_off(self, now: float) -> bool:
        """Returns whether the routes have replicas, all on this machine and unreachable. The loss of another machine is
        no reason to stop serving other models here."""
        replicas = self._routes.replicas
        near = all(route.is_on(self._settings.machine) for route in replicas)
        return bool(replicas) and near and len(self.unreachable(now)) == len(replicas)

    def update(self, routes: ModelRoutes) -> None:
        """Opens links to new replicas, retires those of removed ones, and closes those of former epochs."""
        self._routes = routes
        self.recount()
        self._refused &= set(routes.replicas)
        now = time.monotonic()
        self._last = {route: self._last.get(route, now) for route in routes.replicas}
        epochs = {route.id: route.epoch for route in routes.replicas}
        for route, link in list(self._links.items()):
            if route in routes.replicas:
                link.resume()
            elif epochs.get(route.id, 0) > route.epoch:  # replaced: on a frozen host it would never end its requests
                link.close()
            else:
                link.retire()
        for route in routes.replicas:
            self._keep_link(route)

    def recount(self) -> None:
        """Sums up what the connected replicas have reported."""
        welcomes = [link.welcome for link in self if link.welcome is not None]
        self.slots = sum(welcome.slots for welcome in welcomes)
        # tokens per block of the engines' prefix cache; 0 without one
        self.prefix_block = max((welcome.prefix_block for welcome in welcomes), default=0)
        self.width = max((welcome.width for welcome in welcomes), default=0)  # of vectors; 0 while it is unknown
        max_len = self._routes.max_len
        max_prompt = max((welcome.max_prompt for welcome in welcomes), default=max_len)
        self.limits = RequestLimits(max_len, max_prompt, welcomes[0].vocab_size if welcomes else None)

    def lost(self, link: ReplicaLink) -> None:
        """Removes a link whose connection has ended."""
        self._links.pop(link.route, None)
        if link.welcome is not None and link.route in self._last:
            self._last[link.route] = time.monotonic()
        self.recount()

    async def stop(self) -> None:
        """Closes all links; to be called when the gateway stops."""
        self._routes = msgspec.structs.replace(self._routes, replicas=[])
        pending = set(self._keeping.values())
        while pending:  # more than once: up to Python 3.11 wait_for may swallow a cancellation
            for task in pending:
                task.cancel()
            _, pending = await asyncio.wait(pending, timeout=0.1)
        for link in list(self):
            link.close()

    def new_link(self, route: Route) -> ReplicaLink:
        """Returns a link that is not connected yet."""
        return ReplicaLink(route, Hello(self._settings.gateway, self._settings.token, route.epoch), self._owner)

    def _keep_link(self, route: Route) -> None:
        if route in self._routes.replicas and route not in self._keeping and route not in self._refused:
            task = asyncio.get_running_loop().create_task(self._keep(route))
            self._keeping[route] = task
            task.add_done_callback(lambda task: self._keep_ended(route, task))

    def _keep_ended(self, route: Route, task: asyncio.Task[None]) -> None:
        """Starts a new task if the route came back after the task saw it leave, or if the task failed."""
        del self._keeping[route]
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            self._keep_link(route)
        else:
            log.error("the task of the link to %s failed", route.id, exc_info=error)
            asyncio.get_running_loop().call_later(RECONNECT_S, self._keep_link, route)

    async def _keep(self, route: Route) -> None:
        """Keeps a link to the replica while it is in the routes: a lost link does not mean a lost replica."""
        loop, settings, pause_s = asyncio.get_running_loop(), self._settings, RECONNECT_S
        address = route.address(settings.machine)
        while route in self._routes.replicas:
            try:
                connecting = open_link(loop, lambda: self.new_link(route), address, settings.credentials)
                _, link = await asyncio.wait_for(connecting, CONNECT_DEADLINE_S)
            except (OSError, asyncio.TimeoutError) as error:
                level = logging.WARNING if pause_s < MAX_RECONNECT_S else logging.DEBUG
                log.log(level, "cannot connect to %s at %s: %s", route.id, address, error)
                if not self.reachable:
                    self._owner.unreachable()
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, MAX_RECONNECT_S)
                continue
            if route not in self._routes.replicas:  # it left while the link was being opened
                link.close()
                return
            if not link.closed.is_set():
                opened = [*self._links.items(), (route, link)]
                self._links = dict(sorted(opened, key=lambda item: not item[0].is_on(settings.machine)))
                self._owner.arrived(link, Arrived(time.monotonic(), freed=True))  # its Welcome may have come before
            await link.closed.wait()
            if link.refused:
                self._refused.add(route)
                if not self.slots:
                    self._owner.unusable()
                return
            if link.welcome is None:  # the replica hung up at once: back off
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, MAX_RECONNECT_S)
            else:
                pause_s = RECONNECT_S
