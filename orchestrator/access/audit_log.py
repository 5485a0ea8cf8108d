"""The audit log: records who changed what in a fleet, and with what outcome, as append-only lines of JSON.

A change is written before it starts and again when it has ended. If the first line cannot be written, the change is
refused. Several processes append to the log: the controller, `up`, and the commands.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import secrets
import time
from collections.abc import Iterator, Mapping
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
LONGEST_TEXT = 300  # characters of one argument
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
            who=who,
            by=by,
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
                what = f"{path} cannot be read: {error.strerror}"
                raise Failed("audit-unreadable", what, "run the command as the owner of the file") from None
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
            what = f"{self.path} cannot be written: {error.strerror}"
            hint = "changes are refused until the audit log is writable: free disk space, or check the file's owner"
            raise Failed("audit-unwritable", what, hint) from None

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
                    private_file.rotate(self.path, KEPT)
            except OSError:
                os.close(descriptor)
                raise
            os.close(descriptor)  # the log was rotated meanwhile: retry with the new file


def _without_secrets(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments with secrets redacted, long texts truncated, and the text of a spec as its digest."""
    fields: dict[str, Any] = {}
    for name, value in arguments.items():
        if name in SPEC_FIELDS and isinstance(value, str):
            fields["spec"] = f"sha256:{hashlib.sha256(value.encode('utf-8', 'surrogatepass')).hexdigest()}"
        elif isinstance(value, str):
            fields[name] = redacted(value.encode("utf-8", "replace").decode()[:LONGEST_TEXT])
        elif isinstance(value, list | tuple):
            fields[name] = [redacted(item) if isinstance(item, str) else item for item in value]
        elif value is not None:
            fields[name] = value
    return fields


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
