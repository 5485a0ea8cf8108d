"""Pins the content that all replicas of a version load, in the journal."""

from __future__ import annotations

from collections.abc import Callable

import msgspec.structs

from orchestrator.control.journal.journal_records import Pin
from orchestrator.control.record_writer import RecordWriter
from workers.messages.replica_config import Origin, ReplicaConfig


def _is_of(pinned: Origin | None, origin: Origin | None) -> bool:
    """Returns whether both are contents of one source."""
    if pinned is None or origin is None:
        return False
    return (pinned.source, pinned.revision) == (origin.source, origin.revision)


class ContentPins:
    """The pinned contents by model and version."""

    def __init__(self, records: RecordWriter) -> None:
        self._records = records

    def of(self, config: ReplicaConfig) -> Pin:
        """Returns the pin of the configuration's version; without an origin if there is none."""
        none = Pin(model=config.model, version=config.version, origin=None)
        return self._records.state.pins.get(none.key, none)

    def pinned(self, config: ReplicaConfig) -> ReplicaConfig:
        """Returns the configuration with the pinned content: all replicas of a version load the same."""
        pin = self.of(config)
        return msgspec.structs.replace(
            config,
            contents=pin.contents.get(config.host, ""),
            origin=pin.origin or config.origin,
            draft_origin=pin.draft_origin or config.draft_origin,
            adapter_origins={
                name: pin.adapter_origins[name] if _is_of(pin.adapter_origins.get(name), origin) else origin
                for name, origin in config.adapter_origins.items()
            },
        )

    def pin(self, config: ReplicaConfig) -> None:
        """Pin the content of ``config`` for its version; record a warning if another one was pinned."""
        pin = self.of(config)
        now = Pin(
            model=config.model,
            version=config.version,
            origin=config.origin,
            draft_origin=config.draft_origin,
            adapter_origins=config.adapter_origins,
            contents=pin.contents,
        )
        if now.origins == pin.origins or not any(now.origins):
            return
        contents = [(pin.origin, now.origin), (pin.draft_origin, now.draft_origin)]
        contents += [(origin, now.adapter_origins.get(name)) for name, origin in pin.adapter_origins.items()]
        if any(_is_of(before, after) and before != after for before, after in contents):
            message = (
                "its source has changed, and its previous content is not stored: new replicas load the new content"
            )
            self._records.event("warning", "SourceChanged", message, model=config.model)
        self._records.note(now)

    def pin_contents(self, config: ReplicaConfig, contents: str) -> None:
        """Pin what a replica has loaded from local folders: others of its version on its host load the same."""
        pin = self.of(config)
        if contents and config.host not in pin.contents:
            self._records.note(msgspec.structs.replace(pin, contents={**pin.contents, config.host: contents}))

    def adopt(self, config: ReplicaConfig) -> None:
        """Pin the content of a surviving replica, unless its version is pinned: it may be about to be replaced."""
        if self.of(config).key not in self._records.state.pins:
            self.pin(config)

    def unpin(self, over: Callable[[Pin], bool]) -> None:
        """Remove the pins for which ``over`` holds."""
        for pin in list(self._records.state.pins.values()):
            if over(pin):
                self._records.note(Pin(model=pin.model, version=pin.version, origin=None))
