"""A warm process: it has imported an engine's packages, has no cores and no model, and is forked for each start.

`WarmProcesses` starts it; it ends with its standard input, a pipe of the host actor. `fork_client` is the other end.

1. A request is refused if its environment differs from the server's in a variable that may have been read during the
   imports: the packages would behave differently from those of a fresh process.
2. The fork replies and waits. If the client has given up meanwhile and starts a fresh process, the fork ends.
3. The fork takes over the request's environment, folder and output, closes all other descriptors, and runs the script.
4. A fork can be made before its client comes: it loads the model meanwhile, and ends if none comes in time. The
   environment of a client that comes is applied after the load, if it is not the one that was expected.

What a fork does is never seen by the server, so that no other start gets anything of its model. The server has one
thread only: a fork would lose the others, with the locks that they hold.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from workers.host import forked_process
from workers.host.fork_client import FORKED, REFUSED, RUN, send
from workers.host.host_facts import available_memory

REQUEST_S = 5.0  # deadline of each message of a client, which sends them at once
HANDOVER_S = 30.0  # a fork that loads ahead ends without its start
MEMORY_CHECK_S = 10.0

LEAST_BYTES = 2 << 30
"""The available memory without which there is no warm process. One takes 0.4 GiB (measured with torch 2.13 and
transformers 5.23), which its forks share."""

LIBRARIES = (
    "transformers.modeling_utils",  # with torch; models import all of these when they are loaded
    "transformers.generation.utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.modeling_llama",
    "llguidance",
    "jsonschema",  # these are Ray's; Ray itself reads its environment when it is imported
    "requests",
    "workers.serving.backend",
    "workers.serving.dataplane",
)
IMPORTS = {
    "cpu": ("workers.engines.cpu.engine", "workers.engines.encoder.cpu", *LIBRARIES),
    **dict.fromkeys(("nxd-inference", "optimum-neuron", "torch-neuronx", "transformers-neuronx"), LIBRARIES),
}
"""What a warm process imports for an engine; a start reports what is missing. No package of AWS: they start threads, or
read the cores (docs/engines.md)."""

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
"""Variables of the server. With the first one the imports start no threads. OpenMP reads the second one when torch is
imported; with one thread it has no effect. With the last one torch does not import the packages of devices."""

UNREAD = frozenset({"PWD", "OLDPWD", "SHLVL", "_", "PYTHONBREAKPOINT"})
"""Variables of shells; and that of Ray's debugger, which Ray sets in each driver and, anew, in each worker."""

READ_LATER = UNREAD | {"OMP_NUM_THREADS", "TOKENIZERS_PARALLELISM"}
READ_LATER_PREFIXES = ("COREWRIGHT_", "NEURON_", "RAY_")
"""Variables that none of the imports reads, or that a fork applies itself."""


@dataclass(frozen=True)
class Request:
    """What a fork is for: to load a model ahead, or to become a Ray worker, which may have been forked ahead."""

    environment: dict[str, str]
    start: str  # names the start of a replica; "" if nothing is loaded ahead
    load: str = ""  # what to load ahead, for ``Load``
    arguments: list[str] = field(default_factory=list)  # a script and its arguments, possibly after options of Python
    folder: str = ""
    descriptors: tuple[int, ...] = ()  # to use as 0, 1 and 2; then that of the client, from the server to a fork


Become = Callable[["Request", socket.socket], list[str]]


class Load(Protocol):
    """Begins to load what a request names. Returns a function that waits for its end."""

    def __call__(self, load: str) -> Callable[[], None]: ...


class Server:
    """Forks a process for each request of its listener."""

    def __init__(self, listener: socket.socket, environment: Mapping[str, str], load: Load) -> None:
        """``environment`` is that in which the packages were imported."""
        self._listener = listener
        self._environment = environment
        self._added = {name: value for name, value in os.environ.items() if name not in environment}  # by the imports
        self._load = load
        self._ahead: dict[str, socket.socket] = {}  # to forks that load ahead, by start

    def serve(self) -> list[str] | None:
        """Returns None when standard input ends or memory is short, and in each fork its script with arguments."""
        waiting = select.poll()
        waiting.register(self._listener, select.POLLIN)
        waiting.register(sys.stdin.fileno(), select.POLLIN | select.POLLHUP)
        while True:
            ready = dict(waiting.poll(MEMORY_CHECK_S * 1000))
            if sys.stdin.fileno() in ready or available_memory() < LEAST_BYTES:
                return None
            if not ready:
                continue
            client, _ = self._listener.accept()
            # After an error of one of these types, the client starts a fresh process.
            with client, contextlib.suppress(OSError, TypeError, ValueError), contextlib.ExitStack() as received:
                client.settimeout(REQUEST_S)
                _check_user(client)
                request = _received(client, received)
                if (reason := refusal(request.environment, self._environment)) is not None:
                    client.sendall(REFUSED + reason.encode())
                elif request.load:
                    if (channel := self._fork_ahead(request)) is not None:
                        return _in_fork(self._run_ahead, request, channel)
                elif not self._handed_over(request, client) and os.fork() == 0:
                    return _in_fork(self._run, request, client)

    def _fork_ahead(self, request: Request) -> socket.socket | None:
        """Returns the channel to the server in the fork, None in the server."""
        ours, theirs = socket.socketpair()
        ours.settimeout(REQUEST_S)
        if os.fork() == 0:
            ours.close()
            return theirs
        theirs.close()
        for start, channel in [*self._ahead.items()]:
            if _is_closed(channel):  # the fork has given up
                self._ahead.pop(start).close()
        self._ahead[request.start] = ours
        return None

    def _handed_over(self, request: Request, client: socket.socket) -> bool:
        """Returns whether a fork that loads ahead has taken the request over."""
        channel = self._ahead.pop(request.start, None)
        if channel is None:
            return False
        with channel, contextlib.suppress(OSError):  # it has given up, or was killed
            message = {**vars(request), "descriptors": ()}
            send(channel, message, (*request.descriptors, client.fileno()))
            return channel.recv(1) == FORKED
        return False

    def _close(self) -> None:
        """Closes what a fork must not have."""
        self._listener.close()
        for channel in self._ahead.values():
            channel.close()

    def _run_ahead(self, request: Request, channel: socket.socket) -> list[str]:
        """Loads, and becomes the process of the start. Ends without one."""
        self._close()
        os.setpgid(0, 0)  # Ray kills the process group of a worker that ends
        forked_process.adjust({**self._added, **request.environment})
        wait = self._load(request.load)
        channel.settimeout(HANDOVER_S)
        with contextlib.ExitStack() as received:
            start = _received(channel, received)
            channel.sendall(FORKED)
            channel.close()
            if _without_unread(start.environment) != _without_unread(request.environment):
                wait()  # a thread must not read the environment meanwhile
                kept = {name: value for name, value in os.environ.items() if name not in request.environment}
                forked_process.adjust({**kept, **start.environment})
            with socket.socket(fileno=os.dup(start.descriptors[-1])) as client:
                client.settimeout(REQUEST_S)
                return _become(start, client)

    def _run(self, request: Request, client: socket.socket) -> list[str]:
        self._close()
        os.setpgid(0, 0)  # as above
        forked_process.adjust({**self._added, **request.environment})
        return _become(request, client)


def _check_user(client: socket.socket) -> None:
    """Raises PermissionError for a client of another user."""
    _, user, _ = struct.unpack("3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if user != os.getuid():
        raise PermissionError(f"a client of user {user}")


def _is_closed(channel: socket.socket) -> bool:
    waiting = select.poll()
    waiting.register(channel, select.POLLHUP)
    return bool(waiting.poll(0))


def _received(connection: socket.socket, received: contextlib.ExitStack) -> Request:
    """Raises OSError or ValueError for something else than a request. ``received`` closes its descriptors."""
    length, descriptors, _, _ = socket.recv_fds(connection, 4, 4)
    for descriptor in descriptors:
        received.callback(os.close, descriptor)
    content = b""
    while len(content) < int.from_bytes(length, "big"):
        if not (part := connection.recv(1 << 16)):
            raise ConnectionResetError("an incomplete request")
        content += part
    return Request(**{**json.loads(content), "descriptors": tuple(descriptors)})


def refusal(requested: Mapping[str, str], own: Mapping[str, str]) -> str | None:
    """Returns which variable makes a fork differ from a fresh process with the ``requested`` environment, if any."""
    for name in sorted((requested.keys() | own.keys()) - READ_LATER):
        default = own.get(name) if name in ENVIRONMENT else None
        if requested.get(name, default) != own.get(name) and not name.startswith(READ_LATER_PREFIXES):
            return f"the warm process has imported its packages with another {name}"
    return None


def _without_unread(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in UNREAD}


def _in_fork(become: Become, request: Request, connection: socket.socket) -> list[str]:
    """Ends this fork on any error: it must not become a second server."""
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        return become(request, connection)
    except (OSError, ValueError) as error:  # of a connection whose other end has ended or is silent
        print(f"A fork of the warm process ends without a start: {error!r}.", file=sys.stderr, flush=True)  # noqa: T201
        os._exit(1)
    except BaseException:  # noqa: BLE001 - see above
        traceback.print_exc()
        os._exit(1)


def _become(request: Request, client: socket.socket) -> list[str]:
    """Turns this fork into the process of a request, once the client permits it. Returns its script with arguments."""
    os.chdir(request.folder)
    client.sendall(FORKED)
    if client.recv(1) != RUN:
        os._exit(0)
    for target, descriptor in enumerate(request.descriptors[:3]):
        os.dup2(descriptor, target)
    return request.arguments


def main(engine: str, descriptor: int, load: Load) -> None:
    """Serves on a listening unix socket, and runs the script of a request in each fork."""
    environment = dict(os.environ)
    for module in IMPORTS[engine]:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    forked_process.imported = frozenset(sys.modules)
    gc.collect()
    gc.freeze()  # a collection in a fork would copy the pages of all these objects
    if len([*Path("/proc/self/task").iterdir()]) > 1:
        sys.exit("The imports have started threads, which a fork would lose: replicas start as fresh processes.")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel removes ended forks
    arguments = Server(socket.socket(fileno=descriptor), environment, load).serve()
    if arguments is not None:
        run(arguments)


def run(arguments: list[str]) -> None:
    """Runs a script as Python does: ``arguments`` are those of a Python command without options but -u."""
    sys.argv = arguments[1:] if arguments[0] == "-u" else arguments
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
