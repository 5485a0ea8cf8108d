"""The exception that stops a command or the daemon, with the problem to report."""

from __future__ import annotations

from placements.spec.problems import Problem


class Failed(Exception):
    """A failure of a command: a problem id, a message and a hint. Rendered like every other problem."""

    def __init__(self, id: str, what: str, hint: str) -> None:
        super().__init__(f"{id}: {what}")
        self.problem = Problem(id, "error", "", what, hint)
