"""A replica without Ray: a real batcher over the echo engine behind a real socket, in this process."""

from __future__ import annotations

import tempfile
import threading
from pathlib import Path

import workers
from orchestrator.process.version import corewright_version
from tests.fleet import until
from workers.batching.batcher import Batcher
from workers.engines.echo.engine import EchoEngine
from workers.messages.credentials import Credentials
from workers.messages.wire import PROTOCOL, Welcome
from workers.serving.dataplane import DataPlane
from workers.text.tokenizer import load_tokenizer

TOKEN = "secret"
EPOCH = 3


class SteppedEcho(EchoEngine):
    """Ends a step only when a test says so."""

    def __init__(self, slots: int, max_len: int) -> None:
        super().__init__(slots=slots, max_len=max_len)
        self.turns = threading.Semaphore(0)
        self.free = False  # of turns

    def _take_time(self) -> None:
        if not self.free:
            self.turns.acquire()


class Served:
    """One replica. ``kill`` ends it as kill -9 ends a process: its connections break, and nothing is said."""

    def __init__(
        self,
        slots: int = 4,
        step_ms: float = 0.0,
        max_len: int = 4096,
        protocol: int = PROTOCOL,
        credentials: Credentials | None = None,
        stepped: bool = False,
        prefix_block: int = 0,
        epoch: int = EPOCH,
    ) -> None:
        """With ``credentials`` it listens on TCP with TLS, as for gateways of another host. ``stepped``: no engine step
        ends before a ``turn``. It says that it keeps prompts in blocks of ``prefix_block`` tokens."""
        self._credentials = credentials
        self._epoch = epoch
        engine = SteppedEcho(slots, max_len) if stepped else EchoEngine(slots=slots, max_len=max_len, step_ms=step_ms)
        self._engine = engine
        engine.load()
        self.folder = tempfile.TemporaryDirectory(prefix="cwt-", dir="/tmp")
        self.path = Path(self.folder.name) / "s"
        self.batcher = Batcher(engine, load_tokenizer("echo", None), lambda events: self.plane.emit(events))
        package = str(Path(workers.__file__).parent)
        self._welcome = Welcome(
            corewright_version(), package, slots, max_len, max_len, 257, prefix_block=prefix_block, protocol=protocol
        )
        self.restart_plane()
        self.thread = threading.Thread(target=self.batcher.run)
        self.thread.start()

    def restart_plane(self) -> None:
        """Listen (again) on the same socket."""
        self.plane = DataPlane(
            self.path,
            welcome=self._welcome,
            token=TOKEN,
            epoch=self._epoch,
            batcher=self.batcher,
            listen="" if self._credentials is None else "tls://127.0.0.1:0",
            credentials=self._credentials,
        )
        self.plane.start()

    def kill(self) -> None:
        self.plane.close()

    @property
    def in_step(self) -> bool:
        """Returns whether the engine works on a step."""
        return self.batcher.stats.step_started_at is not None

    @property
    def cancelled(self) -> int:
        """Requests that are to leave before the next step."""
        return len(self.batcher._cancelled)

    def turn(self, deadline_s: float = 10.0) -> None:
        """Let one step end, and wait until it has."""
        assert isinstance(self._engine, SteppedEcho)
        before = self.batcher.stats.steps
        self._engine.turns.release()
        until(lambda: self.batcher.stats.steps != before, deadline_s, "a step has ended")

    def run_free(self) -> None:
        """No step waits for a turn any more."""
        if isinstance(self._engine, SteppedEcho):
            self._engine.free = True
            self._engine.turns.release()

    def close(self) -> None:
        self.run_free()
        self.batcher.close()
        self.thread.join(10)
        self.plane.close()
        self.folder.cleanup()
