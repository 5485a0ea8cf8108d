"""The command `down`: ends the running fleet."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import Annotated

import typer

from orchestrator.cli.app import app
from orchestrator.cli.client import AdminClient, NoListener, the_fleet
from orchestrator.cli.output import libraries_to_log, say
from orchestrator.messages.controller_settings import DRAIN_S
from orchestrator.process.failure import Failed
from orchestrator.process.home import Home, daemon_alive, find_leftovers

DOWN_SPARE_S = 20.0  # shutdown takes up to 10 s after the drain; twice that


@app.command()
def down(
    ray_address: Annotated[
        str | None,
        typer.Option(help="Remove a fleet from the Ray cluster at HOST:PORT, or the one of this machine: auto."),
    ] = None,
    fleet: Annotated[
        str | None, typer.Option(help="Name of the fleet on that cluster.", show_default="the only one")
    ] = None,
) -> None:
    """Drain the running fleet and stop all of its processes. Fails if a process or the fleet's record remains.

    A fleet on a Ray cluster is also removed from the cluster, from any of its machines; the cluster stays."""
    home = Home.from_environment()
    record = home.read_record()
    if ray_address is not None:
        _take_down(home, ray_address, fleet)
        return
    if record is not None and record.on_cluster and not os.environ.get("COREWRIGHT_URL"):
        _take_down(home, record.ray_address, record.name)
        home.forget_fleet()
        return
    if record is not None and not os.environ.get("COREWRIGHT_URL") and not daemon_alive(record):
        leftovers = find_leftovers(home, record)
        hint = f"`corewright up` removes them; without a new fleet: kill the processes and remove {home.record_file}"
        raise Failed("down-incomplete", f"`up` (pid {record.pid}) ended without cleaning up: {leftovers}", hint)
    client = the_fleet()
    within_s = _drain_s(client) + DOWN_SPARE_S
    try:
        client.post("down")
    except Failed as failed:
        # no process has received the request; while the fleet ends, a signal would abort its running requests
        if client.record is None or not isinstance(failed, NoListener):
            raise
        if not (current := home.read_record()) or not current.ending:
            with contextlib.suppress(ProcessLookupError):
                os.kill(client.record.pid, signal.SIGTERM)
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


def _take_down(home: Home, ray_address: str, name: str | None) -> None:
    with libraries_to_log(home.logs / "daemon.log"):
        from orchestrator.cluster.ownership import take_down  # Ray: a second

        take_down(ray_address, name, say)


def _drain_s(client: AdminClient) -> float:
    """Returns the fleet's drain timeout on shutdown, in seconds."""
    with contextlib.suppress(Failed):  # the controller may be restarting; `down` must work all the same
        for value in client.get("config")["values"]:
            if value["name"] == "drain_s":
                return float(value["value"])
    return DRAIN_S
