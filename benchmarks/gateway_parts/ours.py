"""The gateway itself, in a process of its own: keys on, metrics on, cancellation as always; only the controller is
played."""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.gateway_parts.child import argument, say
from benchmarks.gateway_parts.engine import EPOCH, TOKEN
from orchestrator.access.keys import KeyFile
from orchestrator.gateway.server import GatewayServer
from orchestrator.gateway.settings import GatewaySettings
from orchestrator.messages.replica_states import ModelState
from orchestrator.messages.route_table import ModelRoutes, Route, RouteTable
from orchestrator.process.addresses import free_port
from orchestrator.process.collector import settle_collector
from orchestrator.process.home import Home
from orchestrator.scaling.demand_report import DemandReply, DemandReport
from workers.messages.metric_family import MetricFamily

CONNECT_DEADLINE_S = 10.0
BEAT_S = 0.01


class Controller:
    """Of a fleet in which nothing happens."""

    def __init__(self, table: RouteTable) -> None:
        self._table = table

    async def routes(self, seen: int, timeout_s: float) -> tuple[int, RouteTable]:
        if seen:
            await asyncio.sleep(timeout_s)
        return 1, self._table

    async def wake(self, model: str) -> None:
        """Every model is awake."""

    async def demand(self, report: DemandReport) -> DemandReply:
        """Nobody decides from it."""
        return DemandReply()

    async def metrics(self) -> list[MetricFamily]:
        return []


class Turns:
    """How long the turns of an event loop are, of which one is taken each 10 ms."""

    def __init__(self) -> None:
        self.longest_turn_ms = 0.0
        self.busy_ms = 0.0

    async def beat(self) -> None:
        at, used = time.monotonic(), time.thread_time()
        while True:
            await asyncio.sleep(BEAT_S)
            now, now_used = time.monotonic(), time.thread_time()
            self.longest_turn_ms = max(self.longest_turn_ms, (now - at - BEAT_S) * 1000)
            self.busy_ms = max(self.busy_ms, (now_used - used) * 1000)
            at, used = now, now_used


def routes_of(model: dict[str, Any]) -> ModelRoutes:
    sockets = model.get("sockets") or [model["socket"]]
    return ModelRoutes(
        name=model["name"],
        state=ModelState.READY,
        reason=None,
        engine=model.get("engine", "echo"),
        source=model.get("source"),
        max_len=model["max_len"],
        max_queue=4096,
        replicas=[Route(f"{model['name']}/{number}", EPOCH, socket) for number, socket in enumerate(sockets)],
        loads_on_request=False,
    )


def main() -> None:
    """Argument: ``home``, and of each of the ``models`` its ``name``, ``socket`` or ``sockets`` and ``max_len``, and
    where it is not an echo model ``engine`` and ``source``. Says ``port`` and ``key``. Each line of input is answered
    with a line, after a garbage collection: then memory can be read. With ``beats`` the line has the
    ``longest_turn_ms`` of the event loop since the last line, and ``busy_ms``, the most CPU time of its thread in one
    turn."""
    settings = argument()
    home = Path(settings["home"])
    made = KeyFile(Home(home).keys).create("benchmark", now=time.time(), scopes=("inference",))
    port = free_port()
    table = RouteTable(
        ready=True, stopping=False, token=TOKEN, models=[routes_of(model) for model in settings["models"]]
    )
    controller: Any = Controller(table)  # what it lacks is not called
    server = GatewayServer(controller, GatewaySettings(host="127.0.0.1", port=port, home=str(home)))
    server.start()
    deadline = time.monotonic() + CONNECT_DEADLINE_S
    while sum(queue.links.slots > 0 for queue in list(server.gateway.served.queues.values())) < len(settings["models"]):
        if time.monotonic() > deadline:
            raise RuntimeError("the replicas are not connected")
        time.sleep(0.01)
    turns = Turns()
    settle_collector()  # as in the process of a gateway
    if settings.get("beats"):
        loop = server._loop
        assert loop is not None
        asyncio.run_coroutine_threadsafe(turns.beat(), loop)
    say({"port": port, "key": made[1]})
    for _ in sys.stdin:
        seen = vars(turns).copy()
        gc.collect()
        turns.longest_turn_ms = turns.busy_ms = 0.0
        say(seen)
    server.stop()


if __name__ == "__main__":
    main()
