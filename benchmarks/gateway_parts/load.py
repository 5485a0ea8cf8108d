"""The load generator: raw HTTP/1.1 over uvloop, in a process of its own. Every answer is compared with what the echo
engine must say, token for token.

A job is a line of JSON, and so is its result:

- ``closed``: each of so many connections asks again as soon as it is answered, until the seconds are over;
- ``paced``: requests begin at the times of a Poisson process of a fixed seed, whatever the answers do; latency counts
  from the time at which a request was due;
- ``together``: so many streams are asked for at once, ``primer_s`` after the line ``connected``. A line ``idle`` says
  that each has its first byte, and the next line that all have ended;
- ``one_by_one``: streams on connections of their own, one after the other, for the time to the first byte.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import random
import re
import statistics
import struct
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import uvloop

from benchmarks.gateway_parts.child import argument, say
from workers.engines.echo.engine import echo_tokens

PROMPTS = 64  # different ones, asked in turn
CONNECTED_AT_ONCE = 64
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)\r\n", re.IGNORECASE)


class _Choice(msgspec.Struct):
    text: str
    finish_reason: str | None = None


class _Body(msgspec.Struct):
    choices: list[_Choice]


_decode = msgspec.json.Decoder(_Body).decode


@dataclass(frozen=True)
class Question:
    request: bytes
    text: str  # that answers it
    stream: bool


def questions(job: dict[str, Any]) -> list[Question]:
    """``tokens`` for each of the prompts of ``prompt_chars`` characters."""
    drawn = []
    for number in range(PROMPTS):
        prompt = f"{number} ".ljust(job["prompt_chars"], ".")
        body = {"model": job["model"], "prompt": prompt, "max_tokens": job["tokens"], "temperature": 0}
        if job["stream"]:
            body["stream"] = True
        raw = json.dumps(body).encode()
        key = f"authorization: Bearer {job['key']}\r\n" if job.get("key") else ""
        head = (
            f"POST {job.get('path', '/v1/completions')} HTTP/1.1\r\nhost: 127.0.0.1\r\n{key}"
            f"content-type: application/json\r\ncontent-length: {len(raw)}\r\n\r\n"
        )
        text = bytes(echo_tokens(list(prompt.encode()), job["tokens"])).decode()
        drawn.append(Question(head.encode() + raw, text, job["stream"]))
    return drawn


class Caller(asyncio.Protocol):
    """One connection: asks one question at a time."""

    def __init__(self, done: Callable[[Caller], None], first: Callable[[Caller], None] | None = None) -> None:
        self.error: str | None = None
        self.asked_at = self.first_at = self.ended_at = 0.0
        self.reads = 0  # of the last answer
        self._done = done
        self._first = first
        self._transport: Any = None
        self._question: Question | None = None
        self._parts: list[bytes] = []
        self._need = 0  # bytes of the answer; 0: not known yet, -1: in chunks
        self._have = 0

    def ask(self, question: Question, due_at: float | None = None) -> None:
        self._question = question
        self._parts = []
        self._need = self._have = self.reads = 0
        self.first_at = 0.0
        self.asked_at = due_at or time.perf_counter()
        self._transport.write(question.request)

    def close(self) -> None:
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self._question is None:
            self.error = f"nothing was asked: {data[:300]!r}"
            self._done(self)
            return
        if not self._parts:
            self.first_at = time.perf_counter()
            if self._first is not None:
                self._first(self)
        self._parts.append(data)
        self._have += len(data)
        self.reads += 1
        if self._need > 0:
            if self._have >= self._need:
                self._end()
        elif self._need < 0:
            if data.endswith(b"0\r\n\r\n") or (len(data) < 5 and b"".join(self._parts[-5:]).endswith(b"0\r\n\r\n")):
                self._end()
        else:
            self._read_head()

    def connection_lost(self, error: Exception | None) -> None:
        if self._question is not None:
            self._question, self.error = None, f"the connection was lost: {error}"
            self._done(self)

    def _read_head(self) -> None:
        raw = b"".join(self._parts)
        end = raw.find(b"\r\n\r\n") + 4
        if end < 4:
            return
        length = _LENGTH.search(raw, 0, end)
        self._need = -1 if length is None else end + int(length[1])
        ended = raw.endswith(b"0\r\n\r\n") and len(raw) > end if self._need < 0 else len(raw) >= self._need
        if ended:
            self._end()

    def _end(self) -> None:
        self.ended_at = time.perf_counter()
        question, self._question = self._question, None
        assert question is not None
        self.error = _judge(question, b"".join(self._parts))
        self._done(self)


def _judge(question: Question, raw: bytes) -> str | None:
    """What is wrong with an answer."""
    head, _, body = raw.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200"):
        return raw[:300].decode("latin-1")
    try:
        text = _streamed(_unchunked(body)) if question.stream else _decode(_whole(head, body)).choices[0].text
    except (ValueError, IndexError, msgspec.MsgspecError) as error:
        return f"{error}: {raw[-300:]!r}"
    return None if text == question.text else f"{text!r} is not {question.text!r}"


def _whole(head: bytes, body: bytes) -> bytes:
    return body if _LENGTH.search(head + b"\r\n") else _unchunked(body)


def _unchunked(body: bytes) -> bytes:
    pieces: list[bytes] = []
    at = 0
    while True:
        end = body.index(b"\r\n", at)
        size = int(body[at:end], 16)
        if not size:
            return b"".join(pieces)
        pieces.append(body[end + 2 : end + 2 + size])
        at = end + size + 4


def _streamed(body: bytes) -> str:
    """The text of the events. Raises ValueError for a stream without its end."""
    events = body.split(b"\n\n")
    if events[-2:] != [b"data: [DONE]", b""]:
        raise ValueError("the stream has no end")
    choices = [_decode(event[6:]).choices[0] for event in events[:-2]]
    if choices[-1].finish_reason != "length":
        raise ValueError("the stream has no finish reason")
    return "".join([choice.text for choice in choices])


class Clock:
    """Calls back at exact times: an event loop's own timers are of whole milliseconds."""

    def __init__(self, tick: Callable[[], None]) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = self._libc.timerfd_create(1, os.O_NONBLOCK | os.O_CLOEXEC)
        self._tick = tick
        asyncio.get_running_loop().add_reader(self._fd, self._fired)

    def set(self, at: float) -> None:
        """Call back at ``at``, of time.monotonic()."""
        when = struct.pack("@qqqq", 0, 0, int(at), max(1, int(at % 1 * 1e9)))
        self._libc.timerfd_settime(self._fd, 1, when, None)

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._fd)
        os.close(self._fd)

    def _fired(self) -> None:
        try:
            os.read(self._fd, 8)
        except BlockingIOError:
            return
        self._tick()


class Run:
    """One job."""

    def __init__(self, job: dict[str, Any]) -> None:
        self._job = job
        self._questions = questions(job)
        self._asked = 0
        self._answered = 0
        self._reads = 0
        self._errors: list[str] = []
        self._over = asyncio.Event()
        self._callers: list[Caller] = []

    def _next(self) -> Question:
        self._asked += 1
        return self._questions[self._asked % PROMPTS]

    async def _connect(self, count: int, done: Callable[[Caller], None], first: Any = None) -> None:
        loop = asyncio.get_running_loop()
        while count > 0:
            some = [
                loop.create_connection(lambda: Caller(done, first), "127.0.0.1", self._job["port"])
                for _ in range(min(count, CONNECTED_AT_ONCE))
            ]
            self._callers += [caller for _, caller in await asyncio.gather(*some)]
            count -= len(some)

    def _count(self, caller: Caller) -> bool:
        self._answered += 1
        self._reads += caller.reads
        if caller.error is not None:
            self._errors.append(caller.error)
        return caller.error is None

    def _result(self, wall_s: float, **more: Any) -> dict[str, Any]:
        for caller in self._callers:
            caller.close()
        return {
            "answers": self._answered,
            "tokens": self._answered * self._job["tokens"],
            "reads": self._reads,
            "wall_s": wall_s,
            "errors": len(self._errors),
            "error": self._errors[0] if self._errors else None,
            **more,
        }

    async def closed(self) -> dict[str, Any]:
        live = self._job["connections"]
        latencies = []

        def done(caller: Caller) -> None:
            nonlocal live
            latencies.append(caller.ended_at - caller.asked_at)
            if self._count(caller) and time.perf_counter() < until:
                caller.ask(self._next())
                return
            live -= 1
            if not live:
                self._over.set()

        await self._connect(live, done)
        began = time.perf_counter()
        until = began + self._job["seconds"]
        for caller in self._callers:
            caller.ask(self._next())
        await self._over.wait()
        return self._result(time.perf_counter() - began, **percentiles(latencies))

    async def paced(self) -> dict[str, Any]:
        seed = random.Random(7)
        due_at: deque[float] = deque()
        waiting: deque[float] = deque()
        latencies: list[float] = []
        started_late = 0
        offset = time.perf_counter() - time.monotonic()

        def done(caller: Caller) -> None:
            latencies.append(caller.ended_at - caller.asked_at)
            if not self._count(caller):
                self._over.set()
            elif waiting:
                caller.ask(self._next(), waiting.popleft())
            else:
                free.append(caller)
                if not due_at and len(free) == len(self._callers):
                    self._over.set()

        def tick() -> None:
            nonlocal started_late
            now = time.perf_counter()
            while due_at and due_at[0] <= now:
                due = due_at.popleft()
                if free:
                    free.pop().ask(self._next(), due)
                else:
                    started_late += 1
                    waiting.append(due)
            if due_at:
                clock.set(due_at[0] - offset)

        await self._connect(self._job["connections"], done)
        free = list(self._callers)
        began = at = time.perf_counter() + 0.05
        while at < began + self._job["seconds"]:
            due_at.append(at)
            at += seed.expovariate(self._job["rate"])
        clock = Clock(tick)
        clock.set(due_at[0] - offset)
        await self._over.wait()
        clock.close()
        return self._result(time.perf_counter() - began, late=started_late, **percentiles(latencies))

    async def together(self) -> dict[str, Any]:
        count = self._job["connections"]
        first_bytes = 0

        def first(_: Caller) -> None:
            nonlocal first_bytes
            first_bytes += 1
            if first_bytes == count:
                say({"idle": True})

        def done(caller: Caller) -> None:
            self._count(caller)
            if self._answered == count:
                self._over.set()

        await self._connect(count, done, first)
        say({"connected": True})
        await asyncio.sleep(self._job["primer_s"])
        began = time.perf_counter()
        for caller in self._callers:
            caller.ask(self._next())
        asked_s = time.perf_counter() - began
        await self._over.wait()
        waits = [caller.first_at - caller.asked_at for caller in self._callers]
        arrived = sorted(caller.first_at - began for caller in self._callers)
        return self._result(
            time.perf_counter() - began,
            asked_s=asked_s,
            first_opened_s=waits[0],
            last_opened_s=waits[-1],
            first_byte_s=arrived[0],
            last_byte_s=arrived[-1],
        )

    async def one_by_one(self) -> dict[str, Any]:
        def done(caller: Caller) -> None:
            self._count(caller)
            self._over.set()

        began = time.perf_counter()
        waits = []
        for _ in range(self._job["count"]):
            await self._connect(1, done)
            caller = self._callers.pop()
            self._over.clear()
            caller.ask(self._next())
            await self._over.wait()
            waits.append(caller.first_at - caller.asked_at)
            caller.close()
        return self._result(time.perf_counter() - began, first_byte_ms=statistics.median(waits) * 1000)


def percentiles(latencies: list[float]) -> dict[str, float]:
    """In milliseconds."""
    ordered = sorted(latencies)
    return {
        "p50_ms": ordered[len(ordered) // 2] * 1000,
        "p99_ms": ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))] * 1000,
    }


def main() -> None:
    argument()
    say({"pid": os.getpid()})
    loop = uvloop.new_event_loop()
    asyncio.set_event_loop(loop)
    for line in sys.stdin:
        job = json.loads(line)

        async def work(job: dict[str, Any] = job) -> dict[str, Any]:
            run = Run(job)
            result: dict[str, Any] = await getattr(run, job["kind"])()
            return result

        say(loop.run_until_complete(work()))


if __name__ == "__main__":
    main()
