"""The command `corewright`.

Exit codes: 0 done, 1 failed, 64 wrong usage; `plan`: 0 nothing to do, 2 changes, 1 errors or something unplaced;
`explain`: 0 it has what its `min` asks for, 1 it has not; `diff`: 0 the same, 2 differences; `cache verify`: 0 nothing
would be compiled, 1 something would; 130 after Ctrl-C in a wait.
Nothing here imports Ray or torch before `up` really starts a fleet, so that every other command answers at once.
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
    the_fleet,
)
from orchestrator.cli.output import Format, complain, say, show, stdout, use_color
from orchestrator.process.failure import Failed
from orchestrator.process.version import corewright_version

if TYPE_CHECKING:
    from orchestrator.cli.client import AdminClient

__all__ = ["app", "apply", "bench", "cache", "compile", "keys", "main", "operate", "run", "simulate", "trace", "views"]

DOWN_SPARE_S = 20.0  # what an end takes beside the drain: 10 s, and some to spare


@app.command()
def up(
    spec: SpecArgument,
    host: Annotated[
        str | None, typer.Option(help="Address to listen on; beyond loopback with keys.", show_default="127.0.0.1")
    ] = None,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Port of the OpenAI-compatible address.", show_default="8080")
    ] = None,
    gateways: Annotated[
        int | None, typer.Option(min=1, max=64, help="Gateway processes that share the port.", show_default="1")
    ] = None,
    insecure: Annotated[
        bool | None, typer.Option("--insecure", help="Disable API-key authentication on every address.")
    ] = None,
    tls_cert: Annotated[
        str | None, typer.Option(metavar="FILE", help="The gateway's certificate and its chain, PEM.")
    ] = None,
    tls_key: Annotated[str | None, typer.Option(metavar="FILE", help="The key of the certificate, PEM.")] = None,
    tls_client_ca: Annotated[
        str | None, typer.Option(metavar="FILE", help="Demand of clients certificates of these authorities, PEM.")
    ] = None,
    cors_origin: Annotated[
        list[str] | None, typer.Option(metavar="ORIGIN", help="Its scripts in browsers may read answers. Repeatable.")
    ] = None,
    ray_address: Annotated[str | None, typer.Option(help="A Ray cluster to run on; not served yet.")] = None,
    dashboard: Annotated[
        bool | None, typer.Option("--dashboard/--no-dashboard", help="Start Ray's dashboard.", show_default="on")
    ] = None,
    watch: Annotated[
        bool | None,
        typer.Option("--watch/--no-watch", help="Apply the spec when its file changes.", show_default="off"),
    ] = None,
    drain_s: Annotated[
        float | None,
        typer.Option(min=0, max=3600, help="Seconds for running requests at the end.", show_default="20"),
    ] = None,
) -> None:
    """Start the fleet and stay in the foreground until Ctrl-C, SIGTERM or `corewright down`."""
    from orchestrator.access.source_policy import SourcePolicy
    from orchestrator.daemon.settings import resolve
    from placements.spec.problems import has_errors

    if ray_address is not None:
        what = f"--ray-address {ray_address}: `up` of this version starts a Ray of its own, on this machine"
        raise Failed("cluster-not-served", what, "leave the option out")
    flags: dict[str, Any] = {"host": host, "port": port, "dashboard": dashboard, "watch": watch, "drain_s": drain_s}
    flags |= {"gateways": gateways, "insecure": insecure, "tls_cert": tls_cert, "tls_key": tls_key}
    flags |= {"tls_client_ca": tls_client_ca, "cors_origins": cors_origin or None}
    settings = resolve(flags)
    if settings.problems:
        complain(settings.problems)
    if has_errors(settings.problems):
        raise typer.Exit(FAILED)
    if settings["watch"] and spec == "-":
        raise Failed("watch-needs-file", "standard input cannot be watched", "give the spec as a file, or --no-watch")
    from orchestrator.cli.up import check_listening, run_up
    from orchestrator.process.waiting_notice import WaitingNotice
    from orchestrator.revisions.spec_file import load

    check_listening(settings)
    allowed = SourcePolicy(settings["allowed_sources"])  # the operator's own file says which interpreters there are
    with WaitingNotice(say).waiting(lambda: "the sources of the spec"):
        file = load(spec, allowed)
    raise typer.Exit(run_up(file, settings))


@app.command()
def validate(
    spec: SpecArgument,
    offline: Annotated[
        bool, typer.Option("--offline", help="Report a folder that cannot be loaded as a warning only.")
    ] = False,
    output: FormatOption = Format.TABLE,
) -> None:
    """Say everything that is wrong with a spec. Needs no device, no weights and no fleet."""
    from orchestrator.revisions.spec_file import load
    from placements.spec.problems import has_errors

    file = load(spec, folders="plan" if offline else "load")
    count = len([problem for problem in file.problems if problem.severity == "error"])
    if output is Format.TABLE:
        complain(file.problems)
        verdict = f"{file.name}: {count} error{'s' if count != 1 else ''}" if count else f"{file.name}: valid"
        show(None, output, verdict)
    else:
        show({"problems": [problem.as_dict() for problem in file.problems]}, output, "")
    raise typer.Exit(FAILED if has_errors(file.problems) else 0)


@app.command()
def plan(
    spec: OptionalSpecArgument = None,
    defrag: Annotated[
        int | None, typer.Option(min=1, max=1000, metavar="N", help="What must move to free N cores in a row.")
    ] = None,
    brief: Annotated[bool, typer.Option("--brief", help="Without memory, threads and environments.")] = False,
    offline: OfflineOption = False,
    output: FormatOption = Format.TABLE,
) -> None:
    """Preview placement and changes, against the running fleet if there is one."""
    from orchestrator.cli.client import unless_for_other_hosts
    from orchestrator.cli.plan import PlanResult, make_plan
    from orchestrator.revisions.spec_file import load

    if spec is None and (defrag is None or offline):
        raise typer.BadParameter("is missing; only --defrag of a running fleet goes without", param_hint="SPEC")
    file = None if spec is None else load(spec, folders="plan" if offline else "load")

    def planned(fleet: AdminClient | None) -> PlanResult:
        if defrag is not None:
            from orchestrator.cli.defrag import make_defrag

            return make_defrag(file, fleet, defrag)
        assert file is not None
        return make_plan(file, fleet, brief=brief)

    result = unless_for_other_hosts(spec or "", offline, planned)
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
    """Explain why a model is where it is or has no place, and what would help."""
    from orchestrator.cli.client import unless_for_other_hosts
    from orchestrator.cli.explain import explanation, explanation_text
    from orchestrator.revisions.spec_file import load

    if spec is None and offline:
        raise typer.BadParameter("is missing: without a fleet there is no other spec", param_hint="SPEC")
    file = None if spec is None else load(spec, folders="ignore")
    data = unless_for_other_hosts(spec or "", offline, lambda fleet: explanation(file, fleet, model))
    show(data, output, explanation_text(data, color=use_color(stdout())))
    raise typer.Exit(0 if data["fits"] else FAILED)


@app.command()
def schema() -> None:
    """Print the JSON Schema of a spec, for editors."""
    from placements.spec.schema import json_schema

    show(json_schema(), Format.JSON, "")


@app.command()
def generate(
    spec: SpecArgument,
    model: ModelArgument,
    prompt: Annotated[str, typer.Option(metavar="TEXT", help="What a user says; of a model without chats: the text.")],
    raw: Annotated[bool, typer.Option("--raw", help="Continue TEXT as it is, without the chat template.")] = False,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Tokens of the answer at most.", show_default="128")
    ] = None,
    temperature: Annotated[float, typer.Option(min=0, max=2, metavar="T", help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(min=0, metavar="K", help="Among the K most probable; 0 is among all.")] = 0,
    top_p: Annotated[
        float, typer.Option(min=0.001, max=1, metavar="P", help="Among those that make up P of the probability.")
    ] = 1.0,
) -> None:
    """Let one model of a spec answer once, on its own cores, without a fleet."""
    from orchestrator.cli.generate import generate as answer
    from orchestrator.revisions.spec_file import load

    how = {"raw": raw, "max_tokens": max_tokens, "temperature": temperature, "top_k": top_k, "top_p": top_p}
    raise typer.Exit(answer(load(spec, folders="plan"), model, prompt, how))


@app.command()
def doctor(
    spec: Annotated[
        str | None, typer.Argument(metavar="SPEC", help="Look at its hosts, engines and interpreters too.")
    ] = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Look this machine over: versions, Neuron devices, who holds cores, engines and interpreters."""
    from orchestrator.cli.doctor import examination, text
    from orchestrator.revisions.spec_file import load

    report = examination(None if spec is None else load(spec))
    if output is Format.TABLE:
        complain(report.problems)
    show(report.as_dict(), output, text(report))
    raise typer.Exit(FAILED if report.problems else 0)


@app.command()
def status(output: FormatOption = Format.TABLE) -> None:
    """Show the models, replicas and cores of the running fleet."""
    from orchestrator.cli.tables import status_text

    data = the_fleet().get("status")
    show(data, output, status_text(data))


@app.command()
def down() -> None:
    """End the running fleet: drain, then stop what corewright has started. Fails where something is left."""
    from orchestrator.process.home import Home, daemon_alive, left_behind

    home = Home.from_environment()
    record = home.read_record()
    if record is not None and not os.environ.get("COREWRIGHT_URL") and not daemon_alive(record):
        left = left_behind(home, record)
        hint = f"corewright up removes what is left; without a further fleet: end the processes, rm {home.record_file}"
        raise Failed("down-incomplete", f"`up` (pid {record.pid}) has ended without cleaning up: {left}", hint)
    client = the_fleet()
    within_s = _drain_s(client) + DOWN_SPARE_S
    client.post("down")
    if client.record is None:
        return
    say("draining")
    deadline = time.monotonic() + within_s
    while daemon_alive(client.record):
        if time.monotonic() > deadline:
            raise Failed("down-late", f"pid {client.record.pid} still runs after {within_s:.0f} s", "see its terminal")
        time.sleep(0.1)
    left = left_behind(home, client.record)
    if left is not None:
        hint = "the terminal of `up` says why; corewright up removes what is left"
        raise Failed("down-incomplete", f"the fleet has ended, and {left}", hint)
    say("stopped")


@app.command()
def version(output: FormatOption = Format.TABLE) -> None:
    """Show the version."""
    show({"version": corewright_version()}, output, corewright_version())


def _drain_s(client: AdminClient) -> float:
    """How long the fleet drains at its end."""
    from orchestrator.fleet.controller_settings import DRAIN_S

    with contextlib.suppress(Failed):  # the controller may just be away: that is no reason not to end the fleet
        for value in client.get("config")["values"]:
            if value["name"] == "drain_s":
                return float(value["value"])
    return DRAIN_S


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit the process."""
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: list[str]) -> int:
    """Run the command line; gives the exit code."""
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
        # Typer carries click inside from 0.16 on, under another name: known by what it can do.
        if not hasattr(error, "format_message") or not hasattr(error, "show"):
            raise
        if isinstance(told := getattr(error, "message", None), str):
            error.message = told.removeprefix("Value error, ")  # type: ignore[attr-defined]  # how newer Typers begin
        error.show()
        return USAGE


# The other commands. They stand here so that `--help` lists those above first.
from orchestrator.cli import apply, views, operate, keys, compile, cache, bench, simulate, trace  # noqa: E402, I001

if __name__ == "__main__":
    main()
