"""The command `verify`: proves or refutes on this machine what plans and docs assume about it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from orchestrator.cli.app import FAILED, FormatOption, app, argument, one_of, option, switch
from orchestrator.cli.client import find_fleet
from orchestrator.cli.doctor import examination
from orchestrator.cli.output import Format, say, show, write
from orchestrator.control.resolve.spec_file import load
from orchestrator.process.failure import Failed
from orchestrator.process.home import Home
from placements.facts.neuron_releases import sdk_of
from placements.facts.plural import counted


@app.command()
def verify(
    spec: Annotated[str | None, argument("SPEC", "Spec whose host, engines and models to verify.")] = None,
    full: Annotated[
        bool, switch("--full", "Measure every legal start, 20 kills, and prompts of 4,096 tokens.")
    ] = False,
    quick: Annotated[bool, switch("--quick", "Measure the least for each claim, which is the default.")] = False,
    only: Annotated[
        list[str] | None, option("PART", "Only this part. Repeatable.", "--only", default="all parts")
    ] = None,
    engine: Annotated[str | None, option("NAME", "Engine to verify.", default="that of SPEC, else auto")] = None,
    dry_run: Annotated[bool, switch("--dry-run", "Only show what would be measured, and for how long.")] = False,
    markdown_file: Annotated[Path | None, option("FILE", "Write the report to FILE as Markdown.", "--markdown")] = None,
    bundle_file: Annotated[
        Path | None,
        option("FILE", "Write the report to FILE, a .tar.gz, without names, paths, addresses and secrets.", "--bundle"),
    ] = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Measure on free cores what plans and docs assume about this machine, and exit with 1 if a claim is refuted."""
    from orchestrator.verify import report as reports
    from orchestrator.verify import verification
    from orchestrator.verify.claims import PARTS
    from orchestrator.verify.trials import FULL, QUICK

    if full and quick:
        raise typer.BadParameter("use one of --full and --quick")
    for part in only or ():
        one_of("--only", part, PARTS)
    chosen = [part for part in PARTS if not only or part in only]
    home = Home.from_environment()
    home.prepare()
    file = None if spec is None else load(spec, folders="plan")
    report = examination(file)
    tools = report.readings.facts.versions
    known = {"driver": tools.driver, "runtime": tools.runtime, "tools": tools.tools}
    for item in report.readings.all_interpreters:
        known |= {"SDK": sdk_of(item.packages), **item.engines}
    versions = {name: version for name, version in known.items() if version}
    machine = verification.machine_of(file, engine, home, report.readings.facts, report.problems, versions)
    extent = FULL if full else QUICK
    seconds = verification.predicted_s(machine, verification.trials_of(machine, extent, chosen), chosen)
    held = f"; {len(machine.busy)} are in use" if machine.busy else ""
    minutes = counted(max(1, round(seconds / 60)), "minute")
    say(f"verifying {machine.engine} on {len(machine.free)} free cores{held}: about {minutes}")
    if dry_run:
        return
    began, verdicts = time.monotonic(), []
    for verdict in verification.verify(machine, extent, chosen, home, find_fleet() is None, say):
        verdicts.append(verdict)
        if verdict.result != "proved":
            say(f"{verdict.result}: {verdict.claim} {verdict.subject}: {verdict.finding}")
    data = reports.report_of(machine, verdicts, time.monotonic() - began)
    text = reports.markdown(data)
    show(data, output, text)
    if markdown_file is not None:
        write(markdown_file, f"{text}\n")
    if bundle_file is not None:
        models = () if file is None or file.spec is None else (model.name for model in file.spec.models)
        try:
            reports.bundle(data, bundle_file, tuple(models))
        except OSError as error:
            raise Failed("output-unwritable", f"{bundle_file}: {error.strerror}", "pass another FILE") from None
    raise typer.Exit(FAILED if data["refuted"] else 0)
