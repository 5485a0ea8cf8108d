"""Hundreds of random events under constant load: no request without an answer, no core held twice, none leaked, and
afterwards the fleet is as its spec says. The order of the events comes from a fixed seed; who is hit depends on what
is there then."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from orchestrator.process.home import Home
from placements.facts.core_range import CoreRange
from tests.fleet import LiveFleet, until
from tests.orchestrator.clients import Admin, Load, Question, complete, echo_questions
from workers.host.core_claims import CoreClaim, CoresTaken, held_cores

SEED = int(os.environ.get("CHAOS_SEED", "4"))  # another one for a further search; the suite runs this one
EVENTS = 200
PACE = 25  # answered requests from one event to the next
CPU_EVENTS = 24
CPU_SEED = 2  # with it there is at least one event of each kind
CPU_PACE = 8
START_S = 3.0  # of a fork and of a fresh process; what it is in the middle of is left to chance
FIXED_POINT_S = 120.0
CHECK_S = 10.0  # for a claim or a process to be what the controller knows of it

BASE = """\
version: 1
name: chaos
hosts: {emulate: inf2.24xlarge, count: 2}
defaults: {engine: echo, max_len: 512, max_batch: 4, engine_options: {step_ms: 4}, deadlines: {drain_s: 20}}
models:
  alpha: {tp_degree: 2, replicas: {min: 2, max: 3}}
  beta: {tp_degree: 4, replicas: {min: 1, max: 2}, priority: 5}
  gamma: {replicas: {min: 0, max: 2}}
"""
ECHO_SPECS = (
    BASE,
    BASE.replace("max_len: 512", "max_len: 480"),  # every process anew
    BASE.replace("alpha: {tp_degree: 2", "alpha: {tp_degree: 4"),  # other cores
    BASE + "  delta: {tp_degree: 2, cores: ['inf2.24xlarge/1:10-11']}\n",  # a further model, with a pin
)
MODELS = ("alpha", "beta", "gamma", "delta")
ASKED = (*("alpha", "beta", "gamma") * 3, "delta")  # delta is seldom there, and then each answer is a 404
TINY = Path(__file__).parents[3] / "placements" / "examples" / "models" / "tiny"
CPU_BASE = f"""\
version: 1
name: chaos
hosts: {{emulate: inf2.24xlarge}}
defaults:
  engine: cpu
  max_len: 256
  threads: 1
  deadlines: {{drain_s: 20}}
  scaling: {{hold_s: 20}}  # each request is answered before its client gives up, also if there is no room
models:
  pair: {{source: {TINY}, tp_degree: 2, replicas: {{min: 2, max: 2}}}}
  wide: {{source: {TINY}, tp_degree: 4}}
"""
CPU_SPECS = (
    CPU_BASE,
    CPU_BASE.replace("max_len: 256", "max_len: 128"),
    CPU_BASE.replace("tp_degree: 4", "tp_degree: 8"),
)
ECHO_WEIGHTS = {
    "apply": 24,
    "scale": 24,
    "load or unload": 8,
    "kill a replica": 24,
    "kill the controller": 8,
    "freeze or thaw": 12,
    "drain a replica": 14,
    "drain or uncordon a host": 12,
    "cordon or uncordon cores": 16,
    "take or free a core": 14,
    "fill or clear the disk": 12,
    "canary or promote": 6,
    "pause or resume": 6,
}
CPU_WEIGHTS = {
    "apply": 4,
    "scale": 3,
    "kill a replica": 5,
    "kill the controller": 2,
    "kill a warm process": 4,
    "freeze or thaw": 2,
    "drain a replica": 3,
    "take or free a core": 1,
}
REFUSALS = {  # what an event may be answered with, by its cause
    404: {"target-unknown", "model-unknown"},
    409: {
        "rollout-not-running",
        "rollout-not-paused",
        "rollout-paused",
        "no-canary",
        "canary-impossible",
        "update-impossible",
        "drain-no-room",
    },
    422: set(),
    507: {"journal-unwritable"},
}


class Chaos:
    """One fleet, what was done to it, and what still has to be undone."""

    def __init__(self, fleet: LiveFleet, specs: Sequence[str], models: Sequence[str], seed: int) -> None:
        self.fleet = fleet
        self.admin = Admin(fleet.home)
        self.rng = random.Random(seed)
        self.seed = seed
        self.told: list[str] = []
        self.done: Counter[str] = Counter()
        self._specs = specs
        self._models = models
        self._began = time.monotonic()
        self._frozen: dict[int, float] = {}  # stopped processes, with their start
        self._claims: dict[tuple[int, int], CoreClaim] = {}  # by host and core
        self._cordoned: tuple[str, str] | None = None
        self._drained: str | None = None
        self._full: psutil.Process | None = None  # the controller that can write no file any more

    def events(self, weights: dict[str, int], count: int) -> Iterator[str]:
        """The next events, chosen ahead: what happens to the fleet does not change the order."""
        names = list(weights)
        yield from self.rng.choices(names, [weights[name] for name in names], k=count)

    def happen(self, event: str) -> None:
        acts: dict[str, Callable[[], str]] = {
            "apply": self._apply,
            "scale": self._scale,
            "load or unload": self._load_or_unload,
            "kill a replica": self._kill_replica,
            "kill the controller": self._kill_controller,
            "kill a warm process": self._kill_warm_process,
            "freeze or thaw": self._freeze_or_thaw,
            "drain a replica": self._drain_replica,
            "drain or uncordon a host": self._drain_or_uncordon_host,
            "cordon or uncordon cores": self._cordon_or_uncordon_cores,
            "take or free a core": self._take_or_free_core,
            "fill or clear the disk": self._fill_or_clear_disk,
            "canary or promote": self._canary_or_promote,
            "pause or resume": self._pause_or_resume,
        }
        what = acts[event]()
        self.done[event] += 1
        self.told.append(f"{len(self.told) + 1:3} at {time.monotonic() - self._began:6.1f} s: {event}: {what}")

    # The events. Each gives what it did, in words.

    def _ask(self, route: str, **fields: Any) -> str:
        status, answer = self.admin.post(route, **fields)
        shown = ", ".join(str(value)[:40] for name, value in fields.items() if name not in ("text", "base_dir", "file"))
        if status == 0:
            return f"{shown}: no answer, {answer}"
        if status < 300:
            return f"{shown}: done"
        code = answer["error"]["code"]
        assert code in REFUSALS.get(status, ()), f"{route} {fields} was refused: {status} {answer}"
        assert answer["error"]["message"], answer
        assert (code == "journal-unwritable") <= (self._full is not None), f"the disk is not full: {answer}"
        return f"{shown}: {status} {code}"

    def _apply(self) -> str:
        number = self.rng.randrange(len(self._specs))
        return f"spec {number} " + self._ask("/apply", text=self._specs[number], file="chaos.yaml", base_dir="/")

    def _canary_or_promote(self) -> str:
        if self.admin.get("/rollout")["state"] in ("canary", "progressing") and self.rng.random() < 0.5:
            return "promote " + self._ask("/rollout/promote")
        number = self.rng.randrange(len(self._specs))
        text = self._specs[number]
        return f"canary of spec {number} " + self._ask("/apply", text=text, file="chaos.yaml", base_dir="/", canary=0.3)

    def _pause_or_resume(self) -> str:
        verb = "resume" if self.admin.get("/rollout")["state"] in ("paused", "failed") else "pause"
        return f"{verb} " + self._ask(f"/rollout/{verb}")

    def _scale(self) -> str:
        model = self.rng.choice([model for model in self.admin.status()["models"] if model["name"] in self._models])
        most = {"alpha": 3, "beta": 2, "gamma": 2, "pair": 2}.get(model["name"], 1)
        return self._ask("/scale", model=model["name"], count=self.rng.randint(1, most))

    def _load_or_unload(self) -> str:
        asleep = [m["name"] for m in self.admin.status()["models"] if m["scaled"] is not None and m["wanted"] == 0]
        if asleep:
            return "load " + self._ask("/load", model=asleep[0])
        return "unload " + self._ask("/unload", model=self.rng.choice(("beta", "gamma")))

    def _replicas(self) -> list[Any]:
        return [r for model in self.admin.status()["models"] for r in model["replicas"] if r["pid"] is not None]

    def _victim(self) -> Any:
        """The living replicas that have died least come first: a breaker that opens makes the rest of the run dull."""
        replicas = self._replicas()
        fewest = min((replica["failures"] for replica in replicas), default=0)
        return self.rng.choice([r for r in replicas if r["failures"] <= max(2, fewest)]) if replicas else None

    def _kill_replica(self) -> str:
        victim = self._victim()
        if victim is None:
            return "nobody is there"
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim["pid"], signal.SIGKILL)
        return f"{victim['id']}.{victim['epoch']}, {victim['state']}, pid {victim['pid']}"

    def _kill_controller(self) -> str:
        pid = self.fleet.controller_pid()
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        self._full = None  # the limit dies with it
        return f"pid {pid}"

    def _kill_warm_process(self) -> str:
        """In most cases while a start is in progress. No fork that is not a Ray worker yet: Ray would miss it for a
        minute, as a fresh process, and start no other one meanwhile."""
        said = ""
        if self.rng.random() < 0.75:
            said = f"after {self._kill_replica()}, "
            time.sleep(self.rng.uniform(0, START_S))
        pids = self.fleet.named_pids("fork_server")
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in (psutil.Process(pid) for pid in pids):
                if process.ppid() not in pids:
                    process.kill()
                    return f"{said}pid {process.pid} of {pids}"
        return said + "nobody is there"

    def _freeze_or_thaw(self) -> str:
        for pid in list(self._frozen):
            if not self._thaw(pid):
                continue
            return f"thaw pid {pid}"
        victim = self._victim()
        if victim is None:
            return "nobody is there"
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(victim["pid"])
            self._frozen[process.pid] = process.create_time()
            process.suspend()
        return f"freeze {victim['id']}.{victim['epoch']}, {victim['state']}, pid {victim['pid']}"

    def _thaw(self, pid: int) -> bool:
        """Returns whether it was still there."""
        started = self._frozen.pop(pid)
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if process.create_time() == started:
                process.resume()
                return True
        return False

    def _drain_replica(self) -> str:
        victim = self._victim()
        return "nobody is there" if victim is None else self._ask("/drain", target=victim["id"])

    def _drain_or_uncordon_host(self) -> str:
        if self._drained is not None:
            said = self._ask("/uncordon", host=self._drained)
            if said.endswith("done"):
                self._drained = None
            return "uncordon " + said
        host = self.rng.choice(self.admin.status()["hosts"])["name"]
        said = self._ask("/drain", target=host)
        self._drained = None if "drain-no-room" in said else host
        return "drain " + said

    def _cordon_or_uncordon_cores(self) -> str:
        if self._cordoned is not None:
            host, cores = self._cordoned
            said = self._ask("/uncordon", host=host, cores=cores)
            if said.endswith("done"):
                self._cordoned = None
            return "uncordon " + said
        host = self.rng.choice(self.admin.status()["hosts"])["name"]
        first = self.rng.randrange(0, 8)
        self._cordoned = host, f"{first}-{first + 3}"
        return "cordon " + self._ask("/cordon", host=host, cores=self._cordoned[1])

    def _take_or_free_core(self) -> str:
        if self._claims:
            (host, core), claim = self._claims.popitem()
            claim.release()
            return f"free core {core} of host {host}"
        hosts = self.admin.status()["hosts"]
        host = self.rng.randrange(len(hosts))
        leased = {core for lease in hosts[host]["leases"] for core in CoreRange.parse(lease["cores"])}
        free = [core for core in range(hosts[host]["cores"]) if core not in leased]
        if not free:
            return f"no core of host {host} is free"
        core = self.rng.choice(free)
        try:
            self._claims[host, core] = CoreClaim(Home(self.fleet.home).claims(host), [core])
        except CoresTaken:
            return f"core {core} of host {host} is a replica's meanwhile"
        return f"take core {core} of host {host}"

    def _fill_or_clear_disk(self) -> str:
        if self._full is not None:
            self._clear_disk()
            return "clear"
        with contextlib.suppress(psutil.NoSuchProcess):
            controller = psutil.Process(self.fleet.controller_pid())
            size = Home(self.fleet.home).journal.stat().st_size
            self._full = controller
            controller.rlimit(psutil.RLIMIT_FSIZE, (size, psutil.RLIM_INFINITY))
            return f"fill at {size} bytes"
        self._full = None
        return "the controller is gone"

    def _clear_disk(self) -> None:
        if self._full is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                self._full.rlimit(psutil.RLIMIT_FSIZE, (psutil.RLIM_INFINITY, psutil.RLIM_INFINITY))
        self._full = None

    # What must hold

    def check(self) -> None:
        """Cores add up and are leased once; every claim is a living replica's or this test's."""
        for host in self.admin.status()["hosts"]:
            leased: Counter[int] = Counter()
            for lease in host["leases"]:
                leased.update(CoreRange.parse(lease["cores"]))
            assert host["balanced"], f"the cores do not add up: {host}"
            assert leased == Counter(set(leased)), f"two leases share a core: {host}"
            total = host["leased"] + host["free"] + host["free_cordoned"] + host["quarantined"] + host["reserved"]
            assert total == host["cores"], host
        until(lambda: not self._strange_claims(), CHECK_S, f"claims of nobody known: {self._strange_claims()}")

    def _strange_claims(self) -> list[str]:
        """Claims that neither a living replica nor this test holds; a claim is written a moment after it is made."""
        own = {key: os.getpid() for key in self._claims}
        violations = []
        for host in (0, 1):
            for core, pid in held_cores(Home(self.fleet.home).claims(host)).items():
                if (host, core) in own or (pid is not None and _is_replica(pid)):
                    continue
                violations.append(f"core {core} of host {host} by pid {pid}")
        return violations

    def undo(self) -> None:
        """Take back everything that is not the fleet's own doing."""
        self._clear_disk()
        for pid in list(self._frozen):
            self._thaw(pid)
        while self._claims:
            self._claims.popitem()[1].release()
        for host in self.admin.status()["hosts"]:
            assert self.admin.post("/uncordon", host=host["name"])[0] == 200
        state = self.admin.get("/rollout")["state"]
        if state in ("paused", "failed"):
            self.told.append(f"  resume: {self._ask('/rollout/resume')}")
        self.told.append(f"  promote: {self._ask('/rollout/promote')}")
        for model in self.admin.status()["models"]:
            if any((replica["pause_s"] or 0) > 60 for replica in model["replicas"]):  # an operator closes the breaker
                self.told.append(f"  restart: {self._ask('/rollout/restart', model=model['name'])}")

    def wait_fixed_point(self, tmp_path: Path) -> Any:
        """Everything is as the running spec says, and nothing else is left."""
        why = ["nothing was seen"]

        def fixed() -> Any:
            status = self.admin.status()
            why[:] = self._differences(status)
            return None if why else status

        try:
            status = until(fixed, FIXED_POINT_S, "the fixed point")
        except AssertionError as error:
            raise AssertionError(f"{error}: {why}") from None
        spec = tmp_path / "running.yaml"
        spec.write_text(self.admin.get("/spec")["text"])
        planned = self.fleet.corewright("plan", str(spec))
        assert planned.returncode == 0, planned.stdout + planned.stderr
        for model in status["models"]:
            if model["wanted"]:
                assert complete(self.fleet, model["name"], max_tokens=2).status_code == 200
        return status

    def _differences(self, status: Any) -> list[str]:
        deviations = []
        if status["rollout"]["state"] != "complete":
            deviations.append(f"the rollout is {status['rollout']}")
        replicas = [replica for model in status["models"] for replica in model["replicas"]]
        for model in status["models"]:
            if [r["state"] for r in model["replicas"]] != ["ready"] * model["wanted"]:
                states = {r["id"]: (r["state"], r["pause_s"], r["reason"]) for r in model["replicas"]}
                deviations.append(f"{model['name']} wants {model['wanted']} and has {states}, {model['reason']}")
            deviations += [
                f"{r['id']} is of another version" for r in model["replicas"] if r["version"] != model["version"]
            ]
        for index, host in enumerate(status["hosts"]):
            held = held_cores(Home(self.fleet.home).claims(index))
            leased = {
                core: replica["pid"]
                for replica in replicas
                if replica["host"] == host["name"] and replica["cores"] is not None
                for core in CoreRange.parse(replica["cores"])
            }
            if held != leased or host["leased"] != len(leased) or host["quarantined"]:
                deviations.append(f"{host['name']} has {host}, held are {held}")
        left = self.fleet.replica_pids() ^ {replica["pid"] for replica in replicas}
        if left:
            deviations.append(f"processes of no epoch that lives, or none where one should be: {left}")
        return deviations

    def report(self, load: Load) -> str:
        """For whoever has to find out why."""
        log = (self.fleet.home / "logs" / "controller.log").read_text().splitlines()[-60:]
        shown = self.fleet.corewright("status").stdout
        parts = [
            f"seed {self.seed}; answers: {dict(load.kinds)}, the slowest {load.slowest_s:.1f} s",
            "wrong answers:",
            *load.wrong[:10],
            "the last events:",
            *self.told[-25:],
            shown,
            "the controller's log:",
            *log,
        ]
        return "\n".join(parts)


def _is_replica(pid: int) -> bool:
    try:
        return "Replica[" in " ".join(psutil.Process(pid).cmdline())
    except psutil.NoSuchProcess:
        return False


def run(chaos: Chaos, question: Callable[[int, int], Question], weights: dict[str, int], count: int, pace: int) -> Load:
    """All events under load, then back to calm. The load goes on until the events are over."""
    load = Load(chaos.fleet, question)
    try:
        with load:
            load.wait_answered(pace, kind="exact")
            for event in chaos.events(weights, count):
                chaos.happen(event)
                load.wait_answered(pace)
                chaos.check()
                assert load.wrong == []
            chaos.undo()
            load.wait_answered(pace, kind="exact")
        assert load.wrong == []
    except AssertionError as error:
        raise AssertionError(f"{error}\n{chaos.report(load)}") from None
    return load


def settle(chaos: Chaos, load: Load, tmp_path: Path) -> None:
    try:
        chaos.wait_fixed_point(tmp_path)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{chaos.report(load)}") from None


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_after_two_hundred_random_events_the_fleet_matches_its_spec(tmp_path: Path) -> None:
    """Echo replicas on two hosts, 8 clients: each request has its exact answer or a documented error in time."""
    with LiveFleet(BASE) as fleet:
        fleet.wait_ready()
        chaos = Chaos(fleet, ECHO_SPECS, MODELS, SEED)
        load = run(chaos, echo_questions(ASKED, SEED), ECHO_WEIGHTS, EVENTS, PACE)
        settle(chaos, load, tmp_path)
        print(dict(chaos.done), dict(load.kinds), f"{load.slowest_s:.1f} s")  # noqa: T201
        assert sum(chaos.done.values()) == EVENTS
        assert load.kinds["exact"] > EVENTS * PACE / 4, chaos.report(load)
        assert fleet.stop() == 0
        assert fleet.processes() == []


@pytest.mark.soak
@pytest.mark.timeout(400)
def test_cpu_engines_give_the_same_answers_through_random_events(tmp_path: Path) -> None:
    """Real models at temperature 0: their answers among deaths and updates are those without events."""
    with LiveFleet(CPU_BASE) as fleet:
        fleet.wait_ready()
        questions = [
            {"model": model, "prompt": prompt, "max_tokens": 12, "temperature": 0}
            for model in ("pair", "wide")
            for prompt in ("What is a replica?", "The cat", "2 + 3 =", "Once upon a time")
        ]
        alone = [
            fleet.http.post("/v1/completions", json=question).json()["choices"][0]["text"] for question in questions
        ]

        def question(client: int, number: int) -> Question:
            index = (client + 3 * number) % len(questions)
            return {**questions[index], "stream": number % 2 == 0}, alone[index]

        chaos = Chaos(fleet, CPU_SPECS, ("pair", "wide"), CPU_SEED)
        load = run(chaos, question, CPU_WEIGHTS, CPU_EVENTS, CPU_PACE)
        settle(chaos, load, tmp_path)
        print(dict(chaos.done), dict(load.kinds), f"{load.slowest_s:.1f} s")  # noqa: T201
        assert load.kinds["exact"] > CPU_EVENTS, chaos.report(load)
