"""The tokenizer processes of a gateway: it owns them, limits their number and memory, and ends them when they are idle.

A tokenizer has one loader and some workers (`tokenizer_process.py`), which start with a call and serve all models whose
tokenizer is equal. A call ends in one of four ways:

1. The worker replies.
2. It has used more CPU time than the call may: the tokenizer is broken. It is killed, `TokenizerFault`.
3. It is stopped, or reads nothing: it is killed, and another one gets the call.
4. No reply in time, without 2 and 3: the machine is busy. It is killed, `TokenizerBusy`.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn, cast

import msgspec

from workers.host.json_process import environment
from workers.host.lifetime import is_stopped
from workers.messages.encoder_protocol import EncodeInput
from workers.messages.engine_protocol import EngineLoadError
from workers.text.input_tokens import InputTexts
from workers.text.tokenizer import OF_BYTES, ByteTokenizer, PromptTokenizer, TemplateInput, TooManyTokens, unicode
from workers.text.tokenizer_process import ERRORS, Loaded, TokenizerReply

LOAD_S = 60.0  # CPU time for a loader to load its tokenizer
CALL_S = 5.0  # CPU time of a call; a chat is rendered within a millisecond
CALL_S_PER_BYTE = 10.0 / 2**20  # in addition, for a long text: 1 s for a MB
LATE_S = 30.0  # for a reply, however busy the machine is; in addition to the CPU time
START_S = 60.0  # for the nursery to import transformers, 2 s on an idle machine
FORK_S = 10.0
ROOM_S = 5.0  # for another call to end, at the limit of processes
STILL_S = 10  # a process that reads nothing for this long is frozen
KILL_S = 5.0  # for a killed process to exit
CHECK_S = 0.25  # between two looks at a process that has not replied
TRIES = 4  # of a call whose workers are frozen: two of them, their loader and the nursery may be

MAX_PROCESSES = 128  # loaders and workers
MAX_BYTES = 4 * 2**30  # of all loaders, on top of the nursery's; more only while calls use them
WORKER_IDLE_S = 60.0
TOKENIZER_IDLE_S = 600.0
IDLE_WORKERS = 2  # of one tokenizer, kept for the next call
REPLY_BYTES = 2**28
VARIABLES = {
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",  # numpy would start threads, which forks lose
    "TRANSFORMERS_VERBOSITY": "error",  # no warning that torch is missing
}


class TokenizerFault(Exception):
    """The tokenizer or the chat template of a model's folder failed on a text, without rejecting it."""


class TokenizerBusy(Exception):
    """The machine is too busy to tokenize now."""


class _Overrun(Exception):
    """A process used more CPU time than it may."""


class _Frozen(Exception):
    """A process is stopped, or reads nothing."""


class _Late(Exception):
    """A process did not reply in time."""


@dataclass
class _Tokenizer:
    """The processes of one tokenizer, guarded by the pool's condition."""

    starting: threading.Lock = field(default_factory=threading.Lock)  # one starts its processes at a time
    loader: _Process | None = None
    loaded: Loaded | None = None
    idle: list[_Process] = field(default_factory=list)  # workers
    busy: int = 0  # calls, each with a worker or about to have one
    used_at: float = 0.0  # monotonic

    @property
    def processes(self) -> int:
        return 1 + len(self.idle) + self.busy

    def take(self) -> _Process | None:
        """Returns an idle worker."""
        while self.idle:
            worker = self.idle.pop()
            if not worker.ended():
                return worker
            worker.end()
        return None

    def end(self) -> None:
        for process in (*self.idle, self.loader):
            if process is not None:
                process.end()
        self.idle, self.loader = [], None


class TokenizerPool:
    """The processes of all tokenizers of a gateway. May be used from several threads."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._tokenizers: dict[str, _Tokenizer] = {}  # by content, the least recently used first

    def load(self, handle: TokenizerProcess) -> Loaded:
        """Starts the loader of a tokenizer, unless an equal one has started. Blocks. Raises EngineLoadError and
        TokenizerBusy."""
        tokenizer, worker = self._enter(handle.content)
        try:
            with tokenizer.starting:
                return self._loaded(tokenizer, handle)[1]
        finally:
            self._leave(handle.content, tokenizer, worker, kept=True)

    def call(self, handle: TokenizerProcess, data: bytes) -> TokenizerReply:
        """Returns a worker's reply to a pickled call. Blocks. Raises TokenizerFault and TokenizerBusy."""
        limit_s = CALL_S + len(data) * CALL_S_PER_BYTE
        for _ in range(TRIES):
            tokenizer, worker = self._enter(handle.content)
            kept = False
            try:
                worker = worker or self._start_worker(tokenizer, handle)
                reply = worker.ask(data, limit_s, limit_s + LATE_S)
                kept = reply.error != "fault"
                return reply
            except _Frozen:
                continue
            except _Late as late:
                raise TokenizerBusy(str(late)) from None
            except _Overrun as overrun:
                raise TokenizerFault(str(overrun)) from None
            except EngineLoadError as error:
                raise TokenizerFault(f"its process cannot be started: {error.what}") from None
            except (OSError, EOFError, msgspec.MsgspecError) as error:
                raise TokenizerFault("its process exited, possibly out of memory") from error
            finally:
                self._leave(handle.content, tokenizer, worker, kept=kept)
        raise TokenizerBusy("its processes are stopped")

    def retain(self, contents: Collection[str]) -> None:
        """Ends the processes of all other tokenizers; those in use at the end of their calls."""
        with self._changed:
            for content in self._tokenizers.keys() - set(contents):
                self._end(content)

    def sweep(self, now: float) -> None:
        """Ends idle processes. To be called every few seconds."""
        with self._changed:
            for content, tokenizer in list(self._tokenizers.items()):
                idle_s = now - tokenizer.used_at
                if idle_s > WORKER_IDLE_S:
                    while tokenizer.idle:
                        tokenizer.idle.pop().end()
                if idle_s > TOKENIZER_IDLE_S and not tokenizer.busy:
                    self._end(content)

    def _enter(self, content: str) -> tuple[_Tokenizer, _Process | None]:
        """Returns a tokenizer that counts one call more, and an idle worker of it; None: there is room to start one.
        Raises TokenizerBusy."""
        until = time.monotonic() + ROOM_S
        with self._changed:
            while True:
                tokenizer = self._tokenizers.pop(content, None) or _Tokenizer()
                self._tokenizers[content] = tokenizer
                tokenizer.busy += 1
                worker = tokenizer.take()
                while worker is None and self._processes() > MAX_PROCESSES and self._end_one():
                    pass
                if worker is not None or self._processes() <= MAX_PROCESSES:
                    return tokenizer, worker
                self._count_out(content, tokenizer)
                if not self._changed.wait(until - time.monotonic()):
                    raise TokenizerBusy(f"{MAX_PROCESSES} processes tokenize")

    def _leave(self, content: str, tokenizer: _Tokenizer, worker: _Process | None, *, kept: bool) -> None:
        """Ends a call. ``kept``: its worker may serve another."""
        with self._changed:
            tokenizer.used_at = time.monotonic()
            current = self._tokenizers.get(content) is tokenizer
            if worker is not None and kept and current and len(tokenizer.idle) < IDLE_WORKERS:
                tokenizer.idle.append(worker)
            elif worker is not None:
                worker.end()
            self._count_out(content, tokenizer)
            while self._bytes() > MAX_BYTES and self._end_one(workers=False):
                pass
            self._changed.notify_all()

    def _count_out(self, content: str, tokenizer: _Tokenizer) -> None:
        """Counts one call less. After the last one, a tokenizer that was dropped ends, or one without a loader."""
        tokenizer.busy -= 1
        if tokenizer.busy:
            return
        if self._tokenizers.get(content) is not tokenizer:
            tokenizer.end()
        elif tokenizer.loader is None:
            del self._tokenizers[content]

    def _processes(self) -> int:
        return sum(tokenizer.processes for tokenizer in self._tokenizers.values())

    def _bytes(self) -> int:
        return sum(each.loaded.bytes for each in self._tokenizers.values() if each.loader and each.loaded)

    def _end_one(self, *, workers: bool = True) -> bool:
        """Ends an idle worker, else the processes of the idle tokenizer that was not used for longest. Returns False
        where none is idle."""
        for tokenizer in self._tokenizers.values() if workers else ():
            if tokenizer.idle:
                tokenizer.idle.pop().end()
                return True
        content = next((content for content, tokenizer in self._tokenizers.items() if not tokenizer.busy), None)
        if content is not None:
            self._end(content)
        return content is not None

    def _end(self, content: str) -> None:
        tokenizer = self._tokenizers.pop(content)
        if not tokenizer.busy:
            tokenizer.end()

    def _start_worker(self, tokenizer: _Tokenizer, handle: TokenizerProcess) -> _Process:
        """Raises EngineLoadError, TokenizerBusy, and what ``_Process.fork`` raises."""
        with tokenizer.starting:
            loader, _ = self._loaded(tokenizer, handle)
            try:
                return loader.fork()
            except (OSError, EOFError, _Frozen, _Late):
                loader.end()
                return self._loaded(tokenizer, handle)[0].fork()

    def _loaded(self, tokenizer: _Tokenizer, handle: TokenizerProcess) -> tuple[_Process, Loaded]:
        """Returns the loader, and what it has loaded; starts another one where it has ended. Raises EngineLoadError and
        TokenizerBusy."""
        loader = tokenizer.loader
        if loader is not None and tokenizer.loaded is not None and not loader.ended():
            return loader, tokenizer.loaded
        if loader is not None:
            loader.end()
        tokenizer.loader = None
        loader, tokenizer.loaded = _load(handle)
        tokenizer.loader = loader
        return loader, tokenizer.loaded


class TokenizerProcess:
    """A ``PromptTokenizer`` whose calls run in the processes of a pool; they also raise ``TokenizerFault`` and
    ``TokenizerBusy``."""

    def __init__(self, pool: TokenizerPool, path: str, lower_case: bool = False, content: str = "") -> None:
        """``content`` is equal for tokenizers that are equal; empty: none is. The other arguments and the errors are
        those of ``HubTokenizer``. Blocks."""
        self.path = path
        self.lower_case = lower_case
        self.content = content or f"{path} {lower_case}"
        self._pool = pool
        loaded = pool.load(self)
        self.vocab_size = loaded.vocab_size
        self._templates = loaded.templates
        self.response_template = loaded.response_template
        self.special_tokens: Sequence[str] = loaded.special_tokens

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
        try:
            data = pickle.dumps((method, args, options))
        except RecursionError:
            raise ValueError("it is nested too deeply") from None
        reply = self._pool.call(self, data)
        if reply.error:
            _raise(reply)
        return reply.value


def load_apart(
    pool: TokenizerPool, engine: str, path: str | None, lower_case: bool = False, content: str = ""
) -> PromptTokenizer:
    """Like ``load_tokenizer``, in the processes of a pool. ``lower_case`` and ``content`` are those of
    ``TokenizerProcess``."""
    if engine in OF_BYTES:
        return ByteTokenizer()
    if path is None:
        raise EngineLoadError("no-tokenizer", f"the engine {engine} has no model directory to take a tokenizer from")
    return TokenizerProcess(pool, path, lower_case, content)


def _load(handle: TokenizerProcess) -> tuple[_Process, Loaded]:
    """Starts a loader. Raises EngineLoadError and TokenizerBusy."""
    path = handle.path
    with contextlib.ExitStack() as failed:
        try:
            loader = _fork_loader()
            failed.callback(loader.end)
            reply = loader.ask(pickle.dumps((path, handle.lower_case)), LOAD_S, LOAD_S + LATE_S)
        except (_Late, _Frozen) as late:
            raise TokenizerBusy(f"the tokenizer in {path} is not loaded: {late}") from None
        except _Overrun:
            message = f"the tokenizer in {path} was not loaded within {LOAD_S:.0f} s"
            raise EngineLoadError("bad-tokenizer", message) from None
        except (OSError, EOFError, msgspec.MsgspecError) as error:
            message = f"the tokenizer in {path} crashed the process that loaded it, possibly out of memory"
            raise EngineLoadError("bad-tokenizer", message) from error
        if reply.error:
            raise EngineLoadError(*reply.value)
        failed.pop_all()
    return loader, msgspec.convert(reply.value, Loaded)


def _fork_loader() -> _Process:
    """Raises what ``_Process.fork`` raises."""
    parent = nursery()
    try:
        return parent.fork(START_S)
    except (_Frozen, _Late, OSError, EOFError):
        parent.kill()
        return nursery().fork(START_S)


def _raise(reply: TokenizerReply) -> NoReturn:
    if reply.error == "many":
        count, exact, place, limit = reply.value
        raise TooManyTokens(count, exact=exact, place=place, limit=limit)
    for kind in ERRORS:
        if kind.__name__ == reply.error:
            raise kind(reply.value)
    raise TokenizerFault(str(reply.value))


class _Process:
    """Another process and a socket to it, until ``end``."""

    def __init__(self, end: socket.socket, pidfd: int) -> None:
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):  # BlockingIOError
            end.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", STILL_S, 0))
        self._connection = Connection(end.detach())
        self._pidfd = pidfd
        self._pid = _pid_of(pidfd)
        self._forking = threading.Lock()
        self._over = False

    def ask(self, data: bytes, cpu_s: float, wall_s: float) -> TokenizerReply:
        """Returns the reply to ``data``. The process may use ``cpu_s`` of CPU time, and ``wall_s`` in all. Raises
        _Overrun, _Frozen and _Late; OSError, EOFError or MsgspecError where it has exited or replies nonsense."""
        began, until = self._cpu_s(), time.monotonic() + wall_s
        try:
            self._connection.send_bytes(data)
            while not self._connection.poll(CHECK_S):
                if self._cpu_s() - began > cpu_s:
                    raise _Overrun(f"no reply within {cpu_s:.0f} s of CPU time")
                self._check(until)
            return msgspec.msgpack.decode(self._connection.recv_bytes(REPLY_BYTES), type=TokenizerReply)
        except BlockingIOError:
            raise _Frozen("the process reads nothing") from None

    def fork(self, limit_s: float = FORK_S) -> _Process:
        """Returns a child of that process. Raises _Frozen, _Late, OSError and EOFError."""
        ours, theirs = socket.socketpair()
        until = time.monotonic() + limit_s
        with self._forking, theirs, socket.socket(fileno=os.dup(self._connection.fileno())) as control:
            socket.send_fds(control, [b"f"], [theirs.fileno()])
            while not self._connection.poll(CHECK_S):
                self._check(until)
            data, fds, _, _ = socket.recv_fds(control, 1, 1)
        if not data or not fds:
            raise EOFError
        return _Process(ours, fds[0])

    def ended(self, within_s: float = 0.0) -> bool:
        if self._over:
            return True
        ending = select.poll()
        ending.register(self._pidfd, select.POLLIN)
        return bool(ending.poll(within_s * 1000))

    def kill(self) -> None:
        """Kills the process. Threads that wait for it get an error."""
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        self.ended(KILL_S)

    def end(self) -> None:
        """Kills the process and closes its descriptors. No thread may wait for it."""
        if not self._over:
            self._over = True
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            self._connection.close()
            os.close(self._pidfd)

    def _check(self, until: float) -> None:
        """Raises _Frozen if the process is stopped, _Late after ``until``; it is killed then."""
        if is_stopped(self._pid):
            raise _Frozen("the process is stopped")
        if time.monotonic() > until:
            raise _Late("the machine is busy")

    def _cpu_s(self) -> float:
        """Returns the CPU time that the process has used; 0 if it has exited."""
        try:
            return time.clock_gettime(~self._pid << 3 | 2)  # as clock_getcpuclockid(3) does
        except OSError:
            return 0.0


def _pid_of(pidfd: int) -> int:
    """Returns the process of a descriptor; -1 if it has exited."""
    lines = Path(f"/proc/self/fdinfo/{pidfd}").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pid:"))


_nursing = threading.Lock()
_the_nursery: _Process | None = None


def nursery() -> _Process:
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
            _the_nursery = _Process(ours, os.pidfd_open(process.pid))
        return _the_nursery
