"""Commands about load that was, or that may come: `simulate`, `trace export`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrator.cli.app import FAILED, FormatOption, SpecArgument, app, group, the_fleet
from orchestrator.cli.output import Format, complain, say, show, stdout
from orchestrator.failure import Failed

if TYPE_CHECKING:
    from orchestrator.simulate.fromspec import Read
    from orchestrator.simulate.request import Arrival
    from orchestrator.simulate.run import Outcome
    from orchestrator.specfile import SpecFile

PAGE = 5000  # requests that are asked for at once
BEGINS = "2026-01-05"  # a Monday
POLICIES = ("auto", "fixed")

trace = group("trace", help="What was asked of the models, in lengths: for `simulate`.")


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
    from orchestrator.simulate.page import page
    from orchestrator.simulate.report import run_data, text
    from orchestrator.specfile import load

    if (trace is None) == (generate is None):
        raise typer.BadParameter("is needed, or --generate: one of them", param_hint="--trace")
    if policy not in POLICIES:
        raise typer.BadParameter(f"{policy!r} is none of {', '.join(POLICIES)}", param_hint="--policy")
    names = (spec,) if against is None else (spec, against)
    reads = [_read(load(name), hosts, gateways, speeds) for name in names]
    if generate is not None:
        made, told = _made(reads, generate, rate, cv, duration, seed, lengths, _shares(share, reads[0]))
        began = None
    else:
        assert trace is not None
        made, told, began = _traced(trace, reads)
    at = _date(begins) if begins is not None else began if began is not None else _date(BEGINS)
    outcomes = [_run(read, made, policy, seed, at) for read in reads]
    runs = [run_data(read, outcome) for read, outcome in zip(reads, outcomes, strict=True)]
    show({"load": told, "policy": policy, "seed": seed, "runs": runs}, output, text(runs, told))
    if html is not None:
        _write(html, page(runs, outcomes, told))


@trace.command()
def export(
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Write it there.", show_default="to stdout")
    ] = None,
    speeds: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write how fast the replicas were, for `simulate --speeds`.")
    ] = None,
) -> None:
    """Write what the running fleet was asked lately as CSV: times, models, lengths and the ids of keys, no texts."""
    import io
    import json

    from orchestrator.simulate.speeds import measured_speeds
    from orchestrator.simulate.tracefile import write_trace

    client = the_fleet()
    requests: list[dict[str, Any]] = []
    measured: dict[str, dict[str, float]] = {}
    after, more = "", True
    while more:
        told = client.get("trace", {"after": after, "limit": PAGE})
        requests += told["requests"]
        measured, after, more = told["speeds"], told["next"], told["more"]
    lines = io.StringIO()
    count = write_trace(requests, lines)
    if out is None:
        stdout().write(lines.getvalue())
        stdout().flush()
    else:
        _write(out, lines.getvalue())
    if speeds is not None:
        fitted = measured_speeds(requests)
        known = {name: {field: value for field, value in one.items() if value} for name, one in measured.items()}
        each = {name: {**known.get(name, {}), **fitted.get(name, {})} for name in {*known, *fitted}}
        _write(speeds, json.dumps({name: told for name, told in sorted(each.items()) if told}, indent=2) + "\n")
        if unknown := sorted(name for name, told in fitted.items() if "prefill_token_ms" not in told):
            say(
                f"no prefill of {', '.join(unknown)}: its prompts were few, or of about one length; it will be estimated"
            )
    say(f"{count} requests")
    if not count:
        raise typer.Exit(FAILED)


def _read(file: SpecFile, hosts: int | None, gateways: int, speeds: Path | None) -> Read:
    from orchestrator.simulate.fromspec import scenario_of
    from orchestrator.simulate.speeds import parse_speeds

    told = None
    if speeds is not None and file.spec is not None:
        told = parse_speeds(_text(speeds), str(speeds), (model.name for model in file.spec.models))
    return scenario_of(file, hosts=hosts, gateways=gateways, told=told)


def _made(
    reads: list[Read],
    kind: str,
    rate: float,
    cv: float | None,
    duration: float,
    seed: int,
    lengths: str,
    shares: dict[str, float],
) -> tuple[Iterable[Arrival], str]:
    """The arrivals, and what they are in words."""
    from orchestrator.bench.lengths import Lengths
    from orchestrator.simulate.report import span
    from orchestrator.simulate.workload import KINDS, Workload

    if kind not in KINDS:
        raise typer.BadParameter(f"{kind!r} is none of {', '.join(KINDS)}", param_hint="--generate")
    try:
        wanted = Lengths.parse(lengths)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--lengths") from None
    names = [{model.name for model in read.scenario.models} for read in reads]
    models = tuple(model.name for model in reads[0].scenario.models if all(model.name in each for each in names))
    if not models:
        raise Failed("no-model-in-common", "the two specs have no model in common", "the load is for those in both")
    capped = {name: wanted.within(min(_length(read, name) for read in reads)) for name in models}
    load = Workload(kind, models, rate, duration, seed, cv, capped, shares)
    return load, f"{kind}, {rate:g} requests/s for {span(duration)}, lengths {lengths}, seed {seed}"


def _traced(trace: Path, reads: list[Read]) -> tuple[Iterable[Arrival], str, float | None]:
    """The arrivals, what they are in words, and when they began."""
    from orchestrator.simulate.report import span
    from orchestrator.simulate.tracefile import TraceWrong, fitted, read_trace

    called = [
        {alias: model.name for model in read.scenario.spec.models for alias in (model.name, *model.aliases)}
        for read in reads
    ]
    common = {alias: name for alias, name in called[0].items() if all(alias in each for each in called)}
    try:
        with trace.open(encoding="utf-8", newline="") as stream:
            found = read_trace(stream, str(trace), common)
    except (OSError, UnicodeDecodeError) as error:
        what = f"{trace} cannot be read: {getattr(error, 'strerror', None) or error}"
        raise Failed("trace-unreadable", what, "is the path right?") from None
    except TraceWrong as error:
        complain(error.problems)
        raise typer.Exit(FAILED) from None
    limits = {name: min(_length(read, name) for read in reads) for name in found.models}
    fit, cut = fitted(found, limits)
    if cut:
        many = "request is" if cut == 1 else "requests are"
        say(f"{cut} {many} longer than a slot of the model, and cut")
    return fit, f"{trace}: {len(found)} requests in {span(found.seconds)}", found.begins


def _length(read: Read, name: str) -> int:
    """Tokens of a slot."""
    model = read.scenario.spec.model(name)
    assert model is not None
    return model.length(read.scenario.checkpoints.get(name))


def _run(read: Read, arrivals: Iterable[Arrival], policy: str, seed: int, begins: float) -> Outcome:
    from orchestrator.simulate.fromspec import bounds_at
    from orchestrator.simulate.run import simulate as play
    from orchestrator.simulate.scaling import Fixed, Joint

    scenario = read.scenario
    chosen = Joint() if policy == "auto" else Fixed({model.name: model.min for model in scenario.models})
    return play(scenario, arrivals, chosen, seed=seed, bounds=bounds_at(scenario.spec, begins), record=True)


def _shares(given: list[str] | None, read: Read) -> dict[str, float]:
    shares: dict[str, float] = {}
    known = {model.name for model in read.scenario.models}
    for text in given or ():
        name, equals, number = text.partition("=")
        try:
            share = float(number)
        except ValueError:
            share = -1.0
        if not equals or not 0 <= share < 1e9:
            raise typer.BadParameter(f"{text!r} is not of the form MODEL=2.5", param_hint="--share")
        if name not in known:
            raise typer.BadParameter(f"the spec has no model {name!r}", param_hint="--share")
        shares[name] = share
    return shares


def _date(text: str) -> float:
    from datetime import datetime, timezone

    try:
        moment = datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no date of ISO 8601, such as {BEGINS}", param_hint="--begins") from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)).timestamp()


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        what = f"{path} cannot be read: {getattr(error, 'strerror', None) or error}"
        raise Failed("speeds-wrong", what, "is the path right?") from None


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise Failed("output-unwritable", f"{path}: {error.strerror}", "another FILE") from None
    say(f"written to {path}")
