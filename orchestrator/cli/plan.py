"""`corewright plan`: what the daemon would do with a spec, said by the controller, or by the same code without one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.cli.client import AdminClient, FleetRefused
from orchestrator.cli.output import columns
from orchestrator.failure import Failed
from orchestrator.specfile import SpecFile
from placements.coremap import core_map
from placements.cores import CoreRange
from placements.plan import Placement, Plan, plan
from placements.problems import Problem, has_errors
from placements.topology import Host

KINDS = ("start", "stop", "move", "restart", "reconfigure")


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
    if fleet is None or not file.text:
        return _alone(file)
    try:
        data = fleet.post_spec("plan", text_of(file))
    except FleetRefused as refused:
        if not refused.problems:
            raise
        data = _nothing(refused.problems)
    problems = problems_of(data)
    return PlanResult(data, plan_table(data, file.hosts), problems, plan_fails(data), plan_changes(data))


def text_of(file: SpecFile) -> tuple[str, str, str]:
    """What the controller is told of a spec. Raises Failed when there is nothing to tell."""
    if not file.text and file.problems:
        problem = file.problems[0]
        raise Failed(problem.id, problem.what, problem.hint)
    return file.text, file.name, file.base_dir


def problems_of(data: dict[str, Any]) -> tuple[Problem, ...]:
    return tuple(Problem(**problem) for problem in data["problems"])


def plan_fails(data: dict[str, Any]) -> bool:
    """Whether it could not be applied: an error, or a replica that `min` asks for without a place."""
    missing = [problem for unplaced in data["unplaced"] for problem in unplaced["problems"]]
    return any(problem["severity"] == "error" for problem in [*data["problems"], *missing])


def plan_changes(data: dict[str, Any]) -> bool:
    return bool(data["changes"]) or any(_changed(model) for model in data["models"])


def _alone(file: SpecFile) -> PlanResult:
    if file.spec is None or has_errors(file.problems):
        return PlanResult(_nothing(file.problems), "", file.problems, failed=True, changes=False)
    result = plan(file.spec, file.hosts, file.checkpoints)
    problems = (*file.problems, *result.problems)
    data = result.as_dict()
    data["problems"] = [problem.as_dict() for problem in problems]
    data["changes"] = [{"replica": f"{p.model}/{p.replica}", "change": "start"} for p in result.placements]
    data = {"index": None, "revision": None, **data, "models": []}
    return PlanResult(data, plan_table(data, file.hosts), problems, not result.complete, bool(data["changes"]))


def _nothing(problems: Sequence[Problem]) -> dict[str, Any]:
    told = [problem.as_dict() for problem in problems]
    return {
        "index": None,
        "revision": None,
        "placements": [],
        "unplaced": [],
        "problems": told,
        "changes": [],
        "models": [],
    }


def plan_table(data: dict[str, Any], hosts: Sequence[Host]) -> str:
    """For a person: replicas, the core map, what becomes of each model, and how many changes that makes."""
    if has_errors(problems_of(data)):
        return ""
    tags = {change["replica"]: change["change"] for change in data["changes"]}
    rows: list[tuple[object, ...]] = []
    for item in data["placements"]:
        id = f"{item['model']}/{item['replica']}"
        rows.append((id, item["host"], item["cores"], item["threads"], tags.pop(id, "none")))
    rows += [(replica, None, None, None, change) for replica, change in tags.items()]
    parts = [columns(("REPLICA", "HOST", "CORES", "THREADS", "CHANGE"), rows)]
    placements = tuple(_placement(item) for item in data["placements"])
    if {placement.host for placement in placements} <= {host.name for host in hosts}:
        parts.append(core_map(Plan(placements), hosts))
    parts += ["\n".join(lines) for lines in map(model_lines, data["models"]) if lines]
    for missing in data["unplaced"]:
        parts.append("\n".join(f"unplaced: {problem['what']}" for problem in missing["problems"]))
    parts.append(_count(data))
    if data["index"] is not None:
        parts.append(f"check index: {data['index']}")
    return "\n\n".join(part.rstrip("\n") for part in parts)


def _placement(item: dict[str, Any]) -> Placement:
    cores = None if item["cores"] is None else CoreRange.parse(item["cores"])
    return Placement(item["model"], item["replica"], item["host"], cores, item["threads"])


def _count(data: dict[str, Any]) -> str:
    kinds = Counter(change["change"] for change in data["changes"])
    parts = ", ".join(f"{kinds[kind]} to {kind}" for kind in KINDS if kinds[kind])
    count = len(data["changes"])
    if count:
        return f"{count} change{'s' if count != 1 else ''} ({parts})"
    return "no replica changes" if plan_changes(data) else "nothing to do"


def _changed(model: dict[str, Any]) -> bool:
    replicas = model["replicas"]
    return model["tag"] != "none" or bool(model["fields"]) or replicas["before"] != replicas["after"]


def model_lines(model: dict[str, Any]) -> list[str]:
    """What becomes of a model: its tag, how it is updated and what that costs, and its fields; nothing: no lines."""
    if not _changed(model):
        return []
    how = [model["tag"]]
    if model["strategy"]:
        how.append(model["strategy"] + (f" from {model['borrow']}" if model.get("borrow") else ""))
    if model["outage_s"] is not None:
        how.append(f"outage {_seconds(model['outage_s'])}")
    if model["predicted_s"] is not None:
        how.append(f"done in {_seconds(model['predicted_s'])}")
    lines = [f"{model['model']}: {', '.join(how)}"]
    if model["why"]:
        lines.append(f"    why: {model['why']}")
    replicas = model["replicas"]
    if replicas["before"] != replicas["after"]:
        lines.append(f"    replicas: {replicas['before']} -> {replicas['after']}")
    lines += [f"    {f['field']}: {_said(f['before'])} -> {_said(f['after'])}" for f in model["fields"]]
    return lines


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if 0 < value < 10 else f"{value:.0f} s"


def _said(value: Any) -> str:
    import json

    if value is None:
        return "unset"
    return value if isinstance(value, str) else json.dumps(value)
