"""A server of OpenAI's API in this process, whose answers a test scripts, and a replica that relays to it."""

from __future__ import annotations

import json
import tempfile
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import workers
from orchestrator.process.version import corewright_version
from tests.served import EPOCH, TOKEN
from workers.engines.server.completion_relay import CompletionRelay
from workers.engines.server.server_process import Address, CompletionServer
from workers.messages.engine_protocol import EngineSpec
from workers.messages.wire import Welcome
from workers.serving.dataplane import DataPlane

NAME = "name-in-the-server"


def chunk(text: str | None = None, finish: str | None = None, **fields: Any) -> bytes:
    """A chunk of a streamed completion; without a text and a finish, one without choices."""
    choice = {"index": 0, "text": text or "", "finish_reason": finish}
    choices = [] if text is None and finish is None else [choice]
    return event({"id": "c", "object": "text_completion", "model": NAME, "choices": choices, **fields})


def event(value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


class Call(BaseHTTPRequestHandler):
    """One request to the server, with the ways to answer it."""

    protocol_version = "HTTP/1.1"
    server: ScriptedHttpServer
    body: dict[str, Any]

    def do_POST(self) -> None:
        self.body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.calls.append(self)
        self.server.script(self)

    def answer(self, value: Any, status: int = 200) -> None:
        """Answers with JSON, or with bytes as they are."""
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def stream(self, *pieces: bytes, breaks: bool = False, after_first: threading.Event | None = None) -> None:
        """Streams pieces, the second when ``after_first`` is set; with ``breaks`` the connection is lost after them."""
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for piece in pieces:
            self.piece(piece)
            if after_first is not None:
                assert after_first.wait(10)
        if breaks:
            self.close_connection = True
        else:
            self.wfile.write(b"0\r\n\r\n")

    def piece(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))

    def wait_until_gone(self, deadline_s: float = 10.0) -> None:
        """Returns when the client has closed the connection. Raises TimeoutError."""
        self.connection.settimeout(deadline_s)
        assert self.rfile.read(1) == b""

    def log_message(self, format: str, *args: Any) -> None:
        pass


class ScriptedHttpServer(ThreadingHTTPServer):
    """Runs ``script`` for each POST, on a thread of its own."""

    daemon_threads = True
    script: Callable[[Call], None]

    def __init__(self) -> None:
        self.calls: list[Call] = []
        super().__init__(("127.0.0.1", 0), Call)


class RelayedReplica:
    """A replica that relays to a scripted server: a real relay behind a real data plane."""

    def __init__(self, script: Callable[[Call], None], slots: int = 2) -> None:
        self.server = ScriptedHttpServer()
        self.server.script = script
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()
        self.ended = threading.Event()
        spec = EngineSpec(slots, 64, (64,), (64,), vocab_size=0, eos_token_ids=frozenset())
        address = Address(port=self.server.server_address[1])
        server = CompletionServer(address, NAME, spec, (0, 0), self._wait, self.ended.set)
        self.relay = CompletionRelay(server, None, lambda events: self.plane.emit(events))
        self.folder = tempfile.TemporaryDirectory(prefix="cwt-", dir="/tmp")
        self.path = Path(self.folder.name) / "s"
        package = str(Path(workers.__file__).parent)
        self.plane = DataPlane(
            self.path,
            welcome=Welcome(corewright_version(), package, slots, 64, 64, 0),
            token=TOKEN,
            epoch=EPOCH,
            batcher=self.relay,
            taken=self.relay.taken,
        )
        self.plane.start()

    @property
    def calls(self) -> list[Call]:
        return self.server.calls

    def _wait(self) -> int:
        self.ended.wait()
        return 0

    def close(self) -> None:
        self.relay.close()
        self.plane.close()
        self.server.shutdown()
        self.server.server_close()
        self.folder.cleanup()
