"""Prints how much of the product three stories pass through: `python tools/ways.py`.

An apply that changes one of three models, on a fake cluster, until it is answered; the same until the replica is
replaced; and a streamed chat of five tokens, through a real gateway and a replica of the echo engine. Counted by a
profiler: distinct files and functions of orchestrator/, placements/ and workers/, and the calls of the planner and of
the YAML reader.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import threading
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
PACKAGES = tuple(f"{ROOT}/{package}/" for package in ("orchestrator", "placements", "workers"))
PLAN, PARSE = ("placements/planner/plan.py", "plan"), ("placements/spec/parse.py", "parse")
CHATS = 5
BUDGETS = {  # files, functions, plans, parses
    "apply": (45, 300, 2, 1),
    "settled": (45, 300, 2, 1),
    "chat": (30, 150, 0, 0),
}
SPEC = """\
version: 1
hosts: {emulate: inf2.48xlarge}
models:
  a: {engine: echo, tp_degree: 2, max_batch: %d}
  b: {engine: echo, tp_degree: 2, replicas: 2}
  c: {engine: echo, tp_degree: 8}
"""


@dataclass
class Way:
    """The functions that a story passes through, with the number of their calls."""

    calls: Counter[tuple[str, str, int]] = field(default_factory=Counter)

    def __enter__(self) -> Way:
        threading.setprofile(self._count)
        sys.setprofile(self._count)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def _count(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGES) and not code.co_name.startswith("<"):
            self.calls[code.co_filename.removeprefix(f"{ROOT}/"), code.co_name, code.co_firstlineno] += 1

    @property
    def figures(self) -> tuple[int, int, int, int]:
        """The distinct files and functions, the plans and the parses."""
        plans, parses = (
            sum(calls for key, calls in self.calls.items() if key[:2] == function) for function in (PLAN, PARSE)
        )
        return len({file for file, _, _ in self.calls}), len(self.calls), plans, parses


def applied(*, settled: bool = False) -> Way:
    """Returns the way of an apply that changes one of three models, until it is answered or, ``settled``, complete."""
    from tests.orchestrator.fakes import FakeCluster, Played, virtually

    way = Way()

    async def main() -> None:
        with tempfile.TemporaryDirectory() as home:
            async with Played(Path(home), FakeCluster(), SPEC % 4) as played:
                await played.settled()
                await asyncio.sleep(5.0)  # virtual: a fleet at rest
                with way:
                    await played.apply(SPEC % 8)
                    if settled:
                        await played.settled()

    virtually(main)
    return way


def chatted() -> Way:
    """Returns the way of a streamed chat of five tokens, without the start and the end of the gateway and the
    replica."""
    import httpx

    from tests.fleet import until
    from tests.orchestrator.gateways import LiveGateway, routes
    from tests.served import Served

    way = Way()
    threading.setprofile(way._count)  # the threads of the gateway and the replica begin after it
    gateway, replica = LiveGateway(), Served()
    try:
        gateway.serve(routes("m", replica))
        body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5, "stream": True}
        httpx.post(f"{gateway.url}/v1/chat/completions", json=body)  # lazy imports and caches
        ways: list[Way] = []
        for number in range(CHATS):
            until(lambda: gateway.connections == 0, 10, f"the connection {number} has ended")
            way.calls.clear()
            httpx.post(f"{gateway.url}/v1/chat/completions", json=body)
            until(lambda: gateway.connections == 0, 10, f"the connection {number + 1} has ended")
            ways.append(Way(Counter(way.calls)))
    finally:
        threading.setprofile(None)
        gateway.close()
        replica.close()
    return min(ways, key=lambda way: way.figures)  # what the gateway does once a second may fall into a chat


def main(arguments: list[str]) -> None:
    """Print the figures; with ``-v`` also the functions."""
    print(f"{'story':8} {'files':>12} {'functions':>12} {'plans':>10} {'parses':>10}")
    for story, way in (("apply", applied()), ("settled", applied(settled=True)), ("chat", chatted())):
        pairs = zip(way.figures, BUDGETS[story], strict=True)
        print(
            f"{story:8} "
            + " ".join(f"{value:5} of {budget:3}{'!' if value > budget else ' '}" for value, budget in pairs)
        )
        if "-v" in arguments:
            for (file, function, line), calls in sorted(way.calls.items()):
                print(f"  {file}:{line}: {function} x {calls}")


if __name__ == "__main__":
    main(sys.argv[1:])
