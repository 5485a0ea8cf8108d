"""The exception that stops a command or the daemon, with the problem to report."""

from __future__ import annotations

from typing import Protocol

from placements.spec.problems import Problem


class Explained(Protocol):
    """A failure as a value: of a replica, of a source, or a problem of a spec."""

    @property
    def id(self) -> str: ...

    @property
    def what(self) -> str: ...

    @property
    def hint(self) -> str: ...


class Failed(Exception):
    """A failure of a command: a problem id, a message and a hint. Rendered like every other problem."""

    def __init__(self, id: str, what: str, hint: str) -> None:
        super().__init__(f"{id}: {what}")
        self.problem = Problem(id, "error", "", what, hint)

    @classmethod
    def of(cls, failure: Explained) -> Failed:
        """Returns the exception of a failure that was a value."""
        return Failed(failure.id, failure.what, failure.hint)
