"""The entry point of `corewright`, and its commands for specs and for the life of a fleet.

Exit codes: 0 success, 1 failure, 64 wrong usage, 130 Ctrl-C during a wait. `plan`: 0 no changes, 2 changes, 1 errors or
unplaced replicas. `explain`: 0 when `min` replicas are placed, else 1. `diff`: 0 no differences, 2 differences.
`cache verify`: 0 when nothing would be compiled, else 1.
No module here imports Ray or torch before `up` starts a fleet, so that all other commands start fast.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.main import get_command

from orchestrator.cli.app import (
    CHANGES,
    FAILED,
    USAGE,
    FormatOption,
    ModelArgument,
    OfflineOption,
    OptionalSpecArgument,
    SpecArgument,
    app,
    setting_options,
    the_fleet,
)
from orchestrator.cli.output import Format, complain, say, show, stdout, use_color
from orchestrator.process.failure import Failed
from orchestrator.process.version import corewright_version
from placements.facts.plural import counted

if TYPE_CHECKING:
    from orchestrator.cli.client import AdminClient

__all__ = ["app", "apply", "bench", "cache", "compile", "keys", "main", "operate", "run", "simulate", "trace", "views"]

DOWN_SPARE_S = 20.0  # shutdown takes up to 10 s after the drain; twice that


@app.command()
@setting_options
def up(
    spec: SpecArgument,
    ray_address: Annotated[
        str | None, typer.Option(help="Address of an existing Ray cluster. Not supported yet.")
    ] = None,
    **flags: Any,
) -> None:
    """Start a fleet in the foreground. It runs until Ctrl-C, SIGTERM or `corewright down`."""
    from orchestrator.access.source_policy import SourcePolicy
    from orchestrator.daemon.settings import resolve
    from placements.spec.problems import has_errors

    if ray_address is not None:
        message = f"--ray-address {ray_address}: this version starts its own Ray cluster, on this machine"
        raise Failed("cluster-not-served", message, "remove the option")
    settings = resolve(flags)
    if settings.problems:
        complain(settings.problems)
    if has_errors(settings.problems):
        raise typer.Exit(FAILED)
    if settings["watch"] and spec == "-":
        raise Failed("watch-needs-file", "standard input cannot be watched", "pass the spec as a file, or --no-watch")
    from orchestrator.cli.up import check_listening, run_up
    from orchestrator.process.waiting_notice import WaitingNotice
    from orchestrator.revisions.spec_file import load

    check_listening(settings)
    allowed = SourcePolicy(settings["allowed_sources"])  # only the operator's own spec may name interpreters
    with WaitingNotice(say).waiting(lambda: "the sources of the spec"):
        file = load(spec, allowed)
    raise typer.Exit(run_up(file, settings))


@app.command()
def validate(
    spec: SpecArgument,
    offline: Annotated[
        bool, typer.Option("--offline", help="Report model folders that cannot be loaded as warnings, not errors.")
    ] = False,
    output: FormatOption = Format.TABLE,
) -> None:
    """Check a spec and report all errors and warnings. Needs no device, no weights and no fleet."""
    from orchestrator.revisions.spec_file import load
    from placements.spec.problems import has_errors

    file = load(spec, folders="plan" if offline else "load")
    count = len([problem for problem in file.problems if problem.severity == "error"])
    if output is Format.TABLE:
        complain(file.problems)
        verdict = f"{file.name}: {counted(count, 'error')}" if count else f"{file.name}: valid"
        show(None, output, verdict)
    else:
        show({"problems": [problem.as_dict() for problem in file.problems]}, output, "")
    raise typer.Exit(FAILED if has_errors(file.problems) else 0)


@app.command()
def plan(
    spec: OptionalSpecArgument = None,
    defrag: Annotated[
        int | None,
        typer.Option(min=1, max=1000, metavar="N", help="Show which replicas must move to free N contiguous cores."),
    ] = None,
    brief: Annotated[bool, typer.Option("--brief", help="Omit memory, threads and environments.")] = False,
    offline: OfflineOption = False,
    output: FormatOption = Format.TABLE,
) -> None:
    """Preview placement and changes. Compares with the running fleet, if there is one."""
    from orchestrator.cli.client import with_fleet
    from orchestrator.cli.plan import PlanResult, make_plan
    from orchestrator.revisions.spec_file import load

    if spec is None and (defrag is None or offline):
        raise typer.BadParameter("required, except with --defrag and a running fleet", param_hint="SPEC")
    file = None if spec is None else load(spec, folders="plan" if offline else "load")

    def planned(fleet: AdminClient | None) -> PlanResult:
        if defrag is not None:
            from orchestrator.cli.defrag import make_defrag

            return make_defrag(file, fleet, defrag)
        assert file is not None
        return make_plan(file, fleet, brief=brief)

    result = with_fleet(spec or "", offline, planned)
    if output is Format.TABLE:
        complain(result.problems)
    show(result.data, output, result.table)
    raise typer.Exit(FAILED if result.failed else CHANGES if result.changes else 0)


@app.command()
def explain(
    model: ModelArgument,
    spec: OptionalSpecArgument = None,
    offline: OfflineOption = False,
    output: FormatOption = Format.TABLE,
) -> None:
    """Explain the placement of a model. Shows why it has no place, and which changes would help."""
    from orchestrator.cli.client import with_fleet
    from orchestrator.cli.explain import explanation, explanation_text
    from orchestrator.revisions.spec_file import load

    if spec is None and offline:
        raise typer.BadParameter("required with --offline", param_hint="SPEC")
    file = None if spec is None else load(spec, folders="ignore")
    data = with_fleet(spec or "", offline, lambda fleet: explanation(file, fleet, model))
    show(data, output, explanation_text(data, color=use_color(stdout())))
    raise typer.Exit(0 if data["fits"] else FAILED)


@app.command()
def schema() -> None:
    """Print the JSON Schema of specs, for editors."""
    from placements.spec.json_schema import json_schema

    show(json_schema(), Format.JSON, "")


@app.command()
def generate(
    spec: SpecArgument,
    model: ModelArgument,
    prompt: Annotated[
        str, typer.Option(metavar="TEXT", help="User message; plain text for a model without a chat template.")
    ],
    raw: Annotated[bool, typer.Option("--raw", help="Send TEXT without the chat template.")] = False,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Maximum number of output tokens.", show_default="128")
    ] = None,
    temperature: Annotated[
        float, typer.Option(min=0, max=2, metavar="T", help="Sampling temperature; 0 is greedy.")
    ] = 0.0,
    top_k: Annotated[
        int, typer.Option(min=0, metavar="K", help="Sample from the K most probable tokens; 0 disables the limit.")
    ] = 0,
    top_p: Annotated[
        float,
        typer.Option(
            min=0.001, max=1, metavar="P", help="Sample from the most probable tokens with a total probability of P."
        ),
    ] = 1.0,
) -> None:
    """Generate one answer with a model, without a fleet."""
    from orchestrator.cli.generate import generate as answer
    from orchestrator.revisions.spec_file import load

    how = {"raw": raw, "max_tokens": max_tokens, "temperature": temperature, "top_k": top_k, "top_p": top_p}
    raise typer.Exit(answer(load(spec, folders="plan"), model, prompt, how))


@app.command()
def doctor(
    spec: Annotated[
        str | None, typer.Argument(metavar="SPEC", help="Spec whose hosts, engines and interpreters to check too.")
    ] = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Check this machine: versions, Neuron devices and engines."""
    from orchestrator.cli.doctor import examination, text
    from orchestrator.revisions.spec_file import load

    report = examination(None if spec is None else load(spec))
    if output is Format.TABLE:
        complain(report.problems)
    show(report.as_dict(), output, text(report))
    raise typer.Exit(FAILED if report.problems else 0)


@app.command()
def status(output: FormatOption = Format.TABLE) -> None:
    """Show models, replicas and cores of the running fleet."""
    from orchestrator.cli.tables import status_text

    data = the_fleet().get("status")
    show(data, output, status_text(data))


@app.command()
def down() -> None:
    """Drain the running fleet and stop all of its processes. Fails if a process or the fleet's record remains."""
    from orchestrator.process.home import Home, daemon_alive, find_leftovers

    home = Home.from_environment()
    record = home.read_record()
    if record is not None and not os.environ.get("COREWRIGHT_URL") and not daemon_alive(record):
        leftovers = find_leftovers(home, record)
        hint = f"`corewright up` removes them; without a new fleet: kill the processes and remove {home.record_file}"
        raise Failed("down-incomplete", f"`up` (pid {record.pid}) ended without cleaning up: {leftovers}", hint)
    client = the_fleet()
    within_s = _drain_s(client) + DOWN_SPARE_S
    client.post("down")
    if client.record is None:
        return
    say("draining")
    deadline = time.monotonic() + within_s
    while daemon_alive(client.record):
        if time.monotonic() > deadline:
            message = f"pid {client.record.pid} is still running after {within_s:.0f} s"
            raise Failed("down-late", message, "check the terminal of `up`")
        time.sleep(0.1)
    leftovers = find_leftovers(home, client.record)
    if leftovers is not None:
        hint = "the terminal of `up` shows the cause; `corewright up` removes them"
        raise Failed("down-incomplete", f"the fleet has ended, but {leftovers}", hint)
    say("stopped")


@app.command()
def version(output: FormatOption = Format.TABLE) -> None:
    """Show the version."""
    show({"version": corewright_version()}, output, corewright_version())


def _drain_s(client: AdminClient) -> float:
    """Returns the fleet's drain timeout on shutdown, in seconds."""
    from orchestrator.fleet.controller_settings import DRAIN_S

    with contextlib.suppress(Failed):  # the controller may be restarting; `down` must work all the same
        for value in client.get("config")["values"]:
            if value["name"] == "drain_s":
                return float(value["value"])
    return DRAIN_S


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit the process."""
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: list[str]) -> int:
    """Run the command line. Returns the exit code."""
    command = get_command(app)
    try:
        code = command.main(arguments, prog_name="corewright", standalone_mode=False)
        return int(code or 0)
    except typer.Exit as ended:
        return ended.exit_code
    except typer.Abort:
        return FAILED
    except Failed as error:
        complain([*getattr(error, "problems", ()), error.problem])
        return FAILED
    except BrokenPipeError:
        sys.stderr.close()
        return FAILED
    except Exception as error:
        # Typer vendors click from 0.16 on, so a usage error is recognized by its methods, not by its class.
        if not hasattr(error, "format_message") or not hasattr(error, "show"):
            raise
        if isinstance(message := getattr(error, "message", None), str):
            error.message = message.removeprefix("Value error, ")  # type: ignore[attr-defined]  # newer Typers add it
        error.show()
        return USAGE


# Imported last, so that `--help` lists the commands above first.
from orchestrator.cli import apply, views, operate, keys, compile, cache, bench, simulate, trace  # noqa: E402, I001

if __name__ == "__main__":
    main()
