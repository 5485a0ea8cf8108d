"""The command `simulate`: simulates a fleet under a load, in virtual time."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from orchestrator.cli.app import FAILED, FormatOption, SpecArgument, SpeedsOption, app, bad_parameter, one_of, option
from orchestrator.cli.output import Format, complain, say, show, write
from orchestrator.control.decisions.host_demand import START_S
from orchestrator.control.resolve.spec_file import SpecFile, load
from orchestrator.process.durations import moment
from orchestrator.simulate import report
from orchestrator.simulate.inputs import POLICIES, SimulationInputs, run_simulation
from orchestrator.simulate.page import page
from orchestrator.simulate.trace_file import InvalidTrace
from orchestrator.simulate.workload import KINDS, Lengths, Workload
from placements.spec.problems import has_errors

BEGINS = "2026-01-05"  # a Monday
OF_THIS_MACHINE = ("threads-oversubscribed",)  # warnings that do not matter, because nothing is started


@app.command()
def simulate(
    spec: SpecArgument,
    trace: Annotated[
        Path | None, option("FILE", "Recorded requests: CSV or JSON lines, as written by `trace export`.")
    ] = None,
    generate: Annotated[
        str | None, option("KIND", "Generated requests: poisson, gamma, diurnal, onoff or mixed.")
    ] = None,
    rate: Annotated[
        float, option("R", "Mean request rate of all models, in requests/s.", min=0.0001, max=100000)
    ] = 1.0,
    cv: Annotated[
        float | None,
        option(
            "CV", "Coefficient of variation of the interarrival times.", default="4 for gamma, else 1", min=0, max=50
        ),
    ] = None,
    duration: Annotated[float, option("S", "Duration of the arrivals, in seconds.", min=1, max=31_536_000)] = 3600.0,
    seed: Annotated[int, option("N", "Random seed of arrivals and lengths.", min=0)] = 0,
    lengths: Annotated[
        str,
        option(
            "NAME|PROMPT:OUTPUT",
            "Token lengths: chat (sampled from the Azure trace of 2023), or fixed, such as 512:128.",
        ),
    ] = "chat",
    share: Annotated[
        list[str] | None, option("MODEL=W", "Weight of a model's request rate; other models have 1. Repeatable.")
    ] = None,
    against: Annotated[
        str | None, option("SPEC2", "Simulate a second spec with the same load, and compare both.")
    ] = None,
    hosts: Annotated[int | None, option("N", "Number of hosts.", default="the spec's number", min=1, max=4096)] = None,
    host_start: Annotated[
        float, option("S", "Start time of a machine, for hosts with `max`, in seconds.", min=0, max=86400)
    ] = START_S,
    gateways: Annotated[int, option("N", "Number of gateway processes that share the requests.", min=1, max=64)] = 1,
    policy: Annotated[
        str, option("NAME", "Scaling policy: auto (the autoscaler) or fixed (always `replicas.min`).")
    ] = "auto",
    speeds: SpeedsOption = None,
    begins: Annotated[str | None, option("DATE", "Simulated start time, for schedules.", default=BEGINS)] = None,
    html: Annotated[Path | None, option("FILE", "Write an HTML report with plots to FILE.")] = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Simulate a fleet under a load, in virtual time. Needs no fleet or devices."""
    if trace is None and generate is None:
        raise typer.BadParameter("no load: pass --generate poisson, or recorded requests with --trace FILE")
    if trace is not None and generate is not None:
        raise typer.BadParameter("cannot be combined with --generate", param_hint="--trace")
    chosen = one_of("--policy", policy, POLICIES)
    files = tuple(load(name, folders="ignore") for name in ([spec] if against is None else [spec, against]))
    generated = (
        None if generate is None else _generated_load(generate, rate, duration, lengths, cv, _shares(share, files[0]))
    )
    load_source = generated or trace
    assert load_source is not None
    at = None if begins is None else _date(begins)
    question = SimulationInputs(files, load_source, hosts, host_start, gateways, chosen, speeds, at, seed)
    for file in files:
        if not has_errors(file.problems):  # errors are reported with the failure
            complain([problem for problem in file.problems if problem.id not in OF_THIS_MACHINE])
    try:
        description, outcomes = run_simulation(question, say)
    except InvalidTrace as error:
        complain(error.problems)
        if error.more:
            say(f"and {error.more} more")
        raise typer.Exit(FAILED) from None
    runs = [report.run_data(outcome) for outcome in outcomes]
    show({"load": description, "policy": policy, "seed": seed, "runs": runs}, output, report.text(runs, description))
    if html is not None:
        write(html, page(runs, outcomes, description))


def _generated_load(
    kind: str, rate: float, seconds: float, lengths: str, cv: float | None, shares: dict[str, float]
) -> Workload:
    chosen = one_of("--generate", kind, KINDS)
    with bad_parameter("--lengths"):
        return Workload(chosen, (), rate, seconds, cv=cv, lengths=Lengths.parse(lengths), shares=shares)


def _shares(texts: list[str] | None, file: SpecFile) -> dict[str, float]:
    shares: dict[str, float] = {}
    for text in texts or ():
        name, equals, number = text.partition("=")
        try:
            share = float(number)
        except ValueError:
            share = -1.0
        if not equals or not 0 <= share < 1e9:
            raise typer.BadParameter(f"{text!r} is not of the form MODEL=2.5", param_hint="--share")
        if file.spec is not None and file.spec.model(name) is None:
            raise typer.BadParameter(f"the spec has no model {name!r}", param_hint="--share")
        shares[name] = share
    return shares


def _date(text: str) -> float:
    try:
        return moment(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not an ISO 8601 date such as {BEGINS}", param_hint="--begins") from None
