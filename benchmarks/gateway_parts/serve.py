"""Ray Serve's default HTTP proxy before the same replica, over the same data plane.

The deployment does as little as a gateway behind Serve can: it reads the JSON, asks the replica over its socket, and
gives back ready server-sent events as they come. It checks no key and counts nothing.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from collections.abc import AsyncIterator
from typing import Any

import psutil
import ray
from ray import serve
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from benchmarks.gateway_parts.child import argument, say, wait_for_the_end
from benchmarks.gateway_parts.engine import EPOCH, TOKEN, Asked, event_of, last_event, whole
from orchestrator.process.addresses import free_port
from workers.messages.requests import GenerateRequest, TokenEvent
from workers.messages.wire import Cancel, FrameReader, Hello, Step, Submit, Welcome, encode

HANDLERS = "ray::ServeReplica"
PROXY = "ray::ProxyActor"


class Link(asyncio.Protocol):
    """The deployment's connection to the replica."""

    def __init__(self) -> None:
        self.welcome = asyncio.Event()
        self.live: dict[str, asyncio.Queue[TokenEvent]] = {}
        self._reader = FrameReader()
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._transport.write(encode(Hello(f"serve-{os.getpid()}", TOKEN, EPOCH)))

    def data_received(self, data: bytes) -> None:
        for message in self._reader.feed(data):
            if isinstance(message, Step):
                for event in message.events:
                    queue = self.live.get(event.id)
                    if queue is not None:
                        queue.put_nowait(event)
            elif isinstance(message, Welcome):
                self.welcome.set()

    def ask(self, request: GenerateRequest) -> asyncio.Queue[TokenEvent]:
        queue = self.live[request.id] = asyncio.Queue()
        self._transport.write(encode(Submit(request)))
        return queue

    def leave(self, id: str, ended: bool) -> None:
        del self.live[id]
        if not ended:
            self._transport.write(encode(Cancel(id)))


class Handler:
    def __init__(self, path: str) -> None:
        self._path = path
        self._link: Link | None = None
        self._numbers = itertools.count()

    async def __call__(self, request: Request) -> Response:
        wanted = Asked(**{name: value for name, value in (await request.json()).items() if name in FIELDS})
        coming = self._events(wanted)
        if wanted.stream:
            return StreamingResponse(self._written(coming), media_type="text/event-stream")
        text = "".join([event.text async for event in coming])
        return Response(whole(text, wanted), media_type="application/json")

    async def _written(self, coming: AsyncIterator[TokenEvent]) -> AsyncIterator[bytes]:
        async for event in coming:
            yield event_of(event.text) if event.finish is None else event_of(event.text) + last_event()

    async def _events(self, wanted: Asked) -> AsyncIterator[TokenEvent]:
        if self._link is None:
            _, self._link = await asyncio.get_running_loop().create_unix_connection(Link, self._path)
            await self._link.welcome.wait()
        link, id = self._link, f"serve-{next(self._numbers)}"
        ids = list(wanted.prompt.encode())
        queue = link.ask(GenerateRequest(id=id, prompt_ids=ids, max_tokens=wanted.max_tokens, temperature=0.0))
        ended = False
        try:
            while not ended:
                event = await queue.get()
                ended = event.finish is not None
                yield event
        finally:
            link.leave(id, ended)


FIELDS = frozenset(Asked.__struct_fields__)


def named(title: str) -> list[int]:
    """Our processes that go by that title."""
    children = psutil.Process().children(recursive=True)
    return [child.pid for child in children if any(title in part for part in child.cmdline())]


def main() -> None:
    """Argument: ``socket`` of the replica, ``folder`` for Ray's files. Says ``port``, and the process ids of the
    ``proxy`` and the ``handler``."""
    settings = argument()
    port = free_port()
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        _temp_dir=settings["folder"],
        configure_logging=False,
    )
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    options = {"num_cpus": 0}
    deployment = serve.deployment(Handler, max_ongoing_requests=4096, ray_actor_options=options, num_replicas=1)
    serve.run(deployment.bind(settings["socket"]), route_prefix="/")
    say({"port": port, "proxy": named(PROXY), "handler": named(HANDLERS)})
    wait_for_the_end()
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
