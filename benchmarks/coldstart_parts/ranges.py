"""The benchmark's S3: an asyncio server of byte ranges, each connection of which is capped.

One connection to S3 gives 85 to 90 MB/s, whatever the network can do (AWS, "Performance design patterns for Amazon
S3"); so the cap is what a client has to deal with. The data comes by sendfile from a file in memory, so that the server
takes as little of the machine as it can.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import random
import re
import socket
import sys
import time
from email.utils import formatdate
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from benchmarks.gateway_parts.child import argument, say

QUANTUM = 2**18  # bytes that go at once
BURST_S = 0.01  # of the cap, that a connection may have saved up
TAG = '"0123456789abcdef0123456789abcdef-9"'  # as of a multipart upload: no MD5 of the content


class Pace:
    """Of one connection."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._free_at = 0.0

    def pause_s(self, count: int) -> float:
        """``count`` bytes are due to go: so long before they may."""
        now = time.monotonic()
        start = max(self._free_at, now - BURST_S)
        self._free_at = start + count / self._rate
        return start - now


class Ranges:
    """Serves the files below ``root`` as objects of every bucket that is asked for."""

    def __init__(self, root: Path, checksums: dict[str, int], rate: float) -> None:
        """``checksums``: the CRC64NVME of each file by its name. ``rate``: bytes/s of each connection."""
        self.root = root
        self.rate = rate
        self.share_503 = 0.0
        self.requests = 0
        self.refused = 0
        self.most = 0  # connections at once
        self._random = random.Random(7)
        self._open = 0
        self._checksums = checksums
        self._files = {name: (root / name).open("rb") for name in checksums}

    async def connection(self, peer: socket.socket) -> None:
        self._open += 1
        self.most = max(self.most, self._open)
        pace = Pace(self.rate)
        loop = asyncio.get_running_loop()
        left = b""
        try:
            while True:
                while b"\r\n\r\n" not in left:
                    more = await loop.sock_recv(peer, 2**16)
                    if not more:
                        return
                    left += more
                head, _, left = left.partition(b"\r\n\r\n")
                await self._answer(peer, head.decode(), pace)
        except OSError:
            pass
        finally:
            self._open -= 1
            peer.close()

    async def _answer(self, peer: socket.socket, head: str, pace: Pace) -> None:
        method, target, _ = head.split("\r\n", 1)[0].split(" ")
        parts = urlsplit(target)
        name = unquote(parts.path).lstrip("/").partition("/")[2]
        self.requests += 1
        if not name:
            return await _send(peer, _head(200, "application/xml", body := self._listed(parse_qs(parts.query))), body)
        if self.share_503 and method == "GET" and self._random.random() < self.share_503:
            self.refused += 1
            body = b"<Error><Code>SlowDown</Code></Error>"
            return await _send(peer, _head(503, "application/xml", body), body)
        size = os.fstat(self._files[name].fileno()).st_size
        wanted = re.search(r"\r\nrange: bytes=(\d+)-(\d*)", head, re.IGNORECASE)
        start = int(wanted[1]) if wanted else 0
        end = min(size, int(wanted[2]) + 1 if wanted and wanted[2] else size)
        headers = [
            f"HTTP/1.1 {206 if wanted else 200} OK",
            f"Content-Length: {end - start}",
            f"ETag: {TAG}",
            f"Last-Modified: {formatdate(0, usegmt=True)}",
            "Accept-Ranges: bytes",
        ]
        if wanted:
            headers.append(f"Content-Range: bytes {start}-{end - 1}/{size}")
        else:
            value = base64.b64encode(self._checksums[name].to_bytes(8, "big")).decode()
            headers += [f"x-amz-checksum-crc64nvme: {value}", "x-amz-checksum-type: FULL_OBJECT"]
        await _send(peer, "\r\n".join([*headers, "\r\n"]).encode())
        if method == "GET":
            await _send_file(peer, self._files[name].fileno(), start, end, pace)
        return None

    def _listed(self, query: dict[str, list[str]]) -> bytes:
        prefix = query.get("prefix", [""])[0]
        rows = "".join(
            f"<Contents><Key>{escape(name)}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
            f"<ETag>{escape(TAG)}</ETag><Size>{os.fstat(file.fileno()).st_size}</Size></Contents>"
            for name, file in sorted(self._files.items())
            if name.startswith(prefix)
        )
        return f"<ListBucketResult><IsTruncated>false</IsTruncated>{rows}</ListBucketResult>".encode()


def _head(status: int, kind: str, body: bytes) -> bytes:
    return f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n".encode()


async def _send(peer: socket.socket, *data: bytes) -> None:
    await asyncio.get_running_loop().sock_sendall(peer, b"".join(data))


async def _send_file(peer: socket.socket, file: int, start: int, end: int, pace: Pace) -> None:
    while start < end:
        count = min(QUANTUM, end - start)
        if (pause := pace.pause_s(count)) > 0.0:
            await asyncio.sleep(pause)
        due = start + count
        while start < due:
            try:
                start += os.sendfile(peer.fileno(), file, start, due - start)
            except BlockingIOError:
                await _writable(peer)


async def _writable(peer: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_writer(peer.fileno(), ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_writer(peer.fileno())


async def serve(settings: dict[str, Any]) -> None:
    loop = asyncio.get_running_loop()
    ranges = Ranges(Path(settings["root"]), settings["checksums"], settings["rate"])
    listening = socket.create_server(("127.0.0.1", 0), backlog=1024)
    listening.setblocking(False)
    running = set()

    async def accept() -> None:
        while True:
            peer, _ = await loop.sock_accept(listening)
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            running.add(task := asyncio.create_task(ranges.connection(peer)))
            task.add_done_callback(running.discard)

    accepting = asyncio.create_task(accept())
    say({"port": listening.getsockname()[1]})
    while line := await asyncio.to_thread(sys.stdin.readline):
        job = json.loads(line)
        say({"requests": ranges.requests, "refused": ranges.refused, "connections": ranges.most})
        ranges.requests = ranges.refused = ranges.most = 0
        ranges.share_503 = job["share_503"]
    accepting.cancel()


def main() -> None:
    """Argument: root, checksums, rate. A job is the share of 503 from now on; the answer tells what was until then."""
    asyncio.run(serve(argument()))


if __name__ == "__main__":
    main()
