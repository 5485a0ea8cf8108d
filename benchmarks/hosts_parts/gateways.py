"""What a request costs a gateway when there are more gateways and replicas: each gateway has a connection to each
replica, and each has the same load of its own."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.gateway_parts.child import Child, cpu_s

PARTS = "benchmarks.gateway_parts."
MODEL = "echo"
SLOTS = 16
MAX_LEN = 512
RATE = 40.0  # requests/s of each gateway, so that all of them together leave the cores some rest
CONNECTIONS = 8
SECONDS = 8.0


def cost_us(gateways: int, replicas: int) -> float:
    """Returns the CPU microseconds of all gateways for each request. Raises RuntimeError if an answer was wrong."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cwh-", dir="/tmp")))

        def start(part: str, argument: Any) -> Child:
            return stack.enter_context(Child(PARTS + part, argument, log=folder / f"{part}.log"))

        sockets = [str(folder / f"r{index}") for index in range(replicas)]
        for socket in sockets:
            start("engine", {"socket": socket, "slots": SLOTS, "max_len": MAX_LEN, "step_ms": 0.0})
        models = [{"name": MODEL, "sockets": sockets, "max_len": MAX_LEN}]
        children = [start("ours", {"home": str(folder / f"h{index}"), "models": models}) for index in range(gateways)]
        loads = [start("load", None) for _ in children]
        for seconds in (1.0, SECONDS):  # the first one warms
            before = cpu_s([child.pid for child in children])
            for load, child in zip(loads, children, strict=True):
                job = {"model": MODEL, "prompt_chars": 64, "stream": False, "tokens": 1, "kind": "paced"}
                load.tell({**job, "rate": RATE, "seconds": seconds, "connections": CONNECTIONS, **child.ready})
            results = [load.hear() for load in loads]
            used = cpu_s([child.pid for child in children]) - before
        wrong = [result["error"] for result in results if result["errors"]]
        if wrong:
            raise RuntimeError(f"{len(wrong)} of {gateways} load generators got wrong answers, such as: {wrong[0]}")
        answers: int = sum(result["answers"] for result in results)
        return used / answers * 1e6
