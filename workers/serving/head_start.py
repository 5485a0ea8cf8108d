"""Loads the model of a replica in a fork of the warm process, while Ray still prepares the fork's start as a worker."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import msgspec

from workers.engines.open_engine import open_encoder, open_engine
from workers.host import forked_process
from workers.host.start_phases import START
from workers.messages.encoder_protocol import EncodeEngine
from workers.messages.engine_protocol import GenerateEngine
from workers.messages.replica_config import ReplicaConfig

Engine = GenerateEngine | EncodeEngine


def loaded(config: ReplicaConfig) -> Engine:
    """Returns the loaded engine of a configuration: that of the head start, or a new one. Raises EngineLoadError."""
    begun, _HeadStart.current = _HeadStart.current, None
    if begun is None or begun.config != config:
        return _load(config)
    since = time.monotonic()
    engine = begun.result()
    START.waited("weights", since)
    return engine


def _load(config: ReplicaConfig) -> Engine:
    engine = open_engine(config) if config.kind == "generate" else open_encoder(config)
    engine.load()
    return engine


def begin(config: str) -> Callable[[], None]:
    """Begins to load the engine of a configuration as JSON. Returns a function that waits for its end."""
    _HeadStart.current = _HeadStart(msgspec.json.decode(config, type=ReplicaConfig))
    return _HeadStart.current.wait


class _HeadStart:
    """A load on a thread of its own."""

    current: _HeadStart | None = None  # of this process, until it is taken

    def __init__(self, config: ReplicaConfig) -> None:
        self.config = config
        self._engine: Engine | None = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="head start", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        forked_process.use_threads()
        try:
            self._engine = _load(self.config)
        except Exception as error:  # noqa: BLE001 - it is raised where the engine is needed
            self._error = error

    def wait(self) -> None:
        self._thread.join()

    def result(self) -> Engine:
        self.wait()
        if self._error is not None:
            raise self._error
        assert self._engine is not None
        return self._engine
