"""The commands `validate` and `schema`: check a spec, and print the JSON Schema of specs."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from orchestrator.cli.app import FAILED, FormatOption, SpecArgument, app
from orchestrator.cli.output import Format, show
from orchestrator.revisions.spec_file import load
from placements.facts.plural import counted
from placements.rules.checks import NEVER_FIT
from placements.spec.json_schema import json_schema


@app.command()
def validate(
    spec: SpecArgument,
    offline: Annotated[
        bool, typer.Option("--offline", help="Report model folders that cannot be loaded as warnings, not errors.")
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
    show({"problems": [problem.as_dict() for problem in problems]}, output, verdict, problems)
    raise typer.Exit(FAILED if count else 0)


@app.command()
def schema() -> None:
    """Print the JSON Schema of specs, for editors."""
    show(json_schema(), Format.JSON, "")
