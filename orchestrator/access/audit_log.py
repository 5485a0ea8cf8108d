"""The audit log: what was asked of a fleet, by whom, and what came of it. Lines of JSON that are only appended.

An action that changes something is written before it is done and again when it has ended; when the first cannot be
written, the action is refused. Several processes write it: the controller, `up`, and the commands.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from orchestrator.process.failure import Failed
from orchestrator.process.logs import redacted

log = logging.getLogger(__name__)

MAX_BYTES = 16 * 2**20  # then the log is set aside
KEPT = 5  # logs that were set aside; the oldest goes
LONGEST_TEXT = 300  # of one argument
SPEC_FIELDS = ("text",)  # written as a digest


class AuditLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line. The second one of an action has its ``request`` and the outcome."""

    at: float  # seconds since the epoch
    request: str  # the same in both lines of one action
    who: str  # "fleet token", "key ID NAME", "command", "up"
    by: str = ""  # as the caller calls itself
    action: str  # "POST /apply", "keys create", "up"
    arguments: dict[str, Any] = {}
    status: str = ""  # of HTTP, or "done" or a problem's id; empty in the first line
    revision: int | None = None  # of the fleet, after it


class AuditEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One action, as `corewright audit` tells it."""

    at: float
    who: str
    by: str
    action: str
    arguments: dict[str, Any]
    status: str | None  # None: it has not ended, or its end could not be written
    revision: int | None


class Audit:
    """The log at ``path``."""

    def __init__(self, path: Path, *, max_bytes: int = MAX_BYTES) -> None:
        self.path = path
        self._max_bytes = max_bytes

    def asked(self, who: str, action: str, arguments: Mapping[str, Any] | None = None, *, by: str = "") -> AuditLine:
        """Write that something is about to be done. Raises Failed `audit-unwritable`: then it must not be done."""
        line = AuditLine(
            at=time.time(),
            request=secrets.token_hex(6),
            who=who,
            by=by,
            action=action,
            arguments=_harmless(arguments or {}),
        )
        self._append(line)
        return line

    def ended(self, line: AuditLine, status: str, revision: int | None = None) -> None:
        """Write what came of it. Raises Failed, when it is done already: for the caller to log."""
        told = msgspec.structs.replace(line, at=time.time(), status=status, revision=revision, arguments={})
        self._append(told)

    def entries(self, last: int) -> list[AuditEntry]:
        """The last actions, oldest first. A line that is none, after a crash, is passed over. Raises Failed."""
        found: dict[str, AuditEntry] = {}
        for line in self._lines():
            first = found.get(line.request)
            if first is not None:
                found[line.request] = msgspec.structs.replace(first, status=line.status, revision=line.revision)
                continue
            found[line.request] = AuditEntry(
                at=line.at,
                who=line.who,
                by=line.by,
                action=line.action,
                arguments=line.arguments,
                status=line.status or None,
                revision=line.revision,
            )
        return list(found.values())[-last:]

    def _lines(self) -> Iterator[AuditLine]:
        decoder = msgspec.json.Decoder(AuditLine)
        for path in [*(self._aside(number) for number in range(KEPT, 0, -1)), self.path]:
            try:
                data = path.read_bytes()
            except FileNotFoundError:
                continue
            except OSError as error:
                raise Failed("audit-unreadable", f"{path} cannot be read: {error.strerror}", "as its owner?") from None
            for text in data.splitlines():
                with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
                    yield decoder.decode(text)

    def _aside(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{number}")

    def _append(self, line: AuditLine) -> None:
        data = msgspec.json.encode(line) + b"\n"
        try:
            descriptor = self._open()
            try:
                size = os.fstat(descriptor).st_size
                if size and os.pread(descriptor, 1, size - 1) != b"\n":  # a crash has cut a line off
                    data = b"\n" + data
                try:
                    if os.write(descriptor, data) != len(data):
                        raise OSError(28, "No space left on device")
                    os.fsync(descriptor)
                except OSError:
                    os.ftruncate(descriptor, size)
                    raise
            finally:
                os.close(descriptor)
        except OSError as error:
            what = f"{self.path} cannot be written: {error.strerror}"
            hint = "nothing is changed that cannot be told later: make room, or see who owns the file"
            raise Failed("audit-unwritable", what, hint) from None

    def _open(self) -> int:
        """The log, locked, and set aside first when it has grown too large. Raises OSError."""
        while True:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            descriptor = os.open(self.path, flags, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                held = os.fstat(descriptor)
                there = self.path.stat() if self.path.exists() else None
                if there is not None and (there.st_ino, there.st_dev) == (held.st_ino, held.st_dev):
                    if held.st_size < self._max_bytes:
                        return descriptor
                    self._set_aside()
            except OSError:
                os.close(descriptor)
                raise
            os.close(descriptor)  # it is another file by now: again

    def _set_aside(self) -> None:
        for number in range(KEPT - 1, 0, -1):
            with contextlib.suppress(FileNotFoundError):
                self._aside(number).rename(self._aside(number + 1))
        self.path.rename(self._aside(1))


def _harmless(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Without the text of a spec, which could hold anything, and without what is very long."""
    told: dict[str, Any] = {}
    for name, value in arguments.items():
        if name in SPEC_FIELDS and isinstance(value, str):
            told["spec"] = f"sha256:{hashlib.sha256(value.encode('utf-8', 'surrogatepass')).hexdigest()}"
        elif isinstance(value, str):
            told[name] = redacted(value.encode("utf-8", "replace").decode()[:LONGEST_TEXT])
        elif isinstance(value, list | tuple):
            told[name] = [redacted(item) if isinstance(item, str) else item for item in value]
        elif value is not None:
            told[name] = value
    return told


@contextlib.contextmanager
def recorded(audit: Audit, who: str, action: str, arguments: Mapping[str, Any], *, by: str) -> Iterator[None]:
    """Write an action down around what does it. Raises Failed `audit-unwritable` before anything is done."""
    line = audit.asked(who, action, arguments, by=by)
    try:
        yield
    except BaseException as error:
        with contextlib.suppress(Failed):
            audit.ended(line, error.problem.id if isinstance(error, Failed) else type(error).__name__)
        raise
    try:
        audit.ended(line, "done")
    except Failed as failed:  # it is done: whoever asked must hear what came of it
        log.error("%s", failed)


def caller() -> str:
    """Who runs this process, as journal and audit log tell it: user@hostname, in what a header can hold."""
    import getpass
    import socket

    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # no name for the uid, as in some containers
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}".encode("ascii", "replace").decode()
