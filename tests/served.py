"""A replica without Ray: a real batcher over the echo engine behind a real socket, in this process."""

from __future__ import annotations

import tempfile
import threading
from pathlib import Path

import workers
from orchestrator.version import corewright_version
from workers.batcher import Batcher
from workers.credentials import Credentials
from workers.dataplane import DataPlane
from workers.engines.echo import EchoEngine
from workers.tokenizer import load_tokenizer
from workers.wire import Welcome

TOKEN = "secret"
EPOCH = 3


class Served:
    """One replica. ``kill`` ends it as kill -9 ends a process: its connections break, and nothing is said."""

    def __init__(
        self,
        slots: int = 4,
        step_ms: float = 0.0,
        max_len: int = 4096,
        version: str | None = None,
        credentials: Credentials | None = None,
    ) -> None:
        """With ``credentials`` it listens on TCP with TLS, as for gateways of another host."""
        self._credentials = credentials
        engine = EchoEngine(slots=slots, max_len=max_len, step_ms=step_ms)
        engine.load()
        self.folder = tempfile.TemporaryDirectory(prefix="cwt-", dir="/tmp")
        self.path = Path(self.folder.name) / "s"
        self.batcher = Batcher(engine, load_tokenizer("echo", None), lambda events: self.plane.emit(events))
        package = str(Path(workers.__file__).parent)
        self._welcome = Welcome(version or corewright_version(), package, slots, max_len, max_len, 257)
        self.restart_plane()
        self.thread = threading.Thread(target=self.batcher.run)
        self.thread.start()

    def restart_plane(self) -> None:
        """Listen (again) on the same socket."""
        self.plane = DataPlane(
            self.path,
            welcome=self._welcome,
            token=TOKEN,
            epoch=EPOCH,
            batcher=self.batcher,
            listen="" if self._credentials is None else "tls://127.0.0.1:0",
            credentials=self._credentials,
        )
        self.plane.start()

    def kill(self) -> None:
        self.plane.close()

    def close(self) -> None:
        self.batcher.close()
        self.thread.join(10)
        self.plane.close()
        self.folder.cleanup()
