"""The command `corewright`.

Exit codes: 0 done, 1 failed, 64 wrong usage; `plan`: 0 nothing to do, 2 changes, 1 errors or something unplaced.
Nothing here imports Ray or torch before `up` really starts a fleet, so that every other command answers at once.
"""

from __future__ import annotations

import ipaddress
import sys
import time
from typing import Annotated

import typer
from typer.main import get_command

from orchestrator.cli.client import find_fleet, the_fleet
from orchestrator.cli.output import Format, columns, complain, say, show
from orchestrator.failure import Failed
from orchestrator.version import corewright_version

USAGE = 64  # EX_USAGE of sysexits.h
FAILED = 1
CHANGES = 2
DOWN_DEADLINE_S = 40.0  # a drain of 20 s and 10 s to end, and some to spare

app = typer.Typer(
    name="corewright",
    help="Fits models to NeuronCores: one YAML file, several language models, one OpenAI-compatible address.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
SpecArgument = Annotated[str, typer.Argument(metavar="SPEC", help="The YAML file; - is standard input.")]
FormatOption = Annotated[Format, typer.Option("--output", "-o", help="Form of the data on stdout.")]


@app.command()
def up(
    spec: SpecArgument,
    host: Annotated[str, typer.Option(help="Address to listen on; loopback only.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the OpenAI-compatible address.")] = 8080,
    ray_address: Annotated[str | None, typer.Option(help="A Ray cluster to run on; not served yet.")] = None,
    dashboard: Annotated[bool, typer.Option(help="Start Ray's dashboard.")] = True,
) -> None:
    """Start the fleet and stay in the foreground until Ctrl-C, SIGTERM or `corewright down`."""
    from orchestrator.cli.up import run_up
    from orchestrator.specfile import load

    if ray_address is not None:
        what = f"--ray-address {ray_address}: `up` of this version starts a Ray of its own, on this machine"
        raise Failed("cluster-not-served", what, "leave the option out")
    if not _is_loopback(host):
        raise Failed(
            "host-not-loopback", f"--host {host} would open the fleet to the network without keys", "--host 127.0.0.1"
        )
    raise typer.Exit(run_up(load(spec), host, port, dashboard))


@app.command()
def validate(spec: SpecArgument, output: FormatOption = Format.TABLE) -> None:
    """Say everything that is wrong with a spec. Needs no device, no weights and no fleet."""
    from orchestrator.specfile import load
    from placements.problems import has_errors

    file = load(spec)
    count = len([problem for problem in file.problems if problem.severity == "error"])
    if output is Format.TABLE:
        complain(file.problems)
        verdict = f"{file.name}: {count} error{'s' if count != 1 else ''}" if count else f"{file.name}: valid"
        show(None, output, verdict)
    else:
        show({"problems": [problem.as_dict() for problem in file.problems]}, output, "")
    raise typer.Exit(FAILED if has_errors(file.problems) else 0)


@app.command()
def plan(spec: SpecArgument, output: FormatOption = Format.TABLE) -> None:
    """Say who would get which cores, against the running fleet if there is one."""
    from orchestrator.cli.plan import make_plan
    from orchestrator.specfile import load

    result = make_plan(load(spec), find_fleet())
    if output is Format.TABLE:
        complain(result.problems)
    show(result.data, output, result.table)
    raise typer.Exit(FAILED if result.failed else CHANGES if result.changes else 0)


@app.command()
def status(output: FormatOption = Format.TABLE) -> None:
    """Show the models, replicas and cores of the running fleet."""
    client = the_fleet()
    data = client.get("status")
    rows: list[tuple[object, ...]] = []
    notes: list[str] = []
    for model in data["models"]:
        for replica in model["replicas"]:
            rows.append(
                (
                    replica["id"],
                    replica["state"],
                    replica["cores"],
                    replica["host"],
                    replica["pid"],
                    replica["restarts"],
                )
            )
            if replica["reason"]:
                notes.append(f"{replica['id']}: {replica['reason']}")
                if replica["pause_s"]:
                    notes.append(f"    {replica['failures']} failed starts; the next {replica['pause_s']:.0f} s later")
                notes += [f"    | {line}" for line in replica["log"]]
        if not model["replicas"]:
            rows.append((model["name"], model["state"], None, None, None, None))
            if model["reason"]:
                notes.append(f"{model['name']}: {model['reason']}")
    hosts = [(host["name"], host["cores"], host["leased"], host["free"], host["quarantined"]) for host in data["hosts"]]
    table = columns(("REPLICA", "STATE", "CORES", "HOST", "PID", "RESTARTS"), rows)
    table += "\n\n" + columns(("HOST", "CORES", "LEASED", "FREE", "QUARANTINED"), hosts)
    if notes:
        table += "\n\n" + "\n".join(notes)
    show(data, output, table)


@app.command()
def down() -> None:
    """End the running fleet: drain, then stop what corewright has started."""
    from orchestrator.home import daemon_alive

    client = the_fleet()
    client.post("down")
    if client.record is None:
        return
    say("draining")
    deadline = time.monotonic() + DOWN_DEADLINE_S
    while daemon_alive(client.record):
        if time.monotonic() > deadline:
            raise Failed(
                "down-late", f"pid {client.record.pid} still runs after {DOWN_DEADLINE_S:.0f} s", "see its terminal"
            )
        time.sleep(0.1)
    say("stopped")


@app.command()
def version(output: FormatOption = Format.TABLE) -> None:
    """Show the version."""
    show({"version": corewright_version()}, output, corewright_version())


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


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
        complain([error.problem])
        return FAILED
    except BrokenPipeError:
        sys.stderr.close()
        return FAILED
    except Exception as error:
        # Typer carries click inside from 0.16 on, under another name: known by what it can do.
        if not hasattr(error, "format_message") or not hasattr(error, "show"):
            raise
        error.show()
        return USAGE


if __name__ == "__main__":
    main()
