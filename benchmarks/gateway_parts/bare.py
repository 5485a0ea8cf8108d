"""The least that a proxy can be: bytes go from one socket to the other on uvloop, and nothing looks at them."""

from __future__ import annotations

import asyncio
from typing import Any

import uvloop

from benchmarks.gateway_parts.child import argument, say, wait_for_the_end


class Side(asyncio.Protocol):
    """One of the two connections of a client; ``other`` is where its bytes go."""

    def __init__(self, upstream: int | None = None, other: Side | None = None) -> None:
        self.transport: Any = None
        self._upstream = upstream
        self._other = other
        self._early: list[bytes] = []  # before the upstream is connected

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        if self._upstream is not None:
            asyncio.get_running_loop().create_task(self._connect(self._upstream))

    async def _connect(self, port: int) -> None:
        loop = asyncio.get_running_loop()
        _, self._other = await loop.create_connection(lambda: Side(other=self), "127.0.0.1", port)
        for data in self._early:
            self._other.transport.write(data)
        self._early.clear()

    def data_received(self, data: bytes) -> None:
        if self._other is None:
            self._early.append(data)
        else:
            self._other.transport.write(data)

    def pause_writing(self) -> None:
        if self._other is not None:
            self._other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self._other is not None:
            self._other.transport.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        if self._other is not None and self._other.transport is not None:
            self._other.transport.close()


async def serve(upstream: int) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Side(upstream), "127.0.0.1", 0, backlog=4096)
    say({"port": server.sockets[0].getsockname()[1]})
    await asyncio.to_thread(wait_for_the_end)


def main() -> None:
    """Argument: the port of the upstream. Says its own."""
    upstream = argument()
    loop = uvloop.new_event_loop()
    loop.run_until_complete(serve(upstream))


if __name__ == "__main__":
    main()
