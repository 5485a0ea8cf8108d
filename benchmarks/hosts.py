"""What many hosts cost: starts and losses over bare Ray actors, the controller at rest, and a gateway's request.

    .venv/bin/python -m benchmarks.hosts
    .venv/bin/python -m benchmarks.hosts --only virtual --only gateways

- *raylets*: eight raylets with 24 emulated cores each on this machine, and a fleet that joins them. Both sides of a
  ratio are measured in one run, and ratios are the medians of the rounds' ratios.
  - ``apply_to_ready_over_bare``: from `apply` until one echo replica of tp 8 on each host is ready, over eight bare
    actors with the same cores that reply. They take turns.
  - ``loss_to_ready_over_bare``: a raylet is killed, until its replica is ready on another host, over a bare actor
    of that host that Ray restarts on another one and that replies. Both suffer the same kill.
  - ``stream_gap_ms``: the longest time between two tokens of a stream, of a replica on another host whose steps take
    20 ms, through all these losses.
  - ``rest_ms_per_s_N``: CPU of the controller at rest, in each second, with N hosts that have a replica each. All
    share this machine.
- *virtual*: the same of the controller's code on the virtual cluster of the tests, with 24 replicas on each host, in
  virtual time. ``virtual_rest_exponent`` is that of the growth with the number of hosts. The cost of the cluster that
  plays Ray is included.
- *gateways*: CPU of the gateways for each request, with 8 gateways and 16 replicas over 1 and 2. Each gateway has the
  same load.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import math
import signal
import statistics
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import psutil

from benchmarks.gateway_parts.child import Child, cpu_s
from benchmarks.hosts_parts import gateways
from benchmarks.hosts_parts.raylets import Raylets
from benchmarks.report import Target, finish
from orchestrator.process.home import Home
from tests.fleet import LiveFleet, until
from tests.orchestrator.clients import Admin
from tests.orchestrator.conftest import temporary_home

RUN_S = 720  # the whole ends within this time
DEADLINE_S = 90.0
HOSTS = 8
ROUNDS = 3
TP = 8
REST_S = 10.0
SETTLE_S = 3.0
CALM_S = 5.0
SMALLER = (1, 4)
VIRTUAL_HOSTS = (12, 25, 50, 100)
GATEWAY_ROUNDS = 3
TARGETS = {
    "apply_to_ready_over_bare": Target(1.5, at_least=False),
    "loss_to_ready_over_bare": Target(1.5, at_least=False),
    "stream_gap_ms": Target(500, at_least=False),
    "rest_exponent": Target(1.0, at_least=False),
    "virtual_rest_exponent": Target(1.1, at_least=False),
    "gateway_cpu_over_small": Target(1.3, at_least=False),
}


def spec(name: str, hosts: int, *models: str) -> str:
    head = f"version: 1\nname: {name}\nhosts: {{emulate: inf2.48xlarge, count: {hosts}}}\n"
    defaults = f"defaults: {{engine: echo, tp_degree: {TP}, max_len: 2048, engine_options: {{step_ms: 20}}}}\n"
    return head + defaults + "models:\n" + "".join(f"  {model}\n" for model in models)


WATCHED = f'watched: {{cores: ["inf2.48xlarge/0:{TP}-{2 * TP - 1}"]}}'
ECHO = f"echo: {{replicas: {HOSTS}}}"
IDLE = spec("hosts", HOSTS, WATCHED)
BUSY = spec("hosts", HOSTS, WATCHED, ECHO)


@contextlib.contextmanager
def joined(raylets: Raylets, text: str) -> Iterator[LiveFleet]:
    """Yields a ready fleet on the raylets, which is removed at the end."""
    with temporary_home() as home:
        join = ("--ray-address", raylets.address, "--no-dashboard")
        fleet = LiveFleet(text, home=home, arguments=(*join, "--detach"))
        try:
            if fleet.process.wait(DEADLINE_S):
                raise RuntimeError(f"`up` has failed: {fleet.output()}")
            yield fleet
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"`up` has not ended: {fleet.output()}") from None
        finally:
            fleet.corewright("down")
            fleet.http.close()


def rest_ms_per_s(fleet: LiveFleet) -> float:
    """Returns CPU milliseconds of the controller in each second, after a while without changes."""
    record = Home(fleet.home).read_record()
    assert record is not None
    time.sleep(SETTLE_S)
    before = cpu_s([record.pid])
    time.sleep(REST_S)
    return (cpu_s([record.pid]) - before) / REST_S * 1000


def echoes(admin: Admin) -> list[dict[str, Any]]:
    """Returns the entries of the echo replicas in the status."""
    rows = [model["replicas"] for model in admin.status()["models"] if model["name"] == "echo"]
    return rows[0] if rows else []


def ready(admin: Admin) -> bool:
    """Returns whether each host has a ready echo replica."""
    return len({row["host"] for row in echoes(admin) if row["state"] == "ready"}) == HOSTS


def apply_s(admin: Admin) -> float:
    """Returns the seconds from an apply of the echo replicas until they are ready."""
    began = time.perf_counter()
    status, answer = admin.apply(BUSY)
    assert status == 200, answer
    until(lambda: ready(admin), DEADLINE_S, "the echo replicas are ready")
    return time.perf_counter() - began


def cordon(admin: Admin, route: str) -> None:
    """Let each host have cores for one echo replica only, or end that."""
    for host in admin.status()["hosts"]:
        status, answer = admin.post(route, host=host["name"], cores=f"{TP}-23")
        assert status == 200, answer


def loss_s(raylets: Raylets, admin: Admin) -> tuple[float, float]:
    """Kill a raylet with one echo replica, not that of the watched stream. Returns the seconds until the replica is
    ready elsewhere, and until the bare actor replies."""
    rows = echoes(admin)
    hosts = [row["host"] for row in rows]
    victim = next(row for row in rows if hosts.count(row["host"]) == 1 and not row["host"].endswith("/0"))
    raylet = psutil.Process(victim["pid"]).parent()
    assert raylet is not None

    def moved() -> bool:
        row = admin.replica(victim["id"])
        return bool(row and row["state"] == "ready" and row["host"] != victim["host"])

    with raylets.lost(raylet.pid) as (began, back_s), concurrent.futures.ThreadPoolExecutor(1) as pool:
        bare = pool.submit(back_s)
        until(moved, DEADLINE_S, f"{victim['id']} is ready on another host")
        ours = time.perf_counter() - began
        theirs = bare.result(DEADLINE_S)
    until(lambda: all(not host["lost"] for host in admin.status()["hosts"]), DEADLINE_S, "the host is back")
    return ours, theirs


def on_raylets() -> dict[str, float]:
    measured: dict[str, float] = {}
    with contextlib.ExitStack() as stack:
        began = time.perf_counter()
        raylets = Raylets(stack, HOSTS)
        print(f"{HOSTS} raylets in {time.perf_counter() - began:.1f} s", flush=True)
        for count in SMALLER:
            with joined(raylets, spec(f"rest{count}", count, f"echo: {{replicas: {count}, spread: host}}")) as fleet:
                measured[f"rest_ms_per_s_{count}"] = rest_ms_per_s(fleet)
                print(f"rest: {count} hosts, {measured[f'rest_ms_per_s_{count}']:.1f} ms/s", flush=True)
        with joined(raylets, IDLE) as fleet:
            measured |= busy(raylets, fleet)
    growth = measured[f"rest_ms_per_s_{HOSTS}"] / measured["rest_ms_per_s_1"]
    measured["rest_exponent"] = math.log(growth) / math.log(HOSTS)
    return measured


def busy(raylets: Raylets, fleet: LiveFleet) -> dict[str, float]:
    """Starts, rest and losses of the fleet on all raylets."""
    measured: dict[str, float] = {}
    admin = Admin(fleet.home)
    cordon(admin, "/cordon")
    starts = []
    for number in range(ROUNDS):
        if number:
            assert admin.apply(IDLE)[0] == 200
            until(lambda: not echoes(admin), DEADLINE_S, "the echo replicas are gone")
        bare = raylets.bare_start_s(TP)
        starts.append((apply_s(admin), bare))
        print(f"start: ours {starts[-1][0]:.2f} s, bare actors {bare:.2f} s", flush=True)
    cordon(admin, "/uncordon")
    measured[f"rest_ms_per_s_{HOSTS}"] = rest_ms_per_s(fleet)
    print(f"rest: {HOSTS} hosts, {measured[f'rest_ms_per_s_{HOSTS}']:.1f} ms/s", flush=True)
    stream = {"port": fleet.port, "key": "any", "model": "watched", "tokens": 2000}
    losses = []
    with Child("benchmarks.hostile_parts.watch", stream) as watch:
        watch.ask({})
        time.sleep(CALM_S)
        calm = watch.ask({})
        watch.ask({})
        for _ in range(ROUNDS):
            losses.append(loss_s(raylets, admin))
            print(f"loss: ours {losses[-1][0]:.2f} s, bare actor {losses[-1][1]:.2f} s", flush=True)
        gap = watch.ask({})
    if calm["cut"] or gap["cut"]:
        raise RuntimeError(f"the watched stream broke: {calm['cut']} {gap['cut']}")
    for name, pairs in (("apply_to_ready", starts), ("loss_to_ready", losses)):
        measured[f"{name}_over_bare"] = statistics.median(ours / theirs for ours, theirs in pairs)
        measured[f"{name}_s"] = statistics.median(ours for ours, _ in pairs)
    return measured | {"stream_gap_ms": gap["gap_ms"], "stream_gap_undisturbed_ms": calm["gap_ms"]}


def virtual() -> dict[str, float]:
    measured = {}
    for hosts in VIRTUAL_HOSTS:
        with Child("benchmarks.hosts_parts.virtual", hosts) as child:
            measured[f"virtual_rest_ms_per_s_{hosts}"] = child.ready["rest_ms_per_s"]
            print(f"virtual: {hosts} hosts, {child.ready}", flush=True)
    least, most = VIRTUAL_HOSTS[0], VIRTUAL_HOSTS[-1]
    growth = measured[f"virtual_rest_ms_per_s_{most}"] / measured[f"virtual_rest_ms_per_s_{least}"]
    return measured | {"virtual_rest_exponent": math.log(growth) / math.log(most / least)}


def of_gateways() -> dict[str, float]:
    pairs = []
    for _ in range(GATEWAY_ROUNDS):
        pairs.append((gateways.cost_us(8, 16), gateways.cost_us(1, 2)))
        print(f"gateways: 8 with 16 replicas {pairs[-1][0]:.0f} us, 1 with 2 {pairs[-1][1]:.0f} us", flush=True)
    return {
        "gateway_cpu_over_small": statistics.median(large / small for large, small in pairs),
        "gateway_us": statistics.median(large for large, _ in pairs),
    }


PARTS = {"raylets": on_raylets, "virtual": virtual, "gateways": of_gateways}


def _too_late(*_: object) -> None:
    raise TimeoutError(f"the benchmark has not ended within {RUN_S} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=sorted(PARTS), action="append", help="measure these parts only")
    chosen = parser.parse_args().only or list(PARTS)
    signal.signal(signal.SIGALRM, _too_late)
    signal.alarm(RUN_S)
    measured: dict[str, float] = {}
    for part in chosen:
        measured |= PARTS[part]()
    finish("hosts", measured, TARGETS)


if __name__ == "__main__":
    main()
