"""A controller at rest on the virtual cluster, in a process of its own: what a virtual second costs."""

from __future__ import annotations

import asyncio
import logging
import random
import tempfile
import time
from pathlib import Path

from benchmarks.gateway_parts.child import argument, say
from orchestrator.process.collector import settle_collector
from tests.orchestrator import virtual_cluster
from tests.orchestrator.fakes import Played, virtually

CORES = 24
MODELS = 12  # two replicas of each on each host, since a model has at most 1,000
REPORT_S = 5.0  # between two reports of a replica, as on Ray
REST_S = 60.0
WINDOWS = 3


def spec(hosts: int) -> str:
    lines = [f"  m{index}: {{tp_degree: 1, replicas: {hosts * CORES // MODELS}}}\n" for index in range(MODELS)]
    head = f"version: 1\nname: fleet\nhosts: {{emulate: inf2.48xlarge, count: {hosts}}}\n"
    return f"{head}defaults: {{engine: echo}}\nmodels:\n{''.join(lines)}"


async def live(hosts: int, folder: Path) -> dict[str, float]:
    """Returns CPU seconds from nothing to all replicas ready, and CPU milliseconds of a second at rest: the least of
    some windows, since other processes disturb the caches."""
    virtual_cluster.REPORT_S = REPORT_S
    cluster = virtual_cluster.VirtualCluster([f"inf2.48xlarge/{index}" for index in range(hosts)], random.Random(1))
    cluster.load_s = 7.0
    began = time.process_time()
    async with Played(folder, cluster, spec(hosts), tick_s=1.0) as played:
        await played.settled()
        started_s = time.process_time() - began
        settle_collector()
        windows = []
        for _ in range(WINDOWS):
            began = time.process_time()
            await asyncio.sleep(REST_S)
            windows.append((time.process_time() - began) / REST_S * 1000)
        await played.kill()
    return {"start_cpu_s": started_s, "rest_ms_per_s": min(windows)}


def main() -> None:
    """Argument: the number of hosts. Says what `live` returns."""
    logging.disable(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="cwv-", dir="/tmp") as folder:
        say(virtually(lambda: live(argument(), Path(folder))))


if __name__ == "__main__":
    main()
