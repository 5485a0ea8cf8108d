"""What stops a command or a daemon, as a problem to be shown."""

from __future__ import annotations

from placements.spec.problems import Problem


class Failed(Exception):
    """A command that cannot do what it was asked: an id, the fact, the remedy. Shown as every other problem is."""

    def __init__(self, id: str, what: str, hint: str) -> None:
        super().__init__(f"{id}: {what}")
        self.problem = Problem(id, "error", "", what, hint)
