"""A replica with an encoder: a real batcher over the echo encoder, or a test's own, behind a real socket."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import workers
from orchestrator.process.version import corewright_version
from tests.served import EPOCH, TOKEN
from workers.batching.encode_batcher import EncodeBatcher
from workers.engines.echo.engine import EchoEncoder
from workers.messages.encoder_protocol import EncodeEngine, EncodeInput
from workers.messages.requests import GenerateRequest
from workers.messages.wire import Welcome
from workers.serving.dataplane import DataPlane


class HeldEncoder(EchoEncoder):
    """Encodes nothing before ``turns`` has been released."""

    def __init__(self, rows: int = 8, max_len: int = 64) -> None:
        super().__init__(rows, max_len)
        self.turns = threading.Semaphore(0)

    def encode(self, inputs: Sequence[EncodeInput]) -> Any:
        self.turns.acquire()
        return super().encode(inputs)


class EncoderReplica:
    """One replica. ``kill`` ends it as kill -9 ends a process; ``requests`` are those that it was given."""

    def __init__(self, engine: EncodeEngine | None = None) -> None:
        self.engine = engine or EchoEncoder(rows=8, max_len=64)
        self.engine.load()
        self._folder = tempfile.TemporaryDirectory(prefix="cwt-", dir="/tmp")
        self.path = Path(self._folder.name) / "s"
        self.requests: list[GenerateRequest] = []
        self.batcher = EncodeBatcher(self.engine, lambda events: self.plane.emit(events))
        spec = self.batcher.spec
        welcome = Welcome(
            corewright_version(),
            str(Path(workers.__file__).parent),
            spec.slots,
            spec.max_len,
            spec.prefill_buckets[-1],
            spec.vocab_size,
            width=spec.width,
            labels=list(spec.labels),
        )
        self.plane = DataPlane(self.path, welcome=welcome, token=TOKEN, epoch=EPOCH, batcher=self)
        self.plane.start()
        self._thread = threading.Thread(target=self.batcher.run)
        self._thread.start()

    def submit(self, request: GenerateRequest) -> None:
        self.requests.append(request)
        self.batcher.submit(request)

    def cancel(self, id: str) -> None:
        self.batcher.cancel(id)

    def kill(self) -> None:
        self.plane.close()

    def close(self) -> None:
        if isinstance(self.engine, HeldEncoder):
            self.engine.turns.release(1000)
        self.batcher.close()
        self._thread.join(10)
        self.plane.close()
        self._folder.cleanup()
