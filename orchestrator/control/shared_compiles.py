"""Lets one host compile a version of a model, while the others wait for what it pushes to the cache of all hosts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from workers.messages.replica_config import ReplicaConfig


class SharedCompiles:
    """Which host compiles which version. On the controller's event loop; it has no threads.

    It saves compilations and protects nothing: a controller that is replaced meanwhile forgets it, and two hosts may
    push the same graph.
    """

    def __init__(self) -> None:
        self._compiling: dict[tuple[str, str], tuple[str, asyncio.Event]] = {}  # host and its end, by model and version

    def host_for(self, config: ReplicaConfig) -> str | None:
        """The other host that compiles what ``config`` needs and will push it to S3; None: there is none."""
        host, _ = self._compiling.get((config.model, config.version), (None, None))
        return None if host == config.host or not _is_shared(config) else host

    async def ended(self, config: ReplicaConfig) -> None:
        """Waits until that host has ended, in whatever way."""
        if self.host_for(config) is not None:
            await self._compiling[config.model, config.version][1].wait()

    @contextmanager
    def compiling(self, config: ReplicaConfig) -> Iterator[None]:
        """The others wait while this is open. The replicas of one host share its compilation, so the first of them
        stands for all."""
        key = (config.model, config.version)
        if not _is_shared(config) or key in self._compiling:
            yield
            return
        end = asyncio.Event()
        self._compiling[key] = (config.host, end)
        try:
            yield
        finally:
            del self._compiling[key]
            end.set()


def _is_shared(config: ReplicaConfig) -> bool:
    """A folder may be local to each host, so waiting for another host's compile would be useless."""
    return (config.neff_cache or "").startswith("s3://")
