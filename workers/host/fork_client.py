"""Starts a Ray worker as a fork of a warm process, or as a fresh process.

Ray runs ``python -I -S fork_client.py SOCKET SCRIPT ARGUMENTS...`` in place of Python (`py_executable`). It hands its
arguments, environment, folder and output to the `fork_server` at SOCKET and ends once the fork runs. If the server is
gone, refuses or does not reply in time, it becomes a fresh Python process instead, as if there were no server. Every
start waits for it, so it imports little.
"""

import json
import os
import socket
import sys
from typing import NoReturn

DEADLINE_S = 20.0  # the server may still be importing, which a fresh process would do, too
REFUSED, FORKED, RUN = b"n", b"y", b"r"


def main(path: str, arguments: list[str]) -> None:
    """Returns once a fork of the server runs the script. Does not return if a fresh process has to."""
    with socket.socket(socket.AF_UNIX) as server:
        server.settimeout(DEADLINE_S)
        try:
            server.connect(path)
            request = {"arguments": arguments, "environment": dict(os.environ), "folder": os.getcwd()}  # noqa: PTH109 - pathlib takes 20 ms
            content = json.dumps(request).encode()
            socket.send_fds(server, [len(content).to_bytes(4, "big")], [0, 1, 2])
            server.sendall(content)
            reply = server.recv(1)
            reason = "" if reply == FORKED else server.makefile().read() or "the warm process has ended"
        except OSError as error:
            reason = f"the warm process does not reply: {error}"
        if not reason:
            # Not before: a fork that waits for this byte ends if this process has given up on it.
            server.sendall(RUN)
            return
    start_fresh(reason, arguments)


def start_fresh(reason: str, arguments: list[str]) -> NoReturn:
    print(f"A fresh process is started: {reason}.", file=sys.stderr, flush=True)  # noqa: T201 - in the worker's log
    os.execv(sys.executable, [sys.executable, *arguments])


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
