"""Two hosts, each a network namespace: a gateway's links, and a replica that is cut off and comes back.

Run in a network namespace of its own: `unshare --user --map-root-user --net python -m tests.workers.serving.cut_host`.
Prints the seconds until the gateway had given the replica up, and until it was linked again.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import workers
from orchestrator.access.tls import fleet_credentials
from orchestrator.gateway.serving.model_queue import ModelQueue
from orchestrator.gateway.serving.replica_link_pool import LinkSettings
from orchestrator.messages.route_table import Route
from orchestrator.process.version import corewright_version
from tests.orchestrator.gateways import routes
from tests.served import EPOCH, TOKEN
from workers.messages.credentials import Credentials
from workers.messages.requests import GenerateRequest
from workers.messages.wire import Welcome
from workers.serving.dataplane import DataPlane

REPLICA, GATEWAY = "10.9.0.2", "10.9.0.1"
DEADLINE_S = 40.0


class Unused:
    """A batcher that gets no request."""

    def submit(self, request: GenerateRequest) -> None: ...

    def cancel(self, id: str) -> None: ...


def replica(certificate: str, key: str, authority: str) -> None:
    """Serve until stdin ends. Prints the address."""
    with tempfile.TemporaryDirectory(prefix="cwt-", dir="/tmp") as folder:
        plane = DataPlane(
            Path(folder) / "s",
            welcome=Welcome(corewright_version(), str(Path(workers.__file__).parent), 4, 64, 64, 257),
            token=TOKEN,
            epoch=EPOCH,
            batcher=Unused(),
            listen=f"tls://{REPLICA}:0",
            credentials=Credentials(certificate=certificate, key=key, authority=authority),
        )
        plane.start()
        print(plane.address, flush=True)  # noqa: T201
        sys.stdin.read()
        plane.close()


def ip(*words: str, enter: tuple[str, ...] = ()) -> None:
    subprocess.run([*enter, "ip", *words], check=True)


async def cut_and_heal() -> None:
    fleet = fleet_credentials()
    own = fleet.replica
    words = [sys.executable, "-m", __spec__.name, own.certificate, own.key, own.authority]
    peer = subprocess.Popen(  # noqa: ASYNC220
        ["unshare", "--net", "sh", "-c", 'read go; exec "$@"', "sh", *words],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert peer.stdin is not None
    assert peer.stdout is not None
    own_namespace = Path("/proc/self/ns/net").readlink()
    while Path(f"/proc/{peer.pid}/ns/net").readlink() == own_namespace:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    there = ("nsenter", "-t", str(peer.pid), "-n")
    ip("link", "add", "name", "gw", "type", "veth", "peer", "name", "rp", "netns", str(peer.pid))
    for address, device, enter in ((GATEWAY, "gw", ()), (REPLICA, "rp", there)):
        ip("addr", "add", f"{address}/24", "dev", device, enter=enter)
        ip("link", "set", "dev", device, "up", enter=enter)
    peer.stdin.write("go\n")
    peer.stdin.flush()
    route = Route("m/0", EPOCH, "/elsewhere", peer.stdout.readline().strip())
    table = routes("m")
    table.replicas.append(route)
    queue = ModelQueue(table, LinkSettings("g", TOKEN, GATEWAY, fleet.gateway), wake=lambda name: None)
    queue.update(table)

    async def until(linked: bool) -> float:
        began = time.monotonic()
        while bool(queue.links.slots) is not linked:
            assert time.monotonic() - began < DEADLINE_S, (linked, queue.links.slots)
            await asyncio.sleep(0.01)
        return time.monotonic() - began

    await until(True)
    ip("link", "set", "dev", "rp", "down", enter=there)
    gone_s = await until(False)
    ip("link", "set", "dev", "rp", "up", enter=there)
    print(round(gone_s, 1), round(await until(True), 1))  # noqa: T201
    peer.kill()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        replica(*sys.argv[1:])
    else:
        asyncio.run(cut_and_heal())
