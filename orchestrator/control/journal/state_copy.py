"""The copy of the journal's state in the cluster's key-value store, for a new head whose disk has no journal."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import msgspec

from orchestrator.control.journal.journal_records import JournalState
from workers.host.task_boundary import task_boundary

log = logging.getLogger(__name__)

KEPT_REVISIONS = 5  # the newest, beside the current and the completed one: a spec may have many kilobytes
RETRY_S = 1.0

_decoder = msgspec.json.Decoder(JournalState)


def encode(state: JournalState) -> bytes:
    """Returns the copy of a state, which has fewer revisions. Pure."""
    kept = {*sorted(state.revisions)[-KEPT_REVISIONS:], state.revision, state.completed}
    return msgspec.json.encode(
        msgspec.structs.replace(
            state,
            revisions={number: record for number, record in state.revisions.items() if number in kept},
            outcomes={number: record for number, record in state.outcomes.items() if number in kept},
        )
    )


def decode(copy: bytes) -> JournalState | None:
    """Returns the state of a copy; None if it cannot be read. Pure."""
    try:
        return _decoder.decode(copy)
    except msgspec.MsgspecError as error:
        log.error("the copy of the journal in the cluster cannot be read and is ignored: %s", error)
        return None


def is_newer(copy: JournalState, journal: JournalState, fleet: str) -> bool:
    """Returns whether the copy is to replace the state of the journal: it has a higher sequence, or is the fleet's
    while the journal is that of an earlier fleet. Pure."""
    is_ours, journal_is_ours = _fleet(copy) == fleet, _fleet(journal) == fleet
    return copy.seq > journal.seq if is_ours == journal_is_ours else is_ours


def _fleet(state: JournalState) -> str | None:
    revision = state.revisions.get(state.revision or 0)
    return None if revision is None else revision.fleet


class StateCopier:
    """Writes the newest state in a thread, as often as the store allows, and tries again until it is written.

    While the store does not reply, neither the event loop nor an operator waits, and the journal's file has all.
    """

    def __init__(self, put: Callable[[bytes], Any], retry_s: float = RETRY_S) -> None:
        """``put`` stores the copy. It may block and raise any error."""
        self._put = put
        self._retry_s = retry_s
        self._changed = threading.Condition()
        self._newest: JournalState | None = None  # that is not written
        self._failing = False
        threading.Thread(target=self._run, name="journal copy", daemon=True).start()

    def offer(self, state: JournalState) -> None:
        """Write this state, in place of those that are not written yet. Returns at once."""
        with self._changed:
            self._newest = state
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._newest is not None)
                state, self._newest = self._newest, None
            if state is not None and not self._write(state):
                with self._changed:
                    if self._newest is None:
                        self._newest = state
                    self._changed.wait(self._retry_s)

    def _write(self, state: JournalState) -> bool:
        """Returns whether the copy is stored."""
        written = False
        level = logging.DEBUG if self._failing else logging.WARNING
        with task_boundary(log, "the copy of the journal cannot be written, and is tried again", level=level):
            self._put(encode(state))
            written = True
        if written and self._failing:
            log.info("the copy of the journal is written again")
        self._failing = not written
        return written
