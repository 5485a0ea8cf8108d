"""The messages of ``workers.serving.prepare``, the process that checks, predicts or compiles for a replica."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec

from workers.compiled.prediction import Prediction
from workers.host.json_process import ChildRequest
from workers.messages.actor_message import actor_message
from workers.messages.replica_config import ReplicaConfig
from workers.messages.status import Failure, Trouble

NEEDS_DEVICE = "compile-needs-device"  # error of ``compile`` for graphs that only a start on its cores can compile


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


class Working(msgspec.Struct, frozen=True, kw_only=True, tag="working"):
    """The progress of ``compile`` with one set."""

    key: str
    role: str
    phase: Literal["waiting", "looking", "compiling", "sending", "done"] = "waiting"
    done: int = 0  # graphs
    total: int = 0  # graphs; 0: unknown


@actor_message
class Built(msgspec.Struct, frozen=True, kw_only=True, tag="built"):
    """The result of ``compile``: all sets that can be compiled without a device are here."""

    wanted: list[Wanted] = []
    compiled: list[str] = []  # keys of the sets that were compiled
    pulled: list[str] = []  # keys of the sets fetched from the ``neff_cache``
    pushed: list[str] = []  # keys of the sets pushed to it
    missing: list[str] = []  # without ``make``: keys of the sets that are not here
    unsent: list[Failure] = []  # failed pushes
    warnings: list[str] = []  # about an unavailable ``neff_cache``
    seconds: float = 0.0


Reply = Checked | Predicted | Working | Built | Trouble
