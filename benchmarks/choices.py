"""What was measured before the gateway's parts were chosen; the decisions stand in docs/decisions.

    .venv/bin/python -m benchmarks.choices
    .venv/bin/python -m benchmarks.choices --only servers --python other-venv/bin/python

Everything is CPU time, so that other work on the machine disturbs it little; medians of rounds in which the candidates
take turns. Parts are:

- ``servers``: a process with each HTTP server, which reads a small JSON body and answers it at once (unary), or streams
  64 answers of 128 tokens at a time, each token a ready chunk of 190 bytes (streams). Tokens come from a clock in the
  same process, one for each live stream every 2 ms, by a callback: a protocol writes at once, an ASGI application waits
  for an asyncio.Event in its handler. CPU of the server's process and all its children, over the requests or tokens.
- ``json``: reading a chat request of three messages, with unknown fields refused and types checked.
- ``chunks``: the server-sent event of one token.
- ``metrics``: the accounts of one token: a histogram and a counter.
- ``delivery``: from a frame of 64 tokens to 64 streams: a callback each, or an event and a task each.

``--python`` names an interpreter that has servers which are no dependencies of this project (granian, hypercorn); what
cannot be imported is left out.
"""

from __future__ import annotations

import argparse
import asyncio
import bisect
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks.gateway_parts.child import Child, cpu_s, family

SERVERS = (
    "protocol-uvloop",
    "protocol-asyncio",
    "uvicorn-httptools",
    "uvicorn-h11",
    "starlette",
    "aiohttp",
    "granian",
    "hypercorn",
)
ROUNDS = 3
CHAT = json.dumps(
    {
        "model": "llama-8b",
        "messages": [
            {"role": "system", "content": "You are a helpful assistant that answers in short sentences."},
            {"role": "user", "content": "What is a NeuronCore, and how many does an inf2.48xlarge have? " * 4},
            {"role": "assistant", "content": "A compute core of an Inferentia or Trainium device; it has 24. " * 4},
        ],
        "max_tokens": 128,
        "temperature": 0.7,
        "top_p": 0.9,
        "stop": ["\n\n", "User:"],
        "stream": True,
        "stream_options": {"include_usage": True},
        "user": "someone",
    }
).encode()


def rounds(candidates: dict[str, Callable[[], Any]], calls: int) -> dict[str, float]:
    """CPU microseconds of one call, for each candidate."""
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(7):
        for name, call in candidates.items():
            began = time.process_time()
            for _ in range(calls):
                call()
            times[name].append((time.process_time() - began) / calls * 1e6)
    return {name: statistics.median(each) for name, each in times.items()}


def servers(python: str) -> dict[str, dict[str, float]]:
    """CPU microseconds of each server for a request and for a streamed token."""
    times: dict[str, dict[str, list[float]]] = {}
    job = {"kind": "closed", "model": "echo", "prompt_chars": 64, "connections": 64, "seconds": 2.0}
    with Child("benchmarks.gateway_parts.load", None) as load:
        for _ in range(ROUNDS):
            for name in SERVERS:
                try:
                    server = Child("benchmarks.gateway_parts.served_by", name, python=python)
                except RuntimeError as error:
                    print(f"left out: {name}: {error}", file=sys.stderr)
                    continue
                with server:
                    pids, port = family(server.pid), server.ready["port"]
                    for what, stream, tokens in (("request", False, 1), ("token", True, 128)):
                        before = cpu_s(pids)
                        done = load.ask({**job, "port": port, "stream": stream, "tokens": tokens})
                        used = cpu_s(pids) - before
                        if done["errors"]:
                            raise RuntimeError(f"{name}: {done['error']}")
                        cost = used / done["tokens"] * 1e6
                        times.setdefault(name, {}).setdefault(what, []).append(cost)
    return {name: {what: statistics.median(each) for what, each in costs.items()} for name, costs in times.items()}


def json_reading() -> dict[str, float]:
    import msgspec
    import pydantic

    from benchmarks.gateway_parts.shapes import Chat, PydanticChat

    decode = msgspec.json.Decoder(Chat).decode
    validate = pydantic.TypeAdapter(PydanticChat).validate_json
    candidates: dict[str, Callable[[], Any]] = {
        "msgspec Struct": lambda: decode(CHAT),
        "pydantic TypeAdapter.validate_json": lambda: validate(CHAT),
        "json.loads, nothing checked": lambda: json.loads(CHAT),
        "msgspec, nothing checked": lambda: msgspec.json.decode(CHAT),
    }
    try:
        import orjson
    except ImportError:
        pass
    else:
        names = set(Chat.__struct_fields__)
        kinds: dict[str, tuple[type, ...]] = {
            "model": (str,),
            "max_tokens": (int,),
            "temperature": (int, float),
            "top_p": (int, float),
            "stop": (str, list),
            "stream": (bool,),
            "stream_options": (dict,),
            "user": (str,),
        }

        def by_hand() -> Any:
            value = orjson.loads(CHAT)
            if not names.issuperset(value):
                raise ValueError("unknown field")
            for name, types in kinds.items():
                if not isinstance(value.get(name), types):
                    raise ValueError(name)
            for message in value["messages"]:
                if message.keys() != {"role", "content"} or message["role"] not in ("system", "user", "assistant"):
                    raise ValueError("messages")
                if not isinstance(message["content"], str):
                    raise ValueError("content")
            return value

        candidates["orjson and checks by hand"] = by_hand
        candidates["orjson, nothing checked"] = lambda: orjson.loads(CHAT)
    return rounds(candidates, 3000)


def chunks() -> dict[str, float]:
    import msgspec

    from benchmarks.gateway_parts.shapes import Chunk, ChunkChoice, Delta

    encode = msgspec.json.encode
    id, model = "chatcmpl-0123456789abcdef0123456789abcdef", "llama-8b"
    head = {"id": id, "object": "chat.completion.chunk", "created": 1790000000, "model": model}
    text = " token"

    def by_dict() -> bytes:
        choice = {"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": None}
        return b"data: " + encode({**head, "choices": [choice]}) + b"\n\n"

    def by_struct() -> bytes:
        chunk = Chunk(id, "chat.completion.chunk", 1790000000, model, [ChunkChoice(0, Delta(text))])
        return b"data: " + encode(chunk) + b"\n\n"

    def by_stdlib() -> bytes:
        choice = {"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": None}
        return b"data: " + json.dumps({**head, "choices": [choice]}).encode() + b"\n\n"

    before, _, after = by_dict().partition(encode(text))

    def by_halves() -> bytes:
        return before + encode(text) + after

    assert by_halves() == by_dict() == by_struct()
    return rounds(
        {
            "json.dumps of the whole": by_stdlib,
            "msgspec, a dict": by_dict,
            "msgspec, a Struct": by_struct,
            "ready halves, the text escaped by msgspec": by_halves,
        },
        5000,
    )


def metrics() -> dict[str, float]:
    import prometheus_client

    registry = prometheus_client.CollectorRegistry()
    bounds = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
    labels = {"model_name": "llama-8b", "engine": "0"}
    gap = prometheus_client.Histogram("gap", "-", [*labels], buckets=bounds, registry=registry)
    tokens = prometheus_client.Counter("tokens", "-", [*labels], registry=registry)
    known_gap, known_tokens = gap.labels(**labels), tokens.labels(**labels)

    def by_labels() -> None:
        gap.labels(**labels).observe(0.03)
        tokens.labels(**labels).inc()

    def by_children() -> None:
        known_gap.observe(0.03)
        known_tokens.inc()

    class Plain:
        __slots__ = ("counts", "sum", "tokens")

        def __init__(self) -> None:
            self.counts = [0] * (len(bounds) + 1)
            self.sum = 0.0
            self.tokens = 0

        def token(self, seconds: float) -> None:
            self.counts[bisect.bisect_left(bounds, seconds)] += 1
            self.sum += seconds
            self.tokens += 1

    plain = Plain()
    return rounds(
        {
            "prometheus_client, labels looked up": by_labels,
            "prometheus_client, children kept": by_children,
            "plain lists, read when scraped": lambda: plain.token(0.03),
        },
        5000,
    )


def delivery() -> dict[str, float]:
    """CPU microseconds for each token."""
    import uvloop

    streams, steps = 64, 2000
    written = bytearray()

    async def by_callback() -> float:
        def came(piece: bytes) -> None:
            written.clear()
            written.extend(piece)

        sinks: list[Callable[[bytes], None]] = [came] * streams
        began = time.process_time()
        for _ in range(steps):
            for sink in sinks:
                sink(b"x")
            await asyncio.sleep(0)
        return time.process_time() - began

    class Stream:
        def __init__(self) -> None:
            self.news = asyncio.Event()
            self.events: list[bytes] = []

        async def write(self) -> None:
            while True:
                while not self.events:
                    await self.news.wait()
                    self.news.clear()
                events, self.events = self.events, []
                written.clear()
                for piece in events:
                    written.extend(piece)

    async def by_task() -> float:
        live = [Stream() for _ in range(streams)]
        tasks = [asyncio.ensure_future(stream.write()) for stream in live]
        await asyncio.sleep(0)
        began = time.process_time()
        for _ in range(steps):
            for stream in live:
                stream.events.append(b"x")
                stream.news.set()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        used = time.process_time() - began
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return used

    async def by_queue() -> float:
        queues: list[asyncio.Queue[bytes]] = [asyncio.Queue() for _ in range(streams)]

        async def write(queue: asyncio.Queue[bytes]) -> None:
            while True:
                written.clear()
                written.extend(await queue.get())

        tasks = [asyncio.ensure_future(write(queue)) for queue in queues]
        await asyncio.sleep(0)
        began = time.process_time()
        for _ in range(steps):
            for queue in queues:
                queue.put_nowait(b"x")
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        used = time.process_time() - began
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return used

    ways = {
        "a callback for each stream": by_callback,
        "a task and an asyncio.Event for each stream": by_task,
        "a task and an asyncio.Queue for each stream": by_queue,
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    loop = uvloop.new_event_loop()
    for _ in range(7):
        for name, way in ways.items():
            times[name].append(loop.run_until_complete(way()) / streams / steps * 1e6)
    loop.close()
    return {name: statistics.median(each) for name, each in times.items()}


PARTS: dict[str, Callable[[], dict[str, float]]] = {
    "json": json_reading,
    "chunks": chunks,
    "metrics": metrics,
    "delivery": delivery,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["servers", *PARTS], action="append")
    parser.add_argument("--python", default=sys.executable, help="interpreter of the servers, and of part json")
    options = parser.parse_args()
    parts = options.only or ["servers", *PARTS]
    if options.python != sys.executable and parts != ["servers"]:
        others = [part for part in parts if part != "servers"]
        subprocess.run([options.python, "-m", "benchmarks.choices", *(f"--only={part}" for part in others)], check=True)
        parts = [part for part in parts if part == "servers"]
    for part in parts:
        if part == "servers":
            print("CPU us, median: a request, a streamed token")
            for name, costs in servers(options.python).items():
                print(f"  {name:<45} {costs['request']:8.1f} {costs['token']:8.2f}", flush=True)
        else:
            print(f"CPU us, median: {part}")
            for name, cost in PARTS[part]().items():
                print(f"  {name:<45} {cost:8.2f}", flush=True)


if __name__ == "__main__":
    main()
