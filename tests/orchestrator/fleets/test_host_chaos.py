"""Twenty random faults of hosts, processes and operators on a joined cluster of four hosts, under load. CHAOS_SEED
chooses the order of the events."""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

import httpx
import pytest

from tests.fleet import until
from tests.network_faults import Faults
from tests.network_fleet import NetworkFleet, Services, gateway_url
from tests.network_hosts import NetworkHost, needs_network_hosts, network_hosts
from tests.network_invariants import CoreWatch, differences, held_cores, running_on
from tests.orchestrator.clients import Load, echo_questions, echo_text
from tests.repeated import Repeated

SEED = int(os.environ.get("CHAOS_SEED", "1"))
EVENTS = 20
PACE = 50  # answers from one event to the next
CLIENTS = 8
LONGEST = 100  # tokens: streams of two seconds
ANSWER_S = 45.0  # for the next byte of an answer
AGAIN_S = 5.0  # until gateways use a host whose Ray was started again
LEARNT_S = 60.0  # after its return, a raylet that is dead for Ray has ended: 20 s were seen
FIXED_POINT_S = 180.0
REFUSED = {"drain-no-room", "journal-unwritable"}

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900), needs_network_hosts]


def spec(wide: int = 3, pair: int = 3) -> str:
    return f"""\
version: 1
name: chaos
hosts: {{emulate: inf2.48xlarge, count: 4}}
defaults:
  engine: echo
  max_len: 512
  max_batch: 4
  engine_options: {{step_ms: 20}}
  deadlines: {{drain_s: 20}}
  scaling: {{hold_s: 20}}  # each request is answered before its client gives up, also while the head is away
models:
  wide: {{tp_degree: 12, replicas: {wide}}}
  pair: {{tp_degree: 8, replicas: {pair}}}
"""


class Keeper(Repeated):
    """Restarts Ray where it has ended, as services do, and ends the fault of a machine once it serves again."""

    def __init__(self, services: Services, faults: Faults) -> None:
        self._services = services
        self._faults = faults
        self._returning: dict[str, tuple[NetworkHost, float]] = {}  # by name: since when

    def returns(self, machine: NetworkHost) -> None:
        """The machine is reached again, or its Ray is to start again."""
        self._returning[machine.name] = (machine, time.monotonic())

    def is_whole(self, machine: NetworkHost) -> bool:
        return machine.name not in self._returning

    def look(self) -> None:
        with contextlib.suppress(AssertionError):  # a process has not ended yet
            self._services.restart()
        for machine, since in list(self._returning.values()):
            if self._serves(machine, since):
                self._faults.end(machine.name)
                del self._returning[machine.name]

    def _serves(self, machine: NetworkHost, since: float) -> bool:
        """Returns whether its gateway serves, and its Ray node has not yet to learn that it is dead."""
        now = time.monotonic()
        if now < since + (AGAIN_S if machine.ray_began > since else LEARNT_S) or not machine.ray_runs:
            return False
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{gateway_url(machine)}/livez", timeout=2).status_code == 200
        return False


class Chaos:
    """A fleet, and what is to be undone of what has happened to it."""

    def __init__(self, fleet: NetworkFleet, faults: Faults, keeper: Keeper, seed: int, log: TextIO) -> None:
        self._fleet = fleet
        self._faults = faults
        self._keeper = keeper
        self._rng = random.Random(seed)
        self._log = log
        self._began = time.monotonic()
        self._silent: tuple[NetworkHost, Callable[[NetworkHost], None], int] | None = None  # and the events to come
        self._drained: tuple[str, int] | None = None  # host, and the events to come
        self.done: Counter[str] = Counter()

    def note(self, line: str) -> None:
        self._log.write(f"{time.strftime('%H:%M:%S')} {time.monotonic() - self._began:6.1f} s: {line}\n")
        self._log.flush()

    def run(self, count: int, load: Load) -> None:
        """Let all of it happen: each event is followed by answers."""
        events: dict[str, Callable[[], str]] = {
            "kill a replica": self._kill_replica,
            "kill a host actor": self._kill_host_actor,
            "kill a raylet": self._kill_raylet,
            "cut a host off": self._cut,
            "freeze a host": self._freeze,
            "kill the controller": self._kill_controller,
            "restart the head": self._restart_head,
            "drain a host": self._drain,
            "apply": self._apply,
            "kill a gateway": self._kill_gateway,
        }
        names: list[str] = []
        while len(names) < count:  # each kind as often as the others
            names += self._rng.sample(list(events), len(events))
        for name in names[:count]:
            self._undo_what_is_due()
            self.note(f"{name}: {events[name]()}")
            self.done[name] += 1
            load.wait_answered(PACE, deadline_s=180)
            assert not load.wrong, "\n".join(load.wrong)
        self.undo()

    def _undo_what_is_due(self) -> None:
        if self._silent is not None:
            machine, back, left = self._silent
            self._silent = (machine, back, left - 1)
            if left == 0:
                self._end_silence()
        if self._drained is not None:
            host, left = self._drained
            self._drained = (host, left - 1)
            if left == 0:
                self._uncordon()

    def undo(self) -> None:
        self._end_silence()
        self._uncordon()

    def _end_silence(self) -> None:
        if self._silent is not None:
            machine, back, _ = self._silent
            back(machine)
            self._keeper.returns(machine)
            self.note(f"{machine.name} is back")
            self._silent = None

    def _uncordon(self) -> None:
        if self._drained is not None:
            host, _ = self._drained
            self.note(f"uncordon {host}: {self._post('/uncordon', host=host)}")
            self._drained = None

    def _post(self, route: str, **fields: object) -> str:
        status, answer = self._fleet.admin.post(route, **fields)
        if status < 300:  # or 0: the controller has ended meanwhile
            return str(status)
        code = answer["error"]["code"]
        assert code in REFUSED, f"{route} {fields}: {status} {answer}"
        return f"{status} {code}"

    def _whole(self) -> list[NetworkHost]:
        """Returns the hosts without a fault."""
        silent = None if self._silent is None else self._silent[0]
        return [worker for worker in self._fleet.workers if worker is not silent and self._keeper.is_whole(worker)]

    # The events. Each returns what it did.

    def _kill_replica(self) -> str:
        victims = [process for worker in self._whole() for process in running_on(worker)]
        victim = self._rng.choice(victims)
        self._faults.add(victim.id)
        _kill(victim.pid)
        return f"{victim.id}, pid {victim.pid}"

    def _kill_host_actor(self) -> str:
        machine = self._rng.choice(self._whole())
        machine.kill("ray::HostActor")
        return machine.name

    def _kill_raylet(self) -> str:
        machine = self._rng.choice(self._whole())
        self._faults.begin(machine.name)
        machine.kill("raylet/raylet")
        self._keeper.returns(machine)
        return machine.name

    def _cut(self) -> str:
        return self._silence(NetworkHost.cut, NetworkHost.heal)

    def _freeze(self) -> str:
        return self._silence(NetworkHost.freeze, NetworkHost.thaw)

    def _silence(self, silence: Callable[[NetworkHost], None], back: Callable[[NetworkHost], None]) -> str:
        self._end_silence()
        machine, events = self._rng.choice(self._whole()), self._rng.randint(0, 2)
        self._faults.begin(machine.name)
        silence(machine)
        self._silent = (machine, back, events)
        return f"{machine.name}, for {events + 1} events"

    def _kill_controller(self) -> str:
        self._fleet.head.kill("ray::ControllerActor")
        return "done"

    def _restart_head(self) -> str:
        self._fleet.head.kill("gcs_server")
        return "done"

    def _drain(self) -> str:
        self._uncordon()
        host = self._fleet.admin.status()["hosts"][self._rng.randrange(4)]["name"]
        said = self._post("/drain", target=host)
        self._drained = (host, self._rng.randint(0, 2))
        return f"{host}: {said}"

    def _apply(self) -> str:
        counts = {"wide": self._rng.randint(2, 4), "pair": self._rng.randint(2, 4)}
        return f"{counts}: {self._post('/apply', text=spec(**counts), file='chaos.yaml', base_dir='/')}"

    def _kill_gateway(self) -> str:
        machine = self._rng.choice(self._whole())
        pid = self._rng.choice(sorted(machine.processes("ray::ServeReplica")) or [0])
        if pid:
            self._faults.add(gateway_url(machine))
            _kill(pid)
        return f"{machine.name}, pid {pid}"


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 9)


def settled(fleet: NetworkFleet) -> bool:
    with contextlib.suppress(httpx.HTTPError, KeyError):
        return not differences(fleet.status(), fleet.workers)
    return False


def test_a_joined_fleet_outlives_random_faults(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    """Each request has its exact answer, unless a fault explains its failure. No core is ever held twice, and none is
    leaked. Without a further hand, the fleet comes to the state that its spec wants."""
    listed = tmp_path / "events.txt"
    print(f"CHAOS_SEED={SEED}; the events are in {listed}")  # noqa: T201
    settings = {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str(tmp_path / "gcs")}
    with listed.open("w") as log, network_hosts(5, tmp_path / "logs") as network:
        services = Services(network, settings)
        fleet = NetworkFleet(network, spec(), "--detach").wait_ready()
        with CoreWatch(fleet.workers) as watch, Faults(fleet, watch) as faults, fleet.balanced():
            load = Load(fleet, echo_questions(("wide", "pair"), SEED, LONGEST), CLIENTS, faults.permits, ANSWER_S)
            with load, Keeper(services, faults) as keeper:
                load.wait_answered(PACE, kind="exact")
                chaos = Chaos(fleet, faults, keeper, SEED, log)
                chaos.run(EVENTS, load)
                began = time.monotonic()
                try:
                    until(lambda: settled(fleet), FIXED_POINT_S, "the fleet is as its spec says")
                except AssertionError as error:
                    raise AssertionError(f"{error}: {differences(fleet.status(), fleet.workers)}") from None
                chaos.note(f"settled after {time.monotonic() - began:.1f} s")
                load.wait_answered(PACE, kind="exact")
            record_property("answers", dict(load.kinds))
            record_property("slowest_s", round(load.slowest_s, 1))
            record_property("settled_s", round(time.monotonic() - began, 1))
            assert not load.wrong, "\n".join(load.wrong)
            assert watch.violations == []
            assert watch.looks > 0
        for model in ("wide", "pair"):
            assert fleet.complete(model, "hello", 8) == echo_text("hello", 8)
        fleet.head.run("corewright", "down")
        until(lambda: not any(map(held_cores, fleet.workers)), 20, "no core is held")
