"""A process apart that is asked once and answers in lines of JSON: both ends of it.

It reads what it is asked from standard input. Standard output is for its answers alone; all that libraries print goes
to standard error, which is its log.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from workers.host import host_facts
from workers.messages.replica_config import NEVER_SET


def start(
    arguments: Sequence[str], *, python: str | None, env: Mapping[str, str], log_file: str
) -> subprocess.Popen[bytes]:
    """``python -m ARGUMENTS``, with pipes for the question and the answers; ``python`` None: this interpreter.

    It is in a session of its own: Ctrl-C on the terminal reaches whoever asks, who then ends it. Raises OSError.
    """
    Path(log_file).parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(OSError):  # there is none yet
        host_facts.cut_log(Path(log_file))
    words = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
    try:
        return subprocess.Popen(
            [python or sys.executable, "-m", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=words,
            env=environment(env),
            cwd="/",  # a folder `workers` where somebody stands is not ours
            start_new_session=True,
        )
    finally:
        os.close(words)


def environment(env: Mapping[str, str]) -> dict[str, str]:
    """That of this process, without what no replica has, and with ``env``."""
    return {name: value for name, value in os.environ.items() if name not in NEVER_SET} | dict(env)


def answering() -> Callable[[msgspec.Struct], None]:
    """Of the process itself, once it has read what it is asked: makes its outputs and its log ready, and binds it to
    the CPUs that its environment names. What it gives tells one answer."""
    told = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    host_facts.mark_log(2)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    host_facts.pin_to(os.environ.get("COREWRIGHT_CPUS"))

    def tell(what: msgspec.Struct) -> None:
        told.write(msgspec.json.encode(what) + b"\n")
        told.flush()

    return tell
