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
DRAIN_CONTINUES = "the drain continues; `corewright uncordon HOST` ends that of a host"

hosts = group("hosts", "Wait for a host, between the steps of its maintenance.")


@hosts.command("wait")
def wait(
    name: Annotated[str, typer.Argument(metavar="HOST", help="Name of the host.", autocompletion=names_of("hosts"))],
    after: Annotated[
        str | None,
        typer.Option(metavar="NODE", help="Wait until its Ray node is not NODE.", show_default="any"),
    ] = None,
    timeout: Annotated[
        float | None, typer.Option(min=0, metavar="S", help="Timeout, in seconds.", show_default="no timeout")
    ] = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Wait until the host is there, and every replica that has a place is ready."""

    def unmet(status: FleetStatus) -> str | None:
        host = host_of(status, name)
        if host.state != "ready" or host.node in (None, after):
            return f"{name} is not back"
        return None if status.settled else "not every replica is ready"

    status = wait_until(the_fleet(), unmet, timeout, "see `corewright status`")
    show(host_of(status, name), output, f"{name}: ready")


def wait_until(
    client: AdminClient, unmet: Callable[[FleetStatus], str | None], timeout_s: float | None, hint: str
) -> FleetStatus:
    """Returns the status once its condition holds, also over a restart of the controller.

    Raises Failed `wait-late` with what ``unmet`` returns at the timeout, and typer.Exit on Ctrl-C."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    try:
        while True:
            status = typed(client.get_with_retries("status"), FleetStatus)
            reason = unmet(status)
            if reason is None:
                return status
            if deadline is not None and time.monotonic() >= deadline:
                raise Failed("wait-late", f"after {timeout_s:g} s {reason}", hint)
            time.sleep(POLL_S)
    except KeyboardInterrupt:
        say("stopped waiting")
        raise typer.Exit(INTERRUPTED) from None


def wait_empty(client: AdminClient, name: str, timeout_s: float | None) -> HostInFleet:
    """Returns a drained host once it has neither replicas nor requests. Raises Failed if it is uncordoned meanwhile."""

    def unmet(status: FleetStatus) -> str | None:
        host = host_of(status, name)
        if not host.draining:
            raise Failed("drain-ended", f"{name} was uncordoned meanwhile", "corewright drain begins again")
        return f"{name} is not empty: {host.busy} replicas and requests" if host.busy else None

    return host_of(wait_until(client, unmet, timeout_s, DRAIN_CONTINUES), name)


def wait_replaced(client: AdminClient, id: str, epoch: int, timeout_s: float | None) -> None:
    """Returns once the replica of that epoch is gone, and its successor is ready."""

    def unmet(status: FleetStatus) -> str | None:
        runs = any((replica.id, replica.epoch) == (id, epoch) for replica in status.replicas)
        return f"{id} is not replaced" if runs or not status.settled else None

    wait_until(client, unmet, timeout_s, DRAIN_CONTINUES)


def host_of(status: FleetStatus, name: str) -> HostInFleet:
    """Returns the host of that name. Raises Failed."""
    host = next((host for host in status.hosts if host.name == name), None)
    if host is None:
        names = ", ".join(host.name for host in status.hosts)
        raise Failed("host-unknown", f"the fleet has no host {name}", f"existing hosts: {names or 'none'}")
    return host
