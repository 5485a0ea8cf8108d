"""What the replicas of a version share: the content that the journal pins, and one compilation for all hosts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec.structs

from orchestrator.control.journal.journal_records import Pin, pin_of
from orchestrator.control.record_writer import RecordWriter
from workers.messages.replica_config import ADAPTERS, Origin, ReplicaConfig


class ContentPins:
    """The pinned contents by model and version."""

    def __init__(self, records: RecordWriter) -> None:
        self._records = records

    def of(self, config: ReplicaConfig) -> Pin:
        """Returns the pin of the configuration's version; without an origin if there is none."""
        none = pin_of(config.model.name, config.run.version, {})
        return self._records.state.pins.get(none.key, none)

    def pinned(self, config: ReplicaConfig) -> ReplicaConfig:
        """Returns the configuration with the pinned content of sources that are still to be fetched: all replicas of a
        version load the same."""
        pin, origins = self.of(config), dict(config.origins)
        for key, pinned in pin.origins.items():
            origin = origins.get(key)
            if origin is None or (origin.folder and not key.startswith(ADAPTERS)):
                continue  # what a running replica has loaded stays; its adapters can change
            if not key.startswith(ADAPTERS) or (_same_source(pinned, origin) and pinned.artifact != origin.artifact):
                origins[key] = pinned
        run = msgspec.structs.replace(config.run, contents=pin.contents.get(config.place.host, ""))
        return msgspec.structs.replace(config, run=run, origins=origins)

    def pin(self, config: ReplicaConfig) -> None:
        """Pin the content of ``config`` for its version; record a warning if another one was pinned."""
        pin = self.of(config)
        now = pin_of(config.model.name, config.run.version, config.origins, pin.contents)
        if now.origins == pin.origins or not now.origins:
            return
        before_and_after = ((origin, now.origins.get(key)) for key, origin in pin.origins.items())
        if any(after and _same_source(before, after) and before != after for before, after in before_and_after):
            message = (
                "its source has changed, and its previous content is not stored: new replicas load the new content"
            )
            self._records.event("warning", "SourceChanged", message, model=config.model.name)
        self._records.note(now)

    def pin_adapters(self, config: ReplicaConfig) -> None:
        """Pin the adapters of a running replica; the pin of its model may have moved on since it was loaded."""
        adapters = {key: origin for key, origin in config.origins.items() if key.startswith(ADAPTERS)}
        others = {key: origin for key, origin in self.of(config).origins.items() if not key.startswith(ADAPTERS)}
        self.pin(msgspec.structs.replace(config, origins=others | adapters))

    def pin_contents(self, config: ReplicaConfig, contents: str) -> None:
        """Pin what a replica has loaded from local folders: others of its version on its host load the same."""
        pin = self.of(config)
        if contents and config.place.host not in pin.contents:
            self._records.note(msgspec.structs.replace(pin, contents={**pin.contents, config.place.host: contents}))

    def adopt(self, config: ReplicaConfig) -> None:
        """Pin the content of a surviving replica, unless its version is pinned: it may be about to be replaced."""
        if self.of(config).key not in self._records.state.pins:
            self.pin(config)

    def unpin(self, over: Callable[[Pin], bool]) -> None:
        """Remove the pins for which ``over`` holds."""
        for pin in list(self._records.state.pins.values()):
            if over(pin):
                self._records.note(pin_of(pin.model, pin.version, {}))


def _same_source(pinned: Origin, origin: Origin) -> bool:
    """Returns whether both are contents of one source."""
    return (pinned.source, pinned.revision) == (origin.source, origin.revision)


class SharedCompiles:
    """Which host compiles which version. On the controller's event loop; it has no threads.

    It saves compilations and protects nothing: a controller that is replaced meanwhile forgets it, and two hosts may
    push the same graph.
    """

    def __init__(self) -> None:
        self._compiling: dict[tuple[str, str], tuple[str, asyncio.Event]] = {}  # host and its end, by model and version

    def host_for(self, config: ReplicaConfig) -> str | None:
        """The other host that compiles what ``config`` needs and will push it to S3; None: there is none."""
        host, _ = self._compiling.get((config.model.name, config.run.version), (None, None))
        return None if host == config.place.host or not _is_shared(config) else host

    async def ended(self, config: ReplicaConfig) -> None:
        """Waits until that host has ended, in whatever way."""
        if self.host_for(config) is not None:
            await self._compiling[config.model.name, config.run.version][1].wait()

    @contextmanager
    def compiling(self, config: ReplicaConfig) -> Iterator[None]:
        """The others wait while this is open. The replicas of one host share its compilation, so the first of them
        stands for all."""
        key = (config.model.name, config.run.version)
        if not _is_shared(config) or key in self._compiling:
            yield
            return
        end = asyncio.Event()
        self._compiling[key] = (config.place.host, end)
        try:
            yield
        finally:
            del self._compiling[key]
            end.set()


def _is_shared(config: ReplicaConfig) -> bool:
    """A folder may be local to each host, so waiting for another host's compile would be useless."""
    return (config.model.neff_cache or "").startswith("s3://")
