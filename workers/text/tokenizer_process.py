"""The processes in which tokenizers and chat templates run: what they do, and how their results are encoded.

A chat template is a program, a regular expression may backtrack for minutes, and both hold the interpreter's lock. A
thread cannot be stopped from outside; a process can. `tokenizer_pool.py` starts and ends them:

1. A nursery, one for each process that loads tokenizers, imports transformers and forks a loader for each tokenizer.
2. A loader loads its tokenizer and forks workers, which share its memory.
3. A worker serves one call at a time.

Each exits with its parent. Requests are pickled by the trusted side; replies are msgpack, which cannot run code.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import resource
import signal
import socket
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec

from workers.host.process_tree import end_with
from workers.messages.engine_protocol import EngineLoadError
from workers.text.tokenizer import (
    ChatTemplateError,
    HubTokenizer,
    NoChatTemplate,
    NoToolsInTemplate,
    TooManyTokens,
)

MEMORY_BYTES = 4 * 2**30  # that a loader or a worker may allocate on top of the nursery's
ERROR_CHARACTERS = 2000  # the model's folder controls the error text

ERRORS: tuple[type[Exception], ...] = (NoToolsInTemplate, NoChatTemplate, ChatTemplateError, ValueError)


class Loaded(msgspec.Struct):
    """What a loader reports of its tokenizer."""

    vocab_size: int
    templates: list[str | None]  # the chat template without and with tools
    response_template: Any
    special_tokens: list[str]
    bytes: int  # of memory that it does not share with the nursery


class TokenizerReply(msgspec.Struct, array_like=True):
    """``error`` is empty, "load", "fault", "many" or the name of one of ``ERRORS``; ``value`` depends on it."""

    error: str
    value: Any


def _fork_on(control: socket.socket, work: Callable[[socket.socket], None]) -> None:
    """For each socket received over ``control``, fork a child that runs ``work`` with it, and reply with its pidfd."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children are not waited for
    parent = os.getpid()
    while True:
        data, fds, _, _ = socket.recv_fds(control, 1, 1)
        if not data:
            return
        child = os.fork()
        if child == 0:
            try:
                end_with(parent)
                control.close()
                with contextlib.suppress(EOFError, OSError):  # its client has exited
                    work(socket.socket(fileno=fds[0]))
            finally:
                os._exit(0)
        os.close(fds[0])
        try:
            handle = os.pidfd_open(child)
        except ProcessLookupError:
            control.send(b"f")
        else:
            socket.send_fds(control, [b"f"], [handle])
            os.close(handle)


def _load_and_fork(control: socket.socket) -> None:
    """Run a loader."""
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    limit = _bytes_of("status", "VmData:") + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    connection = Connection(os.dup(control.fileno()))
    path, lower_case = pickle.loads(connection.recv_bytes())
    try:
        tokenizer = HubTokenizer(path, lower_case)
    except EngineLoadError as error:
        connection.send_bytes(_encoded("load", [error.id, error.what[:ERROR_CHARACTERS], error.hint]))
        return
    except BaseException as error:  # noqa: BLE001 - a Rust panic derives from it
        message = f"the tokenizer in {path} cannot be read: {_shown(error)}"
        connection.send_bytes(_encoded("load", ["bad-tokenizer", message, ""]))
        return
    templates = [tokenizer.chat_template(False), tokenizer.chat_template(True)]
    gc.freeze()
    private = _bytes_of("smaps_rollup", "Private_Dirty:")
    own, special = tokenizer.response_template, list(tokenizer.special_tokens)
    connection.send_bytes(_encoded("", Loaded(tokenizer.vocab_size, templates, own, special, private)))
    _fork_on(control, lambda end: _serve(Connection(end.detach()), tokenizer))


def _serve(connection: Connection, tokenizer: HubTokenizer) -> None:
    """Run a worker."""
    while True:
        method, args, options = pickle.loads(connection.recv_bytes())
        try:
            reply = _encoded("", getattr(tokenizer, method)(*args, **options))
        except TooManyTokens as error:
            reply = _encoded("many", [error.count, error.exact, error.place, error.limit])
        except ERRORS as error:
            name = next(kind.__name__ for kind in ERRORS if isinstance(error, kind))
            reply = _encoded(name, str(error)[:ERROR_CHARACTERS])
        except BaseException as error:  # noqa: BLE001 - a Rust panic derives from it
            connection.send_bytes(_encoded("fault", _shown(error)))
            return
        connection.send_bytes(reply)


def _encoded(error: str, value: Any) -> bytes:
    return msgspec.msgpack.encode(TokenizerReply(error, value))


def _shown(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:ERROR_CHARACTERS]


def _bytes_of(file: str, field: str) -> int:
    """Returns a size in a file of /proc/self. `VmData` is what counts towards RLIMIT_DATA."""
    lines = Path("/proc/self", file).read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def main(descriptor: int) -> None:
    """Run a nursery."""
    sys.modules["torch"] = None  # type: ignore[assignment]  # tokenizers do not use it, but transformers imports it: 3 s
    import transformers.tokenization_utils_fast  # noqa: F401 - what the loaders would each import
    from transformers import AutoTokenizer  # noqa: F401

    gc.collect()
    gc.freeze()
    _fork_on(socket.socket(fileno=descriptor), _load_and_fork)


if __name__ == "__main__":
    main(int(sys.argv[1]))
