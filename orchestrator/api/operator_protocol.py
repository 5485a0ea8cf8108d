"""The operations of the admin API on a running fleet, as a protocol that the controller implements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from orchestrator.fleet.controller_settings import ControllerSettings
from orchestrator.process.failure import Failed
from placements.spec.problems import Problem


class Refused(Failed):
    """An operation that was refused and has changed nothing; ``problems`` are those of the spec, if there is one."""

    def __init__(self, id: str, what: str, hint: str, *, status: int = 409, problems: Sequence[Problem] = ()) -> None:
        """``status`` is the HTTP status: 400 for a malformed request, 404 for an unknown object, 409 if the state of
        the fleet does not allow it, 422 for a spec with errors, 507 if the journal cannot be written."""
        super().__init__(id, what, hint)
        self.status = status
        self.problems = tuple(problems)


class Operations(Protocol):
    """The operations. Each raises Refused. ``by`` names the caller in the journal. Results: the JSON of docs/cli.md."""

    settings: ControllerSettings

    def status(self) -> dict[str, Any]: ...

    async def propose(self, text: str, file: str, base_dir: str, defrag: int | None = None) -> dict[str, Any]:
        """Previews an apply: placements, unplaced, moves, problems, changes by replica, models, hosts, memory, index,
        revision. With ``defrag``: the moves that free that many contiguous cores."""
        ...

    async def explain(self, text: str, file: str, base_dir: str, model: str) -> dict[str, Any]:
        """Explains the placement of a model of that spec: why it is there or unplaced, and the remedies."""
        ...

    async def apply(
        self,
        text: str,
        file: str,
        base_dir: str,
        *,
        by: str,
        cause: str = "apply",
        check_index: int | None = None,
        canary: float | None = None,
    ) -> dict[str, Any]:
        """Creates a revision: {changed, revision, index, plan}. ``canary`` is a share of requests, 0 to 1 exclusive."""
        ...

    async def undo(self, to: int | None, by: str) -> dict[str, Any]:
        """Applies an earlier revision again: ``to``, or by default the previous one."""
        ...

    def rollout(self) -> dict[str, Any]:
        """Returns {revision, state, reason, since, models: [{model, strategy, wanted, updated, ready, old, state}]}."""
        ...

    def revisions(self) -> list[dict[str, Any]]:
        """Returns all revisions, newest first: {revision, at, by, cause, of, state, changes}."""
        ...

    def revision(self, number: int | None) -> dict[str, Any]:
        """Returns one revision with its ``text``, ``file``, ``base_dir`` and ``plan``; None: the one that ``undo``
        applies by default."""
        ...

    async def pause(self, by: str) -> dict[str, Any]: ...

    async def resume(self, by: str) -> dict[str, Any]: ...

    async def promote(self, by: str) -> dict[str, Any]:
        """Ends the canary: the rollout continues with every replica."""
        ...

    async def restart(self, model: str, by: str) -> dict[str, Any]:
        """Replaces every replica of a model with a new process, as an update would."""
        ...

    async def scale(self, model: str, count: int | None, by: str) -> dict[str, Any]:
        """Sets the number of replicas, which can be below the spec's ``min``; None: back to the spec."""
        ...

    async def load(self, model: str, by: str) -> dict[str, Any]: ...

    async def unload(self, model: str, by: str) -> dict[str, Any]:
        """Stops all replicas until ``load``; requests do not start one."""
        ...

    async def cordon(self, host: str, cores: str | None, on: bool, by: str) -> dict[str, Any]:
        """Excludes the host, or these of its cores, from new placements; ``on`` false removes the cordon."""
        ...

    async def drain(self, target: str, by: str) -> dict[str, Any]:
        """Moves the replicas of a host elsewhere and cordons it; or replaces one replica, given by its id."""
        ...

    async def events(self, after: int, limit: int, wait_s: float, model: str | None) -> dict[str, Any]:
        """Returns {events: [{seq, at, level, reason, message, model, replica, host}], next}, oldest first."""
        ...

    async def logs(self, model: str, replica: int | None, offset: int | None, wait_s: float) -> dict[str, Any]:
        """Returns {replica, file, offset, text}: the last lines, or what follows the byte ``offset``."""
        ...

    async def trace(self, after: str, limit: int) -> dict[str, Any]:
        """Returns the requests that gateways recorded, from ``after``: the ``next`` of an earlier page, or "" for all.

        {requests: [{time, model, prompt_tokens, output_tokens, key, first_ms, decode_ms}], next, more, speeds}."""
        ...

    def config(self) -> dict[str, Any]:
        """Returns {values: [{name, value, origin}]}; the origin is flag, environment, file or default."""
        ...
