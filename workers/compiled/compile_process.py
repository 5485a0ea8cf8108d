"""The process that checks, predicts or compiles for a replica: its messages, and how other processes run it.

It is ``python -m workers.serving.prepare``, in the interpreter and the environment of the replica's engine, and claims
no cores.
"""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from hashlib import blake2s
from pathlib import Path
from typing import Any, Literal

import msgspec

from workers.artifacts.sources.listing import Stopped
from workers.compiled.places import Working
from workers.compiled.prediction import Prediction
from workers.host import json_process
from workers.host.json_process import ChildRequest
from workers.messages.actor_message import actor_message
from workers.messages.replica_config import ReplicaConfig
from workers.messages.status import Failure

MODULE = "workers.serving.prepare"
NEEDS_DEVICE = "compile-needs-device"  # error of ``compile`` for graphs that only a start on its cores can compile
DOING = {  # the error of a process without a result, and what it did
    "check": ("start-failed", "checked"),
    "predict": ("cache-not-verified", "predicted the artifacts of"),
    "compile": ("compile-failed", "compiled"),
}
_OF_ONE_REPLICA = {"replica": 0, "epoch": 0, "socket": "", "token": "", "log": "", "credentials": None, "cores": []}


class Order(ChildRequest, frozen=True, kw_only=True):
    """The input of a command."""

    config: ReplicaConfig
    read: bool = False  # ``predict``: read weights whose digests are needed and unknown
    ahead: bool = False  # ``predict``: for a compilation ahead of time, which ignores NEFFs beside the model
    push: bool = False  # ``compile``: push complete artifacts to the config's ``neff_cache``
    make: bool = True  # ``compile``: compile missing artifacts; False: their weights are not here


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """A set of compiled artifacts that a start needs."""

    role: Literal["model", "draft"]
    source: str
    manifest: dict[str, Any]  # everything they depend on
    folder: str  # their folder on this host; empty: kept by the package's own cache only
    complete: bool  # a complete set of exactly this manifest is here
    ahead: bool  # they can be compiled without a device
    # Checkpoint files whose digests are not in the manifest yet; the folder is then unknown and empty.
    unread: list[str] = []
    prediction: Prediction = Prediction("compile", "nothing", "")  # where a start gets them

    @property
    def key(self) -> str:
        """The name of the folder; empty if unknown."""
        return Path(self.folder).name


@actor_message
class Checked(msgspec.Struct, frozen=True, kw_only=True, tag="checked"):
    """The result of ``check``: no problem that would prevent a load."""


class Predicted(msgspec.Struct, frozen=True, kw_only=True, tag="predicted"):
    """The result of ``predict``."""

    engine: str
    wanted: list[Wanted]  # empty: the engine compiles nothing

    @property
    def missing(self) -> list[str]:
        """The sets to compile, or to fetch from another host's push, each with the reason of its prediction.

        One that only a device compiles is fetched, too: the start would otherwise compile it on its cores."""
        return [
            f"{each.role}: {each.prediction.reason}"
            for each in self.wanted
            if not each.complete
            and ((each.folder and each.prediction.where == "elsewhere") or (each.ahead and not each.prediction.hit))
        ]


@actor_message
class Built(msgspec.Struct, frozen=True, kw_only=True, tag="built"):
    """The result of ``compile``: all sets that can be compiled without a device are here."""

    wanted: list[Wanted]
    compiled: list[str] = []  # keys of the sets that were compiled
    pulled: list[str] = []  # keys of the sets fetched from the ``neff_cache``
    pushed: list[str] = []  # keys of the sets pushed to it
    missing: list[str] = []  # without ``make``: keys of the sets that are not here
    unsent: list[Failure] = []  # failed pushes
    warnings: list[str] = []  # about an unavailable ``neff_cache``
    seconds: float


class BuildTrouble(msgspec.Struct, frozen=True, tag="trouble"):
    """The error of a command."""

    failure: Failure


Reply = Checked | Predicted | Working | Built | BuildTrouble


def build_key(config: ReplicaConfig) -> str:
    """Returns a key that is equal for configs whose replicas need the same compiled artifacts."""
    plain = msgspec.to_builtins(msgspec.structs.replace(config, env={}, **_OF_ONE_REPLICA))
    return blake2s(json.dumps(plain, sort_keys=True).encode(), digest_size=10).hexdigest()


def answers(
    command: Literal["check", "predict", "compile"],
    order: Order,
    stop: threading.Event,
    limit_s: float | None = None,
    warm: str | None = None,
) -> Iterator[Reply]:
    """Yields the replies of the process to a command; ``warm`` as in `json_process.start`. Blocks.

    Its last reply is a result or a BuildTrouble, also if it cannot be started or ends without a result. Raises Stopped
    soon after ``stop`` is set, when its compilers have ended.
    """
    config = msgspec.structs.replace(order.config, token="", credentials=None)
    id, doing = DOING[command]
    began, fact, result = time.monotonic(), "ended without a result", False
    try:
        with json_process.running(
            (MODULE, command),
            msgspec.structs.replace(order, config=config),
            python=config.python,
            env=config.env,
            log_file=config.log,
            warm=warm,
            stop=stop,
            limit_s=limit_s,
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                reply = msgspec.json.decode(line, type=Reply)
                result = not isinstance(reply, Working)
                yield reply
            process.wait()
    except (OSError, subprocess.SubprocessError, msgspec.MsgspecError) as error:
        fact = f"failed: {type(error).__name__}: {error}"
    if stop.is_set():
        raise Stopped(f"stopped {command} of {config.model}: it has no waiters left")
    if not result:
        if limit_s is not None and time.monotonic() - began >= limit_s:
            fact = f"had no result within {limit_s:.0f} s"
        what = f"the process that {doing} {config.model} {fact}"
        yield BuildTrouble(Failure(id, what, f"its log is {config.log}"))


def result_of(replies: Iterable[Reply], tell: Callable[[Working], None] = lambda _: None) -> Any:
    """Returns the result among the replies of a process, or its Failure; ``tell`` gets its progress."""
    for reply in replies:
        if not isinstance(reply, Working):
            return reply.failure if isinstance(reply, BuildTrouble) else reply
        tell(reply)
    raise AssertionError("a process always has a result")
