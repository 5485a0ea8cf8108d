"""One server below a keeper: started, watched until it answers, and stopped."""

from __future__ import annotations

import contextlib
import http.client
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import psutil

from workers.host.lifetime import is_stopped
from workers.host.process_tree import mark_of
from workers.messages.engine_protocol import EngineLoadError, EngineSpec

KEEPER = Path(__file__).with_name("keeper.py")
POLL_S = 0.2
REQUEST_S = 5.0
LOOK_S = 1.0  # between two looks at a keeper
PASSED_ON = (
    "HOME",
    "LANG",
    "LC_ALL",
    "LD_LIBRARY_PATH",
    "PATH",
    "SSL_CERT_FILE",
    "TMPDIR",
    "USER",
    "http_proxy",
    "https_proxy",
    "no_proxy",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "NO_PROXY",
)
"""The variables of the replica's process that its server gets. All others come from the plan or the spec."""


class Address(msgspec.Struct, frozen=True):
    """Where a server listens: the path of a unix socket, else a port of 127.0.0.1."""

    path: str = ""
    port: int = 0

    @property
    def url(self) -> str:
        """The base URL; the host name is ignored on a unix socket."""
        return "http://server" if self.path else f"http://127.0.0.1:{self.port}"

    def connection(self, timeout_s: float) -> http.client.HTTPConnection:
        """Returns a connection for one blocking request."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        if self.path:
            connection.sock = socket.socket(socket.AF_UNIX)
            connection.sock.settimeout(timeout_s)
            connection.sock.connect(self.path)
        return connection

    def get(self, route: str) -> tuple[int, bytes]:
        """Returns status and body of a GET. Raises OSError or http.client.HTTPException."""
        return self._answer("GET", route, None, REQUEST_S, {})

    def post(self, route: str, body: bytes, timeout_s: float, key: str = "") -> tuple[int, bytes]:
        """Returns status and body of a POST of JSON, with the server's key. Raises as ``get``."""
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        return self._answer("POST", route, body, timeout_s, headers)

    def _answer(
        self, method: str, route: str, body: bytes | None, timeout_s: float, headers: Mapping[str, str]
    ) -> tuple[int, bytes]:
        connection = self.connection(timeout_s)
        try:
            connection.request(method, route, body, dict(headers))
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()


def free_port() -> int:
    """Returns a port of 127.0.0.1 that was free; another process may take it, and then the server does not start."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def server_folder(parent: Path, grace_s: float) -> Path:
    """Creates the working directory of this process's server, for its socket too. Its name marks the server's
    processes (`process_tree`), and the keeper removes it."""
    folder = parent / mark_of(os.getpid(), grace_s)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700, parents=True)
    return folder


class ServerProcess:
    """A running server and its keeper. Its processes end with this process, with ``stop``, or by themselves."""

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str], folder: Path, *, grace_s: float, held: Iterable[int] = ()
    ) -> None:
        """Starts it in ``folder``, of `server_folder`, with ``env`` and the variables of `PASSED_ON`. ``held`` are
        descriptors, such as locks, that stay open until its last process has ended. Raises EngineLoadError."""
        own = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        self._command = command[0]
        try:
            self._keeper = subprocess.Popen(
                [sys.executable, "-I", str(KEEPER), str(folder), f"{grace_s:g}", *command],
                stdin=subprocess.PIPE,
                env={**own, **env},
                pass_fds=tuple(held),
                start_new_session=True,
            )
        except OSError as error:
            raise EngineLoadError("server-failed", f"{command[0]} cannot be started: {error.strerror}") from error

    def wait_ready(self, address: Address, route: str) -> None:
        """Waits until a GET of ``route`` is answered with 200: refused connections and 503 mean that it still loads.

        Raises EngineLoadError when the server ends. The caller has a deadline for the whole start.
        """
        while not self._answers(address, route):
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self._keeper.wait(POLL_S)
                raise EngineLoadError(
                    "server-failed",
                    f"{self._command} ended with exit code {code} before it was ready",
                    "the replica's log has its output",
                )

    def _answers(self, address: Address, route: str) -> bool:
        try:
            status, _ = address.get(route)
        except (OSError, http.client.HTTPException):
            return False
        return status == http.client.OK

    def run(self, address: Address, route: str) -> None:
        """Waits until the server is ready, and stops it; or until it ends by itself. Raises EngineLoadError if that is
        with a failure."""
        try:
            self.wait_ready(address, route)
        except EngineLoadError:
            if self.wait() != 0:
                raise
        self.stop()

    def wait(self) -> int:
        """Waits for the end of all its processes. Returns the exit code of the first one, 128 + N after a signal N.

        A stopped keeper is continued, since only the keeper notices the end of the server; killing it would end a
        healthy server."""
        while (code := self._keeper.poll()) is None:
            with contextlib.suppress(ProcessLookupError):  # another thread may have waited for it meanwhile
                ended = os.pidfd_open(self._keeper.pid)
                poller = select.poll()
                poller.register(ended, select.POLLIN)
                poller.poll(LOOK_S * 1000)
                os.close(ended)
            if is_stopped(self._keeper.pid):
                self._keeper.send_signal(signal.SIGCONT)
        return code

    def listens(self, port: int) -> bool:
        """Returns whether one of its processes listens on a TCP port."""
        for process in psutil.Process(self._keeper.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                for connection in process.net_connections("tcp"):
                    if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port:
                        return True
        return False

    @property
    def ended(self) -> bool:
        return self._keeper.poll() is not None

    def stop(self) -> None:
        """Stops the server and returns when all its processes are gone."""
        assert self._keeper.stdin is not None
        self._keeper.stdin.close()
        self.wait()


@dataclass(frozen=True)
class CompletionServer:
    """A server that is ready, and what requests to it depend on."""

    address: Address
    model: str  # its name there
    spec: EngineSpec
    version: tuple[int, int]  # of vLLM, for requests as tokens
    wait: Callable[[], int]  # blocks until its processes are gone; returns the exit code
    stop: Callable[[], None]
    adapters: Mapping[str, str] = field(default_factory=dict)  # folders, by name
    key: str = ""  # that requests need
    most_adapters: int = 0  # loaded at a time; 0: all of them are loaded at the start
    max_rank: int = 0  # of adapters that are loaded later
