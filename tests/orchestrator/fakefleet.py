"""The real admin API on loopback, with a fleet behind it that a test plays."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any

import msgspec

from orchestrator.api.routes import ROUTES, AdminRoute, documented
from orchestrator.api.schemas import Fields, OperationRefused, RequestRow
from orchestrator.api.server import AdminApi, serve_admin
from orchestrator.cluster.settings import resolve
from orchestrator.console.fleet_feed import ConsoleSource, LiveView, RayLinks
from orchestrator.console.page import Entrance
from orchestrator.messages.controller_settings import ControllerSettings
from orchestrator.messages.fleet_status import EventPage, FleetStatus
from orchestrator.process.addresses import free_port
from placements.facts.topology import Machine
from placements.spec.problems import Problem
from tests.fleet import until

TOKEN = "secret"
AT = 1795183685.0  # 2026-11-20 14:08:05 UTC
SPEC = """\
version: 1
name: two
hosts: {emulate: inf2.48xlarge}
defaults: {max_len: 512}
models:
  chat: {engine: echo, tp_degree: 8, replicas: 2}
  small: {engine: echo}
"""


def condition(type: str, status: bool, reason: str, message: str) -> dict[str, Any]:
    return {"type": type, "status": status, "reason": reason, "message": message, "since": AT}


def replica(id: str, cores: str, state: str = "ready", **more: Any) -> dict[str, Any]:
    return {
        "id": id,
        "engine": "echo",
        "host": "inf2.48xlarge/0",
        "cores": cores,
        "state": state,
        "since": AT,
        "phase": None,
        "pid": 4711,
        "epoch": 1,
        "restarts": 0,
        "reason": None,
        "failures": 0,
        "pause_s": None,
        "stopped": False,
        "speculation": None,
        "server": None,
        "log": [],
        "log_file": f"/home/ada/.corewright/logs/{id.replace('/', '-')}.log",
        "version": "7d3f",
        "load_s": 4.2,
        "load_phases": {"actor": 0.4, "process": 1.1, "imports": 2.0, "weights": 0.5, "first_token": 0.2},
        "compile_s": 0.0,
        "compiled": None,
        "fetch": None,
        "live": 3,
        "waiting": 1,
        **more,
    }


STATUS: dict[str, Any] = {
    "name": "two",
    "ready": True,
    "index": 41,
    "settled": True,
    "revision": 3,
    "rollout": {},  # as the fleet is asked
    "conditions": [condition("Ready", True, "Served", "every model has had its replicas")],
    "models": [
        {
            "name": "chat",
            "kind": "generate",
            "state": "degraded",
            "reason": "replica-died: killed",
            "parked": None,
            "wanted": 2,
            "scaled": None,
            "scaling": {
                "auto": True,
                "min": 2,
                "max": 2,
                "target": 2,
                "why": None,
                "demand": {"arrivals_per_s": 1.25, "waiting": 1, "live": 3},
            },
            "version": "7d3f",
            "preparing": [],
            "conditions": [condition("Available", True, "Serving", "1 of 2 replicas serve")],
            "replicas": [
                replica("chat/0", "0-7"),
                replica(
                    "chat/1",
                    "8-15",
                    "failed",
                    pid=None,
                    live=0,
                    waiting=0,
                    failures=2,
                    pause_s=2.0,
                    reason="replica-died: killed",
                    log=["2026-11-20 14:08:13,930 INFO workers.serving.replica: ready"],
                ),
            ],
        },
        {
            "name": "small",
            "kind": "generate",
            "state": "unloaded",
            "reason": None,
            "parked": None,
            "wanted": 0,
            "scaled": {"count": 0, "by": "ada@wright"},
            "scaling": {"auto": True, "min": 1, "max": 1, "target": 1, "why": None, "demand": None},
            "version": "91ac",
            "preparing": [],
            "conditions": [],
            "replicas": [],
        },
    ],
    "hosts": [
        {
            "name": "inf2.48xlarge/0",
            "instance": "inf2.48xlarge",
            "emulated": True,
            "cores": 24,
            "leased": 16,
            "free": 4,
            "free_cordoned": 3,
            "quarantined": 1,
            "reserved": 0,
            "reserved_cores": [],
            "leases": [{"replica": "chat/0", "cores": "0-7"}, {"replica": "chat/1", "cores": "8-15"}],
            "cordoned": ["20-22"],
            "lost": False,
            "starting": None,
            "balanced": True,
            "draining": False,
            "busy": 2,
            "node": "4a5c",
            "leaving": None,
            "quarantine": [{"core": 23, "pid": 99, "command": "python train.py", "cause": None}],
            "fetches": [],
        }
    ],
    "gateways": [],
}


def status_of(status: dict[str, Any], rollout: dict[str, Any] | None = None) -> FleetStatus:
    """Returns the typed status; ``rollout`` replaces its own."""
    return msgspec.convert({**status, "rollout": rollout or ROLLOUT}, FleetStatus)


PLACED = [("chat", 0, "0-7", 60), ("chat", 1, "8-15", 60), ("small", 0, "16", 6)]


def placement(model: str, number: int, cores: str, threads: int) -> dict[str, Any]:
    env = {"NEURON_PROCESS_TAG": f"{model}/{number}", "NEURON_RT_VISIBLE_CORES": cores, "OMP_NUM_THREADS": str(threads)}
    env["TOKENIZERS_PARALLELISM"] = "false"
    return {
        "model": model,
        "replica": number,
        "host": "inf2.48xlarge/0",
        "cores": cores,
        "threads": threads,
        "env": env,
    }


def thread_line(model: str, replicas: int, each: int, arithmetic: str) -> dict[str, Any]:
    together = replicas * each
    return {"model": model, "replicas": replicas, "each": each, "arithmetic": arithmetic, "together": together}


def host(threads: int, *lines: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": "inf2.48xlarge/0",
        "instance": "inf2.48xlarge",
        "emulated": True,
        "lnc": None,
        "cores": 24,
        "reserved": [],
        "cordoned": ["20-22"],
        "quarantined": ["23"],
        "cpus": 192,
        "reserve_vcpus": 8,
        "threads": threads,
        "thread_ledger": list(lines),
        "memory_gib": None,
        "load_gib": 0.0,
    }


CHAT_LINE = thread_line("chat", 2, 60, "floor(92 CPU cores x 8 / 24) x 2 = 60")
SPEED = {
    "model": "chat",
    "tokens_per_s": 400.0,
    "step_ms": 20.0,
    "prefill_base_ms": 14.0,
    "prefill_token_ms": 0.05,
    "prefill_square_ns": 0.0,
    "load_s": 4.2,
    "decode_error": 0.02,
    "prefill_error": 0.02,
    "measured_requests": 345,
    "source": "measured on 345 requests, the rest the echo engine's step_ms",
}
PLAN: dict[str, Any] = {
    "index": 41,
    "revision": 3,
    "placements": [placement(*placed) for placed in PLACED],
    "moves": [],
    "hosts": [host(126, CHAT_LINE, thread_line("small", 1, 6, "floor(92 CPU cores x 1 / 24) x 2 = 6"))],
    "memory": [],
    "speeds": [SPEED],
    "hosts_to_add": [],
    "unplaced": [],
    "problems": [],
    "changes": [
        {"replica": "chat/0", "change": "restart"},
        {"replica": "chat/1", "change": "restart"},
        {"replica": "small/0", "change": "start"},
    ],
    "models": [
        {
            "model": "chat",
            "action": "replace",
            "tag": "restart",
            "fields": [{"field": "max_len", "before": 512, "after": 1024}],
            "replicas": {"before": 2, "after": 2},
            "strategy": "in_place",
            "outage_s": 0.0,
            "predicted_s": 18.8,
            "why": "one of 2 replicas at a time, the others serve",
            "possible": True,
        },
        {
            "model": "small",
            "action": "update",
            "tag": "none",
            "fields": [],
            "replicas": {"before": 0, "after": 1},
            "strategy": None,
            "outage_s": None,
            "predicted_s": None,
            "why": "",
            "possible": True,
        },
        {
            "model": "still",
            "action": "none",
            "tag": "none",
            "fields": [],
            "replicas": {"before": 1, "after": 1},
            "strategy": None,
            "outage_s": None,
            "predicted_s": None,
            "why": "",
            "possible": True,
        },
    ],
}
WINDOW: dict[str, Any] = {
    "index": 41,
    "revision": 3,
    "cores": 8,
    "window": {"host": "inf2.48xlarge/0", "cores": "8-15"},
    "moves": [
        {
            "model": "small",
            "replica": 0,
            "from": {"host": "inf2.48xlarge/0", "cores": "9"},
            "to": {"host": "inf2.48xlarge/0", "cores": "16"},
            "load_s": 4.2,
        }
    ],
    "load_s": 4.2,
    "placements": [placement("chat", 0, "0-7", 60), placement("small", 0, "16", 6)],
    "hosts": [host(66, thread_line("chat", 1, 60, "floor(92 CPU cores x 8 / 24) x 2 = 60"))],
    "problems": [],
}
EXPLAINED: dict[str, Any] = {
    "index": 41,
    "revision": 3,
    "model": "chat",
    "fits": False,
    "priority": 0,
    "min": 2,
    "wanted": 2,
    "replicas": [
        {
            "replica": "chat/0",
            "host": "inf2.48xlarge/0",
            "cores": "0-7",
            "threads": 60,
            "why": ["it runs there already; running replicas stay", "priority 0, required by its min"],
        }
    ],
    "failed": [
        {
            "id": "no-room",
            "what": "chat/1 needs 8 contiguous cores, the longest free run on inf2.48xlarge/0 is 7 (10-16)",
            "details": ["small (priority 0) holds 1 core with 1 replica", "3 cores are cordoned: 20-22"],
            "hint": "use fewer replicas, a smaller tp_degree, or more hosts",
        }
    ],
    "holds": [{"id": "degree", "what": "tp_degree 8: inf2 supports 1, 2, 4, 8, 12, 16, 24", "details": [], "hint": ""}],
    "suggestions": [
        {
            "id": "move",
            "change": "move small/0 from inf2.48xlarge/0 core 9 to inf2.48xlarge/0 core 16",
            "gives": "2 of 2 replicas; inf2.48xlarge/0 cores 8-15",
            "moves": [{key: value for key, value in WINDOW["moves"][0].items() if key != "load_s"}],
        },
        {"id": "replicas", "change": "replicas: 1", "gives": "1 of 1 replica", "moves": []},
    ],
    "tried": "all",
}
ROLLOUT: dict[str, Any] = {
    "revision": 3,
    "state": "progressing",
    "reason": "chat: 1 of 2 ready, 1 old",
    "since": AT,
    "canary": None,
    "models": [
        {"model": "chat", "strategy": "surge", "wanted": 2, "updated": 1, "ready": 1, "old": 1, "state": "progressing"},
        {"model": "small", "strategy": None, "wanted": 0, "updated": 0, "ready": 0, "old": 0, "state": "complete"},
    ],
    "undo": 2,
    "undo_skips": [],
}
REVISIONS = [
    {
        "revision": number,
        "at": AT + 30 * number,
        "by": "ada@wright",
        "cause": cause,
        "of": of,
        "state": state,
        "reason": "",
        "changes": changes,
    }
    for number, cause, of, state, changes in (
        (3, "undo", 1, "progressing", "chat: replace by surge"),
        (2, "apply", None, "superseded", "chat: update"),
        (1, "up", None, "complete", ""),
    )
]


def event(seq: int, reason: str, message: str, *, level: str = "info", **about: str) -> dict[str, Any]:
    about_all = {"model": None, "replica": None, "host": None, **about}
    return {"seq": seq, "at": AT + seq, "level": level, "reason": reason, "message": message, **about_all}


LOG = (
    b"2026-11-20 14:08:10,411 INFO workers.serving.replica: loading\n"
    b"2026-11-20 14:08:13,930 INFO workers.serving.replica: ready\n"
)
EVENTS = [
    event(5, "Ready", "after 4.2 s", model="chat", replica="chat/0"),
    event(8, "Failed", "replica-died: it was killed", level="error", model="chat", replica="chat/1"),
    event(9, "Cordoned", "cores 20-22 by ada@wright", host="inf2.48xlarge/0"),
    event(12, "Unloaded", "by ada@wright: nothing starts it until `corewright load`", model="small"),
]


FIGURES = ("queue", "running", "tokens_per_s", "ttft_p50_ms", "ttft_p99_ms", "gap_p50_ms", "gap_p99_ms")
LIVE: dict[str, Any] = {
    "load": {"chat": {**dict(zip(FIGURES, (1, 3, 118.4, 42.0, 180.0, 8.1, 21.5), strict=True)), "cold": 2}},
    "links": {
        "dashboard": "http://127.0.0.1:8265",
        "replicas": {"chat/0": {"actor": "a1b2c3", "node": "d4e5f6", "log": "replica-chat-0.log"}},
    },
}
HISTORY: dict[str, Any] = {
    "at": [AT + 10.0 * n for n in range(60)],
    "models": {"chat": {figure: [float(place + n % 7) for n in range(60)] for place, figure in enumerate(FIGURES)}},
}
DECISION = {
    "request": "r-1",
    "model": "chat",
    "queue_ms": 12.5,
    "candidates": 1,
    "replica": "chat/0",
    "slot": 3,
    "slots": 8,
    "cold": False,
    "retries": 0,
    "affinity": "session",
}


def live_request(request: str, **more: Any) -> dict[str, Any]:
    empty = {"key": "", "age_s": 1.5, "queue_ms": 12.5, "replica": "", "prompt_tokens": 20, "tokens": 0}
    return {"request": request, "model": "chat", **empty, "decision": None, "ended": "", **more}


REQUESTS = [
    live_request("r-1", key="alice", replica="chat/0", tokens=7, decision=DECISION),
    live_request("r-2"),
    live_request("r-0", replica="chat/0", tokens=30, ended="stop"),
]


def checked(index: int | None) -> tuple[int, ...]:
    """The index that a change was asked to check, for ``calls``."""
    return () if index is None else (index,)


class FakeFleet:
    """Plays a fleet: has a method for each operation, answers what it is given, and keeps what it was asked in
    ``calls``."""

    def __init__(self, home: str = "/nowhere") -> None:
        self.settings = ControllerSettings(
            fleet="f",
            name="fleet",
            home=home,
            spec_text=SPEC,
            spec_file="old.yaml",
            base_dir="/specs",
            token=TOKEN,
            admin_port=1,
            machine=Machine((0, 1)),
        )
        self.calls: list[tuple[Any, ...]] = []
        self.for_keys: FakeFleet = self  # for callers with a key
        self.told_status = copy.deepcopy(STATUS)
        self.told_plan = copy.deepcopy(PLAN)
        self.told_window = copy.deepcopy(WINDOW)
        self.told_entrance: Entrance | None = None
        self.told_live = copy.deepcopy(LIVE)
        self.told_history = copy.deepcopy(HISTORY)
        self.told_requests = copy.deepcopy(REQUESTS)
        self.told_explanation = copy.deepcopy(EXPLAINED)
        self.rollouts = [copy.deepcopy(ROLLOUT)]  # one for each question; the last one stays
        self.told_events = list(EVENTS)
        self.told_speeds: list[dict[str, Any]] = []  # measured ones
        self.log = LOG
        self.changed = True
        self.refusal: Exception | None = None
        self.history = copy.deepcopy(REVISIONS)
        self.news = asyncio.Event()
        self.downs = 0

    def _asked(self, *call: Any) -> None:
        self.calls.append(call)
        if self.refusal is not None:
            raise self.refusal

    def status(self) -> FleetStatus:
        return status_of(self.told_status, self.rollouts[0])

    async def propose(self, text: str, file: str, base_dir: str, defrag: int | None = None) -> dict[str, Any]:
        self._asked("propose", text, file, base_dir, *([] if defrag is None else [defrag]))
        return self.told_plan if defrag is None else self.told_window

    async def preview(self, action: str, target: str, count: int | None = None) -> dict[str, Any]:
        self._asked("preview", action, target, count)
        change = {"replica": "chat/2" if count else "chat/1", "change": "start" if count else "stop"}
        planned = {key: self.told_plan[key] for key in ("index", "revision", "placements", "unplaced")}
        return {**planned, "changes": [change], "strategies": [], "refusal": None}

    async def explain(self, text: str, file: str, base_dir: str, model: str) -> dict[str, Any]:
        self._asked("explain", text, file, base_dir, model)
        if model != EXPLAINED["model"]:
            raise OperationRefused("model-unknown", f"there is no model {model}", "known are chat, small", status=404)
        return self.told_explanation

    async def apply(
        self,
        text: str,
        file: str,
        base_dir: str,
        *,
        by: str,
        cause: str = "apply",
        check_index: int | None = None,
        canary: float | None = None,
    ) -> dict[str, Any]:
        self._asked("apply", text, file, base_dir, by, cause, check_index, canary)
        return {"changed": self.changed, "revision": 3, "index": 41, "plan": self.told_plan}

    async def undo(self, to: int | None, by: str, check_index: int | None = None) -> dict[str, Any]:
        self._asked("undo", to, by, *checked(check_index))
        return {"changed": self.changed, "revision": 4, "index": 50, "plan": self.told_plan, "of": to or 2}

    def entrance(self) -> Entrance | None:
        return self.told_entrance

    def live(self, with_requests: bool) -> LiveView:
        shown = msgspec.convert(self.told_requests, list[RequestRow]) if with_requests else None
        return LiveView(self.told_live["load"], msgspec.convert(self.told_live["links"], RayLinks), shown)

    def load_history(self) -> dict[str, Any]:
        return self.told_history

    def requests(self) -> dict[str, Any]:
        return {"requests": self.told_requests}

    async def cancel_request(self, request: str, by: str) -> dict[str, Any]:
        self._asked("cancel_request", request, by)
        self.told_requests = [each for each in self.told_requests if each["request"] != request]
        return {"request": request}

    def rollout(self) -> dict[str, Any]:
        return self.rollouts.pop(0) if len(self.rollouts) > 1 else self.rollouts[0]

    def revisions(self) -> dict[str, Any]:
        return {"revisions": self.history}

    def spec(self) -> dict[str, Any]:
        return {"file": "old.yaml", "base_dir": "/specs", "text": SPEC, "revision": 3}

    def revision(self, number: int | None) -> dict[str, Any]:
        for row in self.history:
            if row["revision"] == (2 if number is None else number):
                return {**row, "text": SPEC, "file": "old.yaml", "base_dir": "/specs", "plan": {}}
        raise OperationRefused(
            "revision-unknown", f"there is no revision {number}", "corewright rollout history", status=404
        )

    async def pause(self, by: str) -> dict[str, Any]:
        return self._rollout("pause", by)

    async def resume(self, by: str) -> dict[str, Any]:
        return self._rollout("resume", by)

    async def promote(self, by: str) -> dict[str, Any]:
        return self._rollout("promote", by)

    async def restart(self, model: str, by: str, check_index: int | None = None) -> dict[str, Any]:
        return self._rollout("restart", model, by, *checked(check_index))

    def _rollout(self, *call: Any) -> dict[str, Any]:
        self._asked(*call)
        return self.rollout()

    async def scale(self, model: str, count: int | None, by: str, check_index: int | None = None) -> dict[str, Any]:
        self._asked("scale", model, count, by, *checked(check_index))
        return {"model": model, "scaled": count, "wanted": count or 0}

    async def load(self, model: str, by: str, check_index: int | None = None) -> dict[str, Any]:
        self._asked("load", model, by, *checked(check_index))
        return {"model": model, "scaled": 1, "wanted": 1}

    async def unload(self, model: str, by: str, check_index: int | None = None) -> dict[str, Any]:
        self._asked("unload", model, by, *checked(check_index))
        return {"model": model, "scaled": 0, "wanted": 0}

    async def cordon(self, host: str, cores: str | None, by: str, on: bool = True) -> dict[str, Any]:
        self._asked("cordon", host, cores, on, by)
        return dict(self.told_status["hosts"][0])

    async def uncordon(self, host: str, cores: str | None, by: str) -> dict[str, Any]:
        return await self.cordon(host, cores, by, on=False)

    async def drain(
        self,
        target: str,
        by: str,
        deadline_s: float | None = None,
        check_index: int | None = None,
        *,
        keep_served: bool = False,
    ) -> dict[str, Any]:
        deadline = () if deadline_s is None else (deadline_s, "keep_served") if keep_served else (deadline_s,)
        self._asked("drain", target, *deadline, by, *checked(check_index))
        for host in self.told_status["hosts"]:
            if host["name"] == target:
                host["draining"] = True
                return dict(host)
        return {"replica": target, "epoch": 1}

    async def events(self, after: int, limit: int, wait_s: float, model: str | None) -> dict[str, Any]:
        self._asked("events", after, limit, wait_s, model)
        while True:
            events = [e for e in self.told_events if e["seq"] > after and model in (None, e["model"])][:limit]
            if events or wait_s <= 0:
                return {"events": events, "next": events[-1]["seq"] if events else after}
            self.news.clear()
            try:
                await asyncio.wait_for(self.news.wait(), wait_s)
            except asyncio.TimeoutError:
                return {"events": [], "next": after}

    async def logs(self, model: str, replica: int | None, offset: int | None, wait_s: float) -> dict[str, Any]:
        self._asked("logs", model, replica, offset, wait_s)
        if model != "chat":
            raise OperationRefused("model-unknown", f"{model} has no log", "it has not started yet", status=404)
        number = 0 if replica is None else replica
        text, file = self.log[offset or 0 :].decode(), f"/logs/chat-{number}.log"
        return {"replica": f"{model}/{number}", "file": file, "offset": len(self.log), "text": text}

    async def trace(self, after: str, limit: int) -> dict[str, Any]:
        self._asked("trace", after, limit)
        if after not in ("", "g:1", "g:2"):
            raise OperationRefused(
                "trace-cursor-wrong", f"{after} is not a position in a trace", "begin without", status=400
            )
        begin = int(after[2:] or 0)
        page = TRACE[begin : begin + limit]
        end = begin + len(page)
        speeds = {"chat": {"load_s": 4.2, "since": AT, "shape": {}}}
        return {"requests": page, "next": f"g:{end}", "more": end < len(TRACE), "speeds": speeds}

    def speeds(self) -> dict[str, Any]:
        return {"speeds": [dict(own) for own in self.told_speeds]}

    async def down(self, by: str) -> dict[str, Any]:
        self.downs += 1
        return {"stopping": True}

    def config(self) -> dict[str, Any]:
        return {"values": list(resolve({"port": 9000}, {"COREWRIGHT_HOME": "/home/ada/.corewright"}).as_dicts())}


TRACE: list[dict[str, Any]] = [
    {
        "time": AT + n,
        "model": "chat",
        "prompt_tokens": 10 * n,
        "output_tokens": 5,
        "key": "k1",
        "first_ms": 20.0,
        "decode_ms": 80.0,
    }
    for n in (1, 2)
]


def bad_spec() -> OperationRefused:
    """What the controller says of a spec with errors."""
    problem = Problem("pin-overlap", "error", "new.yaml:5:9", 'pin "6-9" of "b" shares cores with "a"', "move one")
    what = "new.yaml has 1 error: nothing was applied"
    return OperationRefused("spec-invalid", what, "corewright validate SPEC", status=422, problems=[problem])


def played(route: AdminRoute) -> AdminRoute:
    """The route whose operation is the ``FakeFleet``'s method of its name."""

    @wraps(route.handler)
    def handler(fleet: FakeFleet, *arguments: Any) -> Any:
        fields = [msgspec.structs.asdict(each) for each in arguments if isinstance(each, Fields)]
        by = [{"by": each} for each in arguments if isinstance(each, str)]
        return getattr(fleet, route.name)(**{key: value for part in (*fields, *by) for key, value in part.items()})

    return replace(route, handler=handler)


FAKE_ROUTES = documented([played(route) for route in ROUTES[:-1]])


def console_of(fleet: FakeFleet) -> ConsoleSource:
    """What the console reads of the fleet."""

    async def events(after: int, limit: int, wait_s: float) -> EventPage:
        return msgspec.convert(await fleet.events(after, limit, wait_s, None), EventPage)

    return ConsoleSource(fleet.status, lambda with_requests: fleet.live(with_requests), events, fleet.entrance)


class LiveAdmin:
    """The API of a ``FakeFleet`` on a free port, on an event loop in a thread of its own. ``close`` it."""

    def __init__(
        self, port: int | None = None, console_url: str | None = None, routes: Sequence[AdminRoute] = FAKE_ROUTES
    ) -> None:
        self._routes = routes
        self.fleet = FakeFleet(tempfile.mkdtemp(prefix="cwt-", dir="/tmp"))
        self.fleet.settings = msgspec.structs.replace(self.fleet.settings, console_url=console_url)
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._loop: asyncio.AbstractEventLoop | None = None
        self._serving: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        until(self._listens, 10, "the admin API listens")

    def _listens(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port)):
            return True
        return False

    def _run(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            asyncio.run(self._serve())  # it also ends the tasks of requests in progress

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        api = AdminApi(self.fleet, self._routes, console_of(self.fleet))  # type: ignore[arg-type]
        self._serving = asyncio.create_task(serve_admin(api, self.port))
        await self._serving

    @property
    def downs(self) -> int:
        """How often a shutdown was requested."""
        return self.fleet.downs

    def tell(self, *events: dict[str, Any]) -> None:
        """Events that happen now."""

        def happen() -> None:
            self.fleet.told_events += events
            self.fleet.news.set()

        self.call_soon(happen)

    def call_soon(self, call: Callable[[], None]) -> None:
        """On the event loop."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(call)

    def close(self) -> None:
        assert self._loop is not None
        assert self._serving is not None
        if not self._thread.is_alive():
            return
        self._loop.call_soon_threadsafe(self._serving.cancel)
        self._thread.join(10)
        shutil.rmtree(self.fleet.settings.home, ignore_errors=True)
