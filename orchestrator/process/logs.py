"""Sets up logging of a process: to files and stderr, as text or as one JSON object per line.

A thread formats and writes the lines, so that a slow disk never delays a token. API keys are
always redacted; prompts are logged only if `log_prompts` is set.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import queue
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol

import msgspec
import msgspec.structs

from workers.host import file_lock, private_file

LogFormat = Literal["text", "json"]
OURS = ("orchestrator", "workers", "placements", "asyncio", "concurrent", "py.warnings")
ABOUT = ("request_id", "model", "replica")  # fields that `extra` may set
MOST_WAITING = 50_000  # lines; a blocked disk must not fill the memory
MOST_WAITING_BYTES = 64 * 2**20  # likewise, for texts of clients and errors
MAX_FILE_BYTES = 64 * 2**20  # then the file is rotated
KEPT = 4  # rotated files: `gateway.log.1` is the newest
MAX_FIELD = 512  # characters of a field that a client sets
MAX_MESSAGE = 2**15  # characters of any line, except prompts and answers
FLUSH_S = 2.0
ACCESS = "orchestrator.access"
_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_KEY = re.compile(r"\b(cw-[0-9a-z]{8})-[\w-]{20,}")
_BEARER = re.compile(r"(?i)\b(bearer\s+|x-api-key['\"]?\s*[:=]\s*['\"]?)(?!cw-[0-9a-z]{8}-\*)[\w.~+/=-]{8,}")
_encode = msgspec.json.Encoder(enc_hook=str).encode


class Access(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One finished request. ``prompt`` and ``answer`` are written only if `log_prompts` is set."""

    method: str
    path: str
    status: int
    request_id: str
    ms: float  # from the request's first byte to the last of its answer
    model: str | None = None
    replica: str | None = None
    key: str | None = None  # the id of the API key, never the key
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    reason: str | None = None  # the finish reason, or the code of the error
    prompt: str | None = None
    answer: str | None = None


class LogFile:
    """A log file that several processes append to. The first process that finds it too large rotates it."""

    def __init__(self, path: Path) -> None:
        """Raises OSError if the file cannot be opened."""
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = private_file.open_to_append(path)

    def write(self, text: str) -> None:
        """Raises OSError, such as on a full disk."""
        with contextlib.suppress(OSError):  # the folder is gone or not writable; the open file still is
            self._follow()
        private_file.write_all(self._descriptor, text.encode(errors="replace"))

    def close(self) -> None:
        os.close(self._descriptor)

    def _follow(self) -> None:
        """Rotate the file if it is too large, and open the new one if this or another process has rotated it."""
        if file_lock.is_at(self._descriptor, self._path) and os.fstat(self._descriptor).st_size < MAX_FILE_BYTES:
            return
        file_lock.lock(self._descriptor)
        try:
            if file_lock.is_at(self._descriptor, self._path):  # again, under the lock
                private_file.rotate(self._path, KEPT)
            opened = private_file.open_to_append(self._path)
        finally:
            file_lock.unlock(self._descriptor)
        os.close(self._descriptor)
        self._descriptor = opened


class LineSink(Protocol):
    """A destination of lines."""

    def write(self, text: str, /) -> object: ...


class Logs:
    """The log of this process, created by ``set_up``. Only ``access`` is called on the request path."""

    def __init__(
        self,
        sinks: Sequence[LineSink],
        format: LogFormat,
        *,
        record_sinks: Sequence[LineSink] = (),
        prompts: bool,
        wall: Callable[[], float],
    ) -> None:
        """``record_sinks`` get no access lines."""
        self._sinks = sinks
        self._record_sinks = record_sinks
        self._json = format == "json"
        self._prompts = prompts
        self._wall = wall
        self._queue: queue.SimpleQueue[logging.LogRecord | tuple[float, Access] | threading.Event | None]
        self._queue = queue.SimpleQueue()
        self._dropped = 0
        self._waiting_bytes = 0
        self._counting = threading.Lock()  # guards the byte count: many threads put, one gets
        self._plain = logging.Formatter(_TEXT)
        self._thread = threading.Thread(target=self._write_all, name="logs", daemon=True)
        self._thread.start()

    def access(self, record: Access) -> None:
        """Log a finished request. Never blocks, and never raises."""
        if len(record.path) > MAX_FIELD:
            record = msgspec.structs.replace(record, path=brief(record.path, MAX_FIELD))
        self.put((self._wall(), record))

    def flush(self, deadline_s: float = FLUSH_S) -> bool:
        """Wait until all lines so far are written. Returns False at the deadline."""
        if not self._thread.is_alive():
            return False
        written = threading.Event()
        self._queue.put(written)
        return written.wait(deadline_s)

    def close(self) -> None:
        """Write the waiting lines, and stop the thread."""
        self._queue.put(None)
        self._thread.join(FLUSH_S)

    def put(self, item: logging.LogRecord | tuple[float, Access]) -> None:
        """Queue a record of the logging module, or a finished request and its time. Drops it if too much waits."""
        size = _size(item)
        with self._counting:
            if self._queue.qsize() >= MOST_WAITING or self._waiting_bytes + size > MOST_WAITING_BYTES:
                self._dropped += 1
                return
            self._waiting_bytes += size
        self._queue.put(item)

    def _write_all(self) -> None:
        while (item := self._queue.get()) is not None:
            lines, records = [], []  # records: without access lines
            while item is not None and not isinstance(item, threading.Event):
                lines.append(self._line(item))
                if isinstance(item, logging.LogRecord):
                    records.append(lines[-1])
                with self._counting:
                    self._waiting_bytes -= _size(item)
                if len(lines) >= 1000 or self._queue.empty():
                    break
                item = self._queue.get()
            if self._dropped:
                with self._counting:
                    dropped, self._dropped = self._dropped, 0
                lost = f"{dropped} lines were dropped: they could not be written in time"
                lines.append(f"{self._own_line(logging.WARNING, lost)}\n")
                records.append(lines[-1])
            _write(self._sinks, lines)
            _write(self._record_sinks, records)
            if isinstance(item, threading.Event):
                item.set()
            if item is None:
                return

    def _line(self, item: logging.LogRecord | tuple[float, Access]) -> str:
        try:
            if isinstance(item, logging.LogRecord):
                text = self._json_record(item) if self._json else brief(self._plain.format(item), 2 * MAX_MESSAGE)
            else:
                text = self._access(*item)
        except Exception as error:  # noqa: BLE001 - no error may stop the thread
            text = self._own_line(logging.ERROR, f"a line cannot be formatted: {type(error).__name__}: {error}")
        return f"{redacted(text)}\n"

    def _own_line(self, level: int, message: str) -> str:
        record = logging.LogRecord(__name__, level, __file__, 0, message, (), None)
        return self._json_record(record) if self._json else self._plain.format(record)

    def _json_record(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = _head(record.created, record.levelname, record.name, record.getMessage())
        fields.update((name, getattr(record, name)) for name in ABOUT if getattr(record, name, None) is not None)
        if record.exc_info and record.exc_info[0] is not None:
            fields["error"] = brief(self._plain.formatException(record.exc_info), MAX_MESSAGE)
        if record.stack_info:
            fields["stack"] = record.stack_info
        return _encoded(fields)

    def _access(self, at: float, access: Access) -> str:
        fields = msgspec.to_builtins(access)
        if not self._prompts:
            fields.pop("prompt", None)
            fields.pop("answer", None)
        if self._json:
            return _encoded({**_head(at, "INFO", ACCESS, f"{access.method} {access.path} {access.status}"), **fields})
        record = logging.LogRecord(ACCESS, logging.INFO, "", 0, _as_text(fields), (), None)
        record.created, record.msecs = at, (at % 1) * 1000
        return self._plain.format(record)


class _Handler(logging.Handler):
    """Passes records to the log's thread, with their messages formatted."""

    def __init__(self, logs: Logs) -> None:
        super().__init__()
        self._logs = logs

    def emit(self, record: logging.LogRecord) -> None:
        try:
            message = brief(record.getMessage(), MAX_MESSAGE)  # formatted now, because arguments may change
            record.msg, record.args = message, None
        except Exception as error:  # noqa: BLE001 - a wrong log call must not raise in its caller
            record.msg, record.args = f"{record.msg} (its arguments do not fit: {error})", None
        self._logs.put(record)


_current: Logs | None = None


def set_up(
    path: Path | None,
    format: LogFormat = "text",
    *,
    prompts: bool = False,
    stderr: bool = True,
    wall: Callable[[], float] = time.time,
) -> Logs:
    """Log everything of this process from level INFO to ``path`` and to stderr, also uncaught exceptions of threads.

    A second call replaces the first. Raises OSError if the file cannot be opened."""
    global _current
    if _current is not None:
        tear_down()
    files = [] if path is None else [LogFile(path)]
    # Ray stores stderr without a limit, so access lines go to the file only.
    errors = [sys.stderr] if stderr else []  # it flushes each line
    sinks: Sequence[LineSink] = files or errors
    _current = logs = Logs(sinks, format, record_sinks=errors if files else (), prompts=prompts, wall=wall)
    handler = _Handler(logs)
    for name in OURS:
        logger = logging.getLogger(name)
        logger.setLevel(logging.INFO)
        logger.handlers[:] = [handler]
        logger.propagate = False
    logging.captureWarnings(True)
    sys.excepthook = _log_uncaught
    threading.excepthook = _log_uncaught_in_thread
    atexit.register(tear_down)
    return logs


def tear_down() -> None:
    """Write the waiting lines, and restore Python's default logging."""
    global _current
    if _current is None:
        return
    for name in OURS:
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler for handler in logger.handlers if not isinstance(handler, _Handler)]
        logger.propagate = True
        logger.setLevel(logging.NOTSET)
    logging.captureWarnings(False)
    sys.excepthook = sys.__excepthook__
    threading.excepthook = threading.__excepthook__
    logs, _current = _current, None
    logs.close()
    atexit.unregister(tear_down)
    for sink in logs._sinks:
        if isinstance(sink, LogFile):
            sink.close()


def access_log(record: Access) -> None:
    """Log a finished request, if logging is set up."""
    if _current is not None:
        _current.access(record)


def redacted(text: str) -> str:
    """Returns the text without the secrets of API keys; `cw-1a2b3c4d-***` keeps the key's id."""
    if "cw-" in text:
        text = _KEY.sub(r"\1-***", text)
    return _BEARER.sub(r"\1***", text)


def _write(sinks: Sequence[LineSink], lines: Sequence[str]) -> None:
    for sink in sinks if lines else ():
        with contextlib.suppress(OSError, ValueError):  # a full disk must not stop the process
            sink.write("".join(lines))


def brief(text: str, most: int) -> str:
    """Returns the text, or its first ``most`` characters and its length."""
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"


def _size(item: logging.LogRecord | tuple[float, Access]) -> int:
    """Returns the approximate memory of a waiting line, in bytes."""
    if isinstance(item, logging.LogRecord):
        return 1024 + len(item.msg)
    access = item[1]
    return 512 + len(access.path) + len(access.prompt or "") + len(access.answer or "")


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
        return
    logging.getLogger("orchestrator").critical("uncaught exception", exc_info=(kind, error, trace))
    if _current is not None:
        _current.flush()


def _log_uncaught_in_thread(uncaught: threading.ExceptHookArgs) -> None:
    if uncaught.exc_value is None or issubclass(uncaught.exc_type, SystemExit):
        return
    thread = uncaught.thread.name if uncaught.thread is not None else "a thread"
    info = (uncaught.exc_type, uncaught.exc_value, uncaught.exc_traceback)
    logging.getLogger("orchestrator").critical("uncaught exception in %s", thread, exc_info=info)


def _head(at: float, level: str, logger: str, message: str) -> dict[str, Any]:
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(at))
    return {"time": f"{stamp}.{int(at % 1 * 1000):03d}Z", "level": level, "logger": logger, "message": message}


def _encoded(fields: Mapping[str, Any]) -> str:
    try:
        return _encode(fields).decode()
    except (UnicodeError, ValueError):  # half a surrogate pair
        return json.dumps(fields, default=str)


def _as_text(fields: Mapping[str, Any]) -> str:
    """Returns one line in which unprintable characters, and values with spaces, are escaped."""
    head = f"{_safe(fields['method'])} {_safe(fields['path'])} {fields['status']}"
    pairs = [f"{name}={_safe(value)}" for name, value in fields.items() if name not in ("method", "path", "status")]
    return " ".join([head, *pairs])


def _safe(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.1f}"
    text = str(value)
    return text if text.isprintable() and text.isascii() and " " not in text else json.dumps(text)
