"""The command `plan`: previews placement and changes."""

from __future__ import annotations

from typing import Annotated

import typer

from orchestrator.cli.app import FormatOption, OfflineOption, OptionalSpecArgument, SpeedsOption, app
from orchestrator.cli.client import AdminClient, with_fleet
from orchestrator.cli.defrag import make_defrag
from orchestrator.cli.output import Format, show
from orchestrator.cli.plan_result import PlanResult, make_plan
from orchestrator.revisions.spec_file import load
from orchestrator.simulate.speeds import read_speeds


@app.command()
def plan(
    spec: OptionalSpecArgument = None,
    defrag: Annotated[
        int | None,
        typer.Option(min=1, max=1000, metavar="N", help="Show which replicas must move to free N contiguous cores."),
    ] = None,
    brief: Annotated[bool, typer.Option("--brief", help="Omit memory, speeds, threads and environments.")] = False,
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
