"""The file of measurements in a home: times of requests by shape and day, measured by fleets, and constants of the
machine, measured by `corewright verify`."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from orchestrator.process.home import Home
from orchestrator.process.version import corewright_version
from placements.facts.topology import MeasuredConstants
from placements.resources.calibration import MeasuredSpeed
from placements.resources.measured_times import Times, merge, speeds_of
from workers.host import private_file

log = logging.getLogger(__name__)

KEPT_DAYS = 14  # measurements of earlier days are forgotten: the machine's drivers and images may have changed
MOST_ENTRIES = 256  # of one shape and day each
DAY_S = 86400


class SpeedEntry(msgspec.Struct, frozen=True):
    """The times of one day's requests on replicas of one shape, under one version of corewright, or constants."""

    software: str
    day: int  # since 1970, UTC
    shape: str  # of `measured_shape`, as JSON with sorted keys
    times: Times
    constants: dict[str, float] = {}  # fields of `MeasuredConstants`; their shape is a machine and an engine

    @property
    def key(self) -> tuple[int, str, str]:
        return self.day, self.software, self.shape


_decoder = msgspec.json.Decoder(list[SpeedEntry])


def merged(entries: Iterable[SpeedEntry]) -> dict[tuple[int, str, str], SpeedEntry]:
    """Returns the sum of the entries by key, in whatever order they come: of the newest KEPT_DAYS days, the newest
    MOST_ENTRIES. The last constants of a day stay."""
    every: dict[tuple[int, str, str], SpeedEntry] = {}
    for entry in entries:
        own = every.setdefault(entry.key, msgspec.structs.replace(entry, times={}, constants={}))
        merge(own.times, entry.times)
        own.constants.update(entry.constants)
    oldest = max((day for day, _, _ in every), default=0) - KEPT_DAYS
    kept = (key for key in sorted(every, reverse=True) if key[0] > oldest)
    return {key: every[key] for key in islice(kept, MOST_ENTRIES)}


class SpeedRecord:
    """The entries of one home. Used from one event loop, except ``write``."""

    def __init__(self, path: Path, software: str, now: float) -> None:
        """Reads the file; ``now`` in seconds since the epoch. Entries of a later day, by a clock that was wrong, are
        dropped, as they would displace all others."""
        self._path = path
        self._software = software
        self._entries: dict[tuple[int, str, str], SpeedEntry] = {}
        self.written_at = now
        self.changed = False
        try:
            read = _decoder.decode(path.read_bytes())
        except FileNotFoundError:
            return
        except (OSError, msgspec.MsgspecError) as error:
            log.warning("%s cannot be read, and speeds are measured again: %s", path, error)
            return
        self._entries = merged(entry for entry in read if entry.day <= now // DAY_S + 1)

    def add(self, shape: Mapping[str, Any], times: Times, now: float) -> None:
        """Adds the times of requests on replicas of a shape, which have ended by ``now``."""
        entry = SpeedEntry(self._software, int(now // DAY_S), json.dumps(shape, sort_keys=True), times)
        own = self._entries.get(entry.key)
        if own is not None:
            merge(own.times, times)
        else:
            self._entries = merged([*self._entries.values(), entry])
        self.changed = True

    def add_constants(self, machine: str, engine: str, constants: Mapping[str, float], now: float) -> None:
        """Adds the constants measured with an engine on a `Host.machine`, replacing earlier ones of the day."""
        shape = json.dumps({"machine": machine, "engine": engine}, sort_keys=True)
        entry = SpeedEntry(self._software, int(now // DAY_S), shape, {}, dict(constants))
        self._entries = merged([*self._entries.values(), entry])
        self.changed = True

    def constants(self) -> dict[str, MeasuredConstants]:
        """Returns the constants by machine, under this version of corewright: the worst of the newest ones of all
        engines."""
        newest: dict[str, dict[str, float]] = {}
        for entry in sorted(self._entries.values(), key=lambda entry: entry.day):
            if entry.constants and entry.software == self._software:
                newest.setdefault(entry.shape, {}).update(entry.constants)
        machines: dict[str, MeasuredConstants] = {}
        for shape, own in newest.items():
            machine = json.loads(shape)["machine"]
            so_far = machines.get(machine, MeasuredConstants())
            machines[machine] = MeasuredConstants(
                hbm_gib=max(so_far.hbm_gib, own.get("hbm_gib", 0.0)),
                host_gib=max(so_far.host_gib, own.get("host_gib", 0.0)),
                read_bytes_s=own.get("read_bytes_s", so_far.read_bytes_s),
            )
        return machines

    def measured(self) -> tuple[MeasuredSpeed, ...]:
        """Returns the speeds under this version of corewright, by shape."""
        shapes: dict[str, Times] = {}
        for entry in self._entries.values():
            if entry.software == self._software:
                merge(shapes.setdefault(entry.shape, {}), entry.times)
        every = ((shape, *speeds_of(times)) for shape, times in sorted(shapes.items()))
        return tuple(MeasuredSpeed("", speeds, count, json.loads(shape)) for shape, speeds, count in every if speeds)

    def content(self, now: float) -> bytes:
        """Returns what is to be written."""
        self.changed, self.written_at = False, now
        return msgspec.json.encode(list(self._entries.values()))

    def write(self, content: bytes) -> None:
        """Writes the file. Blocks; a full disk loses it."""
        try:
            private_file.replace(self._path, content)
        except OSError as error:
            log.warning("%s cannot be written: %s", self._path, error)


def record_of(home: Home) -> SpeedRecord:
    """Returns the record of a home, under this version of corewright."""
    return SpeedRecord(home.speeds, corewright_version(), time.time())
