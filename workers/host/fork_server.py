"""A warm process: it has imported an engine's packages, has no cores and no model, and is forked for each start.

`WarmProcesses` starts it; it ends with its standard input, a pipe of its parent. `fork_client` is the other end.

1. A request is refused if its environment differs from the server's in a variable that may have been read during the
   imports: the packages would behave differently from those of a fresh process.
2. The fork replies and waits. If the client has given up meanwhile and starts a fresh process, the fork ends.
3. The fork takes over the request's environment, folder and output, closes all other descriptors, and runs the script.

The server knows nothing of models: Ray may start workers before one needs them, and a replica gets its configuration
from Ray. The server has one thread only: a fork would lose the others, with the locks that they hold.
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
import sys
import threading
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from placements.engines.registry import ENGINES
from workers.host.fork_client import FORKED, REFUSED, RUN, check_peer
from workers.host.host_facts import available_memory

REQUEST_S = 5.0  # deadline of each message of a client, which sends them at once
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
    "pydantic.v1",
    "starlette.datastructures",
    "workers.serving.backend",
    "workers.serving.dataplane",
)


def imports_of(engine: str) -> tuple[str, ...]:
    """Returns what a warm process imports for an engine; a start reports what is missing. No package of AWS: they start
    threads, or read the cores (docs/engines.md). A module's function ``prepare_forks`` does what else each fork would
    do."""
    name = f"workers.engines.{ENGINES[engine].module}.runner"
    return (*LIBRARIES, *importlib.import_module(name).RUNNER.warm_imports)


IMPORTS_OF_FORKS = ("workers.serving.replica", "ray._common.pydantic_compat", "ray._private.arrow_serialization")
"""What a fork imports before it runs a script: Ray, which reads the fork's environment, and what Ray would import when
the worker becomes a replica."""

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
"""Variables of the server. With the first one the imports start no threads. OpenMP reads the second one when torch is
imported; with one thread it has no effect. With the last one torch does not import the packages of devices."""

READ_LATER = frozenset(
    {
        "OMP_NUM_THREADS",
        "TOKENIZERS_PARALLELISM",
        *("PWD", "OLDPWD", "SHLVL", "_"),  # of shells
        *("PYTHONBREAKPOINT", "SPT_NOENV"),  # Ray sets the first in each driver and, anew, both in each worker
    }
)
READ_LATER_PREFIXES = ("COREWRIGHT_", "NEURON_", "RAY_")
"""Variables that none of the imports reads, or that a fork applies itself."""

imported: frozenset[str] = frozenset()
"""The modules that this process has from the warm process; empty in a fresh process."""


@dataclass(frozen=True)
class ForkRequest:
    """What a fork is to become."""

    environment: dict[str, str]
    arguments: list[str]  # a script and its arguments, possibly after options of Python
    folder: str
    descriptors: tuple[int, ...]  # to use as 0, 1 and 2
    attached: bool = False  # the fork ends with its client, and the client with the fork


def serve(listener: socket.socket, environment: Mapping[str, str]) -> list[str] | None:
    """Forks a process for each request of the listener. ``environment`` is that in which the packages were imported.
    Returns None when standard input ends or memory is short, and in each fork its script with arguments."""
    added = {name: value for name, value in os.environ.items() if name not in environment}  # by the imports
    waiting = select.poll()
    waiting.register(listener, select.POLLIN)
    waiting.register(sys.stdin.fileno(), select.POLLIN | select.POLLHUP)
    while True:
        ready = dict(waiting.poll(MEMORY_CHECK_S * 1000))
        if sys.stdin.fileno() in ready or available_memory() < LEAST_BYTES:
            return None
        if not ready:
            continue
        client, _ = listener.accept()
        # After an error of one of these types, the client starts a fresh process.
        with client, contextlib.suppress(OSError, TypeError, ValueError), contextlib.ExitStack() as received:
            client.settimeout(REQUEST_S)
            check_peer(client)
            request = _received(client, received)
            if (reason := refusal(request.environment, environment)) is not None:
                client.sendall(REFUSED + reason.encode())
            elif os.fork() == 0:
                listener.close()
                return _become({**added, **request.environment}, request, client)


def _received(connection: socket.socket, received: contextlib.ExitStack) -> ForkRequest:
    """Raises OSError or ValueError for something else than a request. ``received`` closes its descriptors."""
    length, descriptors, _, _ = socket.recv_fds(connection, 4, 4)
    for descriptor in descriptors:
        received.callback(os.close, descriptor)
    content = b""
    while len(content) < int.from_bytes(length, "big"):
        if not (part := connection.recv(1 << 16)):
            raise ConnectionResetError("an incomplete request")
        content += part
    return ForkRequest(**{**json.loads(content), "descriptors": tuple(descriptors)})


def refusal(requested: Mapping[str, str], own: Mapping[str, str]) -> str | None:
    """Returns which variable makes a fork differ from a fresh process with the ``requested`` environment, if any."""
    for name in sorted((requested.keys() | own.keys()) - READ_LATER):
        default = own.get(name) if name in ENVIRONMENT else None
        if requested.get(name, default) != own.get(name) and not name.startswith(READ_LATER_PREFIXES):
            return f"the warm process has imported its packages with another {name}"
    return None


def _become(environment: Mapping[str, str], request: ForkRequest, client: socket.socket) -> list[str]:
    """Turns this fork into the process of a request, once the client permits it. Returns its script with arguments.
    Ends it on any error: it must not become a second server."""
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setpgid(0, 0)  # Ray kills the process group of a worker that ends
        adjust(environment)
        os.chdir(request.folder)
        client.sendall(FORKED)
        if client.recv(1) != RUN:
            os._exit(0)
        for target, descriptor in enumerate(request.descriptors):
            os.dup2(descriptor, target)
        if request.attached:
            client.settimeout(None)
            threading.Thread(target=_end_with, args=(client.dup(),), name="attached", daemon=True).start()
        return request.arguments
    except (OSError, ValueError) as error:  # of a connection whose other end has ended or is silent
        print(f"A fork of the warm process ends without a start: {error!r}.", file=sys.stderr, flush=True)  # noqa: T201
        os._exit(1)
    except BaseException:  # noqa: BLE001 - see above
        traceback.print_exc()
        os._exit(1)


def _end_with(client: socket.socket) -> None:
    """Ends this fork with its client, which sends nothing. The connection stays open until the fork ends."""
    with contextlib.suppress(OSError):
        client.recv(1)
    os._exit(1)


def adjust(environment: Mapping[str, str]) -> None:
    """Applies the environment in a new fork. Python's own random numbers and tempfile's folder need nothing."""
    os.environ.clear()
    os.environ.update(environment)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # else all forks would draw the same numbers
    if "torch" in sys.modules:
        sys.modules["torch"].seed()


def use_threads() -> None:
    """Applies OMP_NUM_THREADS in a fork. To be called in each thread that computes: OpenMP has read the variable when
    torch was imported, and ``set_num_threads`` changes OpenMP's number for the calling thread only."""
    if "torch" in imported and (threads := os.environ.get("OMP_NUM_THREADS")):
        sys.modules["torch"].set_num_threads(int(threads))


def main(engine: str, descriptor: int) -> None:
    """Serves on a listening unix socket, and runs the script of a request in each fork."""
    environment = dict(os.environ)
    with contextlib.suppress(OSError):  # a sandbox may forbid it
        Path("/proc/self/oom_score_adj").write_text("1000")  # as Ray does for its workers; forks inherit it
    for name in imports_of(engine):
        with contextlib.suppress(ImportError):
            prepare = getattr(importlib.import_module(name), "prepare_forks", None)
            if prepare is not None:
                prepare()
    global imported
    imported = frozenset(sys.modules)
    gc.collect()
    gc.freeze()  # a collection in a fork would copy the pages of all these objects
    if len([*Path("/proc/self/task").iterdir()]) > 1:
        sys.exit("The imports have started threads, which a fork would lose: replicas start as fresh processes.")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel removes ended forks
    arguments = serve(socket.socket(fileno=descriptor), environment)
    if arguments is not None:
        run(arguments)


def run(arguments: list[str]) -> None:
    """Runs a script as Python does, after ``IMPORTS_OF_FORKS``: a worker of Ray may have the time. ``arguments`` are
    those of a Python command without options but -u."""
    for name in IMPORTS_OF_FORKS:
        importlib.import_module(name)
    sys.argv = arguments[1:] if arguments[0] == "-u" else arguments
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
