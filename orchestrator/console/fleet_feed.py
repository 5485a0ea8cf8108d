"""One reading of the fleet for all open pages: what has changed is pushed to each of them as server-sent events."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec.structs import asdict

from orchestrator.console.page import STREAMED, Entrance
from orchestrator.gateway.http.exchange import Exchange
from orchestrator.messages.fleet_status import EventPage, EventRow, FleetStatus
from workers.host.task_boundary import task_boundary

log = logging.getLogger(__name__)

READ_S = 1.0  # shortest interval between two readings of the status
PING_S = 5.0  # a page that receives nothing for some of these reconnects
RECENT = 500  # events that a new page gets
PAGE = 1000  # events of one query

_encode = msgspec.json.encode


class ReplicaInRay(msgspec.Struct, frozen=True):
    """The ids of a replica's actor and node in Ray, and the name of its log there."""

    actor: str
    node: str
    log: str


class RayLinks(msgspec.Struct, frozen=True):
    """The address of Ray's dashboard, and what it has of the replicas."""

    dashboard: str | None
    replicas: dict[str, ReplicaInRay]


class LiveView(msgspec.Struct, frozen=True):
    """What the page shows beside the status."""

    load: Mapping[str, Mapping[str, float | None]]  # by model and figure
    links: RayLinks
    requests: Sequence[msgspec.Struct] | None  # None: no page shows them


@dataclass(frozen=True)
class ConsoleSource:
    """What the console reads of a fleet."""

    status: Callable[[], FleetStatus]
    live: Callable[[bool], LiveView]  # with the requests or without
    events: Callable[[int, int, float], Awaitable[EventPage]]  # after, limit, wait_s
    entrance: Callable[[], Entrance | None]  # a gateway that serves


class FleetFeed:
    """The last reading, and the task that reads while a page is open. Used from one event loop."""

    def __init__(self, fleet: ConsoleSource) -> None:
        self._fleet = fleet
        self._parts: dict[tuple[str, str], tuple[int, bytes]] = {}  # by kind and name: when it changed, and its JSON
        self._events: deque[tuple[int, bytes]] = deque(maxlen=RECENT)
        self._version = 0
        self._changed = asyncio.Condition()
        self._pages = 0
        self._watchers = 0  # pages that show the requests
        self._task: asyncio.Task[None] | None = None

    async def stream(self, exchange: Exchange, allowed: Callable[[], bool]) -> None:
        """Answers with all parts, then with those that change, until the page is gone or its key is not ``allowed``
        any more."""
        watches = "requests" in exchange.request.query
        self._pages += 1
        self._watchers += watches
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._read())
        try:
            exchange.begin(200, (*STREAMED, (b"content-type", b"text/event-stream")), b": open\n\n")
            seen = 0
            while allowed() and not exchange.ended:  # before Python 3.12, `wait_for` can swallow a cancellation
                exchange.write(self._news(seen) or b": ping\n\n")  # an empty piece would end the answer
                seen = self._version
                await self._wait(seen)
            exchange.end()
        finally:
            self._pages -= 1
            self._watchers -= watches

    @property
    def reads(self) -> bool:
        """True while a page is open, and shortly after."""
        return self._task is not None

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _wait(self, seen: int) -> None:
        """Returns when there is something newer, or after ``PING_S``."""
        async with self._changed:
            try:
                await asyncio.wait_for(self._changed.wait_for(lambda: self._version > seen), PING_S)
            except asyncio.TimeoutError:
                return

    def _news(self, seen: int) -> bytes:
        """Returns the messages with what has changed since the version ``seen``."""
        parts: dict[str, Any] = {}
        for (kind, name), (version, content) in self._parts.items():
            if version > seen and name:
                parts.setdefault(kind, {})[name] = msgspec.Raw(content)
            elif version > seen:
                parts[kind] = msgspec.Raw(content)
        events = [msgspec.Raw(content) for version, content in self._events if version > seen]
        messages = (("state", parts), ("events", events))
        return b"".join(b"event: %b\ndata: %b\n\n" % (kind.encode(), _encode(data)) for kind, data in messages if data)

    async def _read(self) -> None:
        """Reads until no page has been open for an interval."""
        after, read_at = 0, 0.0
        try:
            while self._pages:
                with task_boundary(log, "the console's reading failed; it is repeated"):
                    wait_s = max(0.0, read_at + READ_S - time.monotonic())
                    more = await self._fleet.events(after, PAGE, wait_s)
                    after, now, parts = more.next, time.monotonic(), None
                    if now >= read_at + READ_S:
                        live = self._fleet.live(self._watchers > 0)
                        parts, read_at = parts_of(self._fleet.status(), live), now
                    await self._publish(parts, more.events)
                    continue
                await asyncio.sleep(READ_S)
        finally:
            self._task = None
            self._parts.clear()
            self._events.clear()

    async def _publish(self, parts: Mapping[tuple[str, str], object] | None, events: list[EventRow]) -> None:
        """``parts``: of a new reading; None: there is none."""
        version = self._version + 1
        changed = bool(events)
        self._events.extend((version, _encode(event)) for event in events)
        for key, part in ({} if parts is None else parts).items():
            content = _encode(part)
            if self._parts.get(key, (0, b""))[1] != content:
                self._parts[key] = version, content
                changed = True
        if parts is not None:  # what the fleet no longer has is not in the names of ``fleet``, and pages drop it
            self._parts = {key: part for key, part in self._parts.items() if key in parts}
        if changed:
            self._version = version
            async with self._changed:
                self._changed.notify_all()


def parts_of(status: FleetStatus, live: LiveView) -> dict[tuple[str, str], object]:
    """Returns the parts of a reading by kind and name. ``fleet`` is all that has no name of its own, with the names of
    models and hosts in their order; what is ``live`` has parts without a name."""
    models, hosts = [model.name for model in status.models], [host.name for host in status.hosts]
    parts: dict[tuple[str, str], object] = {("fleet", ""): {**asdict(status), "models": models, "hosts": hosts}}
    parts.update({(kind, ""): part for kind, part in asdict(live).items() if part is not None})
    parts.update({("models", model.name): model for model in status.models})
    parts.update({("hosts", host.name): host for host in status.hosts})
    return parts
