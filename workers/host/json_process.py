"""Runs a child process that takes one request and replies with JSON lines: the parent's and the child's side.

The child reads the request from standard input. Standard output is reserved for replies; output of libraries goes to
standard error, which is its log.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from workers.host import host_facts, private_file
from workers.host.fork_client import ATTACHED
from workers.messages.replica_config import NEVER_SET


def start(
    arguments: Sequence[str], *, python: str | None, env: Mapping[str, str], log_file: str, warm: str | None = None
) -> subprocess.Popen[bytes]:
    """Starts ``python -m ARGUMENTS`` with pipes for the request and the replies; ``python`` None: this interpreter.
    ``warm``: the command of a warm process (`WarmProcesses.command`), of which it is a fork then.

    It runs in its own session: Ctrl-C on the terminal reaches only the parent, which ends it. Raises OSError.
    """
    Path(log_file).parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(OSError):  # no log yet
        host_facts.cut_log(Path(log_file))
    log = private_file.open_to_append(Path(log_file))
    command = [python or sys.executable, "-m", *arguments]
    script = importlib.util.find_spec(arguments[0])
    if warm is not None and script is not None and script.origin is not None:
        command = [*shlex.split(warm), ATTACHED, script.origin, *arguments[1:]]
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=environment(env),
            cwd="/",  # the current folder may have another package `workers`
            start_new_session=True,
        )
    finally:
        os.close(log)


def environment(env: Mapping[str, str]) -> dict[str, str]:
    """Returns this process's environment without the variables that no replica gets, plus ``env``."""
    return {name: value for name, value in os.environ.items() if name not in NEVER_SET} | dict(env)


def answering() -> Callable[[msgspec.Struct], None]:
    """Sets up the child's output, log and CPU mask, after it has read the request; returns the function that sends a
    reply."""
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    host_facts.mark_log(2)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    host_facts.pin_to(os.environ.get("COREWRIGHT_CPUS"))

    def tell(reply: msgspec.Struct) -> None:
        replies.write(msgspec.json.encode(reply) + b"\n")
        replies.flush()

    return tell
