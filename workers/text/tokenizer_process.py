"""Tokenizers in separate processes, so that a model's folder cannot block the gateway that reads it.

A chat template is a program, a regular expression may backtrack for minutes, and both hold the interpreter's lock. A
thread cannot be stopped from outside; a process can. Its memory has a limit, and each call a deadline.

1. A nursery, one for each process that loads tokenizers, imports transformers and forks a loader for each tokenizer.
2. A loader loads its tokenizer and forks workers, which share its memory.
3. A worker serves one call at a time. It is killed when a call exceeds its deadline; the next call uses another one.

Each exits with its parent. Requests are pickled by the trusted side; replies are msgpack, which cannot run code.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn, cast

import msgspec

from workers.host.json_process import environment
from workers.host.process_tree import end_with
from workers.messages.encoder_protocol import EncodeInput
from workers.messages.engine_protocol import EngineLoadError
from workers.text.input_tokens import InputTexts
from workers.text.tokenizer import (
    ByteTokenizer,
    ChatTemplateError,
    HubTokenizer,
    NoChatTemplate,
    NoToolsInTemplate,
    PromptTokenizer,
    TemplateInput,
    TooManyTokens,
    unicode,
)

LOAD_S = 60.0  # for a loader to load its tokenizer
START_S = 60.0  # for the nursery to import transformers, 2 s on an idle machine
FORK_S = 10.0
CALL_S = 5.0  # for a call; a chat is rendered within a millisecond
CALL_S_PER_BYTE = 10.0 / 2**20  # in addition, for a long text: 1 s for a MB on an idle machine
VARIABLES = {
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",  # numpy would start threads, which forks lose
    "TRANSFORMERS_VERBOSITY": "error",  # no warning that torch is missing
}
MEMORY_BYTES = 4 * 2**30  # that a loader or a worker may allocate on top of the nursery's
REPLY_BYTES = 2**28
IDLE_WORKERS = 2  # kept for the next call
ERROR_CHARACTERS = 2000  # the model's folder controls the error text

_ERRORS: tuple[type[Exception], ...] = (NoToolsInTemplate, NoChatTemplate, ChatTemplateError, ValueError)


class TokenizerFault(Exception):
    """The tokenizer or the chat template of a model's folder failed on a text, without rejecting it."""


class _Late(Exception):
    """A peer did not reply in time."""


class _Reply(msgspec.Struct, array_like=True):
    """``error`` is empty, "load", "fault", "many" or the name of one of ``_ERRORS``; ``value`` depends on it."""

    error: str
    value: Any


class TokenizerProcess:
    """A ``PromptTokenizer`` that runs in processes of its own; it also raises ``TokenizerFault``."""

    def __init__(self, path: str, lower_case: bool = False) -> None:
        """Arguments and errors are those of ``HubTokenizer``. Blocks."""
        self._path = path
        self._lower_case = lower_case
        self._lock = threading.Lock()
        self._loader: _Peer | None = None
        self._idle: list[_Peer] = []
        facts = self._load()
        self.vocab_size: int = facts["vocab_size"]
        self._templates: list[str | None] = facts["templates"]

    def encode(self, text: str, add_special_tokens: bool = True, *, most: int | None = None) -> list[int]:
        return cast(list[int], self._call("encode", unicode(text), add_special_tokens, most=most))

    def encode_inputs(self, texts: InputTexts) -> list[EncodeInput]:
        return [EncodeInput(*fields) for fields in self._call("encode_inputs", texts)]

    def apply_chat_template(self, chat: TemplateInput, most: int | None = None) -> list[int]:
        return cast(list[int], self._call("apply_chat_template", chat, most))

    def chat_template(self, tools: bool) -> str | None:
        return self._templates[tools]

    def decode(self, ids: Sequence[int]) -> str:
        return cast(str, self._call("decode", ids))

    def tokens(self, ids: Sequence[int]) -> list[str]:
        return cast(list[str], self._call("tokens", ids))

    def text(self, ids: Sequence[int]) -> str:
        return cast(str, self._call("text", ids))

    def _call(self, method: str, *args: Any, **options: Any) -> Any:
        data = pickle.dumps((method, args, options))
        limit_s = CALL_S + len(data) * CALL_S_PER_BYTE
        worker = self._worker()
        try:
            reply = worker.ask(data, limit_s)
        except _Late:
            raise TokenizerFault(f"no reply within {limit_s:.0f} s") from None
        except (OSError, EOFError, msgspec.MsgspecError) as error:
            raise TokenizerFault("its process exited, possibly out of memory") from error
        with self._lock:
            if reply.error != "fault" and len(self._idle) < IDLE_WORKERS:
                self._idle.append(worker)
        if reply.error:
            _raise(reply)
        return reply.value

    def _worker(self) -> _Peer:
        """Returns an idle worker, or a new one; a new loader where the last has exited. Raises TokenizerFault."""
        with self._lock:
            while self._idle:
                worker = self._idle.pop()
                if not worker.ended():
                    return worker
            try:
                if self._loader is not None:
                    with contextlib.suppress(OSError, EOFError, _Late):
                        return self._loader.fork()
                self._load()
                assert self._loader is not None
                return self._loader.fork()
            except (OSError, EOFError, _Late, EngineLoadError) as error:
                raise TokenizerFault(f"its process cannot be started: {error!r}") from error

    def _load(self) -> dict[str, Any]:
        """Start the loader. Raises EngineLoadError."""
        try:
            self._loader = nursery().fork(START_S)
            reply = self._loader.ask(pickle.dumps((self._path, self._lower_case)), LOAD_S)
        except _Late:
            message = f"the tokenizer in {self._path} was not loaded within {LOAD_S:.0f} s"
            raise EngineLoadError("bad-tokenizer", message) from None
        except (OSError, EOFError, msgspec.MsgspecError) as error:
            message = f"the tokenizer in {self._path} crashed the process that loaded it, possibly out of memory"
            raise EngineLoadError("bad-tokenizer", message) from error
        if reply.error:
            raise EngineLoadError(*reply.value)
        return cast(dict[str, Any], reply.value)


def load_apart(engine: str, path: str | None, lower_case: bool = False) -> PromptTokenizer:
    """Like ``load_tokenizer``, in a process of its own. ``lower_case`` is that of ``HubTokenizer``."""
    if engine == "echo":
        return ByteTokenizer()
    if path is None:
        raise EngineLoadError("no-tokenizer", f"the engine {engine} has no model directory to take a tokenizer from")
    return TokenizerProcess(path, lower_case)


def _raise(reply: _Reply) -> NoReturn:
    if reply.error == "many":
        count, exact, place, limit = reply.value
        raise TooManyTokens(count, exact=exact, place=place, limit=limit)
    for kind in _ERRORS:
        if kind.__name__ == reply.error:
            raise kind(reply.value)
    raise TokenizerFault(str(reply.value))


class _Peer:
    """A socket to another process. The process is killed when this object is deleted or a reply is late."""

    def __init__(self, end: socket.socket, pidfd: int) -> None:
        self._connection = Connection(end.detach())
        self._pidfd = pidfd
        self._forking = threading.Lock()

    def __del__(self) -> None:
        self._kill()
        os.close(self._pidfd)

    def ask(self, data: bytes, limit_s: float) -> _Reply:
        """Raises _Late, and OSError, EOFError or MsgspecError where the process has exited or replies nonsense."""
        until = time.monotonic() + limit_s
        self._connection.send_bytes(data)
        if not self._connection.poll(max(0.0, until - time.monotonic())):
            self._kill()
            raise _Late
        return msgspec.msgpack.decode(self._connection.recv_bytes(REPLY_BYTES), type=_Reply)

    def fork(self, limit_s: float = FORK_S) -> _Peer:
        """Returns a child of that process. Raises _Late, OSError and EOFError."""
        ours, theirs = socket.socketpair()
        with self._forking, theirs, socket.socket(fileno=os.dup(self._connection.fileno())) as control:
            socket.send_fds(control, [b"f"], [theirs.fileno()])
            if not self._connection.poll(limit_s):
                self._kill()
                raise _Late
            data, fds, _, _ = socket.recv_fds(control, 1, 1)
        if not data or not fds:
            raise EOFError
        return _Peer(ours, fds[0])

    def ended(self) -> bool:
        ending = select.poll()
        ending.register(self._pidfd, select.POLLIN)
        return bool(ending.poll(0))

    def _kill(self) -> None:
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)


_nursing = threading.Lock()
_the_nursery: _Peer | None = None


def nursery() -> _Peer:
    """Returns this process's nursery, starting it first where it does not run, without waiting for its imports. Raises
    OSError."""
    global _the_nursery
    with _nursing:
        if _the_nursery is None or _the_nursery.ended():
            ours, theirs = socket.socketpair()
            with theirs:
                process = subprocess.Popen(
                    [sys.executable, "-m", "workers.text.tokenizer_process", str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    env=environment(VARIABLES),
                    cwd="/",
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
            _the_nursery = _Peer(ours, os.pidfd_open(process.pid))
        return _the_nursery


# The code of the other processes


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
    limit = _allocated() + MEMORY_BYTES
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
    connection.send_bytes(_encoded("", {"vocab_size": tokenizer.vocab_size, "templates": templates}))
    gc.freeze()
    _fork_on(control, lambda end: _serve(Connection(end.detach()), tokenizer))


def _serve(connection: Connection, tokenizer: HubTokenizer) -> None:
    """Run a worker."""
    while True:
        method, args, options = pickle.loads(connection.recv_bytes())
        try:
            reply = _encoded("", getattr(tokenizer, method)(*args, **options))
        except TooManyTokens as error:
            reply = _encoded("many", [error.count, error.exact, error.place, error.limit])
        except _ERRORS as error:
            name = next(kind.__name__ for kind in _ERRORS if isinstance(error, kind))
            reply = _encoded(name, str(error)[:ERROR_CHARACTERS])
        except BaseException as error:  # noqa: BLE001 - a Rust panic derives from it
            connection.send_bytes(_encoded("fault", _shown(error)))
            return
        connection.send_bytes(reply)


def _encoded(error: str, value: Any) -> bytes:
    return msgspec.msgpack.encode(_Reply(error, value))


def _shown(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:ERROR_CHARACTERS]


def _allocated() -> int:
    """Returns the bytes that count towards RLIMIT_DATA."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData:"))


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
