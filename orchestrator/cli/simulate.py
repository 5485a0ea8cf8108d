"""The command `simulate`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer

from orchestrator.cli.app import FAILED, FormatOption, SpecArgument, app
from orchestrator.cli.output import Format, complain, say, show, write
from orchestrator.process.durations import moment

if TYPE_CHECKING:
    from orchestrator.revisions.spec_file import SpecFile
    from orchestrator.simulate.inputs import MadeUp

BEGINS = "2026-01-05"  # a Monday
OF_THIS_MACHINE = ("threads-oversubscribed",)  # warnings that do not matter where nothing is started


@app.command()
def simulate(
    spec: SpecArgument,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Requests that were: CSV or JSON lines, as `trace export` gives."),
    ] = None,
    generate: Annotated[
        str | None, typer.Option(metavar="KIND", help="Or made up: poisson, gamma, diurnal, onoff or mixed.")
    ] = None,
    rate: Annotated[
        float, typer.Option(min=0.0001, max=100000, metavar="R", help="Requests/s in the long run, of all models.")
    ] = 1.0,
    cv: Annotated[
        float | None,
        typer.Option(
            min=0, max=50, metavar="CV", help="Coefficient of variation of the gaps.", show_default="4 of gamma, else 1"
        ),
    ] = None,
    duration: Annotated[float, typer.Option(min=1, max=31_536_000, metavar="S", help="Seconds of requests.")] = 3600.0,
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Of arrivals and lengths.")] = 0,
    lengths: Annotated[
        str, typer.Option(metavar="NAME|PROMPT:OUTPUT", help="chat, a sample of Azure's trace; or two numbers.")
    ] = "chat",
    share: Annotated[
        list[str] | None,
        typer.Option(metavar="MODEL=W", help="Its part of the requests, against 1 of every other. Repeatable."),
    ] = None,
    against: Annotated[
        str | None, typer.Option(metavar="SPEC2", help="Give the same load to this one too, and show both.")
    ] = None,
    hosts: Annotated[
        int | None, typer.Option(min=1, max=4096, metavar="N", help="So many hosts, in place of the spec's number.")
    ] = None,
    gateways: Annotated[int, typer.Option(min=1, max=64, metavar="N", help="Gateways that share the requests.")] = 1,
    policy: Annotated[
        str, typer.Option(metavar="NAME", help="auto: the autoscaler; fixed: each model keeps its `replicas.min`.")
    ] = "auto",
    speeds: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Measured speeds, as `trace export --speeds` gives.")
    ] = None,
    begins: Annotated[
        str | None, typer.Option(metavar="DATE", help="When it begins, for schedules.", show_default=BEGINS)
    ] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page with plots.")] = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Play a load through the planner, the router and the autoscaler, in virtual time. Needs no fleet and no device."""
    from orchestrator.revisions.spec_file import load
    from orchestrator.simulate.inputs import POLICIES, SimulationInputs, answer
    from orchestrator.simulate.page import page
    from orchestrator.simulate.report import text
    from orchestrator.simulate.trace_file import TraceWrong
    from placements.spec.problems import has_errors

    if trace is None and generate is None:
        raise typer.BadParameter("is needed, or --generate: one of them", param_hint="--trace")
    if trace is not None and generate is not None:
        raise typer.BadParameter("does not go with --generate: one of them says what the load is", param_hint="--trace")
    found = next((known for known in POLICIES if known == policy), None)
    if found is None:
        raise typer.BadParameter(f"{policy!r} is none of {', '.join(POLICIES)}", param_hint="--policy")
    files = tuple(load(name, folders="ignore") for name in ([spec] if against is None else [spec, against]))
    made = None if generate is None else _made_up(generate, rate, duration, lengths, cv, _shares(share, files[0]))
    wanted = made or trace
    assert wanted is not None
    at = None if begins is None else _date(begins)
    question = SimulationInputs(files, wanted, hosts, gateways, found, speeds, at, seed)
    for file in files:
        if not has_errors(file.problems):  # errors are told with the failure
            complain([problem for problem in file.problems if problem.id not in OF_THIS_MACHINE])
    try:
        played = answer(question, say)
    except TraceWrong as error:
        complain(error.problems)
        if error.more:
            say(f"and {error.more} more")
        raise typer.Exit(FAILED) from None
    told = {"load": played.load, "policy": policy, "seed": seed, "runs": list(played.runs)}
    show(told, output, text(played.runs, played.load))
    if html is not None:
        write(html, page(played.runs, played.outcomes, played.load))


def _made_up(
    kind: str, rate: float, seconds: float, lengths: str, cv: float | None, shares: dict[str, float]
) -> MadeUp:
    from orchestrator.bench.lengths import Lengths
    from orchestrator.simulate.inputs import MadeUp
    from orchestrator.simulate.workload import Kind

    known: tuple[Kind, ...] = get_args(Kind)
    found = next((one for one in known if one == kind), None)
    if found is None:
        raise typer.BadParameter(f"{kind!r} is none of {', '.join(known)}", param_hint="--generate")
    try:
        return MadeUp(found, rate, seconds, Lengths.parse(lengths), cv, shares)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--lengths") from None


def _shares(given: list[str] | None, file: SpecFile) -> dict[str, float]:
    shares: dict[str, float] = {}
    for text in given or ():
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
        raise typer.BadParameter(f"{text!r} is no date of ISO 8601, such as {BEGINS}", param_hint="--begins") from None
