"""Where a process of the fleet logs to, and in which form: text, or one JSON object a line.

Nothing is formatted or written by who logs: lines go over a queue to a thread, so that a slow disk delays no token. A
key never reaches a file, whatever somebody logs; a prompt only where the fleet was told to log prompts.
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
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TextIO

import msgspec

LogFormat = Literal["text", "json"]
OURS = ("orchestrator", "workers", "placements", "asyncio", "concurrent", "py.warnings")
ABOUT = ("request_id", "model", "replica")  # what a line may be about, by `extra`
MOST_WAITING = 50_000  # lines; a disk that takes none must not fill the memory
FLUSH_S = 2.0
ACCESS = "orchestrator.access"
_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_KEY = re.compile(r"\b(cw-[0-9a-z]{8})-[\w-]{20,}")
_BEARER = re.compile(r"(?i)\b(bearer\s+|x-api-key['\"]?\s*[:=]\s*['\"]?)(?!cw-[0-9a-z]{8}-\*)[\w.~+/=-]{8,}")
_encode = msgspec.json.Encoder(enc_hook=str).encode


class Access(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request that is over. ``prompt`` and ``answer`` are written only where prompts are logged."""

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
    reason: str | None = None  # why the answer ended, or the code of the error
    prompt: str | None = None
    answer: str | None = None


class Logs:
    """The log of this process. ``set_up`` makes it; ``access`` is the only call of the hot path."""

    def __init__(self, sinks: list[TextIO], format: LogFormat, *, prompts: bool, wall: Callable[[], float]) -> None:
        self._sinks = sinks
        self._json = format == "json"
        self._prompts = prompts
        self._wall = wall
        self._queue: queue.SimpleQueue[logging.LogRecord | tuple[float, Access] | threading.Event | None]
        self._queue = queue.SimpleQueue()
        self._dropped = 0
        self._plain = logging.Formatter(_TEXT)
        self._thread = threading.Thread(target=self._write_all, name="logs", daemon=True)
        self._thread.start()

    def access(self, record: Access) -> None:
        """One line for a request that is over. Never blocks, and never raises."""
        self._put((self._wall(), record))

    def put(self, record: logging.LogRecord) -> None:
        """One line that somebody has logged."""
        self._put(record)

    def flush(self, deadline_s: float = FLUSH_S) -> bool:
        """Wait until all that was logged so far is written. False at the deadline."""
        if not self._thread.is_alive():
            return False
        written = threading.Event()
        self._queue.put(written)
        return written.wait(deadline_s)

    def close(self) -> None:
        """Write what waits, and end the thread."""
        self._queue.put(None)
        self._thread.join(FLUSH_S)

    def _put(self, item: logging.LogRecord | tuple[float, Access]) -> None:
        if self._queue.qsize() >= MOST_WAITING:
            self._dropped += 1
            return
        self._queue.put(item)

    def _write_all(self) -> None:
        while (item := self._queue.get()) is not None:
            lines = []
            while item is not None and not isinstance(item, threading.Event):
                lines.append(self._line(item))
                if len(lines) >= 1000 or self._queue.empty():
                    break
                item = self._queue.get()
            if self._dropped:
                dropped, self._dropped = self._dropped, 0
                lost = f"{dropped} lines were lost: they could not be written in time"
                lines.append(f"{self._told(logging.WARNING, lost)}\n")
            if lines:
                self._write("".join(lines))
            if isinstance(item, threading.Event):
                item.set()
            if item is None:
                return

    def _write(self, text: str) -> None:
        for sink in self._sinks:
            with contextlib.suppress(OSError, ValueError):  # a full disk: the process goes on
                sink.write(text)
                sink.flush()

    def _line(self, item: logging.LogRecord | tuple[float, Access]) -> str:
        try:
            if isinstance(item, logging.LogRecord):
                text = self._json_record(item) if self._json else self._plain.format(item)
            else:
                text = self._access(*item)
        except Exception as error:  # noqa: BLE001 - whatever it was: it must not end the thread
            text = self._told(logging.ERROR, f"a line cannot be formatted: {type(error).__name__}: {error}")
        return f"{redacted(text)}\n"

    def _told(self, level: int, message: str) -> str:
        record = logging.LogRecord(__name__, level, __file__, 0, message, (), None)
        return self._json_record(record) if self._json else self._plain.format(record)

    def _json_record(self, record: logging.LogRecord) -> str:
        told: dict[str, Any] = _head(record.created, record.levelname, record.name, record.getMessage())
        told.update((name, getattr(record, name)) for name in ABOUT if getattr(record, name, None) is not None)
        if record.exc_info and record.exc_info[0] is not None:
            told["error"] = "".join(traceback.format_exception(*record.exc_info)).rstrip()
        if record.stack_info:
            told["stack"] = record.stack_info
        return _encoded(told)

    def _access(self, at: float, access: Access) -> str:
        told = msgspec.to_builtins(access)
        if not self._prompts:
            told.pop("prompt", None)
            told.pop("answer", None)
        if self._json:
            return _encoded({**_head(at, "INFO", ACCESS, f"{access.method} {access.path} {access.status}"), **told})
        record = logging.LogRecord(ACCESS, logging.INFO, "", 0, _as_text(told), (), None)
        record.created, record.msecs = at, (at % 1) * 1000
        return self._plain.format(record)


class _Handler(logging.Handler):
    """Hands records over as they are; their arguments are formatted on the thread, errors by who knows them still."""

    def __init__(self, logs: Logs) -> None:
        super().__init__()
        self._logs = logs

    def emit(self, record: logging.LogRecord) -> None:
        try:
            record.msg, record.args = record.getMessage(), None  # now: an argument may change meanwhile
        except Exception as error:  # noqa: BLE001 - a line that is written wrong must not end who writes it
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
    """Send all that this process logs from INFO on to ``path`` and to standard error. Errors that nobody has caught
    are logged too, in whichever thread they are. Calling it again replaces what was set up. Raises OSError when the
    file cannot be opened."""
    global _current
    if _current is not None:
        tear_down()
    sinks: list[TextIO] = [sys.stderr] if stderr else []
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        sinks.append(os.fdopen(descriptor, "a", encoding="utf-8", errors="replace"))
    _current = logs = Logs(sinks, format, prompts=prompts, wall=wall)
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
    """Write what waits; log as Python does by itself from then on."""
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
        if sink is not sys.stderr:
            sink.close()


def access_log(record: Access) -> None:
    """One line for a request that is over; nothing where no log was set up."""
    if _current is not None:
        _current.access(record)


def redacted(text: str) -> str:
    """The text without the secrets of keys: `cw-1a2b3c4d-***` still tells which key it was."""
    if "cw-" in text:
        text = _KEY.sub(r"\1-***", text)
    return _BEARER.sub(r"\1***", text)


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
        return
    logging.getLogger("orchestrator").critical("nobody caught this", exc_info=(kind, error, trace))
    if _current is not None:
        _current.flush()


def _log_uncaught_in_thread(what: threading.ExceptHookArgs) -> None:
    if what.exc_value is None or issubclass(what.exc_type, SystemExit):
        return
    thread = what.thread.name if what.thread is not None else "a thread"
    info = (what.exc_type, what.exc_value, what.exc_traceback)
    logging.getLogger("orchestrator").critical("nobody caught this in %s", thread, exc_info=info)


def _head(at: float, level: str, logger: str, message: str) -> dict[str, Any]:
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(at))
    return {"time": f"{stamp}.{int(at % 1 * 1000):03d}Z", "level": level, "logger": logger, "message": message}


def _encoded(told: Mapping[str, Any]) -> str:
    try:
        return _encode(told).decode()
    except (UnicodeError, ValueError):  # half a surrogate pair
        return json.dumps(told, default=str)


def _as_text(told: Mapping[str, Any]) -> str:
    """One line, whatever a client has sent: what is no printable character, and what would end a value, is escaped."""
    head = f"{_safe(told['method'])} {_safe(told['path'])} {told['status']}"
    rest = [f"{name}={_safe(value)}" for name, value in told.items() if name not in ("method", "path", "status")]
    return " ".join([head, *rest])


def _safe(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.1f}"
    text = str(value)
    return text if text.isprintable() and text.isascii() and " " not in text else json.dumps(text)
