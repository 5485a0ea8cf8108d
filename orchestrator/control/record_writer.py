"""Writes records to the journal in a thread, in order, so that a slow disk does not block the event loop."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import reduce
from typing import Any, Literal, cast

import msgspec.structs

from orchestrator.control.decisions.replica_view import ReplicaView
from orchestrator.control.journal.journal import Journal, JournalUnwritable, as_stored
from orchestrator.control.journal.journal_fold import fold
from orchestrator.control.journal.journal_records import AnyRecord, Decision, Event, JournalState, R, ReadyStart, Record

log = logging.getLogger(__name__)

Level = Literal["info", "warning", "error"]
InThread = Callable[..., Coroutine[Any, Any, Any]]  # `asyncio.to_thread`, or a stand-in
MAX_REFUSED = 1000  # records that wait while the disk is full; beyond it, the least important notes are dropped
MAX_WAITING = 20_000  # of a disk that is slow: one round of 2,400 replicas records 4,800


@dataclass(eq=False)
class _Request:
    """A record that is not written yet."""

    record: Record
    is_note: bool
    stored: Record | None = None
    error: JournalUnwritable | None = None


class RecordWriter:
    """The only user of a controller's journal, on its event loop.

    A note is in ``state`` at once, and on disk after ``durable``: an effect waits for that. Notes that a full disk
    refuses are kept and written later, since repairs must go on. The record of an operator's request is in ``state``
    once it is on disk; if the disk refuses it, nothing has changed.
    """

    def __init__(
        self,
        journal: Journal,
        in_thread: InThread | None = None,
        wall: Callable[[], float] = time.time,
        written: Callable[[JournalState], None] = lambda state: None,
    ) -> None:
        """``written`` gets the state on disk after each change of more than events. It must not block."""
        self.journal = journal
        self._written = written
        self.state = journal.state()  # with the notes that are not written yet
        self.writable = True  # False while notes wait that the disk has refused
        self.lost = not journal.is_own()  # nothing that is written would be found again
        self.in_thread: InThread = in_thread or asyncio.to_thread  # runs a blocking function
        self._in_journal_thread = in_thread or _own_thread()
        self.wall = wall
        self._requests: list[_Request] = []  # in order; without the batch that is being written
        self._writing: asyncio.Task[None] | None = None

    def note(self, record: Record) -> None:
        """Record an action or an observation of the controller. Raises TypeError or ValueError as `Journal.append`."""
        self._requests.append(_Request(as_stored(record), is_note=True))
        self.state = self._with_note(self.state, self._requests[-1].record)
        too_many = len(self._requests) > (MAX_WAITING if self.writable else MAX_REFUSED)
        if too_many and (dropped := _least_important(self._requests)) is not None:
            self._requests.remove(dropped)
        self._start()

    async def record(self, record: R) -> R:
        """Write the record of an operator's request and return it as stored. Raises JournalUnwritable: then it is not
        in the journal, and the request must be rejected."""
        request = _Request(as_stored(record), is_note=False)
        self._requests.append(request)
        await self.durable()
        if request.error is not None:
            raise request.error
        return cast(R, request.stored)

    async def verify(self) -> None:
        """Update ``lost``: whether the journal's file is gone, or another one is in its place."""
        lost = not await self._in_journal_thread(self.journal.is_own)
        if lost and not self.lost:
            log.error("the journal's file is gone, or another one is in its place")
        self.lost = lost

    async def durable(self) -> None:
        """Wait until all records so far are on disk, or the disk has refused one of them."""
        if self._requests or (self._writing is not None and not self._writing.done()):
            await asyncio.shield(self._start())

    def event(
        self,
        level: Level,
        reason: str,
        message: str,
        *,
        view: ReplicaView | None = None,
        model: str | None = None,
        host: str | None = None,
    ) -> None:
        """Log a message and record it as an event."""
        replica = None
        if view is not None:
            model, replica, host = view.model, view.id, view.host
        self.note_event(Event(level=level, reason=reason, message=message, model=model, replica=replica, host=host))

    def note_event(self, event: Event) -> None:
        """Log an event and record it."""
        subject = event.replica or event.model or event.host
        text = event.message if subject is None else f"{subject}: {event.message}"
        log.log(logging.INFO if event.level == "info" else logging.WARNING, "%s", text)
        self.note(event)

    def decision(self, action: Any, view: ReplicaView, reason: str) -> None:
        """Record an action on a replica."""
        self.note(
            Decision(
                action=action,
                model=view.model,
                replica=view.replica,
                epoch=view.epoch,
                host=view.host,
                cores=list(view.cores or ()),
                version=view.version,
                reason=reason,
            )
        )

    def _start(self) -> asyncio.Task[None]:
        if self._writing is None or self._writing.done():
            self._writing = asyncio.get_running_loop().create_task(self._write())
        return self._writing

    async def _write(self) -> None:
        """Write batch by batch. After a refusal the notes wait for the next attempt."""
        while self._requests:
            batch, self._requests = self._requests, []
            error = await self._in_journal_thread(_append, self.journal, batch)
            if any(request.stored is not None and not isinstance(request.record, Event) for request in batch):
                self._written(self.journal.state())
            if error is not None:
                unwritten = [request for request in (*batch, *self._requests) if request.stored is None]
                for request in unwritten:
                    request.error = error
                self._requests = [request for request in unwritten if request.is_note]
                if self._requests and self.writable:
                    text = "the journal cannot be written; repairs continue, their records are buffered: %s"
                    log.error(text, error)
            self.writable = error is None or not self._requests
            notes = (request.record for request in self._requests if request.is_note)
            self.state = reduce(self._with_note, notes, self.journal.state())
            if error is not None:
                return

    def _with_note(self, state: JournalState, note: Record) -> JournalState:
        """Returns the state after the note, with its number in the journal unless that refuses an earlier one."""
        return fold(state, cast(AnyRecord, msgspec.structs.replace(note, seq=state.seq + 1, at=self.wall())))


def _least_important(requests: Sequence[_Request]) -> _Request | None:
    """Returns the oldest event or ready start, else the oldest decision that a later one of its replica replaces.
    Nothing else may be lost: a controller that does not know the last epoch of a replica would use it again."""
    event = next((request for request in requests if isinstance(request.record, (Event, ReadyStart))), None)
    if event is not None:
        return event
    replaced, later = None, set()
    for request in reversed(requests):
        if isinstance(record := request.record, Decision):
            id = (record.model, record.replica)
            replaced = request if id in later else replaced
            later.add(id)
    return replaced


def _own_thread() -> InThread:
    """Returns a function like `asyncio.to_thread` with its own thread: slow sources may occupy the shared ones."""
    pool = ThreadPoolExecutor(1, thread_name_prefix="journal")

    async def run(function: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(pool, function, *arguments)

    return run


def _append(journal: Journal, batch: Sequence[_Request]) -> JournalUnwritable | None:
    """Append the records in order. Returns the error at which it stopped. Blocks."""
    for request in batch:
        try:
            request.stored = journal.append(request.record)
        except JournalUnwritable as error:
            return error
    return None
