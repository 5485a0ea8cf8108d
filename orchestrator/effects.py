"""Every side effect of the controller on its fleet, as one small Protocol: Ray behind it, or a fake in a test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from workers.config import ReplicaConfig
from workers.status import ReplicaStatus


class ReplicaDied(Exception):
    """The replica's process is gone, or was never made; the text says why."""


@dataclass(frozen=True)
class Survivor:
    """A replica that outlived its controller."""

    config: ReplicaConfig
    status: ReplicaStatus


def actor_name(model: str, replica: int, epoch: int) -> str:
    """New for each start, so that nothing can take the dying one for the new one."""
    return f"{model}/{replica}.{epoch}"


class Cluster(Protocol):
    """What the controller does to replicas and asks of hosts. ``name`` is an ``actor_name``."""

    async def start(self, config: ReplicaConfig) -> None:
        """Ask for the replica's process. Returns at once; ``watch`` tells how it goes."""
        ...

    async def watch(self, name: str, seen: int) -> ReplicaStatus:
        """The replica's status once it is newer than ``seen``, or as it is after a while. Raises ReplicaDied."""
        ...

    async def drain(self, name: str, timeout_s: float) -> bool:
        """Wait for the replica's live requests to end. True when none is left, or when it is gone."""
        ...

    async def end(self, name: str, pid: int | None, started: float | None) -> bool:
        """Kill the replica; true once the host has seen its process gone (or that there never was one)."""
        ...

    async def log_tail(self, path: str, lines: int) -> list[str]: ...

    async def held_cores(self, claims: str) -> dict[int, int | None]:
        """The cores that any process holds on an emulated host, with the owners' pids."""
        ...

    async def survivors(self) -> tuple[Sequence[Survivor], Mapping[str, int]]:
        """Replicas that a former controller started and that still live; and of those that do not answer, which are
        ended, the epoch by id."""
        ...
