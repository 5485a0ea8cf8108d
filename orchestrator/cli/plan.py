"""The commands `validate`, `schema` and `plan`: check a spec, and preview its placement and changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

import typer

from orchestrator.cli.app import (
    FAILED,
    FormatOption,
    OfflineOption,
    OptionalSpecArgument,
    SpecArgument,
    SpeedsOption,
    app,
    option,
    switch,
)
from orchestrator.cli.client import AdminClient, FleetRefused, with_fleet
from orchestrator.cli.output import Format, show
from orchestrator.cli.plan_result import (
    PlanResult,
    cores_text,
    make_plan,
    move_lines,
    picture,
    problems_of,
    seconds,
    text_of,
)
from orchestrator.control.resolve.spec_file import SpecFile, load, this_machine
from orchestrator.process.failure import Failed
from orchestrator.simulate.speeds import read_speeds
from placements.facts.core_range import CoreRange
from placements.facts.plural import counted
from placements.facts.topology import Host
from placements.planner.plan import plan as place
from placements.planner.spec_hosts import hosts_for
from placements.rules.checks import NEVER_FIT
from placements.spec.json_schema import json_schema
from placements.spec.parse import parse
from placements.spec.problems import Problem, has_errors
from placements.spec.schema import Spec


@app.command()
def plan(
    spec: OptionalSpecArgument = None,
    defrag: Annotated[
        int | None, option("N", "Show which replicas must move to free N contiguous cores.", min=1, max=1000)
    ] = None,
    brief: Annotated[bool, switch("--brief", "Omit memory, speeds, threads and environments.")] = False,
    offline: OfflineOption = False,
    speeds: SpeedsOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Preview placement and changes. Compares with the running fleet, if there is one."""
    if spec is None and (defrag is None or offline):
        raise typer.BadParameter("required, except with --defrag and a running fleet", param_hint="SPEC")
    file = None if spec is None else load(spec, folders="plan" if offline else "load")

    measured = read_speeds(speeds)

    def planned(fleet: AdminClient | None) -> PlanResult:
        if defrag is not None:
            return make_defrag(file, fleet, defrag)
        assert file is not None
        return make_plan(file, fleet, brief=brief, measured=measured)

    result = with_fleet(spec or "", offline, planned)
    show(result.data, output, result.table, result.problems)
    raise typer.Exit(result.exit_code)


def make_defrag(file: SpecFile | None, fleet: AdminClient | None, cores: int) -> PlanResult:
    """Returns the window and its moves, from the state of the fleet, or without one from the plan of the file."""
    if fleet is None:
        if file is None:
            raise Failed("no-fleet", "no fleet is running", "pass a spec: corewright plan --defrag N SPEC")
        return _without_fleet(file, cores)
    if file is None:
        current = fleet.get("spec")
        source = (current["text"], current["file"], current["base_dir"])
        spec = parse(*source).spec
        hosts = hosts_for(spec, this_machine()) if spec is not None else ()
    else:
        source, spec, hosts = text_of(file), file.spec, file.hosts
    try:
        data = fleet.post_spec("plan", source, defrag=cores)
    except FleetRefused as refused:
        if not refused.problems:
            raise
        data = _empty(refused.problems, cores)
    return _result(data, hosts, spec)


def _without_fleet(file: SpecFile, cores: int) -> PlanResult:
    if file.spec is None or has_errors(file.problems):
        return _result(_empty(file.problems, cores), file.hosts, None)
    from orchestrator.control.decisions.relocation import (  # takes 0.1 s; only --defrag needs it
        RunningFleet,
        defragmentation,
    )

    running = RunningFleet(
        [placement.running for placement in place(file.spec, file.hosts, file.checkpoints).placements]
    )
    data = {"index": None, "revision": None, **defragmentation(file.spec, file.hosts, file.checkpoints, running, cores)}
    data["problems"] = [*(problem.as_dict() for problem in file.problems), *data["problems"]]
    return _result(data, file.hosts, file.spec)


def _empty(problems: Sequence[Problem], cores: int) -> dict[str, Any]:
    return {
        "index": None,
        "revision": None,
        "cores": cores,
        "window": None,
        "moves": [],
        "load_s": None,
        "placements": [],
        "hosts": [],
        "problems": [problem.as_dict() for problem in problems],
    }


def _result(data: dict[str, Any], hosts: Sequence[Host], spec: Spec | None) -> PlanResult:
    failed = data["window"] is None
    return PlanResult(data, "" if failed else _table(data, hosts, spec), problems_of(data), failed, bool(data["moves"]))


def _table(data: dict[str, Any], hosts: Sequence[Host], spec: Spec | None) -> str:
    """Returns the window's host after the moves, the moves, and their duration."""
    window = data["window"]
    hosts_shown = [host for host in hosts if host.name == window["host"]]
    on_host = {**data, "placements": [item for item in data["placements"] if item["host"] == window["host"]]}
    on_host["hosts"] = [host for host in data["hosts"] if host["name"] == window["host"]]
    moves = data["moves"]
    parts = [picture(on_host, hosts_shown, spec, (window["host"], CoreRange.parse(window["cores"])))]
    parts.append("\n".join(move_lines(moves)))
    count = counted(data["cores"], "core")
    where = f"{window['host']} {cores_text(window['cores'])}"
    if not moves:
        parts.append(f"a window of {count} is free: {where}")
    else:
        takes = "" if data["load_s"] is None else f", {seconds(data['load_s'])} of loading"
        parts.append(f"{counted(len(moves), 'move')} would open a window of {count}: {where}{takes}")
    if data["index"] is not None:
        parts.append(f"check index: {data['index']}")
    return "\n\n".join(part.rstrip("\n") for part in parts if part)


@app.command()
def validate(
    spec: SpecArgument,
    offline: Annotated[
        bool, switch("--offline", "Report model folders that cannot be loaded as warnings, not errors.")
    ] = False,
    output: FormatOption = Format.TABLE,
) -> None:
    """Check a spec and report all errors and warnings. Needs no device, no engine package and no fleet."""
    file = load(spec, folders="plan" if offline else "load")
    problems = file.problems
    if file.spec is not None and file.spec.hosts:
        problems = tuple(
            replace(problem, severity="error") if problem.id in NEVER_FIT else problem for problem in problems
        )
    count = len([problem for problem in problems if problem.severity == "error"])
    verdict = f"{file.name}: {counted(count, 'error')}" if count else f"{file.name}: valid"
    show({"problems": problems}, output, verdict, problems)
    raise typer.Exit(FAILED if count else 0)


@app.command()
def schema() -> None:
    """Print the JSON Schema of specs, for editors."""
    show(json_schema(), Format.JSON, "")
