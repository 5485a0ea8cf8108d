"""Starts a script as a fork of a warm process, or as a fresh process.

Ray runs ``python -I -S fork_client.py SOCKET SCRIPT ARGUMENTS...`` in place of Python (`py_executable`). It hands
its arguments, environment, folder and output to the `fork_server` at SOCKET and ends once the fork runs. With
``--attached`` before SCRIPT both end together, so that whoever has started it can wait for the fork and end it. If the
server is gone, refuses or does not reply in time, it becomes a fresh Python process instead, as if there were no
server. Every start waits for it, so it imports little.
"""

import json
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

DEADLINE_S = 20.0  # the server may still be importing, which a fresh process would do, too
REFUSED, FORKED, RUN = b"n", b"y", b"r"
ATTACHED = "--attached"


def send(connection: socket.socket, message: Mapping[str, object], descriptors: Sequence[int] = ()) -> None:
    """Sends a message with descriptors, after its length in 4 bytes. Raises OSError."""
    content = json.dumps(message).encode()
    socket.send_fds(connection, [len(content).to_bytes(4, "big")], descriptors)
    connection.sendall(content)


def check_peer(connection: socket.socket) -> None:
    """Raises PermissionError if the other end of a unix socket is a process of another user."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    user = int.from_bytes(credentials[4:8], sys.byteorder)  # after the pid, before the group
    if user != os.getuid():
        raise PermissionError(f"the other end belongs to user {user}")


def main(path: str, arguments: list[str]) -> None:
    """Returns once a fork of the server runs the script, or has ended if it is attached. Does not return if a fresh
    process has to run it."""
    attached = arguments[0] == ATTACHED
    if attached:
        arguments = arguments[1:]
    environment, folder = dict(os.environ), os.getcwd()  # noqa: PTH109 - importing pathlib takes 20 ms
    with socket.socket(socket.AF_UNIX) as server:
        server.settimeout(DEADLINE_S)
        try:
            server.connect(path)
            check_peer(server)  # it gets the environment
            request = {"environment": environment, "arguments": arguments, "folder": folder, "attached": attached}
            send(server, request, (0, 1, 2))
            reply = server.recv(1)
            if reply == FORKED:
                # Not before: a fork that waits for this byte ends if this process has given up on it.
                server.sendall(RUN)
                if attached:
                    server.settimeout(None)
                    server.recv(1)  # the fork has closed its end
                return
            reason = server.makefile().read() or "the warm process has ended"
        except OSError as error:
            reason = f"the warm process does not reply: {error}"
    start_fresh(reason, arguments)


def start_fresh(reason: str, arguments: list[str]) -> NoReturn:
    print(f"A fresh process is started: {reason}.", file=sys.stderr, flush=True)  # noqa: T201 - in the worker's log
    os.execv(sys.executable, [sys.executable, *arguments])


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
