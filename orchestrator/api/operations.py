"""What an operator can ask of a running fleet: the verbs of the admin API, as the controller keeps them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from orchestrator.fleet.controller_settings import ControllerSettings
from orchestrator.process.failure import Failed
from placements.spec.problems import Problem


class Refused(Failed):
    """An operation that changed nothing; ``problems`` are those of the spec that was to be applied, if it was one."""

    def __init__(self, id: str, what: str, hint: str, *, status: int = 409, problems: Sequence[Problem] = ()) -> None:
        """``status`` is HTTP's: 400 for what means nothing, 404 for what does not exist, 409 for what the fleet's state
        forbids, 422 for a spec with errors, 507 for a journal that cannot be written."""
        super().__init__(id, what, hint)
        self.status = status
        self.problems = tuple(problems)


class Operations(Protocol):
    """Each raises Refused. ``by`` is who asked, as the journal tells it. Results are the JSON of docs/cli.md."""

    settings: ControllerSettings

    def status(self) -> dict[str, Any]: ...

    async def propose(self, text: str, file: str, base_dir: str, defrag: int | None = None) -> dict[str, Any]:
        """What an apply would do: placements, unplaced, moves, problems, changes by replica, models, hosts, memory,
        index, revision. With ``defrag``: what would have to move so that so many cores in a row are free."""
        ...

    async def explain(self, text: str, file: str, base_dir: str, model: str) -> dict[str, Any]:
        """Why a model of that spec is where it is, or would have no place, and what would help."""
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
        """A new revision: {changed, revision, index, plan}. ``canary`` is a share of requests, 0 to 1 exclusive."""
        ...

    async def undo(self, to: int | None, by: str) -> dict[str, Any]:
        """Apply an earlier revision again, the one before the current unless ``to`` names it."""
        ...

    def rollout(self) -> dict[str, Any]:
        """{revision, state, reason, since, models: [{model, strategy, wanted, updated, ready, old, state}]}."""
        ...

    def revisions(self) -> list[dict[str, Any]]:
        """Newest first: {revision, at, by, cause, of, state, changes}."""
        ...

    def revision(self, number: int | None) -> dict[str, Any]:
        """One of them with its ``text``, ``file``, ``base_dir`` and ``plan``; None: the one that ``undo`` applies when
        none is named."""
        ...

    async def pause(self, by: str) -> dict[str, Any]: ...

    async def resume(self, by: str) -> dict[str, Any]: ...

    async def promote(self, by: str) -> dict[str, Any]:
        """End the canary: the rollout goes on to every replica."""
        ...

    async def restart(self, model: str, by: str) -> dict[str, Any]:
        """Replace every replica of a model by a new process, as an update would."""
        ...

    async def scale(self, model: str, count: int | None, by: str) -> dict[str, Any]:
        """So many replicas, whatever the spec's ``min`` says; None: as the spec says again."""
        ...

    async def load(self, model: str, by: str) -> dict[str, Any]: ...

    async def unload(self, model: str, by: str) -> dict[str, Any]:
        """No replica until ``load``: not even a request starts one."""
        ...

    async def cordon(self, host: str, cores: str | None, on: bool, by: str) -> dict[str, Any]:
        """Nothing new is placed on the host, or on those of its cores."""
        ...

    async def drain(self, target: str, by: str) -> dict[str, Any]:
        """Move the replicas of a host elsewhere and cordon it; or replace one replica, given by its id."""
        ...

    async def events(self, after: int, limit: int, wait_s: float, model: str | None) -> dict[str, Any]:
        """{events: [{seq, at, level, reason, message, model, replica, host}], next}, oldest first."""
        ...

    async def logs(self, model: str, replica: int | None, offset: int | None, wait_s: float) -> dict[str, Any]:
        """{replica, file, offset, text}: the last lines, or what came after ``offset`` bytes."""
        ...

    async def trace(self, after: str, limit: int) -> dict[str, Any]:
        """What gateways have recorded from ``after`` on, the ``next`` of an earlier answer or "" for the oldest:
        {requests: [{time, model, prompt_tokens, output_tokens, key, first_ms, decode_ms}], next, more, speeds}."""
        ...

    def config(self) -> dict[str, Any]:
        """{values: [{name, value, origin}]} with origin flag, environment, file or default."""
        ...
