"""A warm process: it has imported an engine's packages, holds no cores and no model, and is forked for each start.

`WarmProcesses` starts it; it ends with its standard input, a pipe of the host actor. `fork_client` is the other end.

1. A request is refused if its environment differs from the server's in a variable that may have been read during the
   imports: the packages would behave differently from those of a fresh process.
2. The fork replies and waits. If the client has given up meanwhile and starts a fresh process, the fork ends.
3. The fork takes over the request's environment, folder and output, closes all other descriptors, and runs the script.

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
from collections.abc import Mapping
from dataclasses import dataclass

from workers.host.fork_client import FORKED, REFUSED, RUN

REQUEST_S = 5.0  # deadline of a client's request; it sends it at once
GO_S = 5.0  # deadline of its permission, likewise

IMPORTS = {
    "cpu": (
        "workers.engines.cpu.engine",
        "workers.engines.encoder.cpu",
        "workers.serving.backend",
        "workers.serving.dataplane",
        "transformers.modeling_utils",  # these are imported when a model is loaded
        "transformers.generation.utils",
        "transformers.models.auto.modeling_auto",
        "transformers.models.auto.tokenization_auto",
        "transformers.models.llama.modeling_llama",
        "llguidance",
        "jsonschema",  # these are Ray's; Ray itself reads its environment when it is imported
        "requests",
    )
}
"""What a warm process imports for an engine. A start reports what is missing."""

ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE", "OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
"""Variables of the server. OpenMP reads the first one when torch is loaded; with one thread it has no effect. OpenBLAS
would start threads when numpy is imported."""

imported: frozenset[str] = frozenset()
"""The modules that this process has from the warm one; empty in a fresh process."""

READ_LATER = frozenset({"OMP_NUM_THREADS", "PWD", "OLDPWD", "SHLVL", "_"})
READ_LATER_PREFIXES = ("COREWRIGHT_", "NEURON_", "RAY_")
"""Variables that none of the imports reads, or that a fork applies itself."""


@dataclass(frozen=True)
class Request:
    """What a fork becomes."""

    arguments: list[str]  # a script and its arguments, possibly after options of Python
    environment: dict[str, str]
    folder: str
    output: tuple[int, ...]  # descriptors to use as 0, 1 and 2


def serve(listener: socket.socket, environment: Mapping[str, str]) -> list[str] | None:
    """Forks a process for each request until standard input ends: returns None then, and in each fork its script with
    arguments. ``environment`` is that in which the packages were imported."""
    waiting = select.poll()
    waiting.register(listener, select.POLLIN)
    waiting.register(sys.stdin.fileno(), select.POLLIN | select.POLLHUP)
    while True:
        ready = dict(waiting.poll())
        if sys.stdin.fileno() in ready:
            return None
        client, _ = listener.accept()
        with client, contextlib.suppress(OSError, ValueError):  # the client starts a fresh process
            client.settimeout(REQUEST_S)
            request = _received(client)
            try:
                if (reason := refusal(request.environment, environment)) is not None:
                    client.sendall(REFUSED + reason.encode())
                elif os.fork() == 0:
                    listener.close()
                    added = {name: value for name, value in os.environ.items() if name not in environment}
                    _become(request, client, added)
                    return request.arguments
            finally:
                for descriptor in request.output:
                    os.close(descriptor)


def _received(client: socket.socket) -> Request:
    """Raises OSError or ValueError for a client of another user, or one that sends something else."""
    _, user, _ = struct.unpack("3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if user != os.getuid():
        raise PermissionError(f"a client of user {user}")
    length, descriptors, _, _ = socket.recv_fds(client, 4, 3)
    content = b""
    while len(content) < int.from_bytes(length, "big"):
        if not (part := client.recv(1 << 16)):
            raise ConnectionResetError("an incomplete request")
        content += part
    return Request(**json.loads(content), output=tuple(descriptors))


def refusal(requested: Mapping[str, str], own: Mapping[str, str]) -> str | None:
    """Returns which variable makes a fork differ from a fresh process with the ``requested`` environment, if any."""
    for name in sorted(requested.keys() | own.keys() - READ_LATER):
        default = own.get(name) if name in ENVIRONMENT else None
        if requested.get(name, default) != own.get(name) and not name.startswith(READ_LATER_PREFIXES):
            return f"the warm process has imported its packages with another {name}"
    return None


def _become(request: Request, client: socket.socket, added: Mapping[str, str]) -> None:
    """Turns this fork into the process of a request, once the client permits it. ``added`` are the variables that the
    imports have set."""
    os.setpgid(0, 0)  # Ray kills the process group of a worker that ends
    try:
        client.sendall(FORKED)
        if client.recv(1) != RUN:
            os._exit(0)
    except OSError:
        os._exit(0)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for target, descriptor in enumerate(request.output):
        os.dup2(descriptor, target)
    os.environ.clear()
    os.environ.update({**added, **request.environment})
    os.chdir(request.folder)
    import numpy
    import torch

    numpy.random.seed()  # else each fork would draw the same numbers
    if threads := request.environment.get("OMP_NUM_THREADS"):  # read when torch was loaded
        torch.set_num_threads(int(threads))


def main(engine: str, descriptor: int) -> None:
    """Serves on a listening unix socket, and runs the script of a request in each fork."""
    global imported
    environment = dict(os.environ)
    for module in IMPORTS[engine]:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    imported = frozenset(sys.modules)
    gc.collect()
    gc.freeze()  # a collection in a fork would copy the pages of all these objects
    if len(os.listdir("/proc/self/task")) > 1:
        sys.exit("The imports have started threads, which a fork would lose: replicas start as fresh processes.")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel removes ended forks
    arguments = serve(socket.socket(fileno=descriptor), environment)
    if arguments is not None:
        run(arguments)


def run(arguments: list[str]) -> None:
    """Runs a script as Python does: ``arguments`` are those of a Python command without options but -u."""
    sys.argv = arguments[1:] if arguments[0] == "-u" else arguments
    sys.path[0] = os.path.dirname(sys.argv[0])
    runpy.run_path(sys.argv[0], run_name="__main__")
