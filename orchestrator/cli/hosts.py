"""The commands of `hosts`, and what they share with `drain --wait`: waiting for a state of a host."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Annotated

import typer

from orchestrator.cli.app import INTERRUPTED, FormatOption, group
from orchestrator.cli.client import AdminClient, the_fleet, typed
from orchestrator.cli.fleet_names import names_of
from orchestrator.cli.output import Format, say, show
from orchestrator.fleet.fleet_status import FleetStatus, HostInFleet
from orchestrator.process.failure import Failed

POLL_S = 0.5

hosts = group("hosts", "Wait for a host, between the steps of its maintenance.")


@hosts.command("wait")
def wait(
    name: Annotated[str, typer.Argument(metavar="HOST", help="Name of the host.", autocompletion=names_of("hosts"))],
    after: Annotated[
        str | None,
        typer.Option(metavar="NODE", help="Wait for another Ray node of it than NODE.", show_default="any"),
    ] = None,
    timeout: Annotated[
        float | None, typer.Option(min=0, metavar="S", help="Timeout, in seconds.", show_default="no timeout")
    ] = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Wait until the host is there, and every replica that has a place is ready."""

    def missing(status: FleetStatus) -> str | None:
        host = host_of(status, name)
        if host.state != "ready" or host.node in (None, after):
            return f"{name} is not back"
        return None if status.settled else "not every replica is ready"

    status = wait_until(the_fleet(), missing, timeout, "see `corewright status`")
    show(host_of(status, name), output, f"{name}: ready")


def wait_until(
    client: AdminClient, missing: Callable[[FleetStatus], str | None], timeout_s: float | None, hint: str
) -> FleetStatus:
    """Returns the status once nothing is ``missing`` in it, also over a restart of the controller.

    Raises Failed `wait-late` with what is missing at the timeout, and typer.Exit on Ctrl-C."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    try:
        while True:
            status = typed(client.get_with_retries("status"), FleetStatus)
            lack = missing(status)
            if lack is None:
                return status
            if deadline is not None and time.monotonic() >= deadline:
                raise Failed("wait-late", f"after {timeout_s:g} s {lack}", hint)
            time.sleep(POLL_S)
    except KeyboardInterrupt:
        say("stopped waiting")
        raise typer.Exit(INTERRUPTED) from None


def drained(client: AdminClient, target: str, epoch: int | None, timeout_s: float | None) -> HostInFleet | None:
    """Returns a host once it is empty; None once a replica with that epoch is replaced.

    Raises Failed if the host is used again meanwhile."""

    def missing(status: FleetStatus) -> str | None:
        if epoch is not None:
            runs = any((replica.id, replica.epoch) == (target, epoch) for replica in status.replicas)
            return None if not runs and status.settled else f"{target} is not replaced"
        host = host_of(status, target)
        if not host.draining:
            raise Failed("drain-ended", f"{target} was uncordoned meanwhile", "corewright drain begins again")
        return f"{target} is not empty: {host.busy} replicas and requests" if host.busy else None

    status = wait_until(client, missing, timeout_s, "the drain continues; `corewright uncordon HOST` ends it")
    return host_of(status, target) if epoch is None else None


def host_of(status: FleetStatus, name: str) -> HostInFleet:
    """Returns the host of that name. Raises Failed."""
    host = next((host for host in status.hosts if host.name == name), None)
    if host is None:
        names = ", ".join(host.name for host in status.hosts)
        raise Failed("host-unknown", f"there is no host {name}", f"existing hosts: {names or 'none'}")
    return host
