"""The refusal of an operation on a running fleet."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.process.failure import Failed
from placements.spec.problems import Problem


class OperationRefused(Failed):
    """An operation that was refused and has changed nothing; ``problems`` are those of the spec, if there is one."""

    def __init__(self, id: str, what: str, hint: str, *, status: int = 409, problems: Sequence[Problem] = ()) -> None:
        """``status`` is the HTTP status: 400 for a malformed request, 404 for an unknown object, 409 if the state of
        the fleet does not allow it, 422 for a spec with errors, 507 if the journal cannot be written."""
        super().__init__(id, what, hint)
        self.status = status
        self.problems = tuple(problems)
