"""Loads and unloads models for SageMaker: each is a revision of the running spec with one model more or less."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import yaml

from orchestrator.api.operation import OperatedFleet
from orchestrator.api.preview import outlook_of, read_spec
from orchestrator.api.revisions import install
from orchestrator.api.schemas import OperationRefused, SpecText
from orchestrator.control.resolve.resolved_revision import ResolvedRevision
from orchestrator.control.resolve.spec_file import SpecFile
from orchestrator.control.rollout_progress import failure_of
from orchestrator.messages.controller_replies import Hosting
from orchestrator.messages.replica_states import State
from orchestrator.process.failure import Failed
from orchestrator.sagemaker.model_folder import SPEC, Fields, read_folder, text_of
from placements.facts.plural import counted
from placements.facts.topology import Machine
from placements.spec.notation import NAME, unusable_path
from placements.spec.schema import ModelSpec

log = logging.getLogger(__name__)

MANAGER = "sagemaker"
ATTEMPTS = 5  # at a revision, if another one is applied meanwhile
UPDATE = {"rollback": False, "max_failures": 2}  # a model that fails is removed, and nothing else is undone
NO_ROOM = 507
POLL_S = 0.5

Edit = Callable[[Fields], Hosting | None]
"""Changes a decoded spec, or returns why it does not."""


class HostedModels:
    """SageMaker's operations on a fleet."""

    def __init__(self, fleet: OperatedFleet) -> None:
        self._fleet, self._state = fleet, fleet.state
        self._folders: dict[str, str] = {}  # as SageMaker named them; after a restart the sources stand for them

    def hosted(self) -> list[tuple[str, str]]:
        """Returns the name and the folder of each model that SageMaker has loaded."""
        rows = []
        for model in self._state.current.spec.models:
            if model.managed_by == MANAGER:
                name = next((alias for alias in model.aliases if own_name(alias) == model.name), model.name)
                rows.append((name, self._folders.get(model.name) or model.source_path or model.source))
        return rows

    async def host_model(self, name: str, folder: str, *, again: bool, wait_s: float) -> Hosting:
        """Adds the model in ``folder`` to the fleet, and waits for up to ``wait_s`` until it serves: 200, or 202 if it
        does not yet; then the caller repeats the request with ``again``. 409: it is loaded already. 507: it does not
        fit beside the others. 400: the folder has no model that can be served. 500: it did not start. A model that
        fails is removed. Two callers may wait for the same model."""
        deadline = self._state.clock() + wait_s
        given, name = name, own_name(name)
        model = self._state.current.spec.model(name)
        if model is not None and not again and self._serves(model):
            return Hosting(409, f"the model {name} is loaded already")
        if model is None:
            if again:
                return Hosting(404, f"the model {name} was removed while it was loading")
            refused = await self._add(name, given, folder)
            if refused is not None:
                return refused
        return await self._wait(name, deadline)

    async def unhost_model(self, name: str) -> Hosting:
        """Removes a model that SageMaker has loaded; its requests are drained. 404: there is none of that name."""
        refused = await self._edit(partial(_without, own_name(name)))
        if refused is not None:
            return refused
        self._folders.pop(own_name(name), None)
        return Hosting(200, f"the model {name} is unloaded")

    async def _wait(self, name: str, deadline: float) -> Hosting:
        version = 0
        while True:
            model = self._state.current.spec.model(name)
            if model is None:
                return Hosting(404, f"the model {name} was removed while it was loading")
            if self._serves(model):
                return Hosting(200, f"the model {name} is loaded")
            if (failed := failure_of(self._state, model)) is not None:
                await self.unhost_model(name)
                return Hosting(500, failed)
            remaining_s = deadline - self._state.clock()
            if remaining_s <= 0:
                return Hosting(202, f"the model {name} is loading")
            version = await self._fleet.controller.change(version, min(POLL_S, remaining_s))

    def _serves(self, model: ModelSpec) -> bool:
        """Returns whether it serves, or starts with its first request."""
        views = self._state.views.of_model(model.name)
        return model.replicas.min == 0 or any(view.state is State.READY for view in views)

    async def _add(self, name: str, given: str, folder: str) -> Hosting | None:
        """Adds a model to the spec. Returns why it was refused."""
        if reason := unusable_path(folder):
            return Hosting(400, f"the folder {reason}")
        try:
            fields = await self._state.in_thread(model_fields, Path(folder), self._state.machine)
        except Failed as error:
            return Hosting(400, f"{error.problem.what}; {error.problem.hint}")
        if given != name:
            others = fields.get("aliases") or []
            fields["aliases"] = {given: None, **others} if isinstance(others, dict) else [given, *others]
        self._folders[name] = folder
        try:
            return await self._edit(partial(_with, name, fields), name)
        finally:
            if self._state.current.spec.model(name) is None:  # another caller may have added it meanwhile
                self._folders.pop(name, None)

    async def _edit(self, edit: Edit, added: str | None = None) -> Hosting | None:
        """Applies the spec as edited. Returns why that was refused, if it was. ``added`` is the new model, which must
        fit beside the others."""
        for _ in range(ATTEMPTS):
            current = self._state.current
            spec = yaml.safe_load(current.revision.text)
            refused = edit(spec)
            if refused is not None:
                return refused
            try:
                revision = current.revision
                text = SpecText(text=text_of(spec), file=revision.file, base_dir=revision.base_dir)
                read = await read_spec(self._fleet, text, by=MANAGER, cause="apply")
                if added is not None and (missing := await self._missing(added, *read)):
                    return Hosting(NO_ROOM, f"no room beside the other models: {missing}")
                await install(self._fleet, *read, over=current.number)
            except OperationRefused as error:
                if error.problem.id == "index-changed":
                    continue
                return _refusal(error)
            return None
        return Hosting(503, f"{ATTEMPTS} other revisions were applied meanwhile; try again")

    async def _missing(self, added: str, spec_file: SpecFile, revision: ResolvedRevision) -> str:
        """Returns what the fleet's hosts lack now for the model that is added, or for another one because of it."""
        before = {missing.model for missing in self._state.goal.plan.unplaced}
        plan = (await outlook_of(self._fleet, spec_file, revision)).decision.goal.plan
        return "; ".join(
            problem.what
            for missing in plan.unplaced
            if missing.model == added or (missing.required and missing.model not in before)
            for problem in missing.problems
        )


def _with(name: str, fields: Fields, spec: Fields) -> Hosting | None:
    spec["models"].setdefault(name, fields)  # another caller may have been faster
    return None


def _without(name: str, spec: Fields) -> Hosting | None:
    if (spec["models"].get(name) or {}).get("managed_by") != MANAGER:
        return Hosting(404, f"the model {name} is not loaded")
    del spec["models"][name]
    return None


def _refusal(error: OperationRefused) -> Hosting:
    problems = "; ".join(problem.what for problem in error.problems if problem.severity == "error")
    if error.problem.id == "never-fits":
        return Hosting(NO_ROOM, f"no room beside the other models: {problems}")
    if problems:
        return Hosting(400, f"{error.problem.what}: {problems}")
    return Hosting(error.status, error.problem.what)


def own_name(name: str) -> str:
    """Returns a model's name in the spec, which has narrower rules: SageMaker's names may be hashes of any length."""
    return name if NAME.fullmatch(name) else f"hosted-{hashlib.sha256(name.encode()).hexdigest()[:16]}"


def model_fields(folder: Path, machine: Machine) -> Fields:
    """Returns the fields of the one model in a folder. Blocks. Raises Failed."""
    spec = read_folder(folder, os.environ, machine)
    for note in spec.notes:
        log.warning("%s: %s", folder, note)
    if len(spec.models) != 1:
        fact = f"{folder} has {counted(len(spec.models), 'model')}, and SageMaker loads one at a time"
        raise Failed("model-folder-unreadable", fact, "put each model into an archive of its own")
    dropped = sorted(spec.spec.keys() - {"version", "name", "defaults", "models"})
    if dropped and (folder / SPEC).is_file():
        fact = f"{folder} sets {' and '.join(dropped)} of its own, which belong to the endpoint"
        raise Failed("model-folder-unreadable", fact, f"remove them from its {SPEC}")
    (fields,) = spec.models.values()
    return {"update": UPDATE, **fields, "managed_by": MANAGER}
