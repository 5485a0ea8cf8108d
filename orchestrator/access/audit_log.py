"""The audit log: records who changed what in a fleet, and with what outcome, as append-only lines of JSON.

A change is written before it starts and again when it has ended. If the first line cannot be written, the change is
refused. The size of a record is bounded. Several processes append to the log: the controller, `up`, and the commands.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import os
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import msgspec

from orchestrator.process.failure import Failed
from orchestrator.process.home import Home
from orchestrator.process.logs import redacted
from workers.host import file_lock, private_file

log = logging.getLogger(__name__)

MAX_BYTES = 16 * 2**20  # the log is rotated above this size
KEPT = 5  # rotated logs; the oldest is deleted
MAX_TEXT_CHARACTERS = 300  # of a text in an argument
MAX_ITEMS = 20  # of a list or an object in an argument
REFUSED_SHARE = 0.25  # of the log, for requests that were refused; the oldest of them are dropped
SPEC_FIELDS = ("text",)  # arguments that are written as a digest


class AuditLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of the log. The second line of an action repeats its ``request`` and adds the outcome."""

    at: float  # seconds since the epoch
    request: str  # random id, the same in both lines of one action
    who: str  # "fleet token", "key ID NAME", "command", "up"
    by: str = ""  # the name that the caller gave
    action: str  # "POST /apply", "keys create", "up"
    arguments: dict[str, Any] = {}
    status: str | None = None  # an HTTP status, "done" or a problem's id; None: not ended, or the outcome is not known
    revision: int | None = None  # of the fleet, after the action


class Audit:
    """The audit log in the file ``path``."""

    def __init__(self, path: Path, *, max_bytes: int = MAX_BYTES) -> None:
        self.path = path
        self._max_bytes = max_bytes

    def begin(self, who: str, action: str, arguments: Mapping[str, Any] | None = None, *, by: str = "") -> AuditLine:
        """Records that an action is about to start. Raises Failed `audit-unwritable`: the action must not be done."""
        line = AuditLine(
            at=time.time(),
            request=secrets.token_hex(6),
            who=_bounded(who),
            by=_bounded(by),
            action=action,
            arguments=_without_secrets(arguments or {}),
        )
        self._append(line)
        return line

    def finish(self, line: AuditLine, status: str, revision: int | None = None) -> None:
        """Records the outcome of an action. Logs an error if it cannot be written: the action is already done."""
        try:
            self._append(msgspec.structs.replace(line, at=time.time(), status=status, revision=revision, arguments={}))
        except Failed as failed:
            log.error("%s", failed)

    def entries(self, last: int) -> list[AuditLine]:
        """Returns the ``last`` actions with their outcomes, oldest first. Skips damaged lines. Raises Failed."""
        entries: dict[str, AuditLine] = {}
        for line in self._lines():
            first = entries.get(line.request, line)
            entries[line.request] = msgspec.structs.replace(first, status=line.status, revision=line.revision)
        return list(entries.values())[-last:]

    def _lines(self) -> Iterator[AuditLine]:
        decoder = msgspec.json.Decoder(AuditLine)
        for path in [private_file.rotated(self.path, number) for number in range(KEPT, -1, -1)]:
            try:
                data = path.read_bytes()
            except FileNotFoundError:
                continue
            except OSError as error:
                message = f"{path} cannot be read: {error.strerror}"
                raise Failed("audit-unreadable", message, "run the command as the owner of the file") from None
            for text in data.splitlines():
                with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
                    yield decoder.decode(text)

    def _append(self, line: AuditLine) -> None:
        data = msgspec.json.encode(line) + b"\n"
        try:
            descriptor = self._open()
            try:
                joint = b"" if private_file.ends_whole(descriptor) else b"\n"
                private_file.append(descriptor, joint + data, sync=True)
            finally:
                os.close(descriptor)
        except OSError as error:
            message = f"{self.path} cannot be written: {error.strerror}"
            hint = "changes are refused until the audit log is writable: free disk space, or check the file's owner"
            raise Failed("audit-unwritable", message, hint) from None

    def _open(self) -> int:
        """Returns a descriptor of the locked log; rotates the log first if it is too large. Raises OSError."""
        while True:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = private_file.open_to_append(self.path)
            try:
                file_lock.lock(descriptor)
                if file_lock.is_at(descriptor, self.path):
                    if os.fstat(descriptor).st_size < self._max_bytes:
                        return descriptor
                    self._make_room()
            except OSError:
                os.close(descriptor)
                raise
            os.close(descriptor)  # the log was replaced meanwhile: retry with the new file

    def _make_room(self) -> None:
        """Rotates the log. If less than half of it is about accepted requests, drops the oldest refused ones instead: a
        client that only sends such requests never reaches the older logs. Raises OSError."""
        lines = self.path.read_bytes().splitlines(keepends=True)
        refused = _refused(lines)
        size = sum(len(lines[position]) for places in refused for position in places)
        if sum(map(len, lines)) - size > self._max_bytes / 2:
            private_file.rotate(self.path, KEPT)
            return
        for places in refused:
            if size <= self._max_bytes * REFUSED_SHARE:
                break
            size -= sum(len(lines[position]) for position in places)
            for position in places:
                lines[position] = b""
        private_file.replace(self.path, b"".join(lines), sync=True)


def _refused(lines: Sequence[bytes]) -> list[list[int]]:
    """Returns the places of both lines of each refused request, the oldest first."""
    decoder = msgspec.json.Decoder(AuditLine)
    places: dict[str, list[int]] = {}
    refused: set[str] = set()
    for position, text in enumerate(lines):
        with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
            line = decoder.decode(text)
            places.setdefault(line.request, []).append(position)
            if line.status is not None and line.status.startswith("4"):  # nothing was changed
                refused.add(line.request)
    return [both for request, both in places.items() if request in refused and len(both) == 2]


def _without_secrets(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments with secrets redacted, cut to a bounded size, and the text of a spec as its digest."""
    fields: dict[str, Any] = {}
    for name, value in arguments.items():
        if name in SPEC_FIELDS and isinstance(value, str):
            fields["spec"] = f"sha256:{hashlib.sha256(value.encode('utf-8', 'surrogatepass')).hexdigest()}"
        elif value is not None:
            fields[name] = _bounded(value)
    return fields


def _bounded(value: Any) -> Any:
    """Returns a value with secrets redacted, its texts truncated, and the first items of its lists and objects."""
    if isinstance(value, str):
        return redacted(value.encode("utf-8", "replace").decode()[:MAX_TEXT_CHARACTERS])
    if isinstance(value, list | tuple):
        more = [f"and {len(value) - MAX_ITEMS} more"] if len(value) > MAX_ITEMS else []
        return [_bounded(item) for item in value[:MAX_ITEMS]] + more
    if isinstance(value, Mapping):
        return {_bounded(str(name)): _bounded(part) for name, part in itertools.islice(value.items(), MAX_ITEMS)}
    return value


@contextlib.contextmanager
def recorded(audit: Audit, who: str, action: str, arguments: Mapping[str, Any], *, by: str) -> Iterator[None]:
    """Records the action that its body carries out. Raises Failed `audit-unwritable` before the body runs."""
    line = audit.begin(who, action, arguments, by=by)
    try:
        yield
    except BaseException as error:
        audit.finish(line, error.problem.id if isinstance(error, Failed) else type(error).__name__)
        raise
    audit.finish(line, "done")


def recorded_command(home: Home, action: str, arguments: Mapping[str, Any]) -> AbstractContextManager[None]:
    """Records the action of a command as `recorded`, if the home exists; else there is nothing to change in it."""
    if not home.path.is_dir():
        return contextlib.nullcontext()
    return recorded(Audit(home.audit), "command", action, arguments, by=caller())


def caller() -> str:
    """Returns user@hostname of this process for the journal and the audit log, in ASCII, as a header needs it."""
    import getpass
    import socket

    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # the uid has no name, as in some containers
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}".encode("ascii", "replace").decode()
