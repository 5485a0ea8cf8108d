"""Records what one version of corewright writes: a journal, frames between gateway and replica, and values of actor
calls. The next version must read them (`tests/test_previous_version.py`).

At a release: `.venv/bin/python -m tests.recorded_version tests/golden/previous`.
"""

from __future__ import annotations

import asyncio
import base64
import inspect
import json
import pickle
import sys
import tempfile
from pathlib import Path
from typing import Any

from orchestrator.fleet.replica_states import ModelState
from orchestrator.fleet.route_table import ModelRoutes, Route, RouteTable
from orchestrator.records.journal import Journal
from orchestrator.records.journal_records import Event
from orchestrator.scaling.demand_report import DemandReport, DemandWindow, RoutingDecision
from tests.orchestrator.fakes import FakeCluster, Played, virtually
from workers.artifacts.fetch.artifact_fetcher import FetchedArtifact, WantedArtifact
from workers.artifacts.fetch.progress import FetchStatus
from workers.compiling.prefetch import Foreseen
from workers.host.interpreter import Interpreter
from workers.messages.credentials import Credentials
from workers.messages.metric_family import MetricFamily, Point
from workers.messages.replica_config import Origin, ReplicaConfig
from workers.messages.requests import (
    AnswerPart,
    FinishReason,
    Forwarded,
    GenerateRequest,
    TokenEvent,
    TokenLogprobs,
)
from workers.messages.status import Failure, Phase, Reaction, ReplicaStatus, ServerLoad
from workers.messages.wire import Cancel, Hello, Message, Refused, Room, Step, Submit, Taken, Welcome, encode

AT = 1795183685.0  # 2026-11-20 14:08:05 UTC
SPEC = """\
version: 1
name: fleet
hosts: {{emulate: inf2.48xlarge, count: 3}}
models:
  chat: {{engine: echo, tp_degree: 8, replicas: {{min: 2, max: 3}}, max_batch: {batch}}}
  small: {{engine: cpu, source: s3://models/small, tp_degree: 2, replicas: 2}}
"""


def messages() -> dict[str, Any]:
    """Returns one value of each kind that actor calls carry, with most of its fields."""
    failure = Failure("device-failed", "it is broken", "replace it", Reaction.QUARANTINE, (1, 2))
    origin = Origin(source="s3://models/small", artifact="s3-1@2")
    routes = ModelRoutes(
        name="chat",
        state=ModelState.READY,
        reason=None,
        engine="echo",
        source=None,
        max_len=512,
        max_queue=256,
        loads_on_request=False,
        aliases=["gpt"],
        replicas=[Route("chat/0", 3, "/run/cw/0-0.3"), Route("chat/1", 1, "tls://192.0.2.7:4711")],
    )
    config = ReplicaConfig(
        model="small",
        replica=1,
        epoch=4,
        host="inf2.48xlarge/1",
        engine="cpu",
        source="/store/small",
        dtype="bfloat16",
        slots=4,
        max_len=512,
        cores=[2, 3],
        env={"NEURON_RT_VISIBLE_CORES": "2-3"},
        credentials=Credentials(certificate="C", key="K", authority="A"),
        origin=origin,
        adapters={"law": "/store/law"},
        adapter_origins={"law": origin},
        engine_options={"compile": True, "buckets": [64, 128], "more": {"a": None}},
        version="7d3f",
        tokenizer="t",
    )
    load = ServerLoad(0.5, 1, 2, True)
    status = ReplicaStatus(version=9, phase=Phase.FAILED, pid=4711, started=12.5, failure=failure, live=2, server=load)
    window = DemandWindow(model="chat", arrived=3, ended=2, slot_s=1.5, waiting=4, live=1, longest_wait_s=0.5)
    decision = RoutingDecision(
        request="r", model="chat", queue_ms=1.5, candidates=2, replica="chat/0", slot=1, slots=4, cold=True, retries=1
    )
    return {
        "ReplicaConfig": config,
        "ReplicaStatus": status,
        "Failure": failure,
        "RouteTable": RouteTable(ready=True, stopping=False, token="t", models=[routes]),
        "DemandReport": DemandReport(gateway="g", number=2, seconds=1.0, models=[window], decisions=[decision]),
        "MetricFamily": MetricFamily(
            name="m", kind="histogram", help="h", labels=("a",), points=(Point(("x",), 1.5, (1, 0)),), buckets=(0.5,)
        ),
        "WantedArtifact": WantedArtifact(source="s3://models/small", artifact="s3-1@2"),
        "FetchStatus": FetchStatus(source="s3://models/small", phase="fetching", done=3, total=9, rate=1.0),
        "FetchedArtifact": FetchedArtifact(folder="/store/small", artifact="s3-1@2", bytes=9, moved=3),
        "Interpreter": Interpreter(python="/py", version="3.11.7", ray="2.60.0", packages={"torch": "2.13.0"}),
        "Foreseen": Foreseen(missing=["a graph"], trouble=""),
    }


def frames() -> list[Message]:
    """Returns one message of each kind on a connection."""
    request = GenerateRequest(
        id="a", prompt_ids=[1, 2, 3], max_tokens=7, temperature=0.5, stop=["\n"], logit_bias={5: -1.0}, adapter="law"
    )
    forwarded = GenerateRequest(
        id="b", prompt_ids=[], max_tokens=9, forwarded=Forwarded("/v1/chat/completions", b'{"model": "chat"}')
    )
    logprobs = TokenLogprobs(5, -0.5, "x", [120], [(6, -1.5, "y", [121])])
    welcome = Welcome("0.9", "/opt/workers", slots=4, max_len=512, max_prompt=256, vocab_size=257, prefix_block=32)
    first = TokenEvent(id="a", text="x", token_ids=[5], logprobs=[logprobs])
    last = TokenEvent(id="b", finish=FinishReason.STOP, part=AnswerPart(b"data", 3, 12))
    return [
        Hello("g", "token", 2),
        welcome,
        Refused("wrong token"),
        Submit(request),
        Submit(forwarded),
        Cancel("a"),
        Taken("b", 4096),
        Step([first, last]),
        Step([TokenEvent(id="c", finish=reason, error="e") for reason in FinishReason]),
        Room(1),
    ]


def calls() -> dict[str, list[str]]:
    """Returns the parameters of each method that other processes call on an actor."""
    from orchestrator.on_ray.controller_actor import ControllerActor
    from orchestrator.on_ray.host_actor import HostActor
    from workers.serving.replica import Replica

    kinds = (Replica, HostActor.__ray_metadata__.modified_class, ControllerActor)  # type: ignore[attr-defined]
    return {
        f"{kind.__name__}.{name}": list(inspect.signature(method).parameters)[1:]
        for kind in kinds
        for name, method in inspect.getmembers(kind, inspect.isfunction)
        if not name.startswith("_")
    }


async def _record_journal(home: Path) -> None:
    """Plays a fleet whose journal has records of most kinds: two revisions, an undo, a manual scale, a cordon, a drain,
    a broken device, a restart."""
    cluster = FakeCluster()
    cluster.load_s, cluster.fetch_s = 7.0, 4.0
    loop = asyncio.get_running_loop()
    journal = Journal(home / "journal", clock=lambda: AT + loop.time())
    async with Played(home, cluster, SPEC.format(batch=2), journal=journal, fleet="recorded") as played:
        await played.settled()
        await played.apply(SPEC.format(batch=4))
        await played.settled()
        await played.operator.scale("chat", 3, "ada")
        await played.operator.cordon("inf2.48xlarge/0", "20-23", True, "ada")
        await played.operator.restart("small", "ada")
        await played.settled()
        failure = Failure("device-failed", "it is broken", reaction=Reaction.QUARANTINE)
        await cluster.find("small/1").report(phase=Phase.FAILED, failure=failure)
        await played.until(lambda: played.is_settled(), "small/1 runs elsewhere", 600)
        await played.operator.undo(None, "ada")
        await played.settled()
        await played.operator.drain("inf2.48xlarge/1", "ada")
        await asyncio.sleep(600.0)
        await played.kill()
    journal.close()


def record(folder: Path) -> None:
    """Writes all recordings."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "frames.bin").write_bytes(b"".join(encode(message) for message in frames()))
    pickled = {name: base64.b64encode(pickle.dumps(value, 4)).decode() for name, value in messages().items()}
    (folder / "messages.json").write_text(json.dumps(pickled, indent=1) + "\n")
    (folder / "calls.json").write_text(json.dumps(calls(), indent=1) + "\n")
    with tempfile.TemporaryDirectory() as home:
        virtually(lambda: _record_journal(Path(home)))
        data = (Path(home) / "journal").read_bytes()
        (folder / "journal").write_bytes(data)
        compact = Journal(Path(home) / "journal", most_bytes=1, clock=lambda: AT + 1e6)
        compact.append(Event(level="info", reason="Compacted", message="the file was replaced"))
        compact.close()
        (folder / "journal-compacted").write_bytes((Path(home) / "journal").read_bytes())


if __name__ == "__main__":
    record(Path(sys.argv[1]))
