"""`corewright plan`: what the daemon would do with a spec, by the daemon's own code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.cli.client import AdminClient
from orchestrator.cli.output import columns
from orchestrator.specfile import SpecFile
from placements.cores import CoreRange
from placements.explain import core_map
from placements.parse import parse
from placements.plan import Plan, Running, plan
from placements.problems import Problem, has_errors
from placements.spec import Spec


@dataclass(frozen=True)
class PlanResult:
    """``data`` is the JSON that docs/cli.md promises."""

    data: dict[str, Any]
    table: str
    problems: tuple[Problem, ...]
    failed: bool
    changes: bool


def make_plan(file: SpecFile, fleet: AdminClient | None) -> PlanResult:
    """Plan the spec from the fleet's state, or from nothing. Raises Failed when the fleet does not answer."""
    if file.spec is None or has_errors(file.problems):
        data = {"placements": [], "unplaced": [], "problems": [problem.as_dict() for problem in file.problems]}
        return PlanResult(data, "", file.problems, failed=True, changes=False)
    status = fleet.get("status") if fleet is not None else {"models": []}
    running = _running(status)
    before = _spec_of(fleet) if fleet is not None else None
    result = plan(file.spec, file.hosts, file.checkpoints, running, _wanted(file.spec, status))
    changes = _changes(file.spec, before, result, running)
    problems = (*file.problems, *result.problems)
    data = result.as_dict()
    data["problems"] = [problem.as_dict() for problem in problems]
    data["changes"] = changes
    return PlanResult(data, _table(file, result, changes), problems, not result.complete, bool(changes))


def _running(status: dict[str, Any]) -> list[Running]:
    return [
        Running(model["name"], int(replica["id"].rpartition("/")[2]), replica["host"], _range(replica["cores"]))
        for model in status["models"]
        for replica in model["replicas"]
        if replica["state"] not in ("draining", "stopping")
    ]


def _wanted(spec: Spec, status: dict[str, Any]) -> dict[str, int]:
    """What the fleet runs of a model now (a woken `min: 0` has one), within what the spec allows."""
    now = {model["name"]: model["wanted"] for model in status["models"]}
    return {
        model.name: max(model.replicas.min, min(now.get(model.name, 0), model.replicas.max)) for model in spec.models
    }


def _range(text: str | None) -> CoreRange | None:
    return None if text is None else CoreRange.parse(text)


def _spec_of(fleet: AdminClient) -> Spec | None:
    told = fleet.get("spec")
    return parse(told["text"], told["file"], told["base_dir"]).spec


def _changes(spec: Spec, before: Spec | None, result: Plan, running: Sequence[Running]) -> list[dict[str, str]]:
    """One entry for each replica that would change: start, stop, move (to other cores), restart (on the same ones),
    reconfigure (while it runs)."""
    is_now = {(item.model, item.replica): item for item in running}
    changes = []
    for placement in result.placements:
        key = (placement.model, placement.replica)
        now = is_now.pop(key, None)
        if now is None:
            change = "start"
        elif (now.host, now.cores) != (placement.host, placement.cores):
            change = "move"
        elif (difference := _difference(before, spec, placement.model)) is not None:
            change = difference
        else:
            continue
        changes.append({"replica": f"{placement.model}/{placement.replica}", "change": change})
    changes += [{"replica": f"{model}/{replica}", "change": "stop"} for model, replica in is_now]
    return changes


def _difference(before: Spec | None, after: Spec, name: str) -> str | None:
    """What a model's new fields mean for a replica that stays on its cores."""
    old, new = before.model(name) if before is not None else None, after.model(name)
    if old is None or new is None or old.started_with != new.started_with:
        return "restart"
    return None if old.max_queue == new.max_queue else "reconfigure"


def _table(file: SpecFile, result: Plan, changes: Sequence[dict[str, str]]) -> str:
    tags = {change["replica"]: change["change"] for change in changes}
    rows: list[tuple[object, ...]] = [
        (
            f"{item.model}/{item.replica}",
            item.host,
            item.cores,
            item.threads,
            tags.pop(f"{item.model}/{item.replica}", "none"),
        )
        for item in result.placements
    ]
    rows += [(replica, None, None, None, change) for replica, change in tags.items()]
    parts = [columns(("REPLICA", "HOST", "CORES", "THREADS", "CHANGE"), rows)]
    parts += [core_map(result, file.hosts)]
    for missing in result.unplaced:
        reasons = "; ".join(problem.what for problem in missing.problems)
        parts.append(f"unplaced: {missing.model}/{missing.replica}: {reasons}")
    starts = sum(change["change"] != "stop" for change in changes)
    parts.append(
        f"{len(changes)} change{'s' if len(changes) != 1 else ''} ({starts} to start)" if changes else "nothing to do"
    )
    return "\n\n".join(part.rstrip("\n") for part in parts)
