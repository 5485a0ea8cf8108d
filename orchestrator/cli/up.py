"""The command `up`: checks the spec, runs the daemon, and prints the fleet's addresses."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import typer
from typer.main import get_group

from orchestrator.access.keys import KeyFile
from orchestrator.access.source_policy import SourcePolicy
from orchestrator.access.tls import CertificateFiles
from orchestrator.cli.app import DEMO, FAILED, SpecArgument, app, switch, with_options
from orchestrator.cli.bars import bars_on
from orchestrator.cli.doctor import engine_problems
from orchestrator.cli.keys import access
from orchestrator.cli.output import Format, complain, libraries_to_log, say, show, stderr, stdout, use_color
from orchestrator.cluster.follower import Display, NoDisplay
from orchestrator.cluster.settings import SETTINGS, Setting, Settings, resolve, store_settings
from orchestrator.cluster.up import FleetStart, Up, UpOptions
from orchestrator.control.resolve.spec_file import SpecFile, load, start_problems
from orchestrator.gateway.settings import GatewaySettings
from orchestrator.process.addresses import is_loopback
from orchestrator.process.failure import Failed
from orchestrator.process.home import FleetRecord, Home
from orchestrator.process.waiting_notice import WaitingNotice
from placements.engines.registry import capabilities
from placements.explain.core_map import core_map
from placements.planner.plan import Plan, plan
from placements.planner.spec_hosts import host_groups, kept_hosts
from placements.spec.problems import Problem, has_errors


def check_listening(settings: Settings) -> None:
    """Check the listen address, TLS and API keys before anything starts. Prints warnings. Raises Failed."""
    host, origin = settings["host"], settings.origin("host")
    ring = KeyFile(Home.from_environment().keys).read()
    cert, key, client_ca = (settings[name] for name in ("tls_cert", "tls_key", "tls_client_ca"))
    if (cert is None) != (key is None) or (client_ca is not None and cert is None):
        options = "--tls-client-ca" if client_ca is not None and cert is None else "one of --tls-cert and --tls-key"
        raise Failed("tls-incomplete", f"only {options} is set", "set both --tls-cert FILE and --tls-key FILE")
    if cert is not None and key is not None:
        CertificateFiles(cert, key, client_ca)  # fails now rather than in the gateway
    open_to_all, now = not is_loopback(host) and not settings["sagemaker"], time.time()  # only SageMaker reaches it
    if open_to_all and not settings["insecure"] and not ring.usable(now, "inference"):
        message = f"{origin.where} {host} would open the fleet to the network, and no API key exists"
        hint = "run `corewright keys create NAME`; or use --host 127.0.0.1, or --insecure"
        raise Failed("host-without-keys", message, hint)
    if settings["insecure"] and (open_to_all or ring.requires_key(now)):
        where = "on the network" if open_to_all else "here"
        message = f"--insecure: requests to {host} {where} are accepted without a key"
        complain([Problem("keys-not-required", "warning", "", message, "remove --insecure to require keys")])
    elif ring.keys and not open_to_all and not ring.requires_key(now):
        hint = "run `corewright keys close` to require keys"
        complain([Problem("keys-not-required", "warning", "", access(ring, now), hint)])
    if open_to_all and cert is None:
        message = f"{host} is not loopback, and TLS is off: keys and prompts are sent unencrypted"
        hint = "set --tls-cert FILE and --tls-key FILE, or put a proxy with TLS in front"
        complain([Problem("host-without-tls", "warning", "", message, hint)])


def run_up(file: SpecFile, settings: Settings, ray_address: str | None = None, *, detach: bool = False) -> int:
    """Start the fleet and run it until it ends, or on the cluster at ``ray_address`` until a signal or, with
    ``detach``, until it is ready. Returns the exit code. Raises Failed if the fleet cannot start."""
    problems = (*file.problems, *start_problems(file, joined=ray_address is not None))
    if not has_errors(problems):
        with WaitingNotice(say).waiting(lambda: "the interpreters of the engines"):
            problems = (*problems, *engine_problems(file))
    complain(problems)
    if file.spec is None or has_errors(problems):
        say(f"{file.name} has errors: nothing was started")
        return FAILED
    if not file.spec.hosts and file.hosts[0].emulated:
        name = file.hosts[0].name
        say(f"no Neuron devices on this machine: emulating {name} (only the accelerator; the CPUs are real)")
    placed = plan(file.spec, file.hosts, file.checkpoints)
    if placed.unplaced:
        complain([problem for missing in placed.unplaced for problem in missing.problems])
        say(f"{file.name} does not fit: nothing was started")
        return FAILED

    def announce(record: FleetRecord) -> None:
        display.clear()  # until the next status, so that it does not overwrite this
        report("")
        show(
            None,
            Format.TABLE,
            first_map(file, placed) + "\n" + _addresses(record, file, settings),
        )

    home = Home.from_environment()
    options = settings.fill(
        UpOptions,
        gateway=settings.fill(
            GatewaySettings, tokenizers=any(capabilities(model.engine).reads_checkpoint for model in file.spec.models)
        ),
        store=store_settings(settings, home.store),
        config=settings.as_dicts(),
    )
    home.prepare()
    with libraries_to_log(home.logs / "daemon.log"), _display() as (display, report):
        start = FleetStart(
            text=file.text,
            file=file.name,
            base_dir=file.base_dir,
            name=file.spec.name,
            hosts=file.hosts,
            ray_address=ray_address,
            detach=detach,
            elastic=any(entry.max is not None for entry in file.spec.hosts),
            machine=file.machine,
            warm=file.warm_engines,
        )
        return Up(home, options, start, report, display).run(announce)


@contextlib.contextmanager
def _display() -> Iterator[tuple[Display, Callable[[str], None]]]:
    """Yields the display of progress, and what prints lines beside it."""
    with bars_on(stderr()) as bars:
        yield (NoDisplay(), say) if bars is None else (bars, bars.say)


def first_map(file: SpecFile, placed: Plan) -> str:
    """Returns the core map of the hosts that the first plan keeps."""
    assert file.spec is not None
    used = {placement.host for placement in placed.placements}
    hosts = kept_hosts(host_groups(file.spec, file.hosts), used)
    return core_map(placed, hosts, spec=file.spec, color=use_color(stdout()))


def _addresses(record: FleetRecord, file: SpecFile, settings: Settings) -> str:
    assert file.spec is not None
    token = os.environ.get("RAY_AUTH_TOKEN_PATH")
    dashboard = record.dashboard_url or "off"
    if record.dashboard_url and os.environ.get("RAY_AUTH_MODE") == "token" and token:
        dashboard += f"   (log in with the token in {token})"
    names = [model.name for model in file.spec.models]
    more = _curl_needs(settings)
    on_head = " on the head" if record.on_cluster and record.console_url is None else ""
    lines = [
        f"ready        {record.url}/v1   (models: {', '.join(names) or 'none'})",
        f"console      {record.console}   (log in with the key of `corewright console`{on_head})",
        f"dashboard    {dashboard}",
        f"logs         {Home.from_environment().logs}",
        "",
        "Try, in another terminal:",
        f"  curl {more}{record.url}/v1/models",
    ]
    if names:
        chat = f'{{"model": "{names[0]}", "messages": [{{"role": "user", "content": "What is a NeuronCore?"}}]}}'
        json = "-H 'content-type: application/json'"
        lines.append(f"  curl {more}{record.url}/v1/chat/completions {json} \\\n       -d '{chat}'")
    lines.append(f"  {sys.argv[0]} status")
    return "\n".join(lines)


def _curl_needs(settings: Settings) -> str:
    """Returns the options that `curl` needs beside the address."""
    needs = ""
    if settings["tls_cert"] is not None:
        needs += "--cacert CA.pem "  # not -k, which disables verification
    if settings["tls_client_ca"] is not None:
        needs += "--cert CLIENT.pem --key CLIENT-KEY.pem "
    if not settings["insecure"] and KeyFile(Home.from_environment().keys).read().requires_key(time.time()):
        needs += "-H 'authorization: Bearer KEY' "
    return needs


def _setting_option(setting: Setting) -> Any:
    kind, default = setting.kind, setting.default
    shown = "off" if "/" in setting.option and not default else "on" if default is True else default
    text = setting.doc + (" Repeatable." if kind.type == list[str] else "")
    if shown:  # typer would write the text of a default in parentheses
        text += f"  [default: {f'{shown:g}' if isinstance(shown, float) else shown}]"
    option = typer.Option(setting.option, help=text, show_default=False, **kind.option)
    return Annotated[kind.type | None, option]  # None: not given


@app.command()
@with_options({setting.name: _setting_option(setting) for setting in SETTINGS if setting.option})
def up(
    spec: SpecArgument,
    ray_address: Annotated[
        str | None,
        typer.Option(envvar="RAY_ADDRESS", help="Join the Ray cluster at HOST:PORT, or the one of this machine: auto."),
    ] = None,
    detach: Annotated[
        bool, switch("--detach", "With --ray-address: exit when the fleet is ready, and leave it running.")
    ] = False,
    **flags: Any,
) -> None:
    """Start a fleet in the foreground. It runs until Ctrl-C, SIGTERM or `corewright down`.

    With --ray-address it runs on that cluster until `corewright down`, and Ctrl-C ends only this command."""
    settings = resolve(flags)
    complain(settings.problems)
    if has_errors(settings.problems):
        raise typer.Exit(FAILED)
    if settings["watch"] and spec == "-":
        raise Failed("watch-needs-file", "standard input cannot be watched", "pass the spec as a file, or --no-watch")
    if detach and ray_address is None:
        hint = "pass --ray-address, or run `corewright up` as a service (deploy/systemd/corewright.service)"
        raise Failed("detach-needs-cluster", "--detach: the Ray that `up` starts ends with it", hint)
    if detach and settings["watch"]:
        raise Failed("watch-needs-viewer", "--detach: nothing would watch the file", "drop --detach or --watch")
    check_listening(settings)
    allowed = SourcePolicy(settings["allowed_sources"])  # only the operator's own spec may name interpreters
    with WaitingNotice(say).waiting(lambda: "the sources of the spec"):
        file = load(spec, allowed)
    raise typer.Exit(run_up(file, settings, ray_address, detach=detach))


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def demo(context: typer.Context) -> None:
    """Start three small models on an emulated inf2.48xlarge. Their weights are in the package; options as for `up`."""
    command = get_group(app).commands["up"]
    arguments = [*context.args, str(DEMO)]
    raise typer.Exit(command.main(arguments, prog_name="corewright demo", standalone_mode=False) or 0)
