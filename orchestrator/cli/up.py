"""`corewright up`: check the spec, run the daemon, and tell the user where everything is."""

from __future__ import annotations

import os
import sys

from orchestrator.cli.output import Format, complain, libraries_to_log, say, show, stdout, use_color
from orchestrator.daemon import Daemon, UpOptions
from orchestrator.home import FleetRecord, Home
from orchestrator.settings import Settings
from orchestrator.specfile import SpecFile, start_problems
from placements.coremap import core_map
from placements.plan import plan
from placements.problems import has_errors


def run_up(file: SpecFile, settings: Settings) -> int:
    """Gives the exit code. Raises Failed when the fleet cannot start."""
    problems = (*file.problems, *start_problems(file))
    complain(problems)
    if file.spec is None or has_errors(problems):
        say(f"{file.name} has errors: nothing was started")
        return 1
    if not file.spec.hosts and file.hosts[0].emulated:
        name = file.hosts[0].name
        say(f"no Neuron devices here: emulating {name} (only the accelerator; the CPUs are real)")
    placed = plan(file.spec, file.hosts, file.checkpoints)
    if placed.unplaced:
        complain([problem for missing in placed.unplaced for problem in missing.problems])
        say(f"{file.name} does not fit: nothing was started")
        return 1

    def announce(record: FleetRecord) -> None:
        say("")
        show(
            None,
            Format.TABLE,
            core_map(placed, file.hosts, color=use_color(stdout())) + "\n" + _addresses(record, file),
        )

    home = Home.from_environment()
    daemon = Daemon(
        home,
        _options(settings),
        (file.text, file.name, file.base_dir),
        file.spec.name,
        file.hosts,
        file.machine.instance,
        say,
    )
    home.prepare()
    with libraries_to_log(home.logs / "daemon.log"):
        return daemon.run(announce)


def _options(settings: Settings) -> UpOptions:
    return UpOptions(
        host=settings["host"],
        port=settings["port"],
        dashboard=settings["dashboard"],
        watch=settings["watch"],
        drain_s=settings["drain_s"],
        config=settings.as_dicts(),
    )


def _addresses(record: FleetRecord, file: SpecFile) -> str:
    assert file.spec is not None
    token = os.environ.get("RAY_AUTH_TOKEN_PATH")
    dashboard = record.dashboard_url or "off"
    if record.dashboard_url and os.environ.get("RAY_AUTH_MODE") == "token" and token:
        dashboard += f"   (log in with the token in {token})"
    model, record_logs = file.spec.models[0].name, Home.from_environment().logs
    chat = f'{{"model": "{model}", "messages": [{{"role": "user", "content": "What is a NeuronCore?"}}]}}'
    lines = [
        f"ready        {record.url}/v1   (models: {', '.join(model.name for model in file.spec.models)})",
        f"dashboard    {dashboard}",
        f"logs         {record_logs}",
        "",
        "Try, in another terminal:",
        f"  curl {record.url}/v1/models",
        f"  curl {record.url}/v1/chat/completions -H 'content-type: application/json' \\\n       -d '{chat}'",
        f"  {sys.argv[0]} status",
    ]
    return "\n".join(lines)
